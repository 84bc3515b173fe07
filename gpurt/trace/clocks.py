"""Clocks of several ranks, from what they waited for; and which rank was late.

A task that waits for all ranks starts after its producers have ended on each of them. With c the
time that rank r's clock is ahead of rank 0's, over all steps:

    start on r - end on 0 >= c          end on r - start on 0 <= c

so every collective bounds c from both sides, and the tightest bounds lie about two hops apart.
Their middle is the offset, half their distance the error. Threads of the host have one clock.
Who polls for other ranks' data has it when it ends, and they had begun: bounds a task's run wider.
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
        mine = np.isin(task, waiting)
        if polls:  # the last of them
            first_start[number] = -_FAR
            np.maximum.at(first_start[number], (rank[mine], row[mine]), end[mine])
            first_start[number][first_start[number] == -_FAR] = _FAR
            mine = np.isin(task, made)
            last_end[number] = _FAR
            np.minimum.at(last_end[number], (rank[mine], row[mine]), start[mine])
            last_end[number][last_end[number] == _FAR] = -_FAR
            continue
        np.minimum.at(first_start[number], (rank[mine], row[mine]), start[mine])
        mine = np.isin(task, made)
        np.maximum.at(last_end[number], (rank[mine], row[mine]), end[mine])
    found = [(0, 0)]
    for other in range(1, ranks):
        most = int((first_start[:, other] - last_end[:, 0]).min(initial=_FAR))
        least = int((last_end[:, other] - first_start[:, 0]).max(initial=-_FAR))
        known = most < _FAR // 2 and least > -_FAR // 2
        found.append(((most + least) // 2, abs(most - least) // 2) if known else (0, 0))
    return found


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
