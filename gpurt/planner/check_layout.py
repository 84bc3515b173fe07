"""Layout: all that can be said of a plan without asking in which order things happen.

Indices lie in range, records and arenas hold what they must, segments and lists contain each task
once and ascending, counters are signalled by exactly those who are said to.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from gpurt.buffer import DTYPES
from gpurt.errors import GraphError, PlanError
from gpurt.plan import (
    ADDRS_PER_TASK,
    ARENA_ALIGN_BYTES,
    MEMORIES,
    PARAMS_PER_TASK,
    PLAN_VERSION,
    POLICIES,
    SIGNALS_PER_TASK,
    TASK_ADVANCE,
    TASK_REARM,
    TWO_SETS,
    WAITS_PER_TASK,
    Plan,
    PlanBuffer,
    PlanRegion,
    PlanTask,
)
from gpurt.planner.boxes import text
from gpurt.wire import VARIANTS_PER_PLAN

_U32 = 1 << 32
_STREAM_ALIGN_BYTES = 16  # of a bulk copy
_REMEDY = "plan again"


def fail(plan: Plan, task: int, what: str, remedy: str = _REMEDY) -> PlanError:
    """The error of one task: `task 12 (matvec) <what> - at <path> - <remedy>`."""
    op = plan.tasks[task].op
    path = plan.operators[op].path if 0 <= op < len(plan.operators) else plan.name
    return PlanError(f"task {task} ({plan.tasks[task].body}) {what} - at {path} - {remedy}")


def check_layout(plan: Plan) -> None:
    """Raises: PlanError."""
    if plan.version != PLAN_VERSION:
        msg = f"plan of version {plan.version}, this gpurt runs version {PLAN_VERSION}"
        raise PlanError(f"{msg} - at plan {plan.name} - {_REMEDY}")
    for what, value in (
        ("workers", plan.target.workers),
        ("rows", plan.rows),
        ("slots", plan.slots),
        ("context", plan.context),
        ("tasks", len(plan.tasks)),
    ):
        if value < 1:
            raise PlanError(f"{value} {what} - at plan {plan.name} - {_REMEDY}")
    params: set[int] = set()  # by identity: tasks of an operator share theirs
    for index, task in enumerate(plan.tasks):
        _check_record(plan, index, task)
        if id(task.params) not in params:
            _check_params(plan, index, task)
            params.add(id(task.params))
    _check_buffers(plan)
    memory = _MemoryCheck(plan)
    for index, task in enumerate(plan.tasks):
        memory.check(index, task)
    _check_segments(plan)
    _check_lists(plan)
    _check_counters(plan)
    _check_variants(plan)


def _check_record(plan: Plan, index: int, task: PlanTask) -> None:
    if not 0 <= task.op < len(plan.operators):
        raise fail(plan, index, f"is of operator {task.op}, there are {len(plan.operators)}")
    if task.body != plan.operators[task.op].body:
        msg = f"is not of its operator's body {plan.operators[task.op].body}"
        raise fail(plan, index, msg)
    if len(task.coords) != 4 or min(task.coords) < 0 or max(task.coords) >= _U32:
        raise fail(plan, index, f"has coordinates {list(task.coords)}: not four 32-bit words")
    for what, verb, used, limit in (
        ("waits", "waits for", [c for c, _ in task.waits], WAITS_PER_TASK),
        ("signals", "signals", task.signals, SIGNALS_PER_TASK),
    ):
        if len(used) > limit:
            raise fail(plan, index, f"has {len(used)} {what}, a record holds {limit}")
        for counter in used:
            if not 0 <= counter < len(plan.counters):
                msg = f"{verb} counter {counter}, there are {len(plan.counters)}"
                raise fail(plan, index, msg)
        if len(used) > 1 and len(set(used)) != len(used):
            raise fail(plan, index, f"{verb} one counter twice: {list(used)}")


def _check_params(plan: Plan, index: int, task: PlanTask) -> None:
    if len(task.params) > PARAMS_PER_TASK:
        msg = f"has {len(task.params)} parameters, a record holds {PARAMS_PER_TASK}"
        raise fail(plan, index, msg)
    for value in task.params:
        if isinstance(value, int) and not -(_U32 >> 1) <= value < _U32:
            raise fail(plan, index, f"has parameter {value}, which needs more than 32 bits")


# ---- memory ----------------------------------------------------------------------------------
def _check_buffers(plan: Plan) -> None:
    users: dict[int, int] = {}
    for index, task in enumerate(plan.tasks):
        for entry in task.addr:
            if entry is not None:
                users.setdefault(entry[0], index)
    by_memory: dict[str, list[tuple[int, int]]] = {}
    for index, buffer in enumerate(plan.buffers):
        user = users.get(index, len(plan.tasks) - 1)
        where = f"uses buffer {buffer.name}"
        if buffer.memory not in MEMORIES or buffer.dtype not in DTYPES:
            msg = f"{where} of memory {buffer.memory!r} and dtype {buffer.dtype!r}, one unknown"
            raise fail(plan, user, msg)
        needed = _stored_bytes(plan, user, buffer)
        if buffer.size_bytes < needed:
            msg = f"{where} of {buffer.size_bytes} bytes, its shape needs {needed}"
            raise fail(plan, user, msg)
        if buffer.offset_bytes < 0 or buffer.offset_bytes % ARENA_ALIGN_BYTES:
            msg = f"{where} at byte {buffer.offset_bytes}, no multiple of {ARENA_ALIGN_BYTES}"
            raise fail(plan, user, msg)
        end = buffer.offset_bytes + buffer.size_bytes
        if buffer.memory in TWO_SETS and end > plan.payload_set_bytes:
            msg = f"{where} up to byte {end} of a {buffer.memory} set of {plan.payload_set_bytes}"
            raise fail(plan, user, msg)
        if buffer.memory == "none" and index in users:
            raise fail(plan, user, f"{where}, which has no memory")
        by_memory.setdefault(buffer.memory, []).append((buffer.offset_bytes, index))
    for memory, places in by_memory.items():
        places.sort()
        for (offset, first), (next_offset, second) in pairwise(places):
            end = offset + plan.buffers[first].size_bytes
            if end > next_offset:
                user = users.get(second, users.get(first, len(plan.tasks) - 1))
                one, two = plan.buffers[first].name, plan.buffers[second].name
                msg = f"uses {two} at byte {next_offset} of the {memory} arena, {one} ends at {end}"
                raise fail(plan, user, msg)
    if plan.payload_set_bytes < 0 or plan.payload_set_bytes % ARENA_ALIGN_BYTES:
        msg = f"payload sets of {plan.payload_set_bytes} bytes, no multiple of {ARENA_ALIGN_BYTES}"
        raise PlanError(f"{msg} - at plan {plan.name} - {_REMEDY}")


def _stored_bytes(plan: Plan, user: int, buffer: PlanBuffer) -> int:
    """Least bytes of a buffer; a packing may store fewer or more, its streams are checked."""
    if not buffer.shape or any(n < 1 for n in buffer.shape):
        raise fail(plan, user, f"uses buffer {buffer.name} of shape {list(buffer.shape)}")
    if buffer.packing:
        return 1
    try:
        return prod(buffer.shape[:-1]) * DTYPES[buffer.dtype].row_bytes(buffer.shape[-1])
    except GraphError as error:
        raise fail(plan, user, f"uses buffer {buffer.name}: {error}") from error


class _MemoryCheck:
    """Arguments and regions lie in their buffers. What tasks share, known by identity, is looked at
    once.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._reachable: dict[int, set[int]] = {}  # by argument list
        self._reads: set[int] = set()
        self._writes: set[int] = set()

    def check(self, index: int, task: PlanTask) -> None:
        """Raises: PlanError."""
        reachable = self._reachable.get(id(task.addr))
        if reachable is None:
            reachable = self._reachable[id(task.addr)] = _reachable(self._plan, index, task)
        for verb, regions, known in (
            ("reads", task.reads, self._reads),
            ("writes", task.writes, self._writes),
        ):
            for region in regions:
                if region[0] not in reachable:
                    msg = f"{verb} buffer {region[0]}, which is not among its arguments"
                    raise fail(self._plan, index, msg)
                if id(region) not in known:
                    _check_region(self._plan, index, verb, region)
                    known.add(id(region))
        if task.stream is not None:
            _check_stream(self._plan, index, task.stream)


def _reachable(plan: Plan, index: int, task: PlanTask) -> set[int]:
    """The buffers that a task has as arguments."""
    if len(task.addr) > ADDRS_PER_TASK:
        msg = f"has {len(task.addr)} buffers, a record holds {ADDRS_PER_TASK}"
        raise fail(plan, index, msg)
    reachable = set()
    for entry in task.addr:
        if entry is None:
            continue
        number, offset = entry
        if not 0 <= number < len(plan.buffers):
            raise fail(plan, index, f"uses buffer {number}, there are {len(plan.buffers)}")
        reachable.add(number)
        if not 0 <= offset < plan.buffers[number].size_bytes:
            buffer = plan.buffers[number]
            msg = f"starts at byte {offset} of {buffer.name}, which has {buffer.size_bytes}"
            raise fail(plan, index, msg)
    return reachable


def _check_region(plan: Plan, index: int, verb: str, region: PlanRegion) -> None:
    number, bounds = region
    buffer = plan.buffers[number]
    if len(bounds) != len(buffer.shape) or not all(
        0 <= low < high <= size for (low, high), size in zip(bounds, buffer.shape, strict=True)
    ):
        where = text(buffer.name, bounds)
        msg = f"{verb} {where}, no part of shape {list(buffer.shape)}"
        raise fail(plan, index, msg)
    if verb == "writes" and buffer.memory == "weight":
        raise fail(plan, index, f"writes weight {buffer.name}, which never changes")


def _check_stream(plan: Plan, index: int, stream: tuple[int, int, int]) -> None:
    number, offset, size = stream
    if not 0 <= number < len(plan.buffers) or plan.buffers[number].memory != "weight":
        raise fail(plan, index, f"streams buffer {number}, which is no weight")
    buffer = plan.buffers[number]
    if not (offset >= 0 and 0 < size < _U32 and offset + size <= buffer.size_bytes):
        msg = f"streams bytes {offset}:{offset + size} of {buffer.name}, which has"
        raise fail(plan, index, f"{msg} {buffer.size_bytes}")
    if offset % _STREAM_ALIGN_BYTES or size % _STREAM_ALIGN_BYTES:
        msg = f"streams {size} bytes from byte {offset} of {buffer.name}: not multiples of"
        raise fail(plan, index, f"{msg} {_STREAM_ALIGN_BYTES}")


# ---- variants, segments, lists, counters -----------------------------------------------------
def _check_variants(plan: Plan) -> None:
    variants = plan.step_variants()
    if len(variants) > VARIANTS_PER_PLAN:
        msg = f"{len(variants)} variants, a program holds {VARIANTS_PER_PLAN}"
        raise PlanError(f"{msg} - at plan {plan.name} - {_REMEDY}")
    rows, task, segment = 0, 0, 0
    for number, v in enumerate(variants):
        where = f"variant {number} of {v.rows} rows, tasks [{v.begin}, {v.end})"
        if not rows < v.rows <= plan.rows:
            msg = f"{where}: rows must ascend up to the plan's {plan.rows}"
            raise PlanError(f"{msg} - at plan {plan.name} - {_REMEDY}")
        covered = [(s.begin, s.end) for s in plan.segments[v.segment_begin : v.segment_end]]
        fits = v.segment_begin == segment and covered and covered[0][0] == task == v.begin
        if not fits or covered[-1][1] != v.end:
            msg = f"{where}: its segments are {_some_pairs(covered)}"
            raise PlanError(f"{msg} - at plan {plan.name} - {_REMEDY}")
        _check_variant_tasks(plan, v.begin, v.end)
        rows, task, segment = v.rows, v.end, v.segment_end
    if task != len(plan.tasks) or segment != len(plan.segments):
        msg = f"variants end at task {task} and segment {segment}"
        raise fail(plan, min(task, len(plan.tasks) - 1), f"lies in no variant: {msg}")


def _check_variant_tasks(plan: Plan, begin: int, end: int) -> None:
    """Exactly the last one is advance, and none waits for another variant, which may not run."""
    advances = [i for i in range(begin, end) if plan.tasks[i].flags & TASK_ADVANCE]
    if advances != [end - 1]:
        msg = f"is the last, but advance is {advances}: exactly the last task must be it"
        raise fail(plan, end - 1, msg)
    for index in range(begin, end):
        expert = plan.tasks[index].expert
        chosen = () if expert is None else (expert.wait[0],)
        for counter in (*(c for c, _ in plan.tasks[index].waits), *chosen):
            strange = [p for p in plan.counters[counter].producers if p < begin]
            if strange:
                raise fail(plan, index, f"waits for task {strange[0]} of another variant")


def _some_pairs(pairs: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"[{a}, {b})" for a, b in pairs[:4])
    return f"{shown}{', ...' if len(pairs) > 4 else ''}" or "none"


def _check_segments(plan: Plan) -> None:
    at = 0
    for number, segment in enumerate(plan.segments):
        if segment.policy not in POLICIES:
            msg = f"segment {number} has unknown policy {segment.policy!r}"
            raise PlanError(f"{msg} - at plan {plan.name} - {_REMEDY}")
        if segment.begin != at or not segment.begin < segment.end <= len(plan.tasks):
            msg = f"is where segment {number} should begin, it has [{segment.begin}, {segment.end})"
            raise fail(plan, min(at, len(plan.tasks) - 1), msg)
        for index in range(segment.begin, segment.end):
            policy = plan.operators[plan.tasks[index].op].policy
            if policy != segment.policy:
                msg = f"is {policy}, but lies in segment {number}, which is {segment.policy}"
                raise fail(plan, index, msg)
        at = segment.end
    if at != len(plan.tasks):
        raise fail(plan, at, f"lies in no segment: they end at task {at}")


def _check_lists(plan: Plan) -> None:
    if len(plan.lists) != plan.target.workers:
        msg = f"{len(plan.lists)} lists for {plan.target.workers} workers"
        raise PlanError(f"{msg} - at plan {plan.name} - {_REMEDY}")
    owner = [-1] * len(plan.tasks)
    for worker, rows in enumerate(plan.lists):
        if len(rows) != len(plan.segments):
            msg = f"worker {worker} has {len(rows)} lists for {len(plan.segments)} segments"
            raise PlanError(f"{msg} - at plan {plan.name} - {_REMEDY}")
        for number, (row, segment) in enumerate(zip(rows, plan.segments, strict=True)):
            last = -1
            for index in row:
                if not 0 <= index < len(plan.tasks):
                    msg = f"worker {worker} has task {index}, there are {len(plan.tasks)}"
                    raise PlanError(f"{msg} - at plan {plan.name} - {_REMEDY}")
                if segment.policy != "static" or not segment.begin <= index < segment.end:
                    msg = f"is in worker {worker}'s list of segment {number}, not its own"
                    raise fail(plan, index, msg)
                if owner[index] >= 0:
                    msg = f"is in the lists of workers {owner[index]} and {worker}"
                    raise fail(plan, index, msg)
                if index < last:
                    msg = f"stands after task {last} in worker {worker}'s list: lists ascend"
                    raise fail(plan, index, msg)
                owner[index], last = worker, index
    for segment in plan.segments:
        if segment.policy == "static":
            for index in range(segment.begin, segment.end):
                if owner[index] < 0:
                    raise fail(plan, index, "is static, but in no worker's list")


def _check_counters(plan: Plan) -> None:
    producers: list[list[int]] = [[] for _ in plan.counters]
    waiters: list[list[int]] = [[] for _ in plan.counters]
    ready: list[list[int]] = [[] for _ in plan.counters]
    for index, task in enumerate(plan.tasks):
        for number in task.signals:
            producers[number].append(index)
        for number, _ in task.waits:
            waiters[number].append(index)
            if plan.operators[task.op].policy == "ready":
                if plan.counters[number].ranks:
                    msg = f"waits under ready for counter {number}, which other ranks signal"
                    raise fail(plan, index, msg)
                ready[number].append(index)
    for number, counter in enumerate(plan.counters):
        signals = producers[number]
        if sorted(counter.producers) != signals:
            odd = _odd_one(plan, counter.producers, signals)
            verb = "signals" if odd in signals else "does not signal"
            msg = f"{verb} counter {number}, whose producers are {_some(counter.producers)}"
            raise fail(plan, odd, msg)
        if signals and counter.signals_per_step != len(signals):
            msg = f"signals counter {number}: {len(signals)} signals a step come, it says"
            raise fail(plan, signals[0], f"{msg} {counter.signals_per_step}")
        for index in waiters[number]:
            _check_wait(plan, index, number, signals)
        if sorted(counter.successors) != ready[number]:
            odd = _odd_one(plan, counter.successors, ready[number])
            verb = "waits for" if odd in ready[number] else "does not wait under ready for"
            msg = f"{verb} counter {number}, whose successors are {_some(counter.successors)}"
            raise fail(plan, odd, msg)


def _check_wait(plan: Plan, index: int, number: int, signals: list[int]) -> None:
    if not signals:
        raise fail(plan, index, f"waits for counter {number}, which no task signals")
    needed = dict(plan.tasks[index].waits)[number]
    if needed != len(signals):
        msg = f"waits for {needed} signals a step on counter {number}, {len(signals)} come"
        raise fail(plan, index, msg)
    if signals[-1] >= index:
        late = signals[-1]
        msg = f"waits for task {late} ({plan.tasks[late].body}), which comes no earlier"
        raise fail(plan, index, f"{msg}: it could wait for itself")


def _odd_one(plan: Plan, said: Sequence[int], seen: Sequence[int]) -> int:
    """The lowest task that only one of the two names; the last task if that is no task."""
    odd = sorted(set(said) ^ set(seen)) or sorted(said)
    return odd[0] if 0 <= odd[0] < len(plan.tasks) else len(plan.tasks) - 1


def _some(values: Sequence[int]) -> str:
    shown = ", ".join(str(v) for v in values[:6])
    return f"[{shown}{', ...' if len(values) > 6 else ''}]"


def is_rearm(task: PlanTask) -> bool:
    """Whether a task fills payload buffers with sentinels."""
    return bool(task.flags & TASK_REARM)
