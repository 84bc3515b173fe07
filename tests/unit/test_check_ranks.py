"""The checker on plans of ranks: reads on all ranks, no re-arm, one order of collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest

import gpurt
from gpurt.body import Arg, Body, Target
from gpurt.errors import GraphError, PlanError
from gpurt.graph import Graph
from gpurt.graphs.collectives import all_gather, all_reduce
from gpurt.graphs.ops.collect import collect
from gpurt.graphs.ops.publish import publish
from gpurt.graphs.ops.reduce import reduce
from gpurt.plan import Plan
from gpurt.planner import plan
from gpurt.planner.check_ranks import check_group

TARGET = Target("host", 2)
FILL = Body("fill", (Arg("slots", "w"),), ranks=True, publishes=True)
NOTHING = gpurt.body("nothing", lambda *_: None)


def start(rank=0, count=2):
    graph = Graph("ranks", rows=2, rank=rank, rank_count=count)
    part = graph.row_activation("part", 8, "f32")
    graph.task(NOTHING, [], [part])
    return graph, part


def reduced(rank=0, count=2, gathers=False, rearms=False):
    """Two collectives: a sum, then a gather or another sum. rearms: the first one's slots are
    filled once they were read.
    """
    graph, part = start(rank, count)
    total = all_reduce(graph, part, count)
    if rearms:
        slots = next(b for b in graph.buffers if b.name == "part.slots")
        graph.op(FILL, {"slots": slots})
    (all_gather if gathers else all_reduce)(graph, total, count)
    return graph


def in_two_shots(rank=0, rearmed=""):
    """A sum in two shots. rearmed: which of its slots are filled at the end, shares or sums."""
    graph, part = start(rank, 4)
    shares = graph.symmetric("slots.shares", part, slots=4, width=2)
    sums = graph.symmetric("slots.sums", part)
    publish(graph, part, shares, scatter=True)
    reduce(graph, shares, sums)
    total = graph.row_activation("total", 8, "f32")
    collect(graph, sums, total)
    if rearmed:
        graph.op(FILL, {"slots": shares if rearmed == "shares" else sums})
    return graph


def edited(made: Plan, index: int, **changes: object) -> Plan:
    tasks = list(made.tasks)
    tasks[index] = replace(tasks[index], **changes)
    return replace(made, tasks=tuple(tasks))


def index_of(made: Plan, body: str) -> int:
    return next(i for i, task in enumerate(made.tasks) if task.body == body)


@pytest.mark.parametrize("policy", ["static", "claim", "ready"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_plan_of_ranks_passes_and_waits_for_all_of_them(policy, workers):
    made = plan(reduced(), Target("host", workers), policy=policy)
    for task in made.tasks:
        if task.body == "collect":
            assert any(made.counters[counter].ranks for counter, _ in task.waits)
            assert made.operators[task.op].policy != "ready"
    assert [e.kind for e in made.edges if e.what == "part.slots"] == ["ranks"]
    assert made.check() is None


def test_a_read_that_waits_for_its_own_rank_alone_is_caught():
    made = plan(reduced(), TARGET)
    first = next(i for i, c in enumerate(made.counters) if c.ranks)
    counters = list(made.counters)
    counters[first] = replace(counters[first], ranks=False)
    own = replace(made, counters=tuple(counters))
    with pytest.raises(PlanError, match=r"collect\) reads part\.slots.* of other ranks: a wait"):
        own.check()


def test_an_unordered_rearm_of_symmetric_memory_is_caught():
    with pytest.raises(PlanError, match=r"fill\) writes symmetric part\.slots.* used it in this"):
        plan(reduced(rearms=True), TARGET)


@pytest.mark.parametrize(("which", "body"), [(0, "reduce"), (1, "collect")])
def test_each_of_two_shots_waits_for_all_ranks(which, body):
    made = plan(in_two_shots(), TARGET)
    crossing = [i for i, counter in enumerate(made.counters) if counter.ranks]
    assert len(crossing) == 2
    counters = list(made.counters)
    counters[crossing[which]] = replace(counters[crossing[which]], ranks=False)
    own = replace(made, counters=tuple(counters))
    with pytest.raises(PlanError, match=rf"{body}\) reads slots.* of other ranks: a wait"):
        own.check()


@pytest.mark.parametrize("which", ["shares", "sums"])
def test_an_unordered_rearm_of_two_shots_is_caught(which):
    with pytest.raises(PlanError, match=r"fill\) writes symmetric slots.* used it in this"):
        plan(in_two_shots(rearmed=which), TARGET)


def test_two_shots_are_the_same_on_all_ranks():
    check_group([plan(in_two_shots(rank), TARGET) for rank in range(4)])


def test_one_set_alone_is_caught():
    made = plan(reduced(), TARGET)
    with pytest.raises(PlanError, match=r"publish\) has payload mask 0x0, which is wrong"):
        edited(made, index_of(made, "publish"), payload_mask=0).check()


def test_ranks_without_a_collective_in_a_step_are_caught():
    with pytest.raises(PlanError, match=r"^no task of ranks waits for all of 2 ranks"):
        plan(start()[0], TARGET)


def test_only_collectives_may_touch_symmetric_memory():
    graph, part = start()
    slots = graph.symmetric("slots", part, slots=2)
    graph.task(NOTHING, [part], [slots[0]])
    with pytest.raises(GraphError, match=r"^nothing writes slots\[0:1, .*, which is symmetric"):
        plan(graph, TARGET)


def test_a_group_takes_its_collectives_in_one_order():
    plans = [plan(reduced(rank), TARGET) for rank in range(2)]
    check_group(plans)
    with pytest.raises(PlanError, match=r"^the plan of rank 0 of 2 is for 1 of 2"):
        check_group(plans[::-1])
    other = plan(reduced(1, gathers=True), TARGET)
    with pytest.raises(PlanError, match=r"^ranks 0 and 1 (place symmetric|have)"):
        check_group([plans[0], other])
    publishes = [i for i, t in enumerate(plans[1].tasks) if t.body == "publish"]
    swapped = edited(plans[1], publishes[0], writes=plans[1].tasks[publishes[1]].writes)
    with pytest.raises(PlanError, match=r"publish\) differs from rank 0's.*the order of rank 0"):
        check_group([plans[0], swapped])


def test_a_plan_of_ranks_survives_its_file(tmp_path):
    made = plan(reduced(1), TARGET)
    made.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan") == made
