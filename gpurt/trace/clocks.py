"""Clocks of several ranks, from what they waited for; and which rank was late.

A task that waits for all ranks starts after its producers have ended on each of them. With c the
time that rank r's clock is ahead of rank 0's, over all steps:

    start on r - end on 0 >= c          end on r - start on 0 <= c

so every collective bounds c from both sides, and the tightest bounds of a step lie about two hops
apart. Who polls for other ranks' data has it when it ends, and they had begun: bounds a task's run
wider. Threads of the host have one clock.

A clock may be wrong for a while, as an SM's is in the first step of a launch, until its rate is
known. So the offset is the middle of what the most steps allow, not what all of them do; the error
is half of that, or what nine of ten steps are away from it if that is more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.shared_edges import shared_edges

if TYPE_CHECKING:
    from gpurt.plan import Plan
    from gpurt.trace.trace import Trace

_FAR = np.iinfo(np.int64).max // 4


@dataclass(frozen=True)
class LateRanks:
    """Of all collectives of a trace: how often each rank came last, and by how much."""

    shares: tuple[float, ...]
    median_us: float  # from the last rank but one to the last

    def __str__(self) -> str:
        """As in `last to a collective: rank 0 12%, rank 1 88%, by 3.2 us in the median`."""
        ranks = ", ".join(f"rank {rank} {share:.0%}" for rank, share in enumerate(self.shares))
        return f"last to a collective: {ranks}, by {self.median_us:.1f} us in the median"


def offsets(spans: NDArray[Any], plan: Plan, ranks: int) -> list[tuple[int, int]]:
    """(nanoseconds that each rank's clock is ahead of rank 0's, the error of that). Without a
    collective in `spans`: (0, 0).
    """
    tasks = len(plan.tasks)
    start = spans["begin_ns"] + spans["wait_ns"]
    end = start + spans["run_ns"]
    steps, row = np.unique(spans["step"], return_inverse=True)
    rank, task = spans["task"] // tasks, spans["task"] % tasks
    exchanges = _exchanges(plan)
    shape = (len(exchanges), ranks, len(steps))
    first_start, last_end = np.full(shape, _FAR), np.full(shape, -_FAR)
    for number, (made, waiting, polls) in enumerate(exchanges):
        waits, makes = np.isin(task, waiting), np.isin(task, made)
        if polls:  # when the last of those who wait had ended, and of those who make had begun
            _last_of(first_start[number], rank[waits], row[waits], end[waits])
            _last_of(last_end[number], rank[makes], row[makes], start[makes])
            first_start[number][first_start[number] == -_FAR] = _FAR
        else:
            np.minimum.at(first_start[number], (rank[waits], row[waits]), start[waits])
            np.maximum.at(last_end[number], (rank[makes], row[makes]), end[makes])
    found = [(0, 0)]
    for other in range(1, ranks):
        most = (first_start[:, other] - last_end[:, 0]).min(axis=0, initial=_FAR)
        least = (last_end[:, other] - first_start[:, 0]).max(axis=0, initial=-_FAR)
        known = (most < _FAR // 2) & (least > -_FAR // 2)
        found.append(_common(least[known], most[known]))
    return found


def _last_of(
    into: NDArray[np.int64],
    rank: NDArray[np.int64],
    row: NDArray[np.int64],
    times: NDArray[np.int64],
) -> None:
    """into: [rank, step], the latest of the times; one without any is -_FAR."""
    into[:] = -_FAR
    np.maximum.at(into, (rank, row), times)


def _common(least: NDArray[np.int64], most: NDArray[np.int64]) -> tuple[int, int]:
    """The middle of what the most of the intervals [least, most] hold, and its error. An interval
    whose ends are the wrong way round holds what lies between them: its clocks were less exact.
    """
    if not len(least):
        return 0, 0
    low, high = np.minimum(least, most), np.maximum(least, most)
    ends = np.concatenate([low, high])
    opens = np.concatenate([np.ones(len(low), np.int64), np.full(len(high), -1)])
    order = np.lexsort((-opens, ends))  # one that ends where another begins touches it
    best = int(np.argmax(np.cumsum(opens[order])))
    low_end, high_end = int(ends[order][best]), int(ends[order][best + 1])
    offset = (low_end + high_end) // 2
    away = np.maximum(0, np.maximum(low - offset, offset - high))
    return offset, max((high_end - low_end) // 2, int(np.quantile(away, 0.9)))


def _exchanges(plan: Plan) -> list[tuple[NDArray[Any], NDArray[Any], bool]]:
    """(producers, those who wait for all ranks' producers, whether they poll for data)."""

    def tasks_of(wanted: Iterable[int]) -> NDArray[np.int64]:
        return np.array(list(wanted), np.int64)

    found = [
        (
            tasks_of(counter.producers),
            tasks_of(i for i, t in enumerate(plan.tasks) if any(w == c for w, _ in t.waits)),
            False,
        )
        for c, counter in enumerate(plan.counters)
        if counter.ranks
    ]
    by_op: dict[int, list[int]] = {}
    for index, task in enumerate(plan.tasks):
        by_op.setdefault(task.op, []).append(index)
    return found + [
        (tasks_of(by_op[a]), tasks_of(by_op[b]), True) for a, b in sorted(shared_edges(plan))
    ]


def late_ranks(trace: Trace) -> LateRanks | None:
    """Who came last; None without a collective of ranks in the trace."""
    counts, by = np.zeros(trace.ranks, np.int64), []
    for ends in _ends(trace):
        last = int(ends.argmax())
        counts[last] += 1
        by.append(int(ends[last] - np.partition(ends, -2)[-2]))
    if not by:
        return None
    return LateRanks(tuple((counts / len(by)).tolist()), float(np.median(by)) / 1e3)


def _ends(trace: Trace) -> Iterator[NDArray[np.int64]]:
    """Of each collective of each whole step: when each rank's last producer had ended."""
    if trace.ranks == 1:
        return
    tasks = len(trace.task_op) // trace.ranks
    bounds, values = trace.producers
    # Each rank has a counter of its own for a collective, with the same producers: rank 0's do.
    rows = [values[a:b] for a, b in pairwise(bounds)]
    rows = [r for r in rows[: len(rows) // trace.ranks] if len(r) and r.max() >= tasks]
    # That all ranks have `armed` the next step's payload holds up nobody; their data may.
    rows = [r for r in rows if trace.operators[trace.task_op[r[0]]].name != "armed"]
    ops = len(trace.operators) // trace.ranks
    shared = sorted({a % ops for a, b in trace.payload_edges if a // ops != b // ops})
    rows += [np.flatnonzero(trace.task_op % ops == op) for op in shared]
    for step in trace.whole_steps.tolist():
        spans = trace.spans_of(step)
        end = np.full(len(trace.task_op), -_FAR)
        end[spans["task"]] = spans["begin_ns"] + spans["wait_ns"] + spans["run_ns"]
        for row in rows:
            ends = np.full(trace.ranks, -_FAR)
            np.maximum.at(ends, row // tasks, end[row])
            if ends.min() > -_FAR:  # not of another variant
                yield ends
