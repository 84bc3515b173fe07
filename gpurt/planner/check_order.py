"""Order: what happens before what in a step, and that every conflict is ordered by it.

Happens-before is the closure of two relations: a task's signal precedes whoever waits for the
counter, and a task precedes the next one in its worker's list. A payload edge orders its own bytes
only, so it is no part of it. Sets of tasks are bitsets in Python integers; each is dropped after
its last use, so a plan of 100k tasks needs as many as are live at one moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from gpurt.plan import Bounds, Plan
from gpurt.planner.boxes import BoxSet, first_uncovered, text
from gpurt.planner.check_layout import fail, is_rearm

_Tasks = tuple[int, int]  # (first task, bitset counted from it): short where tasks are near


def check_order(plan: Plan) -> None:
    """Raises: PlanError naming the first task that is out of order with another.

    Needs a plan that passed check_layout: every wait goes to lower indices.
    """
    accesses = _Accesses(plan)
    before = 0
    for index, before in enumerate(happens_before(plan)):
        accesses.check(index, before)
    last = len(plan.tasks) - 1
    missing = ((1 << last) - 1) & ~before
    if missing:
        first = _lowest(missing)
        what = "does not precede advance: the next step could begin before it ends"
        if is_rearm(plan.tasks[first]):
            what = "does not precede advance: its fill could erase the next step's payload"
        raise fail(plan, first, what)


def happens_before(plan: Plan) -> Iterator[int]:
    """For each task in order the bitset of the tasks that have ended when it begins."""
    previous = [-1] * len(plan.tasks)
    for rows in plan.lists:
        chain = [index for row in rows for index in row]
        for one, two in pairwise(chain):
            previous[two] = one
    first_wait: dict[int, int] = {}
    last_wait: dict[int, int] = {}
    for index, task in enumerate(plan.tasks):
        for counter, _ in task.waits:
            first_wait.setdefault(counter, index)
            last_wait[counter] = index
    # done[i]: tasks that have ended when task i has; freed after its last reader.
    done: dict[int, int] = {}
    frees: dict[int, list[int]] = {}
    last_use = list(range(len(plan.tasks)))
    for index, task in enumerate(plan.tasks):
        if previous[index] >= 0:
            last_use[previous[index]] = max(last_use[previous[index]], index)
        for counter in task.signals:
            use = first_wait.get(counter, index)
            last_use[index] = max(last_use[index], use)
    for index, use in enumerate(last_use):
        frees.setdefault(use, []).append(index)
    signalled: dict[int, int] = {}
    for index, task in enumerate(plan.tasks):
        before = done[previous[index]] if previous[index] >= 0 else 0
        for counter, _ in task.waits:
            if counter not in signalled:
                union = 0
                for producer in plan.counters[counter].producers:
                    union |= done[producer]
                signalled[counter] = union
            before |= signalled[counter]
            if last_wait[counter] == index:
                del signalled[counter]
        yield before
        done[index] = before | (1 << index)
        for ended in frees.get(index, ()):
            del done[ended]


class _Accesses:
    """Who touched which region so far, in task order."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        written = {b for t in plan.tasks for b, _ in t.writes}
        shared = {b for t in plan.tasks for b, _ in t.reads if plan.buffers[b].memory != "weight"}
        self._buffers = {b: _BufferAccess(plan.buffers[b].shape) for b in sorted(written | shared)}
        for task in plan.tasks:
            for number, bounds in (*task.reads, *task.writes):
                if number in self._buffers:
                    self._buffers[number].declare(bounds)

    def check(self, index: int, before: int) -> None:
        """Raises: PlanError if the task conflicts with an earlier one that may still run."""
        task = self._plan.tasks[index]
        for number, bounds in task.reads:
            access = self._buffers.get(number)
            if access is None:
                continue
            memory = self._plan.buffers[number].memory
            if memory in ("activation", "payload") and not access.covered(bounds):
                missing = first_uncovered(bounds, access.covers(bounds))
                name = self._plan.buffers[number].name
                msg = f"reads {text(name, bounds)}, but no task before it writes"
                remedy = "write the whole region or read less of it"
                raise fail(self._plan, index, f"{msg} {text(name, missing or bounds)}", remedy)
            if memory != "payload":
                self._order(index, before, number, bounds, access.writers(bounds), "reads")
        for number, bounds in task.writes:
            access = self._buffers[number]
            users = access.writers(bounds) | access.readers(bounds)
            if self._plan.buffers[number].memory != "payload":
                self._order(index, before, number, bounds, users, "writes")
            elif users:
                where = text(self._plan.buffers[number].name, bounds)
                msg = f"writes payload {where} after task {_lowest(users)} used it in this step"
                raise fail(self._plan, index, msg)
        for number, bounds in task.reads:
            if number in self._buffers:
                self._buffers[number].add_reader(bounds, index)
        for number, bounds in task.writes:
            self._buffers[number].add_writer(bounds, index)

    def _order(
        self, index: int, before: int, number: int, bounds: Bounds, users: int, verb: str
    ) -> None:
        if users | before == before:
            return
        other = _lowest(users & ~before)
        where = text(self._plan.buffers[number].name, bounds)
        writes = any(b == number for b, _ in self._plan.tasks[other].writes)
        theirs = "writes" if writes else "reads"
        body = self._plan.tasks[other].body
        msg = f"{verb} {where} in no order with task {other} ({body}), which {theirs} it"
        raise fail(self._plan, index, f"{msg}: a wait is missing")


class _BufferAccess:
    """The distinct regions of one buffer and which tasks read and wrote them."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._boxes = BoxSet(shape)
        self._near: dict[int, list[int]] = {}
        self._readers: dict[int, _Tasks] = {}
        self._writers: dict[int, _Tasks] = {}
        self._covered: set[int] = set()
        self._version = 0  # of all writers, so that equal questions are answered once
        self._known: dict[int, tuple[int, int]] = {}

    def declare(self, bounds: Bounds) -> None:
        self._boxes.add(bounds)

    def writers(self, bounds: Bounds) -> int:
        number = self._boxes.numbers[bounds]
        version, users = self._known.get(number, (-1, 0))
        if version != self._version:
            users = self._union(self._writers, self._overlapping(number, bounds))
            self._known[number] = (self._version, users)
        return users

    def readers(self, bounds: Bounds) -> int:
        return self._union(self._readers, self._overlapping(self._boxes.numbers[bounds], bounds))

    def covers(self, bounds: Bounds) -> list[Bounds]:
        near = self._overlapping(self._boxes.numbers[bounds], bounds)
        return [self._boxes.index.bounds[i] for i in near if i in self._writers]

    def covered(self, bounds: Bounds) -> bool:
        number = self._boxes.numbers[bounds]
        if number not in self._covered:
            if number not in self._writers and (
                first_uncovered(bounds, self.covers(bounds)) is not None
            ):
                return False
            self._covered.add(number)
        return True

    def add_reader(self, bounds: Bounds, task: int) -> None:
        number = self._boxes.numbers[bounds]
        self._readers[number] = _with(self._readers.get(number), task)

    def add_writer(self, bounds: Bounds, task: int) -> None:
        number = self._boxes.numbers[bounds]
        self._writers[number] = _with(self._writers.get(number), task)
        self._version += 1

    def _overlapping(self, number: int, bounds: Bounds) -> list[int]:
        near = self._near.get(number)
        if near is None:
            near = self._near[number] = self._boxes.index.near(bounds)
        return near

    def _union(self, users: dict[int, _Tasks], numbers: list[int]) -> int:
        union = 0
        for number in numbers:
            if number in users:
                first, bits = users[number]
                union |= bits << first
        return union


def _with(tasks: _Tasks | None, task: int) -> _Tasks:
    """Tasks come in ascending order, so `first` never changes."""
    return (task, 1) if tasks is None else (tasks[0], tasks[1] | 1 << (task - tasks[0]))


def _lowest(bitset: int) -> int:
    return (bitset & -bitset).bit_length() - 1
