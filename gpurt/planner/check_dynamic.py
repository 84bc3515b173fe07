"""Dynamic: a step of a dynamic segment has only the tasks of its live slots, and still all is met.

What must hold for every number of live slots, from none to all:

    signals   every signal of a task that may be absent is given by the compensator
    order     the compensator follows all that an absent task would have waited for, but for tasks
              of the same family; of those a task waits only for its own slot and higher ones,
              which are absent with it
    decision  the decider wrote the count, nobody changes it before the last reader

Then whatever precedes a task through absent ones precedes it through their compensators in every
step (scheduler/DESIGN.md has the proof). So check_order's proof, made as if all tasks were there,
covers every step. Family: the tasks of all dynamic segments of one decider.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from gpurt.body import STAGE_ROOM_BYTES
from gpurt.plan import (
    ADDRS_PER_TASK,
    PARAMS_PER_TASK,
    TASK_DECIDES,
    Plan,
    PlanDynamic,
    PlanExpert,
    PlanSegment,
)
from gpurt.planner.boxes import overlap
from gpurt.planner.check_layout import fail
from gpurt.planner.dynamic import absent_signals
from gpurt.planner.ended import Ended
from gpurt.wire import EXPERT_STRIDE_UNIT, EXPERT_WORDS, PUBLISHED_PER_DECISION

_WORD_BYTES = 4
_NO_SLOT = 1 << 32
_DECIDER_PARAMS = PARAMS_PER_TASK - 1  # a record's last words are the executor's
_EXPERT_PARAMS, _EXPERT_ADDRS = PARAMS_PER_TASK - 4, ADDRS_PER_TASK - 2

_Dynamic = list[tuple[PlanSegment, PlanDynamic]]


def check_dynamic(plan: Plan, before: Mapping[int, Ended]) -> None:
    """Raises: PlanError. Needs a plan that passed check_layout and check_order.

    before: what check_order found.
    """
    dynamic = [(s, s.dynamic) for s in plan.segments if s.dynamic is not None]
    first = {
        s.begin: v.begin
        for v in plan.step_variants()
        for s in plan.segments[v.segment_begin : v.segment_end]
    }
    absent = bytearray(len(plan.tasks))
    for segment, _ in dynamic:
        absent[segment.begin : segment.end] = b"\1" * (segment.end - segment.begin)
    for segment, d in dynamic:
        _check_segment(plan, segment, d, absent, first[segment.begin])
        _check_decision(plan, segment, d)
        _check_family_waits(plan, segment, d, dynamic)
    _check_flags(plan, dynamic)
    _check_before(plan, dynamic, before)
    writer: dict[int, int] = {}  # by buffer: who wrote last
    for index, task in enumerate(plan.tasks):
        if task.expert is not None:
            _check_expert(plan, index, task.expert, writer.get(task.expert.live[0], -1))
        writer.update((buffer, index) for buffer, _ in task.writes)


def _check_segment(
    plan: Plan, segment: PlanSegment, d: PlanDynamic, absent: bytearray, first: int
) -> None:
    """first: the variant's first task."""
    begin, count = segment.begin, segment.end - segment.begin
    if segment.policy != "claim":
        raise fail(plan, begin, f"is {segment.policy} and dynamic: only claim segments can be")
    if not first <= d.decider <= d.compensator < begin:
        msg = f"is dynamic by task {d.decider} and compensated by task {d.compensator}"
        raise fail(plan, begin, f"{msg}: the first must come first, both before it in its variant")
    for index in (d.decider, d.compensator):
        if absent[index]:
            raise fail(plan, index, f"decides about task {begin}, but may be absent itself")
    if d.tiles_per_slot < 1 or count % d.tiles_per_slot:
        raise fail(plan, begin, f"is one of {count}, no multiple of {d.tiles_per_slot} a slot")
    for number, index in enumerate(range(begin, segment.end)):
        slot = number // d.tiles_per_slot
        if plan.tasks[index].coords[0] != slot:
            msg = f"is of slot {plan.tasks[index].coords[0]}, but lies where slot {slot} does"
            raise fail(plan, index, msg)
    needed = absent_signals(plan.tasks[begin : segment.end], d.tiles_per_slot)
    if d.absent != needed:
        odd = sorted(set(d.absent) ^ set(needed) or d.absent)[0]
        counter, low, high, signals = odd
        verb = "gives" if odd in d.absent else "lacks"
        msg = f"{verb} {signals} signals on counter {counter} for each absent slot of {low}:{high}"
        raise fail(plan, d.compensator, f"{msg} of the segment at task {begin}")


def _check_decision(plan: Plan, segment: PlanSegment, d: PlanDynamic) -> None:
    number, offset = d.live
    if not 0 <= number < len(plan.buffers) or plan.buffers[number].dtype != "u32":
        raise fail(plan, d.decider, f"leaves its count in buffer {number}, which is no u32 buffer")
    buffer = plan.buffers[number]
    if offset % _WORD_BYTES or not 0 <= offset <= buffer.size_bytes - _WORD_BYTES:
        raise fail(plan, d.decider, f"leaves its count at byte {offset} of {buffer.name}")
    written = [bounds for b, bounds in plan.tasks[d.decider].writes if b == number]
    if not written:
        raise fail(plan, d.decider, f"leaves its count in {buffer.name}, which it does not write")
    readers = [d.compensator, *range(segment.begin, segment.end)]
    for index in readers:
        if index != d.decider and all(b != number for b, _ in plan.tasks[index].reads):
            raise fail(plan, index, f"depends on the count in {buffer.name}, but does not read it")
    for index in range(d.decider + 1, segment.end):
        for b, bounds in plan.tasks[index].writes:
            if b == number and any(overlap(bounds, w) for w in written):
                msg = f"writes {buffer.name} between its decider, task {d.decider}, and task"
                raise fail(plan, index, f"{msg} {segment.end - 1}, which depends on its count")


def _check_family_waits(
    plan: Plan, segment: PlanSegment, d: PlanDynamic, dynamic: _Dynamic
) -> None:
    family = [s for s, other in dynamic if other.decider == d.decider]
    lowest: dict[int, tuple[int, int]] = {}  # by counter: slot and task of the lowest slot
    for index in range(segment.begin, segment.end):
        slot = plan.tasks[index].coords[0]
        for counter, _ in plan.tasks[index].waits:
            if counter not in lowest:
                lowest[counter] = min(
                    (
                        (plan.tasks[producer].coords[0], producer)
                        for producer in plan.counters[counter].producers
                        if any(s.begin <= producer < s.end for s in family)
                    ),
                    default=(_NO_SLOT, -1),
                )
            other, producer = lowest[counter]
            if other < slot:
                msg = f"of slot {slot} waits for task {producer} of slot {other}, which may"
                raise fail(plan, index, f"{msg} still run when its own slot is absent")


def _check_flags(plan: Plan, dynamic: _Dynamic) -> None:
    users: dict[int, _Dynamic] = {}
    for segment, d in dynamic:
        for index in {d.decider, d.compensator}:
            users.setdefault(index, []).append((segment, d))
    for index, task in enumerate(plan.tasks):
        if bool(task.flags & TASK_DECIDES) != (index in users):
            does = "decides" if task.flags & TASK_DECIDES else "does not decide"
            raise fail(plan, index, f"{does} by its flags, unlike the segments say")
    for index, rows in users.items():
        if len(plan.tasks[index].params) > _DECIDER_PARAMS:
            msg = f"has {len(plan.tasks[index].params)} parameters"
            raise fail(plan, index, f"{msg}, one that decides has room for {_DECIDER_PARAMS}")
        published = sum(d.decider == index for _, d in rows)
        if published > PUBLISHED_PER_DECISION:
            msg = f"decides about {published} segments, a record holds {PUBLISHED_PER_DECISION}"
            raise fail(plan, index, msg)
        counts = [(d.live, (s.end - s.begin) // d.tiles_per_slot) for s, d in rows]
        for one, two in pairwise(counts):
            if one != two:
                raise fail(plan, index, f"decides by two counts or bounds, {one} and {two}")


def _check_before(plan: Plan, dynamic: _Dynamic, before: Mapping[int, Ended]) -> None:
    families: dict[int, list[PlanSegment]] = {}  # by decider
    for segment, d in dynamic:
        families.setdefault(d.decider, []).append(segment)
    for segment, d in dynamic:
        allowed, decider = before[d.compensator].plus(d.compensator), d.decider
        if not allowed.has(decider):
            msg = f"compensates for task {segment.begin} in no order with its decider, task"
            raise fail(plan, d.compensator, f"{msg} {decider}")
        for own in families[decider]:
            allowed = allowed.with_range(own.begin, own.end)
        for index in range(segment.begin, segment.end):
            ended = before.get(index)
            if ended is None:
                continue
            first = ended.first_outside(allowed)
            if first >= 0:
                msg = f"follows task {first} ({plan.tasks[first].body}), which its compensator,"
                raise fail(plan, index, f"{msg} task {d.compensator}, does not")
            if not ended.has(decider):
                raise fail(plan, index, f"is in no order with its decider, task {decider}")


def _check_expert(plan: Plan, index: int, expert: PlanExpert, decider: int) -> None:
    task = plan.tasks[index]
    if task.stream is None:
        raise fail(plan, index, "chooses an expert, but streams no weights")
    number, offset, size = task.stream
    weights = plan.buffers[number]
    end = offset + size + (weights.shape[0] - 1) * expert.stride_bytes
    if expert.stride_bytes % EXPERT_STRIDE_UNIT or expert.stride_bytes < size:
        msg = f"has experts of {size} bytes every {expert.stride_bytes}: no multiple of"
        raise fail(plan, index, f"{msg} {EXPERT_STRIDE_UNIT}, or they overlap")
    if end > weights.size_bytes:
        msg = f"streams up to byte {end} of {weights.name} for its last expert, it has"
        raise fail(plan, index, f"{msg} {weights.size_bytes}")
    if expert.stage_bytes % EXPERT_STRIDE_UNIT or not 0 < expert.stage_bytes <= STAGE_ROOM_BYTES:
        msg = f"has stages of {expert.stage_bytes} bytes: no multiple of {EXPERT_STRIDE_UNIT}"
        raise fail(plan, index, f"{msg} up to {STAGE_ROOM_BYTES}")
    for what, count, limit in (
        ("buffers", len(task.addr), _EXPERT_ADDRS),
        ("parameters", len(task.params), _EXPERT_PARAMS),
    ):
        if count > limit:
            msg = f"has {count} {what}, one that chooses an expert has room for {limit}"
            raise fail(plan, index, msg)
    routes = expert.live[0]
    for buffer, at in (expert.live, expert.expert_id):
        known = buffer == routes and 0 <= buffer < len(plan.buffers)
        # Behind an id lie the words of its slot that the loader brings along.
        words = EXPERT_WORDS if (buffer, at) == expert.expert_id else 1
        end = at + words * _WORD_BYTES
        if not known or at % _WORD_BYTES or not 0 <= at < end <= plan.buffers[buffer].size_bytes:
            raise fail(plan, index, f"finds its expert at byte {at} of buffer {buffer}")
    counter, signals = expert.wait
    producers = plan.counters[counter].producers if 0 <= counter < len(plan.counters) else ()
    if not producers or signals != len(producers):
        raise fail(plan, index, f"waits for its expert on counter {counter}, {signals} signals")
    if decider not in producers:
        msg = f"waits for its expert on counter {counter}, which task {decider} does not signal"
        raise fail(plan, index, msg)
