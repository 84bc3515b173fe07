"""Planner: lowers a Graph to a checked Plan for one target.

    lower      operators that the target computes by several
    forms      of values that can be computed in several ways, one
    direct     operators that store their results on all ranks themselves
    fragments  activations that lie in the order in which matvecs read them
    tile       each operator asks its body for tiles
    hazards    what every tile must follow, from declared regions in program order
    waits      the few groups of producers it waits for (transitive reduction, joins)
    dynamic    `claim` operators of which a step has only some tiles, and who decides that
    payload    buffers whose data is its own flag need no wait, but a re-arm
    schedule   static lists; waits that a list already gives are dropped
    finish     groups become counters; memory; edges for the table
    variants   the above for each step size; one plan of all of them
    check      proves the result without trusting any of the above

A Plan is a function of (graph, target, policy, edges) alone. Tiles, and with them the order of
sums, do not depend on workers or policy.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from gpurt.body import Target
from gpurt.buffer import Buffer
from gpurt.errors import PlanError
from gpurt.graph import Graph
from gpurt.plan import PLAN_VERSION, TASK_ADVANCE, Plan, Policy
from gpurt.planner import (
    direct,
    dynamic,
    finish,
    forms,
    fragments,
    memory,
    payload,
    schedule,
    tile,
    variants,
)
from gpurt.planner import policy as policies
from gpurt.planner.check import check_graph, check_plan
from gpurt.planner.cost import task_ns
from gpurt.planner.draft import Draft, DraftOp, DraftTask, Group
from gpurt.planner.hazards import Hazards
from gpurt.planner.lower import lower
from gpurt.planner.payload import Edges
from gpurt.planner.waits import Waits
from gpurt.progress import Progress

__all__ = ["plan"]


def plan(
    graph: Graph,
    target: Target,
    *,
    policy: Policy | Mapping[str, Policy] = "static",
    edges: Edges = "counter",
    progress: Progress | None = None,
    rows: Sequence[int] | None = None,
) -> Plan:
    """The checked Plan of `graph` for `target`.

    policy: one for all operators, or {operator name or body name: policy}, the rest static.
    edges: `payload` makes payload buffers of all that can be, `auto` of the small ones; only on
        cuda, and only where every body that touches the buffer can poll.
    progress: called as (what, done, total).
    rows: the most that a step of each variant carries, ascending, up to the graph's rows; a step
        runs the smallest one that holds what waits. None: one variant of all the graph's rows.
    Raises: GraphError, PlanError: each names the task, where it is, and what to do.
    """
    if target.workers < 1:
        raise PlanError(f"{target.workers} workers - at target {target.kind} - use 1 or more")
    with _without_collector():
        check_graph(graph)
        plans = [
            _planned(
                graph if size == graph.rows else graph.narrowed(size),
                target,
                policy,
                edges,
                progress or _silent,
            )
            for size in variants.step_rows(graph, rows)
        ]
        made = variants.join(plans, graph)
        check_plan(made, progress)
    return made


@contextmanager
def _without_collector() -> Iterator[None]:
    """A plan is millions of small objects without a cycle: looking for one took a fifth of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _silent(what: str, done: int, total: int) -> None:
    """No progress wanted."""


def _planned(
    graph: Graph,
    target: Target,
    policy: Policy | Mapping[str, Policy],
    edges: Edges,
    progress: Progress,
) -> Plan:
    """The plan of one variant, not checked."""
    lowered = lower(graph, target, policies.resolve(graph, policy))
    draft = Draft(len(graph.operators), generated_count=lowered.generated)
    for op, op_policy in lowered.replaced:
        draft.leave_out(op, op_policy)
    graph, chosen = lowered.graph, lowered.policies
    graph, left_out = direct.directed(graph, target, forms.left_out(graph))
    graph = fragments.ordered(graph, target, left_out)
    polled = payload.choose(graph, target, chosen, edges, left_out)
    buffers = memory.BufferMap(graph, target)
    unused = forms.unused(graph, left_out)
    last = policies.tail_policy(chosen[-1], bool(polled))
    early = buffers.plan_buffers(polled, unused, {})  # weights have no place yet

    def arm() -> Group | None:
        number = draft.graph_op_count + draft.generated_count
        rearm = payload.rearm(number, last, early, target, "symmetric_payload")
        if rearm is None:
            return None
        draft.next_generated()
        draft.append(*rearm)
        return payload.armed(draft.next_generated(), rearm[0], draft)

    hazards, armed = _lower(graph, target, chosen, polled, left_out, buffers, draft, progress, arm)
    placed = buffers.plan_buffers(polled, unused, finish.packed_bytes(buffers, graph))
    lists = schedule.Schedule(draft, target)
    for drafted in draft.ops:
        lists.place(drafted)
    lists.drop_waits()
    rearm = payload.rearm(draft.graph_op_count + draft.generated_count, last, placed, target)
    if rearm is not None:
        draft.next_generated()
        draft.append(*rearm)
        lists.place(rearm[0])
    advance = _advance(graph, draft, last)
    reads = tuple((b.index, b.whole.bounds) for b in _made(graph))
    task = DraftTask(advance, (0, 0, 0, 0), reads, cost_ns=task_ns(0, target))
    schedule.add_advance(draft, lists, advance, task, armed)
    dynamic.settle(draft)
    counters, tasks = finish.tasks(draft)
    segments = dynamic.finish(policies.segments(draft.ops), draft, tasks)
    return Plan(
        version=PLAN_VERSION,
        name=graph.name,
        target=target,
        rows=graph.rows,
        slots=graph.slots,
        context=graph.context,
        vocab=graph.vocab,
        buffers=placed,
        operators=finish.operators(draft),
        tasks=tasks,
        counters=counters,
        segments=segments,
        lists=finish.lists(lists.lists, segments),
        edges=finish.edges(draft, hazards, lists, polled, graph),
        payload_set_bytes=memory.payload_set_bytes(placed),
        rank=graph.rank,
        rank_count=graph.rank_count,
        notes=tuple(graph.notes),
    )


def _made(graph: Graph) -> list[Buffer]:
    """What a step makes that `advance` takes."""
    return [b for b in (graph.sampled, graph.proposals, graph.parents) if b is not None]


def _advance(graph: Graph, draft: Draft, policy: Policy) -> DraftOp:
    """The generated end of a step."""
    sampled = graph.sampled
    further = [(b.index, 0) for b in _made(graph)[1:]]
    return DraftOp(
        draft.next_generated(),
        "advance",
        "advance",
        "plan.advance",
        0,
        policy,
        (None if sampled is None else (sampled.index, 0), *further),
        () if graph.proposals is None else (graph.proposal_limit,),
        TASK_ADVANCE,
    )


def _lower(
    graph: Graph,
    target: Target,
    chosen: Sequence[Policy],
    polled: set[int],
    left_out: set[int],
    buffers: memory.BufferMap,
    draft: Draft,
    progress: Progress,
    arm: Callable[[], Group | None],
) -> tuple[Hazards, Group | None]:
    """Tiles and waits of all operators of the graph, in program order. arm: adds the re-arm of
    symmetric payload, behind the first that writes it. Returns also: what tells that all ranks did.
    """
    armed: Group | None = None
    hazards, waits = Hazards(graph, polled), Waits(draft)
    deciders = dynamic.Deciders(draft, hazards, waits)
    for done, (op, op_policy) in enumerate(zip(graph.operators, chosen, strict=True), 1):
        if op.index in left_out:
            draft.leave_out(op, op_policy)
            continue
        tiles = tile.cut(op, target)
        drafted = tile.draft_op(op, op_policy, target, buffers, polled)
        tasks = tile.draft_tasks(op, drafted, tiles, target, buffers)
        needs = hazards.needs(drafted, tiles)
        if drafted.policy == "ready" and any(p.ranks for need in needs for p in need):
            drafted.policy = "claim"  # other ranks push nothing here
        for task, groups in zip(tasks, waits.waits(drafted, needs), strict=True):
            task.waits = groups
        deciders.lower(op, drafted, tasks)
        deciders.choose_experts(op, tiles, tasks)
        draft.append(drafted, tasks)
        deciders.wrote(op, drafted)
        if armed is None and any(r.buffer.role == "symmetric" for r in op.writes):
            armed = arm()
        progress("planning", done, len(graph.operators))
    return hazards, armed
