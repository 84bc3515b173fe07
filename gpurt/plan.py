"""Plan: a Graph lowered for one target. Printable, checkable, saved as msgpack.

Owns: the nouns that planner, checker, executors and trace share, and the file format.
Does not know: how a plan is made (gpurt/planner) or run (gpurt/executors).

Tasks lie in topological order, which is program order: of two tasks that touch the same bytes and
do not both read, the one with the lower index goes first. A task's index is its record's index.
The last task is always the generated `advance`.

A plan may have several variants: step sizes of one graph, over the same weights and states. Each
is a range of tasks, segments and operators with an `advance` of its own, and never waits for
another: a step runs one of them, and `advance` chooses which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from math import prod
from pathlib import Path
from typing import Any, Literal, cast

import msgpack

from gpurt.body import Param, Target
from gpurt.buffer import DTYPES
from gpurt.errors import PlanError
from gpurt.wire import ADDRS_PER_TASK as ADDRS_PER_TASK
from gpurt.wire import PARAMS_PER_TASK as PARAMS_PER_TASK
from gpurt.wire import RANK_COUNTER, TaskFlags
from gpurt.wire import SIGNALS_PER_TASK as SIGNALS_PER_TASK
from gpurt.wire import WAITS_PER_TASK as WAITS_PER_TASK

PLAN_VERSION = 1
FILE_FORMAT = "gpurt.plan"

# PlanTask.flags, as plain integers: they go to plan files.
TASK_ADVANCE = int(TaskFlags.ADVANCE)
TASK_PAYLOAD_IN = int(TaskFlags.PAYLOAD_IN)
TASK_PAYLOAD_OUT = int(TaskFlags.PAYLOAD_OUT)
TASK_REARM = int(TaskFlags.REARM)
TASK_DECIDES = int(TaskFlags.DECIDES)
TASK_EXPERT_STREAM = int(TaskFlags.EXPERT_STREAM)
TASK_OWN_ROWS = int(TaskFlags.OWN_ROWS)
TASK_RING = int(TaskFlags.RING)

ARENA_ALIGN_BYTES = 256

Policy = Literal["static", "claim", "ready"]
Memory = Literal[
    "weight",
    "state",
    "activation",
    "payload",
    "symmetric",
    "symmetric_payload",
    "step",
    "none",
]
EdgeKind = Literal["order", "counter", "payload", "ranks"]
MEMORIES: tuple[Memory, ...] = (
    "weight",
    "state",
    "activation",
    "payload",
    "symmetric",
    "symmetric_payload",  # in symmetric memory, and its data is its own flag
    "step",
    "none",  # of forms that were not chosen: no task uses it
)
PAYLOAD: tuple[Memory, ...] = ("payload", "symmetric_payload")
TWO_SETS: tuple[Memory, ...] = (*PAYLOAD, "symmetric")  # in use in turn, by rounds of a variant
POLICIES: tuple[Policy, ...] = ("static", "claim", "ready")

Bounds = tuple[tuple[int, int], ...]
PlanRegion = tuple[int, Bounds]  # (index into Plan.buffers, one half-open range an axis)


@dataclass(frozen=True, slots=True)
class PlanBuffer:
    """A buffer's place: `offset_bytes` in the arena of its `memory`.

    source: name of the Graph's buffer that it holds; differs from `name` only where two operators
    want one weight in two packings. payload, symmetric: one set; the other lies
    `payload_set_bytes` further.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str
    packing: str  # "" for row-major as stored
    size_bytes: int
    memory: Memory
    offset_bytes: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class PlanOperator:
    """An operator of the Graph, or a generated one: `noop` join, `rearm`, `advance`."""

    name: str
    body: str
    path: str
    layer: int
    policy: Policy


@dataclass(frozen=True, slots=True)
class PlanExpert:
    """Which expert's weights a task streams, known at run time: those at `stream` and then
    `stride_bytes` further for each expert id.

    live, expert_id: (buffer index, byte offset) of the count of live slots and of the id of this
    task's slot (coords[0]). wait: (counter, signals_per_step); then both words are there.
    stage_bytes: of the stream, in one stage of the ring.
    """

    live: tuple[int, int]
    expert_id: tuple[int, int]
    stride_bytes: int
    wait: tuple[int, int]
    stage_bytes: int


@dataclass(frozen=True, slots=True)
class PlanTask:
    """One task record before addresses are known.

    waits: (counter, signals_per_step). addr: (buffer index, byte offset) in the order of the body's
    arguments, None for an absent optional. stream: (buffer index, offset, bytes) of packed weights.
    """

    op: int
    body: str
    coords: tuple[int, int, int, int]
    flags: int
    waits: tuple[tuple[int, int], ...]
    signals: tuple[int, ...]
    addr: tuple[tuple[int, int] | None, ...]
    payload_mask: int
    params: tuple[Param, ...]
    stream: tuple[int, int, int] | None
    layer: int
    reads: tuple[PlanRegion, ...]
    writes: tuple[PlanRegion, ...]
    cost_ns: int
    cost_bytes: int = 0
    expert: PlanExpert | None = None


@dataclass(frozen=True, slots=True)
class PlanCounter:
    """A word that only grows. successors: tasks under `ready` that wait for it.

    ranks: the producers of every rank signal it, on every rank; who waits does so for all of them.
    """

    signals_per_step: int
    producers: tuple[int, ...]
    successors: tuple[int, ...]
    ranks: bool = False


@dataclass(frozen=True, slots=True)
class PlanDynamic:
    """Makes a `claim` segment dynamic: a step has only the tasks of its live slots, which are the
    first ones. Tasks lie slot by slot, `tiles_per_slot` in each.

    live: (buffer index, byte offset) of a u32, how many slots are live; task `decider` writes it.
    Task `compensator` (the decider itself, or one that follows it and all that an absent task would
    have waited for) gives the signals of absent tasks. absent: (counter, first slot, end slot,
    signals a slot).
    """

    decider: int
    compensator: int
    live: tuple[int, int]
    tiles_per_slot: int
    absent: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class PlanSegment:
    """Tasks [begin, end) under one policy; every worker walks the segments in this order."""

    policy: Policy
    begin: int
    end: int
    dynamic: PlanDynamic | None = None


@dataclass(frozen=True, slots=True)
class PlanVariant:
    """The tasks [begin, end) and segments [segment_begin, segment_end) of steps of up to `rows`
    rows.
    """

    rows: int
    begin: int
    end: int
    segment_begin: int
    segment_end: int


@dataclass(frozen=True, slots=True)
class PlanEdge:
    """For people: how `count` tasks of one operator depend on another. Executors do not read it."""

    kind: EdgeKind
    producer_op: int
    consumer_op: int
    count: int
    what: str
    variant: int = 0


@dataclass(frozen=True)
class Plan:
    """What an executor runs. lists[worker][segment]: task indices, () unless it is static.

    rows, slots, context, vocab: bounds of one step, as in Graph; so rank, rank_count. variants:
    ascending by rows; () if there is one, of `rows` rows and all tasks: see `step_variants`.
    profile: with policy `auto`, where policy and edges come from. notes: what the graph's builder
    chose, and why.
    """

    version: int
    name: str
    target: Target
    rows: int
    slots: int
    context: int
    vocab: int
    buffers: tuple[PlanBuffer, ...]
    operators: tuple[PlanOperator, ...]
    tasks: tuple[PlanTask, ...] = field(repr=False)
    counters: tuple[PlanCounter, ...] = field(repr=False)
    segments: tuple[PlanSegment, ...] = field(repr=False)
    lists: tuple[tuple[tuple[int, ...], ...], ...] = field(repr=False)
    edges: tuple[PlanEdge, ...] = field(repr=False)
    payload_set_bytes: int = 0
    variants: tuple[PlanVariant, ...] = ()
    profile: str = ""
    rank: int = 0
    rank_count: int = 1
    notes: tuple[str, ...] = ()

    def check(self) -> None:
        """Prove the plan. Raises: PlanError naming the task, what is wrong and what to do."""
        from gpurt.planner.check import check_plan

        check_plan(self)

    def step_variants(self) -> tuple[PlanVariant, ...]:
        """The variants, also where there is only one."""
        one = PlanVariant(self.rows, 0, len(self.tasks), 0, len(self.segments))
        return self.variants or (one,)

    def buffer_index(self, name: str) -> int:
        """Index of the buffer of that name. Raises: PlanError without it, or its memory."""
        for index, buffer in enumerate(self.buffers):
            if buffer.name == name:
                if buffer.memory == "none":
                    what = f"no task uses {name}, so it has no memory - at plan {self.name}"
                    raise PlanError(f"{what} - read what takes its place: see print(plan)")
                return index
        raise PlanError(f"no buffer is named {name!r} - at plan {self.name} - see print(plan)")

    def arena_bytes(self, memory: Memory) -> int:
        """Bytes of the arena of one kind of memory; with two sets: of ONE of them."""
        ends = [b.offset_bytes + b.size_bytes for b in self.buffers if b.memory == memory]
        return align_up(max(ends, default=0))

    def two_sets_bytes(self, memory: Memory) -> int:
        """Bytes of both sets of `payload` or `symmetric` buffers."""
        return 2 * self.payload_set_bytes if self.arena_bytes(memory) else 0

    def describe(self, bandwidth_bytes_per_s: float = 0.0) -> str:
        """The table of print(plan); with a bandwidth, also the floor of a step's time."""
        from gpurt.planner.table import plan_table

        return plan_table(self, bandwidth_bytes_per_s)

    def __str__(self) -> str:
        """The table: operators, edges, workers' load, memory."""
        return self.describe()

    def save(self, path: str | Path) -> None:
        """Write a plan file. Raises: PlanError if the path cannot be written."""
        payload = cast("bytes", msgpack.packb(_to_wire(self), use_bin_type=True))
        record = {
            "format": FILE_FORMAT,
            "schema": PLAN_VERSION,
            "checksum": hashlib.sha256(payload).digest(),
            "payload": payload,
        }
        try:
            Path(path).write_bytes(cast("bytes", msgpack.packb(record, use_bin_type=True)))
        except OSError as error:
            msg = f"cannot write the plan: {error.strerror} - at {path} - choose another path"
            raise PlanError(msg) from error

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file; it is not checked yet (`check()`).

        Raises: PlanError if the file is missing, truncated, corrupt, or of a newer gpurt.
        """
        payload = _read_payload(path)
        try:
            return _from_wire(msgpack.unpackb(payload, use_list=False, strict_map_key=False))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            msg = f"the plan's fields do not fit schema {PLAN_VERSION} ({error!r})"
            raise PlanError(f"{msg} - at {path} - plan again") from error


def rank_counters(plan: Plan) -> dict[int, int]:
    """Of the plan's counters that all ranks signal: their number on the wire."""
    indices = [i for i, counter in enumerate(plan.counters) if counter.ranks]
    return {index: number for number, index in enumerate(indices)}


def plan_counter(plan: Plan, wire_counter: int) -> int:
    """The index in Plan.counters of a counter as records and Faults name it."""
    if not wire_counter & RANK_COUNTER:
        return wire_counter
    return list(rank_counters(plan))[wire_counter & ~RANK_COUNTER]


def sent_share(written_bytes: int, ranks: int) -> int:
    """Bytes that one rank sends to others when all ranks together write so many of each one's
    symmetric memory: each an equal share, and to every rank, of which one is itself.
    """
    return written_bytes // ranks * (ranks - 1)


def sent_bytes(plan: Plan, task: PlanTask) -> int:
    """Bytes that a task sends to other ranks. Regions are declared as Graph.symmetric says."""
    written = 0
    for number, bounds in task.writes:
        buffer = plan.buffers[number]
        if buffer.role == "symmetric":
            elements = prod(high - low for low, high in bounds)
            written += elements * DTYPES[buffer.dtype].row_bytes(1)
    return sent_share(written, plan.rank_count)


def name_in_variant(name: str, rows: int) -> str:
    """The payload buffer that steps of up to `rows` rows have of their own."""
    return f"{name}@{rows}rows"


def align_up(size_bytes: int, alignment: int = ARENA_ALIGN_BYTES) -> int:
    """The next multiple of `alignment`."""
    return (size_bytes + alignment - 1) // alignment * alignment


# ---- file format -----------------------------------------------------------------------------
# Regions and parameter tuples repeat thousands of times, so tasks name rows of a table.


def _read_payload(path: str | Path) -> bytes:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        msg = f"cannot read the plan: {error.strerror} - at {path} - check the path"
        raise PlanError(msg) from error
    try:
        record = msgpack.unpackb(data)
    except Exception as error:  # msgpack raises a dozen kinds, ValueError among them
        msg = f"no whole plan file: {len(data)} bytes end early or are damaged"
        raise PlanError(f"{msg} - at {path} - save the plan again") from error
    if not isinstance(record, dict) or record.get("format") != FILE_FORMAT:
        raise PlanError(f"not a plan file - at {path} - pass a file that Plan.save() wrote")
    schema = record.get("schema")
    if not isinstance(schema, int) or schema > PLAN_VERSION:
        msg = f"plan file of schema {schema}, this gpurt reads up to {PLAN_VERSION}"
        raise PlanError(f"{msg} - at {path} - update gpurt or plan again")
    payload = record.get("payload")
    checksum = hashlib.sha256(payload).digest() if isinstance(payload, bytes) else b""
    if not isinstance(payload, bytes) or checksum != record.get("checksum"):
        msg = "the plan's checksum does not match its content"
        raise PlanError(f"{msg} - at {path} - save the plan again")
    return payload


class _Table:
    """Values by first use; `rows` goes to the file."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._index: dict[Any, int] = {}

    def put(self, value: Any) -> int:
        # 1, 1.0 and True are equal keys, so the types belong to the key.
        key = (value, str(value))
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.rows)
            self.rows.append(value)
        return index

    def put_all(self, values: Iterable[Any]) -> list[int]:
        return [self.put(v) for v in values]


def _row(record: Any) -> list[Any]:
    return [getattr(record, f.name) for f in fields(record)]


def _part(record: Any) -> list[Any] | None:
    return None if record is None else _row(record)


def _to_wire(plan: Plan) -> dict[str, Any]:
    regions, params, texts = _Table(), _Table(), _Table()
    tasks = []
    for t in plan.tasks:
        row = _row(t)
        row[1] = texts.put(t.body)
        row[8] = params.put(t.params)
        row[11], row[12] = regions.put_all(t.reads), regions.put_all(t.writes)
        row[15] = _part(t.expert)
        tasks.append(row)
    return {
        "version": plan.version,
        "name": plan.name,
        "target": asdict(plan.target),
        "bounds": [plan.rows, plan.slots, plan.context, plan.vocab],
        "buffers": [_row(b) for b in plan.buffers],
        "operators": [_row(o) for o in plan.operators],
        "regions": regions.rows,
        "params": params.rows,
        "texts": texts.rows,
        "tasks": tasks,
        "counters": [_row(c) for c in plan.counters],
        "segments": [[s.policy, s.begin, s.end, _part(s.dynamic)] for s in plan.segments],
        "lists": plan.lists,
        "edges": [_row(e) for e in plan.edges],
        "payload_set_bytes": plan.payload_set_bytes,
        "variants": [_row(v) for v in plan.variants],
        "profile": plan.profile,
        "notes": plan.notes,
        "ranks": [plan.rank, plan.rank_count],
    }


def _from_wire(wire: dict[str, Any]) -> Plan:
    regions, params, texts = wire["regions"], wire["params"], wire["texts"]
    tasks = []
    for row in wire["tasks"]:
        values = list(row)
        values[1], values[8] = texts[row[1]], params[row[8]]
        values[11] = tuple(regions[i] for i in row[11])
        values[12] = tuple(regions[i] for i in row[12])
        if values[15] is not None:
            values[15] = PlanExpert(*values[15])
        tasks.append(PlanTask(*values))
    rows, slots, context, vocab = wire["bounds"]
    rank, rank_count = wire.get("ranks", (0, 1))
    return Plan(
        version=wire["version"],
        name=wire["name"],
        target=Target(**wire["target"]),
        rows=rows,
        slots=slots,
        context=context,
        vocab=vocab,
        buffers=tuple(PlanBuffer(*row) for row in wire["buffers"]),
        operators=tuple(PlanOperator(*row) for row in wire["operators"]),
        tasks=tuple(tasks),
        counters=tuple(PlanCounter(*row) for row in wire["counters"]),
        segments=tuple(
            PlanSegment(policy, begin, end, None if dynamic is None else PlanDynamic(*dynamic))
            for policy, begin, end, dynamic in wire["segments"]
        ),
        lists=wire["lists"],
        edges=tuple(PlanEdge(*row) for row in wire["edges"]),
        payload_set_bytes=wire["payload_set_bytes"],
        variants=tuple(PlanVariant(*row) for row in wire.get("variants", ())),
        profile=wire.get("profile", ""),
        notes=tuple(wire.get("notes", ())),
        rank=rank,
        rank_count=rank_count,
    )
