"""Ended: sets of tasks that have ended, and what happens before what in a step.

Happens-before is the closure of two relations: a task's signal precedes whoever waits for the
counter, and a task precedes the next one in its worker's list. A payload edge orders its own bytes
only, so it is no part of it. What has ended when a task begins is nearly all that lies a layer or
more behind it, so a set is a floor, below which everything has ended, and a short bitset: a plan of
300k tasks costs per task what one of 3k does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gpurt.plan import Plan, PlanVariant


class Ended(NamedTuple):
    """The tasks below `floor`, and those of `bits`, which count from it."""

    floor: int
    bits: int

    def has(self, task: int) -> bool:
        """Whether it is in the set."""
        return task < self.floor or bool(self.bits >> (task - self.floor) & 1)

    def plus(self, task: int) -> Ended:
        """With one more task, which lies at the floor or above."""
        return raised(self.floor, self.bits | 1 << (task - self.floor))

    def with_range(self, begin: int, end: int) -> Ended:
        """With the tasks from `begin` to `end`."""
        begin = max(begin, self.floor)
        more = (1 << max(0, end - begin)) - 1
        return raised(self.floor, self.bits | more << (begin - self.floor))

    def joined(self, other: Ended) -> Ended:
        """The tasks of both."""
        low, high = (self, other) if self.floor <= other.floor else (other, self)
        return raised(high.floor, high.bits | low.bits >> (high.floor - low.floor))

    def lacks(self, first: int, bits: int) -> int:
        """The lowest task of a bitset counted from `first` that is not in the set, or -1."""
        if self.floor >= first:
            first, bits = self.floor, bits >> (self.floor - first) & ~self.bits
        else:
            bits &= ~(self.bits >> (first - self.floor))
        return -1 if bits == 0 else first + (bits & -bits).bit_length() - 1

    def first_outside(self, other: Ended) -> int:
        """The lowest task of this set that is not in `other`, or -1."""
        below = other.lacks(other.floor, (1 << max(0, self.floor - other.floor)) - 1)
        return below if below >= 0 else other.lacks(self.floor, self.bits)


NOTHING = Ended(0, 0)


def raised(floor: int, bits: int) -> Ended:
    """The set with its floor as high as it goes."""
    if bits & 1:
        ones = (~bits & (bits + 1)).bit_length() - 1
        floor, bits = floor + ones, bits >> ones
    return Ended(floor, bits)


class _Signals:
    """What has ended once those who signalled a counter so far have."""

    __slots__ = ("bits", "floor", "seen")

    def __init__(self, nothing: Ended) -> None:
        self.floor, self.bits = nothing
        self.seen = nothing

    def add(self, before: Ended, task: int) -> None:
        if before is not self.seen:
            self.floor, self.bits = Ended(self.floor, self.bits).joined(before)
            self.seen = before
        self.bits |= 1 << (task - self.floor)


def happens_before(plan: Plan) -> Iterator[Ended]:
    """For each task in order the tasks that have ended when it begins; those of variants before its
    own, whose steps it is in no step with, count as ended.

    Needs a plan that passed check_layout: every wait goes to lower indices.
    """
    workers = [-1] * len(plan.tasks)
    for worker, rows in enumerate(plan.lists):
        for row in rows:
            for index in row:
                workers[index] = worker
    last_wait = {c: index for index, task in enumerate(plan.tasks) for c, _ in task.waits}
    for variant in plan.step_variants():
        yield from _of_variant(plan, variant, workers, last_wait)


def _of_variant(
    plan: Plan, variant: PlanVariant, workers: Sequence[int], last_wait: Mapping[int, int]
) -> Iterator[Ended]:
    nothing = Ended(variant.begin, 0)
    in_list = [nothing] * len(plan.lists)
    signals: dict[int, _Signals] = {}
    # Tasks outside of lists that wait for the same come in rows: they share one object.
    waits: tuple[tuple[int, int], ...] = ()
    shared = nothing
    for index in range(variant.begin, variant.end):
        task = plan.tasks[index]
        worker = workers[index]
        if worker < 0 and task.waits == waits:
            before = shared
        else:
            before = in_list[worker] if worker >= 0 else nothing
            for counter, _ in task.waits:
                before = before.joined(raised(signals[counter].floor, signals[counter].bits))
            if worker < 0:
                waits, shared = task.waits, before
        yield before
        for counter in task.signals:
            if counter in last_wait:
                signals.setdefault(counter, _Signals(nothing)).add(before, index)
        for counter, _ in task.waits:
            if last_wait[counter] == index:
                del signals[counter]
        if worker >= 0:
            in_list[worker] = before.plus(index)
