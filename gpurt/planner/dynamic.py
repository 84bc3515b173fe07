"""Dynamic: which `claim` operators have as many tasks in a step as their decider says.

    decider      the one task that writes `routes`; its first word says how many slots are live
    dynamic op   tiles slot by slot; those of slots that are not live do not exist in a step
    compensator  gives the signals of tasks that do not exist

Whoever waits for an absent task relies on what that task would have waited for. So the compensator
follows all of that: it is the decider where that is enough, else a generated `noop` in front of the
dynamic operator. It need not follow tasks of the same family (dynamic operators of one decider),
since an expert's tasks wait for those of its own slot, which are absent too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpurt.body import Tile
from gpurt.buffer import Region
from gpurt.errors import GraphError
from gpurt.graph import Operator
from gpurt.plan import (
    PARAMS_PER_TASK,
    TASK_DECIDES,
    PlanDynamic,
    PlanSegment,
    PlanTask,
)
from gpurt.planner.draft import Draft, DraftExpert, DraftOp, DraftTask, DynamicOp, Group
from gpurt.planner.hazards import Hazards, Needs
from gpurt.planner.waits import Waits
from gpurt.wire import PUBLISHED_PER_DECISION

ROUTES = "routes"  # the argument that says which slots are live


class Deciders:
    """Finds the decider of each dynamic operator while a graph is lowered."""

    def __init__(self, draft: Draft, hazards: Hazards, waits: Waits) -> None:
        self._draft, self._hazards, self._waits = draft, hazards, waits
        self._writers: dict[int, tuple[DraftOp, Region]] = {}  # by buffer: who wrote last
        self._families: dict[int, list[DraftOp]] = {}  # by the decider's place in the draft

    def decider(self, op: Operator) -> DraftOp | None:
        """The operator of one task that wrote all of `op`'s routes."""
        region = op.args.get(ROUTES)
        if region is None:
            return None
        found = self._writers.get(region.buffer.index)
        if found is None or not found[1].covers(region):
            return None
        decider = found[0]
        fits = decider.end - decider.begin == 1 and len(decider.params) < PARAMS_PER_TASK
        return decider if fits else None

    def lower(self, op: Operator, drafted: DraftOp, tasks: Sequence[DraftTask]) -> None:
        """Make a `claim` operator dynamic if it can be. Its tasks have their waits and are not in
        the draft yet; a compensator may be appended before them.
        """
        decider = self.decider(op) if op.body.dynamic else None
        if decider is None or drafted.policy != "claim":
            return
        family = self._families.setdefault(decider.begin, [])
        if len(family) == PUBLISHED_PER_DECISION:
            return
        region = op.args[ROUTES]
        live = (region.buffer.index, region.offset_bytes)
        slots = tiles_by_slot(op, tasks)
        compensator = decider if not family else family[-1].dynamic_of().compensator
        needs = _needs(tasks, family)
        if not self._waits.reaches(compensator, needs):
            # Tasks of the family that these follow stand on what their own compensator follows.
            needs[compensator] = 1
            compensator = self._compensator(drafted, decider, needs, region, live)
        drafted.dynamic = DynamicOp(decider, compensator, live, len(tasks) // slots)
        family.append(drafted)

    def choose_experts(
        self, op: Operator, tiles: Sequence[Tile], tasks: Sequence[DraftTask]
    ) -> None:
        """Which expert's weights a tile streams. Raises: GraphError if nobody decides that."""
        for tile, task in zip(tiles, tasks, strict=True):
            stream = tile.stream
            if stream is None or stream.stride_bytes == 0:
                continue
            decider = self.decider(op)
            if decider is None:
                msg = f"{op.body.name} streams an expert's weights, but no one task writes all of"
                raise GraphError(f"{msg} its {ROUTES!r} - at {op.path} - add a `route` operator")
            region = op.args[ROUTES]
            live = (region.buffer.index, region.offset_bytes)
            expert_id = (live[0], live[1] + stream.expert_id_bytes)
            task.expert = DraftExpert(
                live, expert_id, stream.stride_bytes, decider.group(1), stream.stage_bytes
            )

    def wrote(self, op: Operator, drafted: DraftOp) -> None:
        """Remember what an operator wrote, after it."""
        for region in op.writes:
            self._writers[region.buffer.index] = (drafted, region)

    def _compensator(
        self,
        drafted: DraftOp,
        decider: DraftOp,
        needs: Needs,
        region: Region,
        live: tuple[int, int],
    ) -> DraftOp:
        op = DraftOp(
            self._draft.next_generated(),
            f"{drafted.name}.absent",
            "noop",
            f"{drafted.path}.absent",
            drafted.layer,
            # `ready` tasks wait for no other rank.
            "claim" if any(p.ranks for p in needs) else decider.policy,
            (live,),
        )
        tile = Tile((0, 0, 0, 0), (region,), ())
        needs = dict(needs)
        for producer, tiles in self._hazards.needs(op, [tile])[0].items():
            needs[producer] = needs.get(producer, 0) | tiles
        task = DraftTask(op, (0, 0, 0, 0), ((live[0], region.bounds),))
        (task.waits,) = self._waits.waits(op, [needs])
        self._draft.append(op, [task])
        return op


def tiles_by_slot(op: Operator, tasks: Sequence[DraftTask]) -> int:
    """The number of slots. Raises: GraphError if the tiles do not lie slot by slot."""
    slots = tasks[-1].coords[0] + 1
    count = len(tasks) // slots
    if count * slots == len(tasks) and all(t.coords[0] == i // count for i, t in enumerate(tasks)):
        return slots
    msg = f"{op.body.name} is dynamic, but its {len(tasks)} tiles do not lie slot by slot"
    raise GraphError(f"{msg} - at {op.path} - coords[0] is the slot, as many tiles in each")


def settle(draft: Draft) -> None:
    """Give up what cannot be dynamic after all, and flag deciders and compensators."""
    members = [op for op in draft.ops if op.dynamic is not None]
    given_up = {op.dynamic_of().decider.begin for op in members if _waits_for_others(draft, op)}
    for op in members:
        dynamic = op.dynamic_of()
        if dynamic.decider.begin in given_up:
            op.dynamic = None
        else:
            dynamic.decider.flags |= TASK_DECIDES
            dynamic.compensator.flags |= TASK_DECIDES


def finish(
    segments: Sequence[PlanSegment], draft: Draft, tasks: Sequence[PlanTask]
) -> tuple[PlanSegment, ...]:
    """The segments, with what each dynamic one needs."""
    found = {op.begin: op.dynamic for op in draft.ops if op.dynamic is not None}
    result = []
    for segment in segments:
        dynamic = found.get(segment.begin)
        if dynamic is not None:
            made = PlanDynamic(
                dynamic.decider.begin,
                dynamic.compensator.begin,
                dynamic.live,
                dynamic.tiles_per_slot,
                absent_signals(tasks[segment.begin : segment.end], dynamic.tiles_per_slot),
            )
            segment = replace(segment, dynamic=made)
        result.append(segment)
    return tuple(result)


def absent_signals(
    tasks: Sequence[PlanTask], tiles_per_slot: int
) -> tuple[tuple[int, int, int, int], ...]:
    """(counter, first slot, end slot, signals a slot) of all that the tasks of a segment signal,
    by counter, then slot.
    """
    counts: dict[int, dict[int, int]] = {}
    for index, task in enumerate(tasks):
        for counter in task.signals:
            by_slot = counts.setdefault(counter, {})
            slot = index // tiles_per_slot
            by_slot[slot] = by_slot.get(slot, 0) + 1
    rows: list[tuple[int, int, int, int]] = []
    for counter, by_slot in sorted(counts.items()):
        for slot, signals in sorted(by_slot.items()):
            if rows and rows[-1][0] == counter and rows[-1][2:] == (slot, signals):
                rows[-1] = (counter, rows[-1][1], slot + 1, signals)
            else:
                rows.append((counter, slot, slot + 1, signals))
    return tuple(rows)


def _needs(tasks: Sequence[DraftTask], family: Sequence[DraftOp]) -> Needs:
    """What the tasks wait for outside of their family."""
    needs: Needs = {}
    for group in {id(g): g for task in tasks for g in task.waits}.values():
        if group.op not in family:
            needs[group.op] = needs.get(group.op, 0) | group.tiles
    return needs


def _waits_for_others(draft: Draft, op: DraftOp) -> bool:
    """Whether a task waits for lower slots of its family, which may live while its own does not,
    or, since a group of producers became coarse, for more than the compensator follows.
    """
    decider = op.dynamic_of().decider
    lowest: dict[int, int] = {}  # by group of the family: the lowest slot among its producers

    def is_other(group: Group, slot: int) -> bool:
        producer = group.op.dynamic
        if producer is None or producer.decider is not decider:
            return False
        if id(group) not in lowest:
            lowest[id(group)] = min(draft.tasks[t].coords[0] for t in group.tasks)
        return lowest[id(group)] < slot

    return any(
        group.alias is not None or is_other(group, task.coords[0])
        for task in draft.tasks[op.begin : op.end]
        for group in task.waits
    )
