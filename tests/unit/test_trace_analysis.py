"""Split, blame and critical path on traces whose answers are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpurt.errors import TraceError
from gpurt.trace import RequestInfo, StepSpans, analysis
from gpurt.trace.figures import acceptance, bandwidth, experts
from gpurt.trace.slow import slow_steps
from tests.helpers.hand_trace import hand_trace


def test_split_adds_up_to_the_step_for_every_worker():
    parts = analysis.split(hand_trace())
    #                  compute stall wait idle tail
    assert parts.tolist() == [[500, 0, 500, 0, 0], [470, 300, 110, 0, 120]]
    assert parts.sum(axis=1).tolist() == [1000, 1000]


def test_split_of_many_steps_is_their_sum_without_a_rest():
    parts = analysis.split(hand_trace(5))
    assert parts.sum(axis=1).tolist() == [5000, 5000]
    assert parts[1].tolist() == [5 * v for v in (470, 300, 110, 0, 120)]


def test_claim_before_the_step_opened_counts_for_no_step_twice():
    trace = hand_trace(2)
    row = np.flatnonzero((trace.spans["step"] == 1) & (trace.spans["task"] == 2))[0]
    trace.spans["begin_ns"][row] -= 120  # its worker was done with step 0 at 880
    trace.spans["wait_ns"][row] += 120
    parts = analysis.split(trace, [1])
    assert parts[1].tolist() == [470, 300, 110, 0, 120]


def test_critical_path_is_the_chain_that_ended_last():
    path = hand_trace().critical_path(0)
    assert path["task"].tolist() == [0, 2, 3]


def test_critical_path_follows_the_worker_where_no_edge_was_late():
    trace = hand_trace()
    row = np.flatnonzero(trace.spans["task"] == 1)[0]
    trace.spans["run_ns"][row] = 750  # task 1 now ends at 850
    row = np.flatnonzero(trace.spans["task"] == 2)[0]
    trace.spans["run_ns"][row] = 100  # and task 2 at 210
    assert trace.critical_path(0)["task"].tolist() == [0, 1, 3]


def test_longest_wait_blames_the_producer_that_signalled_last():
    first, second = analysis.longest_waits(hand_trace())
    assert (first.task, first.late_task, first.late_worker) == (3, 2, 1)
    assert (first.wait_us, first.late_us, first.why) == (0.5, 0.48, "its own run")
    assert (second.task, second.late_task, second.wait_us) == (2, 0, 0.11)


@pytest.mark.parametrize(
    ("begin", "wait", "run", "stall", "why"),
    [
        (0, 110, 770, 300, "its own run"),
        (0, 110, 770, 700, "its weights came late"),
        (0, 800, 80, 0, "waited itself"),
        (800, 0, 80, 0, "claimed late"),
    ],
)
def test_blame_says_why_the_late_one_was_late(begin, wait, run, stall, why):
    trace = hand_trace()
    row = np.flatnonzero(trace.spans["task"] == 2)[0]
    for name, value in (("begin", begin), ("wait", wait), ("run", run), ("stall", stall)):
        trace.spans[f"{name}_ns"][row] = value
    span = trace.spans[trace.spans["task"] == 3][0]
    assert analysis.blame(trace, span).why == why


def test_blame_tells_a_waiter_that_looked_late_from_a_producer_that_was_late():
    trace = hand_trace()
    row = np.flatnonzero(trace.spans["task"] == 3)[0]
    trace.spans["wait_ns"][row] = 3000
    first = analysis.longest_waits(trace, 1)[0]
    assert (first.task, first.why, first.late_us) == (3, "seen late", 0.48)


def test_operators_are_summed_over_layers_with_bytes_and_shares():
    rows = {r.name: r for r in analysis.operators(hand_trace(4))}
    up = rows["layers[*].up"]
    assert (up.tasks, up.body, up.run_us) == (2.0, "matvec", 1.07)
    assert up.stall_us == pytest.approx(0.3)
    assert up.share == pytest.approx(1070 / 1270)
    # 10,700 bytes in the 780 ns in which any of its tasks ran.
    assert up.gigabytes_per_s == pytest.approx(10_700 / 780)


def test_payload_edges_make_producers_too():
    trace = hand_trace(waits=(np.zeros(5, int), np.zeros(0, int)), payload_edges=((0, 1), (1, 2)))
    assert trace.producers_of(3).tolist() == [1, 2]
    assert trace.critical_path(0)["task"].tolist() == [0, 2, 3]


def test_typical_step_is_the_median_one_and_partial_steps_do_not_count():
    trace = hand_trace(3)
    last = trace.spans["step"] == 2
    trace = hand_trace(3, spans=trace.spans[~(last & (trace.spans["task"] == 3))])
    assert trace.whole_steps.tolist() == [0, 1]
    assert analysis.typical_step(trace) in (0, 1)
    with pytest.raises(TraceError, match=r"^no step has all of its 4 spans"):
        analysis.split(hand_trace(1, spans=hand_trace().spans[:3]))


# ---- slow steps and figures ------------------------------------------------------------------
def slowed(step, **late_ns):
    """hand_trace of five steps, one of them with a task 2 that runs or starts late."""
    trace = hand_trace(5)
    for name, late in late_ns.items():
        row = (trace.spans["step"] == step) & (trace.spans["task"] == 2)
        trace.spans[name][row] += late
        last = (trace.spans["step"] == step) & (trace.spans["task"] == 3)
        trace.spans["wait_ns"][last] += late
        later = trace.spans["step"] > step
        trace.spans["begin_ns"][later] += late
        trace.steps["end_ns"][trace.steps["step"] >= step] += late
        trace.steps["begin_ns"][trace.steps["step"] > step] += late
    return trace


def test_a_slow_step_names_the_task_that_ran_long():
    slowest, *rest = slow_steps(slowed(3, run_ns=5000))
    assert (slowest.step, slowest.phase, slowest.step_us, slowest.times) == (3, "decode", 6.0, 6.0)
    assert (slowest.part, slowest.part_us) == ("compute", 5.0)
    assert (slowest.task, slowest.worker, slowest.task_us) == (2, 1, 5.0)
    assert [r.why for r in rest] == ["nothing stands out"] * 4


def test_a_slow_step_names_the_start_that_came_late():
    slowest = slow_steps(slowed(2, wait_ns=3000))[0]
    assert (slowest.step, slowest.part, slowest.task) == (2, "hop", 2)
    assert slowest.why.startswith(
        "+3.0 us from signals to the starts that waited for them; 3.0 us at"
    )


def test_slow_steps_without_spans_are_followed_by_slow_ones_with_spans():
    trace = slowed(3, run_ns=5000)
    kept = np.isin(trace.spans["step"], (0, 1))
    rows = slow_steps(replace(trace, kept=StepSpans(trace.spans[kept])), 2)
    assert [(r.step, r.kept) for r in rows] == [(3, False), (0, True), (1, True)]
    assert rows[0].why == "no spans kept"


def test_bandwidth_is_bytes_of_a_step_over_its_length():
    found = bandwidth(hand_trace(3, ceiling_gbps=21.4))
    assert found.gigabytes_per_s == pytest.approx(10_700 / 1000)
    assert found.share == pytest.approx(0.5)
    assert bandwidth(hand_trace(3)).share is None


def test_experts_are_the_dynamic_tasks_that_ran():
    dynamic = np.array([False, True, True, False])
    trace = hand_trace(2, task_dynamic=dynamic)
    absent = (trace.spans["step"] == 1) & (trace.spans["task"] == 1)
    trace = replace(trace, kept=StepSpans(trace.spans[~absent]))
    (row,) = experts(trace)
    assert (row.name, row.tasks) == ("layers[*].up", 2)
    assert (row.share, row.least, row.most) == (0.75, 0.5, 1.0)
    assert experts(hand_trace(2)) == []


def test_acceptance_counts_all_requests():
    requests = (RequestInfo(0, 0, 3, 5, 4, 3, (2, 1)), RequestInfo(1, 4, 5, 5, 4, 1, (1,)))
    found = acceptance(hand_trace(2, requests=requests))
    assert (found.verify_steps, found.by_position) == (4, (0.75, 0.25))
    assert found.tokens_per_step == 2.0
    assert acceptance(hand_trace(2)) is None
