"""Draft: a plan while it is made. Operators, tasks and the groups of producers that tasks wait for.

A Group becomes one counter: a set of tasks, and everybody who waits for all of them. Counters get
their numbers last, so that groups may be merged and waits dropped until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpurt.body import Param
from gpurt.plan import SIGNALS_PER_TASK, PlanRegion, Policy

if TYPE_CHECKING:
    from gpurt.graph import Operator

NO_WORKER = -1


@dataclass(eq=False, slots=True)
class Group:
    """Tasks of one operator (of several only for `advance`) that some tasks wait for together."""

    op: DraftOp
    tasks: tuple[int, ...]
    tiles: int  # the same as a bitset counted from op.begin; 0 for `advance`
    alias: Group | None = None  # the whole operator's group, once this one was coarsened
    ready_ns: int = -1  # schedule: when its last producer ends
    worker: int | None = None  # schedule: who runs all of it from a list, NO_WORKER if several do

    def final(self) -> Group:
        """The group that stands in the plan."""
        return self if self.alias is None else self.alias


@dataclass(eq=False, slots=True)
class DraftExpert:
    """As plan.PlanExpert; the decider's counter has no number yet."""

    live: tuple[int, int]
    expert_id: tuple[int, int]
    stride_bytes: int
    group: Group
    stage_bytes: int


@dataclass(eq=False, slots=True)
class DynamicOp:
    """What makes an operator dynamic: see plan.PlanDynamic."""

    decider: DraftOp
    compensator: DraftOp
    live: tuple[int, int]
    tiles_per_slot: int


@dataclass(eq=False, slots=True)
class DraftTask:
    """One task; `waits` shrinks as the planner proves waits to be redundant."""

    op: DraftOp
    coords: tuple[int, int, int, int]
    reads: tuple[PlanRegion, ...] = ()
    writes: tuple[PlanRegion, ...] = ()
    waits: tuple[Group, ...] = ()
    stream: tuple[int, int, int] | None = None
    params: tuple[Param, ...] | None = None  # None: those of the operator
    cost_bytes: int = 0
    cost_ns: int = 1
    expert: DraftExpert | None = None
    worker: int = NO_WORKER  # static: whose list it is in
    end_ns: int = 0  # schedule: when it would end


@dataclass(eq=False, slots=True)
class DraftOp:
    """An operator and its tasks [begin, end). `index` is its place in Plan.operators."""

    index: int
    name: str
    body: str
    path: str
    layer: int
    policy: Policy
    addr: tuple[tuple[int, int] | None, ...] = ()
    params: tuple[Param, ...] = ()
    flags: int = 0
    payload_mask: int = 0
    begin: int = 0
    end: int = 0
    groups: dict[int, Group] = field(default_factory=dict)  # by bitset from `begin`
    signal_counts: list[int] = field(default_factory=list)
    coarse: bool = False
    ranks: bool = False  # it writes symmetric buffers: who follows it waits for that of all ranks
    dynamic: DynamicOp | None = None

    def dynamic_of(self) -> DynamicOp:
        """`dynamic` of an operator that has it."""
        assert self.dynamic is not None, self.path
        return self.dynamic

    @property
    def all_tiles(self) -> int:
        """The bitset of all tasks, counted from `begin`."""
        return (1 << (self.end - self.begin)) - 1

    def group(self, tiles: int) -> Group:
        """The group of `tiles` (a bitset from `begin`), made on first use.

        A tile that would signal more than a record holds makes the operator coarse: all waits for
        parts of it become waits for the whole.
        """
        whole = self.all_tiles
        if self.coarse:
            tiles = whole
        found = self.groups.get(tiles)
        if found is not None:
            return found
        for tile in bits_of(tiles):
            self.signal_counts[tile] += 1
            if self.signal_counts[tile] > SIGNALS_PER_TASK:
                self.coarse = True
        if self.coarse:
            tiles = whole
        made = self.groups.get(tiles)
        if made is None:
            tasks = tuple(self.begin + tile for tile in bits_of(tiles))
            made = Group(self, tasks, tiles)
            self.groups[tiles] = made
        if self.coarse:
            for other in self.groups.values():
                other.alias = made if other is not made else None
        return made


@dataclass(eq=False, slots=True)
class Draft:
    """All operators in task order, and their tasks."""

    graph_op_count: int
    ops: list[DraftOp] = field(default_factory=list)
    tasks: list[DraftTask] = field(default_factory=list)
    generated_count: int = 0
    left_out: list[DraftOp] = field(default_factory=list)  # of forms not chosen: without tasks

    def next_generated(self) -> int:
        """Index of the next generated operator: after those of the Graph, whose indices stay."""
        self.generated_count += 1
        return self.graph_op_count + self.generated_count - 1

    def leave_out(self, op: Operator, policy: Policy) -> None:
        """Keep the place of an operator of the Graph whose form was not chosen."""
        self.left_out.append(DraftOp(op.index, op.name, op.body.name, op.path, op.layer, policy))

    def append(self, op: DraftOp, tasks: list[DraftTask]) -> None:
        """Give `op` its tasks, after all that are there."""
        op.begin = len(self.tasks)
        op.end = op.begin + len(tasks)
        op.signal_counts = [0] * len(tasks)
        self.ops.append(op)
        self.tasks.extend(tasks)


def bits_of(bitset: int) -> Iterator[int]:
    """Indices of the ones of a bitset, ascending."""
    base = 0
    while bitset:
        word = bitset & 0xFFFFFFFFFFFFFFFF
        while word:
            low = word & -word
            yield base + low.bit_length() - 1
            word ^= low
        bitset >>= 64
        base += 64
