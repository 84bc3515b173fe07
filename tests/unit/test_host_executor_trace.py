"""Spans: every task of every step leaves one, in the ring of the worker that ran it."""

import time

import numpy as np
import pytest

from gpurt import wire
from gpurt.body import Target
from gpurt.body import body as make_body
from gpurt.executors.base import whole_spans
from gpurt.graph import Graph
from gpurt.planner import plan
from gpurt.trace import Trace
from gpurt.wire import FinishReason
from tests.helpers.drive import driven
from tests.helpers.hand_plan import Node, hand_plan, random_nodes

HELD = 30  # steps before the one that is held


def planned(workers=3, policy="static"):
    nodes = random_nodes(20, 5, lambda _, after: Node("noop", after))
    return hand_plan(nodes, workers, [(policy, 0)])


@pytest.mark.parametrize("policy", ["static", "claim", "ready"])
def test_every_task_of_every_step_has_exactly_one_span(policy):
    plan = planned(policy=policy)
    with driven(plan) as driver:
        assert driver.run(max_tokens=50)[1] == FinishReason.STEPS
        assert driver.executor.raw_trace().dropped == 0
        driver.executor.close()
        raw = driver.executor.raw_trace()
    spans = np.concatenate(raw.spans)
    found = sorted(zip(spans["step"].tolist(), spans["task"].tolist(), strict=True))
    assert found == [(step, task) for step in range(50) for task in range(len(plan[0].tasks))]
    for own in raw.spans:
        ends = own["begin"] + own["wait"] + own["run"]
        assert (ends[:-1] <= own["begin"][1:]).all()


def test_summaries_give_each_step_its_time_and_rows():
    with driven(planned()) as driver:
        driver.run(max_tokens=50)
        summaries = driver.executor.raw_trace().summaries
    assert summaries["step"].tolist() == list(range(50))
    assert (summaries["begin_ns"] <= summaries["end_ns"]).all()
    assert (summaries["end_ns"][:-1] <= summaries["begin_ns"][1:]).all()
    assert set(summaries["rows"].tolist()) == {1}
    assert set(summaries["phase"].tolist()) == {wire.Phase.PLAIN}


def test_a_launch_keeps_nothing_of_the_one_before():
    """Both count their steps from 0: spans of the first would be taken for the second's."""
    plan = planned()
    with driven(plan) as driver:
        for steps in (50, 3):
            driver.run(max_tokens=steps)
            driver.executor.host.request_exit()
            assert driver.executor.join(10.0)
            raw = driver.executor.raw_trace()
            assert sum(map(len, raw.spans)) == steps * len(plan[0].tasks)
            assert raw.summaries["step"].tolist() == list(range(steps))
        assert driver.executor.launches == 2


def test_a_full_ring_keeps_the_newest_spans_and_counts_the_dropped():
    plan = planned(workers=1)
    tasks = len(plan[0].tasks)
    with driven(plan, span_capacity=64, sample_period=10) as driver:
        driver.run(max_tokens=100)
        driver.executor.close()
        raw = driver.executor.raw_trace()
    assert raw.dropped == 100 * tasks - 64
    newest = raw.spans[0]
    assert len(newest) == 64
    assert newest[-1]["step"] == 99
    assert newest[-1]["task"] == tasks - 1
    sampled = set(raw.sampled[0]["step"].tolist())
    assert max(sampled) >= 90
    lengths = {int(s["step"]): int(s["end_ns"] - s["begin_ns"]) for s in raw.summaries}
    for step in sampled - set(range(0, 100, 10)):  # kept because it was slow: longer than others
        assert lengths[step] > 0.99 * lengths[step - 1]


@pytest.mark.parametrize("policy", ["static", "ready"])
def test_a_slow_step_is_kept_when_its_ring_has_long_gone_round(policy):
    """A body holds step HELD until that is four times as long as any step before it."""
    seen = []

    def body(x, y):
        seen.append(None)
        if len(seen) == HELD + 1:
            summaries = driver.executor.raw_trace().summaries
            ended = summaries[summaries["end_ns"] > 0]
            longest = int((ended["end_ns"] - ended["begin_ns"]).max())
            until = time.monotonic_ns() + 4 * longest
            while time.monotonic_ns() < until:
                pass
        np.copyto(y, x)

    graph = Graph("held")
    x, y = graph.input("x", [4], "f32"), graph.output("y", [4], "f32")
    last = graph.activation("last", [4], "f32")
    graph.task(make_body("hold", body), reads=[x], writes=[last])
    graph.task(make_body("copy", lambda x, y: np.copyto(y, x)), reads=[last], writes=[y])
    made = plan(graph, Target("host", 1), policy=policy)  # of two, one's ring may not go round
    options = {"span_capacity": 64, "sample_period": 100_000, "first_step": 1}
    with driven((made, graph), **options) as driver:
        driver.executor.write("x", np.ones(4, np.float32))
        driver.run(max_tokens=HELD + 40)
        driver.executor.close()
        raw = driver.executor.raw_trace()
    trace = Trace.from_raw(made, raw)
    assert 1 + HELD in trace.whole_steps
    assert 1 + HELD not in np.concatenate(raw.spans)["step"]
    lengths = trace.steps["end_ns"] - trace.steps["begin_ns"]
    assert int(lengths[HELD]) >= 4 * int(lengths[:HELD].max())


def test_without_trace_nothing_is_kept():
    with driven(planned(), trace=False) as driver:
        assert driver.run(max_tokens=20)[1] == FinishReason.STEPS
        raw = driver.executor.raw_trace()
    assert sum(len(s) for s in raw.spans) == 0
    assert len(raw.summaries) == 0


@pytest.mark.parametrize("unpublished", [0, 1, 64])
@pytest.mark.parametrize("stored", [0, 40, 127, 128, 129, 500])
@pytest.mark.parametrize("during_copy", [0, 1, 30, 300])
def test_spans_that_a_lap_may_have_overwritten_are_left_out(unpublished, stored, during_copy):
    """The worst copy: the worker got as far as it can before the first place was read."""
    capacity = 128
    ring = np.zeros(capacity, wire.SPAN)
    for number in range(stored + during_copy + unpublished):
        ring[number % capacity]["task"] = number
    whole, gone = whole_spans(ring, stored, stored + during_copy, unpublished)
    assert whole["task"].tolist() == list(range(gone, stored))
    most = stored + during_copy + unpublished - capacity  # nothing is left out that is whole
    assert gone == min(max(0, most), stored)
