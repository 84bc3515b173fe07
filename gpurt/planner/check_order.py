"""Order: that every conflict is ordered by what happens before what, and all precedes `advance`.

Of a buffer that is written before it is read, each place once, nearly all activations, only the
reads need a look. Others keep who read and wrote each of their regions. Sets of tasks are bitsets
counted from the first task that touches the buffer. Of symmetric buffers check_ranks proves the
order, since it is one among ranks.
"""

from __future__ import annotations

import numpy as np

from gpurt.plan import TWO_SETS, Bounds, Plan, PlanRegion, PlanVariant
from gpurt.planner import boxes
from gpurt.planner.check_layout import fail, is_rearm
from gpurt.planner.ended import NOTHING, Ended, happens_before
from gpurt.progress import Progress

_CHUNK_PAIRS = 1 << 21
_PROGRESS_TASKS = 4096


def check_order(plan: Plan, progress: Progress | None = None) -> dict[int, Ended]:
    """What has ended when a compensator or a task of a dynamic segment begins; of tasks in a row
    for which it is the same only the first.

    Raises: PlanError naming the first task that is out of order with another. Needs a plan that
    passed check_layout: every wait goes to lower indices.
    """
    ends = {variant.end: variant for variant in plan.step_variants()}
    starts = {variant.begin: variant for variant in plan.step_variants()}
    always, members = set(), bytearray(len(plan.tasks))
    for segment in plan.segments:
        if segment.dynamic is not None:
            always |= {segment.begin, segment.dynamic.compensator}
            members[segment.begin : segment.end] = b"\1" * (segment.end - segment.begin)
    found: dict[int, Ended] = {}
    before = last = NOTHING
    for index, before in enumerate(happens_before(plan)):
        if index in starts:
            accesses = _Accesses(plan, starts[index])
        accesses.check(index, before)
        if index + 1 in ends:
            _check_end(plan, ends[index + 1], before)
        if index in always or (members[index] and before is not last):
            found[index] = before
        last = before
        if progress is not None and index % _PROGRESS_TASKS == 0:
            progress("checking the plan", index, len(plan.tasks))
    return found


def _check_end(plan: Plan, variant: PlanVariant, before: Ended) -> None:
    """before: what has ended when the variant's advance begins."""
    first = before.lacks(variant.begin, (1 << variant.end - 1 - variant.begin) - 1)
    if first >= 0:
        what = "does not precede advance: the next step could begin before it ends"
        if is_rearm(plan.tasks[first]):
            what = "does not precede advance: its fill could erase the next step's payload"
        raise fail(plan, first, what)


class _Region:
    """A region of a buffer, its users so far, and what was last proved about reading it."""

    __slots__ = (
        "bounds",
        "buffer",
        "covered",
        "is_read",
        "number",
        "passed",
        "readers",
        "version",
        "writers",
    )

    def __init__(self, buffer: _Buffer, number: int, bounds: Bounds) -> None:
        self.buffer, self.number, self.bounds = buffer, number, bounds
        self.readers, self.writers = 0, 0
        self.is_read = self.covered = False
        self.passed, self.version = NOTHING, -1


class _Buffer:
    """The distinct regions of one buffer that tasks use."""

    def __init__(self, index: int, memory: str, first: int) -> None:
        self.index, self.first = index, first  # the first task that uses it
        self.has_two_sets = memory in TWO_SETS
        self.needs_writers = memory in ("activation", *TWO_SETS)
        self.regions: list[_Region] = []
        self.version = 0  # of all writers
        self.writes, self.last_write, self.first_read = 0, -1, 1 << 62
        self.is_simple = False
        self._near: dict[int, list[_Region]] = {}

    def settle(self) -> None:
        """Once all its uses are known: whether all writes come first, each place once."""
        written = [r for r in self.regions if r.writers]
        self.is_simple = (
            self.first_read > self.last_write
            and self.writes == len(written)
            and boxes.are_disjoint([r.bounds for r in written])
        )
        if not self.is_simple:
            for region in written:
                region.writers = 0

    def near(self, region: _Region) -> list[_Region]:
        """The regions that share an element with this one."""
        if not self._near:
            self._pair_all()
        return self._near[region.number]

    def _pair_all(self) -> None:
        """Of a simple buffer regions to read with written ones, else all with all."""
        asking, others = self.regions, self.regions
        if self.is_simple:
            asking = [r for r in self.regions if r.is_read]
            others = [r for r in self.regions if r.writers]
        ours = boxes.boxes_of([r.bounds for r in asking])
        theirs = boxes.boxes_of([r.bounds for r in others])
        step = max(1, _CHUNK_PAIRS // len(others))
        for begin in range(0, len(asking), step):
            hits = boxes.overlaps(ours[begin : begin + step], theirs)
            for region, row in zip(asking[begin : begin + step], hits, strict=True):
                self._near[region.number] = [others[i] for i in np.flatnonzero(row).tolist()]

    def users(self, region: _Region, *, readers: bool) -> int:
        """Who wrote, or also read, a part of a region so far."""
        users = 0
        for other in self.near(region):
            users |= other.writers | (other.readers if readers else 0)
        return users

    def uncovered(self, region: _Region) -> Bounds | None:
        """A part of a region that nobody wrote so far."""
        if not region.covered:
            written = [r.bounds for r in self.near(region) if r.writers] if self.writes else []
            missing = boxes.first_uncovered(region.bounds, written)
            if missing is not None:
                return missing
            region.covered = True
        return None


class _Accesses:
    """Who of a variant's tasks touched which region so far, in task order."""

    def __init__(self, plan: Plan, variant: PlanVariant) -> None:
        self._plan = plan
        tasks = plan.tasks[variant.begin : variant.end]
        self._buffers: dict[int, _Buffer] = {}
        # By identity, since tasks share regions and a region takes long to hash; None: the buffer
        # is never written and need not be.
        self._regions: dict[int, _Region | None] = {}
        places: dict[PlanRegion, _Region] = {}
        written = {b for t in tasks for b, _ in t.writes}
        for index, task in enumerate(tasks, variant.begin):
            for place in task.reads:
                region = self._region(place, index, written, places)
                if region is not None:
                    region.is_read = True
                    region.buffer.first_read = min(region.buffer.first_read, index)
            for place in task.writes:
                region = self._region(place, index, written, places)
                if region is not None:
                    buffer = region.buffer
                    region.writers |= 1 << (index - buffer.first)
                    buffer.writes, buffer.last_write = buffer.writes + 1, index
        for buffer in self._buffers.values():
            buffer.settle()

    def _region(
        self, place: PlanRegion, index: int, written: set[int], places: dict[PlanRegion, _Region]
    ) -> _Region | None:
        try:
            return self._regions[id(place)]
        except KeyError:
            pass
        region = places.get(place)
        if region is None:
            number, bounds = place
            memory = self._plan.buffers[number].memory
            if number in written or memory in ("activation", *TWO_SETS):
                buffer = self._buffers.get(number)
                if buffer is None:
                    buffer = self._buffers[number] = _Buffer(number, memory, index)
                region = places[place] = _Region(buffer, len(buffer.regions), bounds)
                buffer.regions.append(region)
        self._regions[id(place)] = region
        return region

    def check(self, index: int, before: Ended) -> None:
        """Raises: PlanError if the task conflicts with an earlier one that may still run."""
        task, regions = self._plan.tasks[index], self._regions
        for place in task.reads:
            region = regions[id(place)]
            if region is not None:
                buffer = region.buffer
                if region.passed is not before or region.version != buffer.version:
                    self._check_read(index, before, region)
                    region.passed, region.version = before, buffer.version
        for place in task.writes:
            region = regions[id(place)]
            if region is not None and not region.buffer.is_simple:
                self._check_write(index, before, region)
        for place in task.reads:
            region = regions[id(place)]
            if region is not None and not region.buffer.is_simple:
                region.readers |= 1 << (index - region.buffer.first)
        for place in task.writes:
            region = regions[id(place)]
            if region is not None and not region.buffer.is_simple:
                region.writers |= 1 << (index - region.buffer.first)
                region.buffer.version += 1

    def _check_read(self, index: int, before: Ended, region: _Region) -> None:
        buffer = region.buffer
        if buffer.needs_writers:
            missing = buffer.uncovered(region)
            if missing is not None:
                name = self._plan.buffers[buffer.index].name
                msg = f"reads {boxes.text(name, region.bounds)}, but no task before it writes"
                remedy = "write the whole region or read less of it"
                raise fail(self._plan, index, f"{msg} {boxes.text(name, missing)}", remedy)
        if not buffer.has_two_sets:
            self._order(index, before, region, buffer.users(region, readers=False), "reads")

    def _check_write(self, index: int, before: Ended, region: _Region) -> None:
        buffer = region.buffer
        users = buffer.users(region, readers=True)
        if not buffer.has_two_sets:
            self._order(index, before, region, users, "writes")
        elif users:
            named = self._plan.buffers[buffer.index]
            where = f"{named.memory} {boxes.text(named.name, region.bounds)}"
            other = buffer.first + (users & -users).bit_length() - 1
            msg = f"writes {where} after task {other} used it in this step"
            raise fail(self._plan, index, msg)

    def _order(self, index: int, before: Ended, region: _Region, users: int, verb: str) -> None:
        other = before.lacks(region.buffer.first, users)
        if other < 0:
            return
        number, plan = region.buffer.index, self._plan
        theirs = "writes" if any(b == number for b, _ in plan.tasks[other].writes) else "reads"
        where = boxes.text(plan.buffers[number].name, region.bounds)
        msg = f"{verb} {where} in no order with task {other} ({plan.tasks[other].body})"
        raise fail(plan, index, f"{msg}, which {theirs} it: a wait is missing")
