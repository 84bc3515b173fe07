"""Plans built by hand, so that executor tests need no planner and can be wrong on purpose."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpurt.body import Target, body
from gpurt.graph import Graph
from gpurt.plan import (
    PLAN_VERSION,
    TASK_ADVANCE,
    Plan,
    PlanBuffer,
    PlanCounter,
    PlanOperator,
    PlanSegment,
    PlanTask,
    Policy,
    align_up,
)


@dataclass(frozen=True)
class Node:
    """A task: what it runs ("noop" or a Python function) and the earlier nodes it waits for.

    joined: all of them signal one counter; else each has its own, and the task has several waits.
    """

    run: str | Callable[[], None] = "noop"
    after: tuple[int, ...] = ()
    joined: bool = True


def hand_plan(
    nodes: Sequence[Node],
    workers: int,
    policies: Sequence[tuple[Policy, int]],
    *,
    rows: int = 1,
    slots: int = 1,
    context: int = 16,
    vocab: int = 0,
    unsignalled: Sequence[tuple[int, int]] = (),
) -> tuple[Plan, Graph]:
    """A plan of `nodes` with an advance that waits for all sinks, through joins if need be.

    policies: (policy, tasks) a segment; the last one takes what is left. unsignalled: pairs
    (producer, consumer) of edges whose signal is left out, past every checker.
    """
    graph = Graph("hand", rows=rows, slots=slots, context=context, vocab=vocab)
    nodes = _with_advance(nodes)
    bodies: list[str] = []
    for index, node in enumerate(nodes[:-1]):
        if callable(node.run):
            name = f"python{index}"
            graph.task(body(name, node.run), [], [])
            bodies.append(name)
        else:
            bodies.append(node.run)
    bodies.append("advance")
    segments = _segments(policies, len(nodes))
    counters, waits, signals = _edges(nodes, segments, set(unsignalled))
    tasks = tuple(
        PlanTask(
            op=i,
            body=bodies[i],
            coords=(0, 0, 0, 0),
            flags=TASK_ADVANCE if i == len(nodes) - 1 else 0,
            waits=tuple(waits[i]),
            signals=tuple(signals[i]),
            addr=(),
            payload_mask=0,
            params=(),
            stream=None,
            layer=0,
            reads=(),
            writes=(),
            cost_ns=1,
        )
        for i in range(len(nodes))
    )
    return (
        Plan(
            version=PLAN_VERSION,
            name="hand",
            target=Target("host", workers),
            rows=rows,
            slots=slots,
            context=context,
            vocab=vocab,
            buffers=_buffers(graph, rows),
            operators=tuple(PlanOperator(b, b, f"hand.{b}", 0, "static") for b in bodies),
            tasks=tasks,
            counters=counters,
            segments=segments,
            lists=_lists(segments, workers),
            edges=(),
        ),
        graph,
    )


def random_nodes(count: int, seed: int, run: Callable[[int, tuple[int, ...]], Node]) -> list[Node]:
    """`count` nodes, each after up to four earlier ones; at most four wait for one node."""
    rng = random.Random(seed)
    waiters = [0] * count
    nodes = []
    for index in range(count):
        free = [i for i in range(max(0, index - 8), index) if waiters[i] < 4]
        after = tuple(sorted(rng.sample(free, min(len(free), rng.randrange(4)))))
        for i in after:
            waiters[i] += 1
        nodes.append(replace(run(index, after), joined=rng.random() < 0.5))
    return nodes


def _with_advance(nodes: Sequence[Node]) -> list[Node]:
    result = list(nodes)
    sinks = set(range(len(result))) - {p for n in result for p in n.after}
    while len(sinks) > 4:
        first = sorted(sinks)[:4]
        sinks = sinks - set(first) | {len(result)}
        result.append(Node("noop", tuple(first)))
    return [*result, Node("noop", tuple(sorted(sinks)))]


def _segments(policies: Sequence[tuple[Policy, int]], tasks: int) -> tuple[PlanSegment, ...]:
    result, begin = [], 0
    for number, (policy, count) in enumerate(policies):
        end = tasks if number == len(policies) - 1 else min(tasks, begin + count)
        result.append(PlanSegment(policy, begin, end))
        begin = end
    return tuple(result)


def _edges(nodes, segments, unsignalled):
    """Counters of each consumer: every producer signals its own once, unless told not to."""
    counters = []
    waits = [[] for _ in nodes]
    signals = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        if not node.after:
            continue
        ready = any(s.policy == "ready" and s.begin <= index < s.end for s in segments)
        for producers in [node.after] if node.joined else [(p,) for p in node.after]:
            waits[index].append((len(counters), len(producers)))
            for producer in producers:
                if (producer, index) not in unsignalled:
                    signals[producer].append(len(counters))
            counters.append(PlanCounter(len(producers), producers, (index,) if ready else ()))
    return tuple(counters), waits, signals


def _lists(segments, workers):
    return tuple(
        tuple(
            tuple(t for t in range(s.begin, s.end) if t % workers == worker)
            if s.policy == "static"
            else ()
            for s in segments
        )
        for worker in range(workers)
    )


def _buffers(graph: Graph, rows: int) -> tuple[PlanBuffer, ...]:
    if graph.sampled is None:
        return ()
    b = graph.sampled
    size = align_up(rows * 4)
    return (PlanBuffer(b.name, b.shape, "u32", "state", "", size, "step", 0, b.name),)
