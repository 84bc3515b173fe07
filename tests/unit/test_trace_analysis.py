"""Split, blame and critical path on traces whose answers are known."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.errors import TraceError
from gpurt.trace import analysis
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
