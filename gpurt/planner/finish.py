"""Finish: a Draft becomes the tuples of a Plan. Groups that are still waited for get counters."""

from __future__ import annotations

from collections.abc import Sequence

from gpurt.buffer import DTYPES
from gpurt.graph import Graph
from gpurt.plan import (
    TASK_PAYLOAD_IN,
    TASK_PAYLOAD_OUT,
    EdgeKind,
    PlanCounter,
    PlanEdge,
    PlanExpert,
    PlanOperator,
    PlanSegment,
    PlanTask,
)
from gpurt.planner.draft import Draft, Group
from gpurt.planner.hazards import Hazards
from gpurt.planner.memory import BufferMap
from gpurt.planner.schedule import Schedule


def tasks(draft: Draft) -> tuple[tuple[PlanCounter, ...], tuple[PlanTask, ...]]:
    """Counters in the order of their first wait, and all task records."""
    numbers: dict[int, int] = {}
    groups: list[Group] = []
    successors: list[list[int]] = []
    signals: list[list[int]] = [[] for _ in draft.tasks]
    waits: list[tuple[tuple[int, int], ...]] = []
    experts: list[PlanExpert | None] = []

    def wait_of(group: Group) -> tuple[int, int]:
        final = group.final()
        number = numbers.get(id(final))
        if number is None:
            number = numbers[id(final)] = len(groups)
            groups.append(final)
            successors.append([])
            for producer in final.tasks:
                signals[producer].append(number)
        return number, len(final.tasks)

    for index, task in enumerate(draft.tasks):
        row = tuple(wait_of(group) for group in task.waits)
        if task.op.policy == "ready":
            for number, _ in row:
                successors[number].append(index)
        waits.append(row)
        chosen = task.expert
        experts.append(
            None
            if chosen is None
            else PlanExpert(
                chosen.live,
                chosen.expert_id,
                chosen.stride_bytes,
                wait_of(chosen.group),
                chosen.stage_bytes,
            )
        )
    counters = tuple(
        PlanCounter(len(group.tasks), group.tasks, tuple(after), group.op.ranks)
        for group, after in zip(groups, successors, strict=True)
    )
    made = tuple(
        PlanTask(
            task.op.index,
            task.op.body,
            task.coords,
            task.op.flags,
            row,
            tuple(signal),
            task.op.addr,
            task.op.payload_mask,
            task.op.params if task.params is None else task.params,
            task.stream,
            task.op.layer,
            task.reads,
            task.writes,
            task.cost_ns,
            task.cost_bytes,
            expert,
        )
        for task, row, signal, expert in zip(draft.tasks, waits, signals, experts, strict=True)
    )
    return counters, made


def operators(draft: Draft) -> tuple[PlanOperator, ...]:
    """The graph's operators under their own indices, then the generated ones."""
    ordered = sorted([*draft.ops, *draft.left_out], key=lambda op: op.index)
    return tuple(PlanOperator(o.name, o.body, o.path, o.layer, o.policy) for o in ordered)


def lists(
    by_worker: Sequence[Sequence[int]], segments: Sequence[PlanSegment]
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Every worker's list cut at the segments' ends; () where the segment is dynamic."""
    result = []
    for worker in by_worker:
        rows, at = [], 0
        for segment in segments:
            begin = at
            if segment.policy == "static":
                while at < len(worker) and worker[at] < segment.end:
                    at += 1
            rows.append(tuple(worker[begin:at]))
        result.append(tuple(rows))
    return tuple(result)


def edges(
    draft: Draft, hazards: Hazards, schedule: Schedule, polled: set[int], graph: Graph
) -> tuple[PlanEdge, ...]:
    """What the table prints: edges by kind between operators, with the buffers they are for."""
    counts: dict[tuple[int, int], int] = {}
    for task in draft.tasks:
        for group in task.waits:
            producers = (
                {draft.tasks[t].op.index: None for t in group.tasks}
                if group.op is task.op
                else {group.final().op.index: None}
            )
            for producer in producers:
                key = (producer, task.op.index)
                counts[key] = counts.get(key, 0) + 1
    result = []
    crossing = {op.index for op in draft.ops if op.ranks}
    for (producer, consumer), count in counts.items():
        what = ", ".join(hazards.causes.get((producer, consumer), {}))
        kind: EdgeKind = "ranks" if producer in crossing else "counter"
        result.append(PlanEdge(kind, producer, consumer, count, what))
    for (producer, consumer), count in schedule.order_edges.items():
        what = ", ".join(hazards.causes.get((producer, consumer), {}))
        result.append(PlanEdge("order", producer, consumer, count, what))
    result += _payload_edges(draft, polled, graph)
    return tuple(result)


def _payload_edges(draft: Draft, polled: set[int], graph: Graph) -> list[PlanEdge]:
    writers: dict[int, list[int]] = {}
    result = []
    sources = {op.index: op for op in graph.operators}
    for op in draft.ops:
        source = sources.get(op.index)
        if source is None or not op.flags & (TASK_PAYLOAD_IN | TASK_PAYLOAD_OUT):
            continue
        found: dict[int, list[str]] = {}
        for region in source.reads:
            for writer in writers.get(region.buffer.index, ()):
                if any(region.overlaps(w) for w in sources[writer].writes):
                    found.setdefault(writer, []).append(region.buffer.name)
        for writer, names in found.items():
            what = ", ".join(dict.fromkeys(names))
            result.append(PlanEdge("payload", writer, op.index, op.end - op.begin, what))
        for index in {r.buffer.index: None for r in source.writes}:
            if index in polled:
                writers.setdefault(index, []).append(op.index)
    return result


def packed_bytes(buffers: BufferMap, graph: Graph) -> dict[int, int]:
    """Bytes of packed weights, where the packer states them."""
    sizes = {}
    for index, name in enumerate(buffers.packings):
        if not name:
            continue
        from gpurt.graphs.ops.packing import packed_bytes as stated_bytes

        buffer = graph.buffers[buffers.sources[index]]
        sizes[index] = stated_bytes(name, buffer.shape, DTYPES[buffer.dtype.name])
    return sizes
