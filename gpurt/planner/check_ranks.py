"""Ranks: what tasks of other ranks must have done, and that all ranks have the same tasks.

A rank's own order is check_order's. This adds what holds on EVERY rank: a task that waits for a
rank counter begins after its producers on all ranks, and, since ranks have the same tasks, after
all that precedes those producers there. From that two things are proved of symmetric buffers:

    read    all that ranks write of the region was written before, on all ranks
    write   nobody else touches the region in this step; and no rank still reads it from an earlier
            one. For it lies in the set of steps s, s + 2, ...: whoever writes in step s + 2 ended
            step s + 1, in which it waited for a task of every rank, which had ended step s.

So no re-arm is needed, and none is allowed: one that no rank waits for could erase the data of the
next step. The same wait in every step bounds how far rank 0's orders (scheduler/ranks.hpp) run
ahead.

Symmetric payload is re-armed, as check_payload says, and three things are proved of it beside that:

    armed   advance begins after all re-arms of ALL ranks: so the fill of round r is released to the
            writers of round r+1, wherever they are
    read    what ranks write of a region, tasks here read: a store that nobody saw could come after
            the fill. One that was polled precedes it, since the reader precedes it through advance
    write   nobody else writes the region in this step: as above

Progress. Waits between ranks go to lower task indices like all others, and all ranks have the same
tasks (check_group). Take the earliest step, and in it the lowest task, that has not ended on some
rank: all it waits for, on any rank, has ended, so it runs, as argued in check.py.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence

from gpurt.errors import PlanError
from gpurt.plan import Bounds, Plan, PlanTask, PlanVariant
from gpurt.planner.boxes import first_uncovered, overlap, text
from gpurt.planner.check_layout import fail, is_rearm
from gpurt.planner.ended import NOTHING, Ended, happens_before

_SHARED = ("target", "rows", "slots", "context", "vocab", "payload_set_bytes")

_SYMMETRIC = ("symmetric", "symmetric_payload")


def check_ranks(plan: Plan) -> None:
    """Raises: PlanError naming the first task that touches symmetric memory in no order.

    Needs a plan that passed check_order.
    """
    symmetric = {i for i, b in enumerate(plan.buffers) if b.memory == "symmetric"}
    shared = any(b.memory == "symmetric_payload" for b in plan.buffers)
    waiters = [
        index
        for index, task in enumerate(plan.tasks)
        if any(plan.counters[counter].ranks for counter, _ in task.waits)
    ]
    if plan.rank_count == 1 and not symmetric and not shared:
        return
    for variant in plan.step_variants():
        if not any(variant.begin <= waiter < variant.end for waiter in waiters):
            msg = f"no task of {plan.name} waits for all of {plan.rank_count} ranks"
            remedy = "a step needs a collective, or ranks could be two steps apart"
            raise PlanError(f"{msg} - at plan {plan.name} - {remedy}")
    readers = {i for i, t in enumerate(plan.tasks) if any(n in symmetric for n, _ in t.reads)}
    ends = {variant.end - 1: variant for variant in plan.step_variants()}
    before = _Everywhere(plan, waiters, readers | ends.keys()).before
    for end, variant in ends.items():
        _check_rearms(plan, variant, before[end])
    writers = _Writers(plan)
    for index, task in enumerate(plan.tasks):
        for number, bounds in task.reads:
            if number not in symmetric:
                continue
            other = before[index].lacks(*writers.touching(number, bounds))
            if other >= 0:
                where = text(plan.buffers[number].name, bounds)
                body = plan.tasks[other].body
                msg = f"reads {where} in no order with task {other} ({body}) of other ranks"
                raise fail(plan, index, f"{msg}: a wait for all ranks is missing")
        for number, _ in task.writes:
            if number in symmetric:
                writers.add(index, number)


def _check_rearms(plan: Plan, variant: PlanVariant, before: Ended) -> None:
    """before: what has ended on all ranks when the variant's advance begins."""
    written: dict[int, dict[Bounds, int]] = {}  # by whom first
    read: dict[int, dict[Bounds, None]] = {}
    for index in range(variant.begin, variant.end):
        task = plan.tasks[index]
        if is_rearm(task) and task.addr[0] is not None:
            if _is_polled(plan, task.addr[0][0]) and not before.has(index):
                what = "fills symmetric memory in no order with writers of the next step"
                raise fail(plan, index, f"{what}: advance waits for no such signal of all ranks")
            continue
        for number, bounds in task.writes:
            if _is_polled(plan, number):
                written.setdefault(number, {}).setdefault(bounds, index)
        for number, bounds in task.reads:
            if _is_polled(plan, number):
                read.setdefault(number, {})[bounds] = None
    for number, regions in written.items():
        readers = list(read.get(number, ()))
        # Nearly always all of it is read, and a box about it is one question in place of thousands.
        if first_uncovered(_box(list(regions)), readers) is None:
            continue
        for bounds, index in regions.items():
            unread = first_uncovered(bounds, readers)
            if unread is not None:
                where = text(plan.buffers[number].name, unread)
                raise fail(plan, index, f"writes payload {where} on all ranks, which nobody reads")


def _box(regions: Sequence[Bounds]) -> Bounds:
    """The smallest region that holds them all."""
    return tuple(
        (min(begin for begin, _ in axis), max(end for _, end in axis))
        for axis in zip(*regions, strict=True)
    )


def _is_polled(plan: Plan, number: int) -> bool:
    return plan.buffers[number].memory == "symmetric_payload"


def check_group(plans: Sequence[Plan]) -> None:
    """The plans of a group's ranks, in their order. Raises: PlanError naming the first difference:
    then ranks would not take collectives in one order, or wait for signals that never come.
    """
    first = plans[0]
    for rank, plan in enumerate(plans):
        if (plan.rank, plan.rank_count) != (rank, len(plans)):
            msg = f"the plan of rank {rank} of {len(plans)} is for {plan.rank} of {plan.rank_count}"
            raise PlanError(f"{msg} - at plan {plan.name} - give each rank its own, in order")
        for what in _SHARED:
            ours, theirs = getattr(plan, what), getattr(first, what)
            if ours != theirs:
                raise _differ(plan, rank, f"have {what} {theirs} and {ours}")
        if _symmetric(plan) != _symmetric(first):
            raise _differ(plan, rank, "place symmetric buffers differently")
        if len(plan.tasks) != len(first.tasks):
            raise _differ(plan, rank, f"have {len(first.tasks)} and {len(plan.tasks)} tasks")
        for index, (ours, theirs) in enumerate(zip(plan.tasks, first.tasks, strict=True)):
            if _shape(plan, ours) != _shape(first, theirs):
                msg = f"differs from rank 0's, which is {theirs.body}"
                remedy = f"rank {rank} must take collectives in the order of rank 0"
                raise fail(plan, index, msg, remedy)
        if plan.counters != first.counters:
            raise _differ(plan, rank, "count different signals")


def group_digest(plan: Plan) -> str:
    """Of all that `check_group` wants equal, for plans of other processes."""
    shared = [getattr(plan, what) for what in _SHARED]
    shapes = [_shape(plan, task) for task in plan.tasks]
    text = repr((plan.rank_count, shared, _symmetric(plan), shapes, plan.counters))
    return hashlib.sha256(text.encode()).hexdigest()


class _Everywhere:
    """For tasks that read symmetric buffers: what has ended on all ranks when they begin."""

    def __init__(self, plan: Plan, waiters: Sequence[int], readers: set[int]) -> None:
        self.before: dict[int, Ended] = {}  # by reader
        crossing = {
            w: tuple(c for c, _ in plan.tasks[w].waits if plan.counters[c].ranks) for w in waiters
        }
        producers = {
            p for row in crossing.values() for c in row for p in plan.counters[c].producers
        }
        # Tasks that wait for the same, in the order of the first of them.
        self._alike: dict[tuple[int, ...], list[int]] = {}
        self._firsts: list[int] = []
        self._own: list[Ended] = []  # what their waits give
        self._given = [NOTHING]  # what those of the first ones give together
        done: dict[int, Ended] = {}
        known, last = NOTHING, None
        for index, before in enumerate(happens_before(plan)):
            if index in producers:
                done[index] = before.plus(index)
            row = crossing.get(index, ())
            if row:
                self._add(index, row, [done[p] for c in row for p in plan.counters[c].producers])
            if index in readers:
                if last != (id(before), row):
                    known = self._known(before, row)
                    kept, last = before, (id(before), row)  # `kept`: no other has its id
                self.before[index] = known
        del kept

    def _add(self, waiter: int, row: tuple[int, ...], given: Sequence[Ended]) -> None:
        if row in self._alike:
            self._alike[row].append(waiter)
            return
        own = NOTHING
        for ended in given:
            own = own.joined(ended)
        self._alike[row] = [waiter]
        self._firsts.append(waiter)
        self._own.append(own)
        self._given.append(self._given[-1].joined(own))

    def _known(self, before: Ended, row: tuple[int, ...]) -> Ended:
        """From its own waits, and from those of all waiters that ended before it."""
        low = bisect_left(self._firsts, before.floor)
        known = self._given[low]
        rows = list(self._alike)[low:]
        for waited, own in zip(rows, self._own[low:], strict=True):
            if waited == row or any(before.has(waiter) for waiter in self._alike[waited]):
                known = known.joined(own)
        return known


class _Writers:
    """The tasks so far that write each symmetric buffer."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._of: dict[int, list[int]] = {}
        self._found: dict[tuple[int, Bounds], tuple[int, tuple[int, int]]] = {}

    def add(self, index: int, number: int) -> None:
        self._of.setdefault(number, []).append(index)

    def touching(self, number: int, bounds: Bounds) -> tuple[int, int]:
        """Those that write a part of a region: the first, and a bitset that counts from it."""
        writers = self._of.get(number, [])
        count, found = self._found.get((number, bounds), (-1, (0, 0)))
        if count != len(writers):
            tasks, bits, first = self._plan.tasks, 0, writers[0]
            for index in writers:
                if any(n == number and overlap(b, bounds) for n, b in tasks[index].writes):
                    bits |= 1 << (index - first)
            found = first, bits
            self._found[number, bounds] = len(writers), found
        return found


def _symmetric(plan: Plan) -> list[tuple[object, ...]]:
    return [
        (b.name, b.shape, b.dtype, b.memory, b.offset_bytes)
        for b in plan.buffers
        if b.memory in _SYMMETRIC
    ]


def _shape(plan: Plan, task: PlanTask) -> tuple[object, ...]:
    """What must be the same on all ranks: not which weights it reads."""
    shared = [
        (plan.buffers[number].name, bounds)
        for number, bounds in (*task.reads, *task.writes)
        if plan.buffers[number].memory in _SYMMETRIC
    ]
    return (task.op, task.body, task.flags, task.waits, task.signals, shared)


def _differ(plan: Plan, rank: int, what: str) -> PlanError:
    return PlanError(f"ranks 0 and {rank} {what} - at plan {plan.name} - plan all from one model")
