"""Program: a Plan as wire arrays. Pure numpy; the host and the CUDA executor place them in memory.

    zeroed(plan, options)                      what must be allocated, and on which side
    buffer_addresses(plan, arenas, step_state) where every buffer lies
    constants(plan, bodies, addresses)         records, segments, lists, counters: the plan's bytes
    header(plan, options, sections)            the one Program struct that workers get

Owns: the order and encoding of these arrays. Does not know: allocation, copies, launches.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpurt import wire
from gpurt.body import Param
from gpurt.errors import PlanError
from gpurt.executors.base import SPAN_CAPACITY_MIN, SPAN_STEPS, Options, Record
from gpurt.plan import (
    TASK_EXPERT_STREAM,
    TWO_SETS,
    Plan,
    PlanExpert,
    align_up,
    name_in_variant,
    rank_counters,
)
from gpurt.wire import TaskFlags

Place = Literal["device", "host"]
TICK_SCALE = 1024  # Program.tick_ns_x1024
_BODY_MAX = 0xFFFF


@dataclass(frozen=True)
class Section:
    """Zeroed memory that a program needs. `host`: the host and the workers share it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    place: Place

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole section."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def zeroed(plan: Plan, options: Options) -> dict[str, Section]:
    """Every section that starts as zeroes, by the name of its Program field."""
    workers, tasks = plan.target.workers, len(plan.tasks)
    spans = span_capacity(plan, options)
    summaries = options.summary_capacity if options.trace else 0
    queue, word, byte = options.queue_capacity, np.dtype("u8"), np.dtype("u1")
    token = np.dtype("u4")
    return {
        "counters": Section((len(plan.counters) * wire.COUNTER_STRIDE,), byte, "device"),
        "arrived": Section((tasks,), word, "device"),
        "ready_slots": Section((tasks,), word, "device"),
        "cursors": Section((len(plan.segments),), wire.CURSOR, "device"),
        "held_tickets": Section((workers * len(plan.segments),), word, "device"),
        "step_state": Section((wire.step_state_bytes(plan.rows),), byte, "device"),
        "slots": Section((plan.slots,), wire.SLOT_STATE, "device"),
        "slot_owners": Section((plan.slots,), word, "device"),
        "device_control": Section((), wire.DEVICE_CONTROL, "device"),
        "symmetric": Section((symmetric_layout(plan, options).size_bytes,), byte, "device"),
        "peers": Section((options.rank_count,), word, "device"),
        "spans": Section((workers, spans), wire.SPAN, "device"),
        "span_counts": Section((workers * wire.SPAN_COUNT_STRIDE,), byte, "device"),
        "sampled_spans": Section((workers, spans), wire.SPAN, "device"),
        "sampled_counts": Section((workers * wire.SPAN_COUNT_STRIDE,), byte, "device"),
        "summaries": Section((summaries,), wire.STEP_SUMMARY, "device"),
        "host_control": Section((), wire.HOST_CONTROL, "host"),
        "requests": Section((queue,), wire.REQUEST_RECORD, "host"),
        "outputs": Section((queue,), wire.REQUEST_OUTPUT, "host"),
        "prompt_tokens": Section((queue, plan.context), token, "host"),
        "output_tokens": Section((queue, plan.context), token, "host"),
    }


# Zero at each launch: steps are counted anew, and older spans would be taken for the launch's own.
TRACE_COUNTS = ("span_counts", "sampled_counts", "summaries")


@dataclass(frozen=True)
class Symmetric:
    """Symmetric memory: what lies at which byte. Head: RankControl and two StepOrders."""

    counters: int
    buffers: int
    payload: int  # of those whose data is its own flag
    size_bytes: int


def symmetric_layout(plan: Plan, options: Options) -> Symmetric:
    """The same on every rank of a group."""
    order = wire.STEP_ORDER.itemsize + plan.slots * wire.SLOT_STATE.itemsize
    order += wire.sampled_offset_bytes(plan.rows)
    counters = align_up(wire.RANK_CONTROL.itemsize + 2 * align_up(order, 64))
    words = len(rank_counters(plan)) * options.rank_count
    buffers = align_up(counters + words * wire.COUNTER_STRIDE)
    payload = buffers + plan.two_sets_bytes("symmetric")
    return Symmetric(counters, buffers, payload, payload + plan.two_sets_bytes("symmetric_payload"))


def buffer_addresses(plan: Plan, arenas: Mapping[str, int], step_state: int) -> list[int]:
    """Address of every PlanBuffer, of those without memory 0. arenas: base address by
    PlanBuffer.memory, but for "step".
    """
    bases = {**arenas, "step": step_state + wire.sampled_offset_bytes(plan.rows)}
    return [0 if b.memory == "none" else bases[b.memory] + b.offset_bytes for b in plan.buffers]


def last_step(plan: Plan, buffer_name: str, step: NDArray[Any]) -> tuple[int, int]:
    """Where a buffer's content of the last step lies: its index, since several variants may have
    one each, and bytes from its first set. step: the STEP_STATE.

    Raises: PlanError for an unknown name.
    """
    own = name_in_variant(buffer_name, int(step["rows_capacity"]))
    name = own if any(b.name == own for b in plan.buffers) else buffer_name
    index = plan.buffer_index(name)
    second = plan.buffers[index].memory in TWO_SETS and int(step["round"]) & 1
    return index, plan.payload_set_bytes if second else 0


def constants(
    plan: Plan, bodies: Mapping[str, int], addresses: Sequence[int]
) -> dict[str, NDArray[Any]]:
    """The sections that hold the plan itself, by the name of their Program field.

    bodies: index in the executor's body table by name. addresses: of every PlanBuffer.
    Raises: PlanError if a task does not fit its record.
    """
    successors, infos = _counters(plan)
    lists, offsets = _lists(plan)
    segments = np.zeros(len(plan.segments), wire.SEGMENT)
    for index, segment in enumerate(plan.segments):
        policy = "DYNAMIC" if segment.dynamic is not None else segment.policy.upper()
        segments[index] = (wire.Policy[policy], segment.begin, segment.end, index)
    records = _records(plan, bodies, addresses)
    decisions, absents = _decisions(plan, records, addresses)
    return {
        "records": records,
        "segments": segments,
        "lists": lists,
        "list_offsets": offsets,
        "counter_infos": infos,
        "successors": np.concatenate([successors, np.array(ready_roots(plan), np.uint32)]),
        "decisions": decisions,
        "absents": absents,
    }


def ready_roots(plan: Plan) -> list[int]:
    """Tasks under `ready` that wait for nothing, ascending: whoever opens a step of their variant
    pushes them.
    """
    return [
        task
        for segment in plan.segments
        if segment.policy == "ready"
        for task in range(segment.begin, segment.end)
        if not plan.tasks[task].waits
    ]


def header(
    plan: Plan, options: Options, sections: Mapping[str, int], *, tick_ns: float = 1.0
) -> Record:
    """The Program. sections: address of every section of `zeroed` and `constants`.

    Raises: PlanError if the options contradict the plan.
    """
    _check_options(plan, options)
    record = np.zeros((), wire.PROGRAM)
    for name, address in sections.items():
        record[name] = address
    record["variants"][: len(plan.step_variants())] = _variants(plan)
    values = {
        "wait_timeout_ns": _ns(options.wait_timeout_ms),
        # 0 means "stays" on the wire, so a linger of nothing is the shortest there is.
        "linger_ns": 0 if options.resident else max(1, _ns(options.linger_ms)),
        "residency_ns": 0 if options.resident else _ns(options.residency_ms),
        "tick_ns_x1024": round(tick_ns * TICK_SCALE),
        "first_step": options.first_step,
        "payload_set_bytes": plan.payload_set_bytes,
        "task_count": len(plan.tasks),
        "segment_count": len(plan.segments),
        "worker_count": plan.target.workers,
        "counter_count": len(plan.counters),
        "rows_capacity": plan.rows,
        "slot_count": plan.slots,
        "queue_capacity": options.queue_capacity,
        "context_capacity": plan.context,
        "span_capacity": span_capacity(plan, options),
        "summary_capacity": options.summary_capacity if options.trace else 0,
        "sample_period": options.sample_period,
        "vocab_size": plan.vocab,
        "prefill_rows": options.prefill_rows or plan.rows,
        "team_warps": plan.target.team_warps,
        "variant_count": len(plan.step_variants()),
        "rank_counters": symmetric_layout(plan, options).counters,
        "rank": options.rank,
        "rank_count": options.rank_count,
        "rank_counter_count": len(rank_counters(plan)),
    }
    for name, value in values.items():
        record[name] = value
    return record


def span_capacity(plan: Plan, options: Options) -> int:
    """Spans that one worker's ring holds: a power of two, 0 without a trace."""
    if not options.trace:
        return 0
    most = max(v.end - v.begin for v in plan.step_variants())
    share = -(-most // plan.target.workers)
    wanted = max(SPAN_CAPACITY_MIN, SPAN_STEPS * share)
    return options.span_capacity or 1 << (wanted - 1).bit_length()


def param_bits(value: Param) -> int:
    """A scalar parameter as its record holds it: floats by bit pattern, integers modulo 2^32."""
    if isinstance(value, float):
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    return int(value) & 0xFFFFFFFF


# ---- helpers ---------------------------------------------------------------------------------
def _wire_counters(plan: Plan) -> dict[int, int]:
    """How records name the counters that all ranks signal."""
    return {i: wire.RANK_COUNTER | number for i, number in rank_counters(plan).items()}


def _records(plan: Plan, bodies: Mapping[str, int], addresses: Sequence[int]) -> NDArray[Any]:
    records = np.zeros(len(plan.tasks), wire.TASK_RECORD)
    params: dict[tuple[Param, ...], list[int]] = {}  # tiles of one operator share theirs
    ranks = _wire_counters(plan)
    for index, task in enumerate(plan.tasks):
        body = bodies.get(task.body)
        if body is None or body > _BODY_MAX:
            known = sorted(bodies)
            msg = f"task {index} runs {task.body}, which this executor lacks - at {plan.name}"
            raise PlanError(f"{msg} - it has {known}")
        record = records[index]
        if task.stream is not None:
            buffer, offset, size = task.stream
            record["stream_base"] = addresses[buffer] + offset
            record["stream_bytes"] = size
        wakes = any(plan.counters[c].successors or c in ranks for c in task.signals)
        record["body"], record["flags"] = body, task.flags | TaskFlags.WAKES * wakes
        record["task_index"], record["op_index"] = index, task.op
        record["layer"], record["payload_mask"] = task.layer, task.payload_mask
        record["wait_count"], record["signal_count"] = len(task.waits), len(task.signals)
        for i, (counter, signals) in enumerate(task.waits):
            record["wait"][i] = ranks.get(counter, counter), signals
        record["signal"][: len(task.signals)] = [ranks.get(c, c) for c in task.signals]
        record["tile"] = task.coords
        for i, place in enumerate(task.addr):
            if place is not None:
                record["addr"][i] = addresses[place[0]] + place[1]
        bits = params.get(task.params)
        if bits is None:
            bits = params[task.params] = [param_bits(p) for p in task.params]
        record["param"][: len(bits)] = bits
        if task.expert is not None:
            _add_expert(record, task.expert, addresses)
    return records


def _add_expert(record: Record, expert: PlanExpert, addresses: Sequence[int]) -> None:
    record["flags"] |= TASK_EXPERT_STREAM
    counter, signals = expert.wait
    record["param"][wire.PARAM_EXPERT_COUNTER] = counter
    record["param"][wire.PARAM_EXPERT_SIGNALS] = signals
    record["param"][wire.PARAM_EXPERT_STAGE] = expert.stage_bytes // wire.EXPERT_STRIDE_UNIT
    record["param"][wire.PARAM_EXPERT_STRIDE] = expert.stride_bytes // wire.EXPERT_STRIDE_UNIT
    for at, (buffer, offset) in (
        (wire.ADDR_LIVE_SLOTS, expert.live),
        (wire.ADDR_EXPERT_ID, expert.expert_id),
    ):
        record["addr"][at] = addresses[buffer] + offset


def _decisions(
    plan: Plan, records: NDArray[Any], addresses: Sequence[int]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """What deciders and compensators do, one row a task, and its index in the task's record."""
    dynamic = [(i, s, s.dynamic) for i, s in enumerate(plan.segments) if s.dynamic is not None]
    ranks = _wire_counters(plan)
    tasks = sorted({t for _, _, d in dynamic for t in (d.decider, d.compensator)})
    decisions = np.zeros(len(tasks), wire.DECISION)
    absents: list[tuple[int, int, int, int]] = []
    for number, task in enumerate(tasks):
        decision, begin, published = decisions[number], len(absents), 0
        for index, segment, d in dynamic:
            if task not in (d.decider, d.compensator):
                continue
            decision["live"] = addresses[d.live[0]] + d.live[1]
            decision["slots"] = (segment.end - segment.begin) // d.tiles_per_slot
            if task == d.decider:
                decision["published"][published] = (index, d.tiles_per_slot)
                published += 1
            if task == d.compensator:
                absents += [(ranks.get(row[0], row[0]), *row[1:]) for row in d.absent]
        decision["absent_begin"], decision["absent_count"] = begin, len(absents) - begin
        decision["published_count"] = published
        records[task]["param"][wire.PARAM_DECISION] = number
    return decisions, np.array(absents, wire.ABSENT)


def _variants(plan: Plan) -> NDArray[Any]:
    rows = np.zeros(len(plan.step_variants()), wire.VARIANT)
    roots, at = ready_roots(plan), sum(len(c.successors) for c in plan.counters)
    for index, variant in enumerate(plan.step_variants()):
        count = sum(variant.begin <= task < variant.end for task in roots)
        segments = variant.segment_begin, variant.segment_end
        rows[index] = (variant.rows, *segments, at, count, 0)
        at += count
    return rows


def _counters(plan: Plan) -> tuple[NDArray[np.uint32], NDArray[Any]]:
    infos = np.zeros(len(plan.counters), wire.COUNTER_INFO)
    successors: list[int] = []
    for index, counter in enumerate(plan.counters):
        tasks = counter.successors
        only = [wire.ONLY_WAIT * (len(plan.tasks[t].waits) == 1) for t in tasks]
        queue = _sole_segment(plan, tasks) + 1 if all(only) else 0
        infos[index] = (counter.signals_per_step, len(successors), len(tasks), queue)
        successors += [task | bit for task, bit in zip(tasks, only, strict=True)]
    return np.array(successors, np.uint32), infos


def _sole_segment(plan: Plan, tasks: Sequence[int]) -> int:
    """The segment that holds all of `tasks`; -1 if there is none."""
    for index, segment in enumerate(plan.segments):
        if tasks and all(segment.begin <= task < segment.end for task in tasks):
            return index
    return -1


def _lists(plan: Plan) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    flat: list[int] = []
    offsets = [0]
    for worker in plan.lists:
        for segment in worker:
            flat += segment
            offsets.append(len(flat))
    return np.array(flat, np.uint32), np.array(offsets, np.uint32)


def _check_options(plan: Plan, options: Options) -> None:
    workers = plan.target.workers
    if options.workers not in (0, workers):
        msg = f"{options.workers} workers for a plan of {workers} - at {plan.name}"
        raise PlanError(f"{msg} - plan again for that target")
    if len(plan.lists) != workers:
        msg = f"{len(plan.lists)} lists for {workers} workers - at {plan.name}"
        raise PlanError(f"{msg} - the plan is broken: plan again")
    if not 0 <= options.prefill_rows <= plan.rows:
        msg = f"prefill_rows is {options.prefill_rows} - at {plan.name}"
        raise PlanError(f"{msg} - the plan has {plan.rows} rows a step")
    capacity = options.span_capacity
    if capacity < 0 or capacity & (capacity - 1):
        raise PlanError(f"span_capacity is {capacity} - at {plan.name} - use a power of two")
    if options.sample_period < 1 or options.queue_capacity < 1 or options.wait_timeout_ms <= 0:
        msg = (
            f"sample_period {options.sample_period}, queue_capacity {options.queue_capacity}, "
            f"wait_timeout_ms {options.wait_timeout_ms}"
        )
        raise PlanError(f"{msg} - at {plan.name} - all of them must be positive")


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)
