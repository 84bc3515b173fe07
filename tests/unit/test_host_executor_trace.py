"""Spans: every task of every step leaves one, in the ring of the worker that ran it."""

import numpy as np
import pytest

from gpurt import wire
from gpurt.executors.base import whole_spans
from gpurt.wire import FinishReason
from tests.helpers.drive import driven
from tests.helpers.hand_plan import Node, hand_plan, random_nodes


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
    for worker, own in enumerate(raw.spans):
        assert set(own["worker"].tolist()) <= {worker}
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
    assert set(raw.sampled[0]["step"].tolist()) <= set(range(0, 100, 10))
    assert raw.sampled[0][-1]["step"] == 90


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
