"""GraphOracle: runs a Graph of built-in bodies by their numpy references, operator by operator.

No plan, no executor: what a step must compute, in the plainest way. Float buffers are held as
float32; a buffer stored in f16 or bf16 is rounded after every operator that wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import StepRows
from gpurt.buffer import Buffer
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.draft_rows import table_rows
from gpurt.graphs.ops.dtypes import to_float32, to_storage


def step_rows(
    tokens: Sequence[int],
    positions: Sequence[int],
    slots: Sequence[int] | None = None,
    sample_rows: Sequence[int] | None = None,
) -> StepRows:
    """A StepRows from plain lists; by default slot 0, and the last row is sampled."""
    return StepRows(
        token=np.array(tokens, np.uint32),
        slot=np.array([0] * len(tokens) if slots is None else slots, np.uint32),
        position=np.array(positions, np.uint32),
        sample_rows=np.array([len(tokens) - 1] if sample_rows is None else sample_rows, np.uint32),
    )


class GraphOracle:
    """State and activations of a graph between steps: `arrays` by buffer name, as float32."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.arrays = {buffer.name: _initial(buffer) for buffer in graph.buffers}

    def step(self, step: StepRows) -> list[int]:
        """Run one step; returns the tokens of its sample rows."""
        self.run(self.graph.operators, step)
        assert self.graph.sampled is not None
        sampled = self.arrays[self.graph.sampled.name]
        return [int(token) for token in sampled[: len(step.sample_rows)]]

    def run(self, operators: Sequence[Operator], step: StepRows) -> None:
        """Run some operators of a step."""
        for op in operators:
            assert op.body.reference is not None, op.path
            arrays = {name: self.arrays[region.buffer.name] for name, region in op.args.items()}
            op.body.reference(op, arrays, self._rows(op, step))
            for region in op.writes:
                self._round(region.buffer)

    def generate(self, prompt: Sequence[int], count: int, slot: int = 0) -> list[int]:
        """Greedy tokens of one request, prefill in chunks of the graph's rows."""
        tokens: list[int] = []
        for begin in range(0, len(prompt), self.graph.rows):
            chunk = list(prompt[begin : begin + self.graph.rows])
            positions = range(begin, begin + len(chunk))
            last = begin + len(chunk) == len(prompt)
            rows = step_rows(
                chunk, list(positions), [slot] * len(chunk), [len(chunk) - 1] if last else []
            )
            tokens = self.step(rows)
        while len(tokens) < count:
            position = len(prompt) + len(tokens) - 1
            tokens += self.step(step_rows([tokens[-1]], [position], [slot]))
        return tokens

    def _rows(self, op: Operator, step: StepRows) -> StepRows:
        return step if op.rows is None else table_rows(self.arrays[op.rows.buffer.name])

    def _round(self, buffer: Buffer) -> None:
        if buffer.dtype.name in ("f16", "bf16"):
            array = self.arrays[buffer.name]
            array[...] = to_float32(to_storage(array, buffer.dtype), buffer.dtype)


def _initial(buffer: Buffer) -> NDArray[Any]:
    is_integer = buffer.dtype.name in ("u8", "u32", "i32")
    if buffer.source is None:
        # NaN where nothing was written yet: reading it must not go unnoticed.
        if buffer.role == "activation" and not is_integer:
            return np.full(buffer.shape, np.nan, np.float32)
        return np.zeros(buffer.shape, buffer.dtype.storage if is_integer else np.float32)
    stored = np.asarray(buffer.source() if callable(buffer.source) else buffer.source)
    if is_integer:
        return stored.copy()
    return to_float32(stored, buffer.dtype).reshape(buffer.shape).copy()
