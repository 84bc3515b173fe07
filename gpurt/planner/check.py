"""Check: proves a Graph before planning, and a Plan before it runs, also one loaded from a file.

A plan is proved from its own data alone; nothing is taken from the planner:

    check_layout   indices, capacities, lists, segments, counters, places in memory
    check_order    what happens before what: every conflict ordered, every task before `advance`,
                   no read of what nobody writes
    check_dynamic  tasks that a step may lack: all they would signal and order is still there
    check_ranks    symmetric buffers: what holds on all ranks, and of a group of plans
    check_payload  sentinels re-armed in every step, polls only where they may block

Why these give progress. Every wait and every poll goes to a lower task index; lists ascend; workers
walk the segments in one order. Of the tasks of a step that have not ended take the lowest: all it
waits for has ended, or is absent and its signals are given. In a list: all before it have ended,
and its worker cannot be blocked before it. Under `claim`: whoever is blocked further on drew later,
so it has been drawn; in a dynamic segment its decider has ended, so it can be drawn. Under `ready`:
it has been pushed, and tickets are drawn in the order of pushes. So it runs.
"""

from __future__ import annotations

from gpurt.errors import GraphError
from gpurt.graph import Graph, Operator
from gpurt.plan import Plan
from gpurt.planner.boxes import BoxSet, first_uncovered, overlap, text
from gpurt.planner.check_dynamic import check_dynamic
from gpurt.planner.check_layout import check_layout
from gpurt.planner.check_order import check_order
from gpurt.planner.check_payload import check_payload
from gpurt.planner.check_ranks import check_ranks
from gpurt.progress import Progress

__all__ = ["check_graph", "check_plan"]


def check_plan(plan: Plan, progress: Progress | None = None) -> None:
    """Raises: PlanError naming the task, what is wrong and what to do."""
    check_layout(plan)
    check_payload(plan)
    check_dynamic(plan, check_order(plan, progress))
    check_ranks(plan)


def check_graph(graph: Graph) -> None:
    """Raises: GraphError naming the first task that reads what no earlier task wrote, whose own
    writes overlap, or that is missing.
    """
    if not graph.operators:
        msg = f"graph {graph.name} has 0 tasks"
        raise GraphError(f"{msg} - at {graph.name} - add one with graph.task() or graph.op()")
    written: dict[int, BoxSet] = {}
    for op in graph.operators:
        for region in op.reads:
            if region.buffer.role in ("activation", "symmetric"):
                known = written.get(region.buffer.index)
                if known is None or not known.covers(region.bounds):
                    _raise_unwritten(graph, op, region.buffer.index, region.bounds)
        for number, region in enumerate(op.writes):
            for other in op.writes[:number]:
                if other.buffer is region.buffer and overlap(other.bounds, region.bounds):
                    msg = f"task {op.index} ({op.body.name}) writes {other} and {region}"
                    raise GraphError(
                        f"{msg}, which overlap - at {op.path} - declare each element once"
                    )
            index = region.buffer.index
            if index not in written:
                written[index] = BoxSet(region.buffer.shape)
            written[index].add(region.bounds)
    sampled = graph.sampled
    if sampled is not None:
        boxes = written.get(sampled.index)
        if boxes is None or not boxes.covers(sampled.whole.bounds):
            msg = f"graph {graph.name} has a vocab of {graph.vocab}, but no task writes all of"
            raise GraphError(f"{msg} {sampled.whole} - at {graph.name} - add a `sample` operator")


def _raise_unwritten(
    graph: Graph, op: Operator, index: int, bounds: tuple[tuple[int, int], ...]
) -> None:
    name = graph.buffers[index].name
    head = f"task {op.index} ({op.body.name}) reads {text(name, bounds)}"
    writers = [(o, r) for o in graph.operators for r in o.writes if r.buffer.index == index]
    never = first_uncovered(bounds, [r.bounds for _, r in writers])
    if never is not None:
        raise GraphError(
            f"{head}, but no task writes {text(name, never)} - at {op.path} - "
            "write the whole region or read less of it"
        )
    earlier = [r.bounds for o, r in writers if o.index < op.index]
    missing = first_uncovered(bounds, earlier)
    assert missing is not None, "the caller found an uncovered part"
    later = next(o for o, r in writers if o.index >= op.index and overlap(r.bounds, missing))
    which = "it writes itself" if later is op else f"task {later.index} ({later.body.name}) writes"
    raise GraphError(
        f"{head}, but {text(name, missing)} is what {which} only afterwards - at {op.path} - "
        "add the writer before the reader, or use a state buffer"
    )
