"""Variants: step sizes of one graph in one plan.

Each is planned on its own, from the graph narrowed to its rows. Joined, they share what outlives a
step or is only read, and activations, of which a smaller variant uses the first rows: steps come
one after another. Payload and symmetric buffers are not shared, since which of their two sets is
in use alternates by the rounds of a variant. Operators of the graph keep their indices; generated
ones follow, variant by variant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gpurt.errors import GraphError, PlanError
from gpurt.graph import Graph
from gpurt.plan import (
    TWO_SETS,
    Plan,
    PlanBuffer,
    PlanCounter,
    PlanEdge,
    PlanExpert,
    PlanRegion,
    PlanSegment,
    PlanTask,
    PlanVariant,
    align_up,
    name_in_variant,
)
from gpurt.wire import VARIANTS_PER_PLAN

_Addr = tuple[tuple[int, int] | None, ...]


def step_rows(graph: Graph, rows: Sequence[int] | None) -> tuple[int, ...]:
    """The rows of each variant, ascending; None: one of all the graph's rows. Raises: PlanError."""
    if rows is None:
        return (graph.rows,)
    chosen = tuple(rows)
    msg = f"variants of {list(chosen)} rows - at plan {graph.name}"
    ascends = all(a < b for a, b in zip((0, *chosen), chosen, strict=False))
    if not chosen or len(chosen) > VARIANTS_PER_PLAN or not ascends or chosen[-1] > graph.rows:
        hint = f"use 1 to {VARIANTS_PER_PLAN} ascending numbers, of the graph's {graph.rows} rows"
        raise PlanError(f"{msg} - {hint}")
    if not graph.vocab and chosen != (graph.rows,):
        raise PlanError(f"{msg} - a graph without tokens has steps of all its rows: drop them")
    return chosen


def usual_rows(graph: Graph, kind: str) -> tuple[int, ...] | None:
    """The sizes of steps where nobody chose any: on a GPU also one row, if tokens come one by one.

    A step of one row in a plan of 16 has tasks for rows that are not there, 5 to 15 % of its time.
    A drafter's steps have several rows, and host threads gain nothing. A graph that has operators
    on chosen rows has one size.
    """
    if kind != "cuda" or not graph.vocab or graph.proposals is not None or graph.rows < 2:
        return None
    try:
        graph.narrowed(1)
    except GraphError:
        return None
    return 1, graph.rows


def join(plans: Sequence[Plan], graph: Graph) -> Plan:
    """One Plan of all variants, ascending by rows. plans: of `graph` narrowed to each's rows."""
    if len(plans) == 1:
        one = plans[0]
        return one if one.rows == graph.rows else replace(one, rows=graph.rows, variants=_sole(one))
    joined = _Joined(plans[-1], graph)
    for plan in plans:
        joined.add(plan)
    return joined.plan()


@dataclass(frozen=True)
class _Shift:
    """What one variant's numbers become."""

    variant: int
    tasks: int
    counters: int
    operators: int  # of those that were generated
    operator_count: int  # of the graph, which stay
    buffers: tuple[int, ...]
    # By identity: tasks share regions and arguments, and the checker relies on it.
    known_regions: dict[int, PlanRegion] = field(default_factory=dict)
    known_addrs: dict[int, _Addr] = field(default_factory=dict)

    def place(self, place: tuple[int, int]) -> tuple[int, int]:
        return self.buffers[place[0]], place[1]

    def op(self, op: int) -> int:
        return op if op < self.operator_count else op + self.operators

    def waits(self, waits: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((counter + self.counters, signals) for counter, signals in waits)

    def regions(self, regions: Sequence[PlanRegion]) -> tuple[PlanRegion, ...]:
        return tuple([self.region(region) for region in regions])

    def region(self, region: PlanRegion) -> PlanRegion:
        found = self.known_regions.get(id(region))
        if found is None:
            buffer = self.buffers[region[0]]
            found = region if buffer == region[0] else (buffer, region[1])
            self.known_regions[id(region)] = found
        return found

    def addr(self, addr: _Addr) -> _Addr:
        found = self.known_addrs.get(id(addr))
        if found is None:
            found = tuple(None if place is None else self.place(place) for place in addr)
            self.known_addrs[id(addr)] = found
        return found

    def task(self, task: PlanTask) -> PlanTask:
        stream = task.stream
        return replace(
            task,
            op=self.op(task.op),
            waits=self.waits(task.waits),
            signals=tuple(counter + self.counters for counter in task.signals),
            addr=self.addr(task.addr),
            stream=None if stream is None else (self.buffers[stream[0]], *stream[1:]),
            reads=self.regions(task.reads),
            writes=self.regions(task.writes),
            expert=None if task.expert is None else self.expert(task.expert),
        )

    def expert(self, expert: PlanExpert) -> PlanExpert:
        return replace(
            expert,
            live=self.place(expert.live),
            expert_id=self.place(expert.expert_id),
            wait=self.waits([expert.wait])[0],
        )

    def counter(self, counter: PlanCounter) -> PlanCounter:
        return replace(
            counter,
            producers=tuple(task + self.tasks for task in counter.producers),
            successors=tuple(task + self.tasks for task in counter.successors),
        )

    def segment(self, segment: PlanSegment) -> PlanSegment:
        d = segment.dynamic
        if d is not None:
            d = replace(
                d,
                decider=d.decider + self.tasks,
                compensator=d.compensator + self.tasks,
                live=self.place(d.live),
                absent=tuple((c + self.counters, low, high, n) for c, low, high, n in d.absent),
            )
        begin, end = segment.begin + self.tasks, segment.end + self.tasks
        return PlanSegment(segment.policy, begin, end, d)

    def edge(self, edge: PlanEdge) -> PlanEdge:
        ops = self.op(edge.producer_op), self.op(edge.consumer_op)
        return PlanEdge(edge.kind, *ops, edge.count, edge.what, self.variant)


class _Joined:
    """A Plan that grows by one variant after another."""

    def __init__(self, widest: Plan, graph: Graph) -> None:
        self._graph = graph
        operators = widest.operators[: len(graph.operators)]
        self._plan = replace(
            widest,
            rows=graph.rows,
            operators=operators,
            tasks=(),
            counters=(),
            segments=(),
            lists=((),) * len(widest.lists),
            edges=(),
            payload_set_bytes=0,
        )
        self._buffers = _of_one_set(widest)
        self._index = {b.name: i for i, b in enumerate(self._buffers)}

    def add(self, plan: Plan) -> None:
        joined = self._plan
        count = len(self._graph.operators)
        shift = _Shift(
            len(joined.variants),
            len(joined.tasks),
            len(joined.counters),
            len(joined.operators) - count,
            count,
            tuple(self._place(plan, index) for index in range(len(plan.buffers))),
        )
        segments = len(joined.segments)
        variant = PlanVariant(
            plan.rows,
            shift.tasks,
            shift.tasks + len(plan.tasks),
            segments,
            segments + len(plan.segments),
        )
        self._plan = replace(
            joined,
            operators=joined.operators + plan.operators[count:],
            tasks=joined.tasks + tuple(shift.task(t) for t in plan.tasks),
            counters=joined.counters + tuple(shift.counter(c) for c in plan.counters),
            segments=joined.segments + tuple(shift.segment(s) for s in plan.segments),
            lists=tuple(
                before + tuple(tuple(t + shift.tasks for t in row) for row in rows)
                for before, rows in zip(joined.lists, plan.lists, strict=True)
            ),
            edges=joined.edges + tuple(shift.edge(e) for e in plan.edges),
            payload_set_bytes=joined.payload_set_bytes + plan.payload_set_bytes,
            variants=(*joined.variants, variant),
        )

    def plan(self) -> Plan:
        return replace(self._plan, buffers=tuple(self._buffers))

    def _place(self, plan: Plan, index: int) -> int:
        """Index of a variant's buffer in the joined plan; one that it does not share is added."""
        buffer = plan.buffers[index]
        if buffer.memory in TWO_SETS:
            offset = self._plan.payload_set_bytes + buffer.offset_bytes
            name = name_in_variant(buffer.name, plan.rows)
            buffer = replace(buffer, name=name, offset_bytes=offset)
        elif buffer.name not in self._index:  # a weight that only this variant packs in this way
            ends = [b.offset_bytes + b.size_bytes for b in self._buffers if b.memory == "weight"]
            buffer = replace(buffer, offset_bytes=align_up(max(ends, default=0)))
        known = self._index.get(buffer.name)
        if known is not None and self._buffers[known].memory == "none" != buffer.memory:
            same = [b for b in self._buffers if b.memory == buffer.memory]
            end = align_up(max((b.offset_bytes + b.size_bytes for b in same), default=0))
            moved = replace(self._buffers[known], memory=buffer.memory, offset_bytes=end)
            self._buffers[known] = moved
        if buffer.name not in self._index:
            self._index[buffer.name] = len(self._buffers)
            self._buffers.append(buffer)
        return self._index[buffer.name]


def _sole(plan: Plan) -> tuple[PlanVariant, ...]:
    return (PlanVariant(plan.rows, 0, len(plan.tasks), 0, len(plan.segments)),)


def _of_one_set(plan: Plan) -> list[PlanBuffer]:
    """The buffers of the widest variant; those of two sets as activations, as others use them."""
    result, end = [], plan.arena_bytes("activation")
    for buffer in plan.buffers:
        if buffer.memory in TWO_SETS:
            buffer = replace(buffer, memory="activation", offset_bytes=end)
            end = align_up(end + buffer.size_bytes)
        result.append(buffer)
    return result
