"""Trace: spans and steps of a run as numpy arrays, with what the plan says about their tasks.

Times are nanoseconds from the first moment of the trace. A Trace is complete in itself: analysis
and viewers need no plan and no device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.trace.spans import StepSpans

if TYPE_CHECKING:
    from gpurt.executors.base import RawTrace
    from gpurt.plan import Plan

# phase: 0 plain, 1 prefill, 2 decode. variant: index into Trace.variant_rows.
STEP = np.dtype(
    [
        ("step", "<u8"),
        ("begin_ns", "<i8"),
        ("end_ns", "<i8"),
        ("rows", "<u4"),
        ("phase", "<u2"),
        ("variant", "<u2"),
    ]
)
PHASES = ("plain", "prefill", "decode")
STEP_MASK = (1 << 32) - 1  # a raw span keeps the low half of its step's number


@dataclass(frozen=True)
class OperatorInfo:
    """What a plan says about an operator. experts: of how many each of its tasks runs one, or 0."""

    name: str
    body: str
    path: str
    layer: int
    experts: int = 0


@dataclass(frozen=True)
class RequestInfo:
    """A request that ran in the steps first_step..last_step, both included.

    verify_steps: of them, those with proposals; accepted: how many committed proposal 1, 2, ...
    """

    sequence: int
    first_step: int
    last_step: int
    prompt_tokens: int
    tokens: int
    verify_steps: int = 0
    accepted: tuple[int, ...] = ()


Rows = tuple[NDArray[np.int64], NDArray[np.int64]]  # row i is values[offsets[i] : offsets[i + 1]]


def _no_rows() -> Rows:
    return np.zeros(1, np.int64), np.zeros(0, np.int64)


@dataclass(frozen=True)
class Trace:
    """kept: the spans, see `spans`. steps: STEP, by number; every step, also without spans.

    task_op, task_bytes: by task. waits: counters a task waits for; producers: tasks that signal a
    counter; both as Rows. payload_edges: (producer operator, consumer operator).
    regions: `x[0:16, 0:576] f32`, to which task_reads and task_writes point, Rows by task; none
    where they are not known. task_dynamic: whether a step may do without the task (a slot of an
    expert that no row chose). task_variant: which of the plan's variants it belongs to; steps of
    variant i have up to variant_rows[i] rows. requests: those that are known. dropped: spans that
    newer ones overwrote. ranks: workers and tasks are as many for each, those of rank 0 first;
    all on rank 0's clock, within clock_error_ns.
    ceiling_gbps: GB/s that this machine was measured to reach, 0 if it never was.
    """

    name: str
    device: str
    workers: int
    operators: tuple[OperatorInfo, ...]
    task_op: NDArray[np.int64]
    task_bytes: NDArray[np.int64]
    waits: Rows = field(repr=False)
    producers: Rows = field(repr=False)
    payload_edges: tuple[tuple[int, int], ...] = field(repr=False)
    kept: StepSpans = field(repr=False)
    steps: NDArray[Any] = field(repr=False)
    dropped: int = 0
    regions: tuple[str, ...] = field(default=(), repr=False)
    task_reads: Rows = field(default_factory=_no_rows, repr=False)
    task_writes: Rows = field(default_factory=_no_rows, repr=False)
    task_dynamic: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool), repr=False)
    requests: tuple[RequestInfo, ...] = ()
    task_variant: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(0, np.int64), repr=False
    )
    variant_rows: tuple[int, ...] = (0,)
    ranks: int = 1
    clock_error_ns: int = 0
    ceiling_gbps: float = 0.0

    def __post_init__(self) -> None:
        """Unless told otherwise, every task runs in every step."""
        if not len(self.task_dynamic):
            object.__setattr__(self, "task_dynamic", np.zeros(len(self.task_op), bool))
        if len(self.task_variant) != len(self.task_op):
            object.__setattr__(self, "task_variant", np.zeros(len(self.task_op), np.int64))

    @staticmethod
    def from_raw(
        plan: Plan,
        *raws: RawTrace,
        first_step: int = 0,
        last_step: int | None = None,
        requests: tuple[RequestInfo, ...] = (),
        ceiling_gbps: float = 0.0,
    ) -> Trace:
        """A Trace of the steps first..last of one launch. raws: of every rank. Every rank has
        operators, tasks and counters of its own, one rank's after another's.

        Raises: TraceError if it is empty.
        """
        from gpurt.trace.raw import build

        return build(plan, raws, first_step, last_step, requests, ceiling_gbps)

    def save(self, path: str | Path) -> None:
        """Write a trace file. Raises: TraceError if the path cannot be written."""
        from gpurt.trace.file import write_trace

        write_trace(self, path)

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read a trace file. Raises: TraceError if it is missing, corrupt or newer."""
        from gpurt.trace.file import read_trace

        return read_trace(path)

    def critical_path(self, step: int | None = None) -> NDArray[Any]:
        """Spans of the longest chain of a step, first to last. step None: the median step."""
        from gpurt.trace.analysis import critical_path, typical_step

        return critical_path(self, typical_step(self) if step is None else step)

    @property
    def spans(self) -> NDArray[Any]:
        """All spans: SPAN, by step and begin. Of a file: reads all of them; see `spans_of`."""
        return self.kept.all()

    def spans_of(self, step: int) -> NDArray[Any]:
        """The spans of one step, by begin; empty if none was kept."""
        return self.kept.of(step)

    def lane(self, worker: int) -> tuple[int, int]:
        """(rank, worker of that rank)."""
        return divmod(worker, self.workers // self.ranks)

    def lane_name(self, worker: int) -> str:
        """A worker in words; with its rank if there are several."""
        rank, own = self.lane(worker)
        return f"rank {rank} worker {own}" if self.ranks > 1 else f"worker {own}"

    # ---- for analysis ------------------------------------------------------------------------
    @cached_property
    def whole_steps(self) -> NDArray[np.uint64]:
        """Numbers of the steps of which every span is here that no step of its variant may do
        without.
        """
        known = self.kept.whole_steps
        return self.whole_among(self.spans) if known is None else known

    def whole_among(self, spans: NDArray[Any]) -> NDArray[np.uint64]:
        """Numbers of the steps of which `spans` holds all."""
        needed = spans[~self.task_dynamic[spans["task"]]]
        numbers, first, counts = np.unique(needed["step"], return_index=True, return_counts=True)
        wanted = np.bincount(self.task_variant[~self.task_dynamic])
        variants = self.task_variant[needed["task"][first]]
        whole: NDArray[np.uint64] = numbers[counts == wanted[variants]].astype(np.uint64)
        return whole

    def producers_of(self, task: int) -> NDArray[np.int64]:
        """Tasks whose signals or payload `task` waits for."""
        counters = row(self.waits, task)
        found = [row(self.producers, int(c)) for c in counters]
        op = int(self.task_op[task])
        feeding = [a for a, b in self.payload_edges if b == op]
        mine = self.task_variant == self.task_variant[task]
        found += [np.flatnonzero((self.task_op == a) & mine) for a in feeding]
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)


def row(rows: Rows, index: int) -> NDArray[np.int64]:
    """Row `index`, a view."""
    offsets, values = rows
    return values[offsets[index] : offsets[index + 1]]
