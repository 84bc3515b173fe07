"""draft_rows: the rows that a block drafter runs after `sample`, as a table of their own.

For every sequence that sampled a token and may go on, one block: row 0 is the anchor, the last
token that the step commits, at its position; the rows behind it hold the mask token and want
logits: row i proposes the token of position anchor + i. A sequence that ends with what it commits,
one that may produce no more than one further token, and those for which the table has no room left
get no block. Blocks lie in the order of the step's sample rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt import wire
from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.graphs.ops.draft_ngram import committed
from gpurt.graphs.ops.regions import required

if TYPE_CHECKING:
    from gpurt.buffer import Buffer
    from gpurt.graph import Graph, Operator

_HEAD_WORDS = wire.STEP_STATE.itemsize // 4
_ROWS_WORD = wire.field_offset(wire.STEP_STATE, "rows") // 4
_SAMPLES_WORD = wire.field_offset(wire.STEP_STATE, "sample_count") // 4


def draft_rows(
    graph: Graph, table: Buffer, *, block: int, mask: int, name: str = "draft_rows"
) -> Operator:
    """Add the making of a table, behind `sample`. block: rows of a sequence. mask: a token id."""
    return graph.op(
        DRAFT_ROWS,
        {"sampled": graph.sampled, "table": table},
        name=name,
        block=block,
        capacity=wire.row_table_rows(table.shape[0]),
        context=graph.context,
        mask=mask,
    )


def tile_draft_rows(op: Operator, target: Target) -> list[Tile]:
    """One task."""
    del target
    size = op.args["table"].buffer.size_bytes
    return [Tile((0, 0, 0, 0), (op.args["sampled"],), (op.args["table"],), cost_bytes=size)]


def draft_rows_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """Every sequence goes on: a StepRows does not say what ends one but the context."""
    sampled, table = required(op, arrays, "sampled"), required(op, arrays, "table")
    block, capacity = int(op.params["block"]), int(op.params["capacity"])
    rows: list[tuple[int, int, int, int]] = []
    slots = step.slot[step.sample_rows]
    for slot in dict.fromkeys(int(s) for s in slots):
        own = np.flatnonzero(slots == slot)
        fed = [int(step.token[step.sample_rows[j]]) for j in own]
        made = committed(fed, [int(sampled[j]) for j in own])
        anchor = int(step.position[step.sample_rows[own[0]]]) + len(made)
        if anchor >= int(op.params["context"]) or len(rows) + block > capacity:
            continue
        rows.append((made[-1], slot, anchor, 0))
        mask, flag = int(op.params["mask"]), int(wire.RowFlags.SAMPLE)
        rows += [(mask, slot, anchor + i, flag) for i in range(1, block)]
    samples = [i for i, row in enumerate(rows) if row[3]]
    table[:] = 0
    table[_ROWS_WORD], table[_SAMPLES_WORD] = len(rows), len(samples)
    table[_HEAD_WORDS : _HEAD_WORDS + 4 * len(rows)] = np.array(rows, np.uint32).reshape(-1)
    begin = _HEAD_WORDS + 4 * capacity
    table[begin : begin + len(samples)] = samples


def table_rows(table: NDArray[np.uint32]) -> StepRows:
    """What a table says, as references take it."""
    count, samples = int(table[_ROWS_WORD]), int(table[_SAMPLES_WORD])
    rows = table[_HEAD_WORDS : _HEAD_WORDS + 4 * count].reshape(-1, 4)
    begin = _HEAD_WORDS + 4 * wire.row_table_rows(len(table))
    return StepRows(rows[:, 0], rows[:, 1], rows[:, 2], table[begin : begin + samples])


DRAFT_ROWS = Body(
    name="draft_rows",
    args=(Arg("sampled", "r"), Arg("table", "w")),
    params=("block", "capacity", "context", "mask"),
    tile=tile_draft_rows,
    reference=draft_rows_reference,
)
