"""Payload: whoever touches a payload buffer polls or stores granules, and all of it is re-armed.

That each re-arm is released before the next writer, and follows the last reader of its set, holds
if every task precedes `advance`, which check_order proves: the set that round r of a variant fills
was last read in its round r-1, and is next written in its round r+1. No other variant touches it.
Of symmetric payload the next writers are other ranks': check_ranks has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpurt.plan import (
    PAYLOAD,
    TASK_PAYLOAD_IN,
    TASK_PAYLOAD_OUT,
    TASK_REARM,
    TWO_SETS,
    Plan,
    PlanBuffer,
    PlanTask,
)
from gpurt.planner.check_layout import fail, is_rearm

_PAYLOAD_FLAGS = TASK_PAYLOAD_IN | TASK_PAYLOAD_OUT | TASK_REARM


def check_payload(plan: Plan) -> None:
    """Raises: PlanError."""
    owners: dict[int, int] = {}  # by payload buffer: the variant that uses it
    payload = {n for n, buffer in enumerate(plan.buffers) if buffer.memory in PAYLOAD}
    two_sets = {n for n, buffer in enumerate(plan.buffers) if buffer.memory in TWO_SETS}
    plain: dict[int, bool] = {}  # by identity of arguments, which tasks share: none has two sets
    for variant, own in enumerate(plan.step_variants()):
        fills: dict[str, list[tuple[int, int]]] = {memory: [] for memory in PAYLOAD}
        users: dict[int, int] = {}
        for index in range(own.begin, own.end):
            task = plan.tasks[index]
            is_plain = plain.get(id(task.addr))
            if is_plain is None:
                is_plain = all(entry is None or entry[0] not in two_sets for entry in task.addr)
                plain[id(task.addr)] = is_plain
            if is_plain and not task.payload_mask and not task.flags & _PAYLOAD_FLAGS:
                continue
            if is_rearm(task):
                memory, begin, end = _fill(plan, index, task)
                fills[memory].append((begin, end))
                continue
            _check_flags(plan, index, task)
            touched = (*task.writes, *task.reads)
            users.update((number, index) for number, _ in touched if number in payload)
        for number, user in users.items():
            if owners.setdefault(number, variant) != variant:
                msg = f"uses payload {plan.buffers[number].name}, as does another variant, whose"
                raise fail(plan, user, f"{msg} rounds re-arm it at other times")
            buffer = plan.buffers[number]
            _check_armed(plan, user, buffer, sorted(fills[buffer.memory]))


def _check_armed(
    plan: Plan, user: int, buffer: PlanBuffer, fills: Sequence[tuple[int, int]]
) -> None:
    if plan.target.kind != "cuda":
        raise fail(plan, user, f"reads payload {buffer.name}, {plan.target.kind} has none")
    at, end = buffer.offset_bytes, buffer.offset_bytes + buffer.size_bytes
    for begin, fill_end in fills:
        if begin <= at:
            at = max(at, fill_end)
    if at < end:
        msg = f"reads payload {buffer.name}, but no task re-arms bytes {at}:{end} of its set"
        raise fail(plan, user, msg)


def _fill(plan: Plan, index: int, task: PlanTask) -> tuple[str, int, int]:
    """The memory, and the bytes of its set, that a re-arm fills."""
    if len(task.addr) != 1 or task.addr[0] is None or len(task.params) != 2:
        raise fail(plan, index, "does not name one buffer and its bytes to re-arm")
    number, offset = task.addr[0]
    if plan.buffers[number].memory not in PAYLOAD:
        raise fail(plan, index, f"re-arms {plan.buffers[number].name}, no payload buffer")
    begin = plan.buffers[number].offset_bytes + offset + task.coords[0] + (task.coords[1] << 32)
    end = begin + int(task.params[0]) + (int(task.params[1]) << 32)
    if end > plan.payload_set_bytes or begin % 16 or end % 16:
        msg = f"re-arms bytes {begin}:{end} of a set of {plan.payload_set_bytes}"
        raise fail(plan, index, msg)
    return plan.buffers[number].memory, begin, end


def _check_flags(plan: Plan, index: int, task: PlanTask) -> None:
    polled = [n for n, _ in task.reads if plan.buffers[n].memory in PAYLOAD]
    stored = [n for n, _ in task.writes if plan.buffers[n].memory in PAYLOAD]
    for numbers, flag, verb in (
        (polled, TASK_PAYLOAD_IN, "reads"),
        (stored, TASK_PAYLOAD_OUT, "writes"),
    ):
        if bool(numbers) != bool(task.flags & flag):
            names = [plan.buffers[n].name for n in numbers]
            msg = f"{verb} payload {names}, its flags say {task.flags}"
            raise fail(plan, index, msg)
    for regions, some, verb in ((task.reads, polled, "reads"), (task.writes, stored, "writes")):
        plain = [n for n, _ in regions if plan.buffers[n].memory == "symmetric"]
        if some and plain:
            names = [plan.buffers[n].name for n in (some[0], plain[0])]
            raise fail(plan, index, f"{verb} payload {names[0]} and {names[1]}, which is none")
    for position, entry in enumerate(task.addr):
        masked = bool(task.payload_mask >> position & 1)
        if masked != (entry is not None and plan.buffers[entry[0]].memory in TWO_SETS):
            msg = f"has payload mask {task.payload_mask:#x}, which is wrong for argument {position}"
            raise fail(plan, index, msg)
    if task.payload_mask >> len(task.addr):
        raise fail(plan, index, f"has payload mask {task.payload_mask:#x} beyond its arguments")
    if polled and plan.operators[task.op].policy == "ready":
        msg = "polls payload under ready: it may hold a worker that its producer needs"
        raise fail(plan, index, msg)
