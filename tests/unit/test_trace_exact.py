"""Split, blame and critical path on random traces, against plain loops that say what they mean."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.trace import analysis
from gpurt.trace.edges import edge_rows, late_tasks
from tests.helpers.hand_trace import hand_trace
from tests.helpers.random_trace import random_trace

SEEDS = range(12)


def end_of(span):
    return int(span["begin_ns"] + span["wait_ns"] + span["run_ns"])


@pytest.mark.parametrize("seed", SEEDS)
def test_split_says_of_each_nanosecond_what_the_worker_did(seed):
    trace = random_trace(seed)
    for step in range(3):
        low, high = analysis.step_window(trace, step)
        parts = analysis.split(trace, [step])
        assert (parts >= 0).all()
        assert parts.sum(axis=1).tolist() == [high - low] * trace.workers
        for worker in range(trace.workers):
            state = np.full(high - low, 3)  # idle
            mine = trace.spans_of(step)
            mine = mine[mine["worker"] == worker]
            for span in mine:
                begin, met = int(span["begin_ns"]), int(span["begin_ns"] + span["wait_ns"])
                state[max(begin - low, 0) : max(met - low, 0)] = 2
                state[met - low : end_of(span) - low] = 0
            last = max((end_of(s) for s in mine), default=low)
            state[last - low :] = 4
            counts = np.bincount(state, minlength=5)
            stall = int(mine["stall_ns"].sum())
            assert parts[worker].tolist() == [counts[0] - stall, stall, *counts[2:].tolist()]


@pytest.mark.parametrize("seed", SEEDS)
def test_critical_path_is_the_chain_of_latest_ends(seed):
    trace = random_trace(seed)
    spans = {int(s["task"]): s for s in trace.spans_of(1)}
    chain = [max(spans, key=lambda t: end_of(spans[t]))]
    while True:
        task = chain[0]
        needed = set(trace.producers_of(task).tolist())
        worker, begin = spans[task]["worker"], spans[task]["begin_ns"]
        earlier = [t for t, s in spans.items() if s["worker"] == worker and s["begin_ns"] < begin]
        if earlier:
            needed.add(max(earlier, key=lambda t: spans[t]["begin_ns"]))
        if not needed:
            break
        latest = max(end_of(spans[t]) for t in needed)
        chain.insert(0, next(t for t in sorted(needed) if end_of(spans[t]) == latest))
    found = trace.critical_path(1)
    assert [end_of(s) for s in found] == [end_of(spans[t]) for t in chain]
    assert set(found["task"].tolist()) == set(chain)


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_of_the_path_add_up_to_the_step(seed):
    trace = random_trace(seed)
    for step in range(3):
        low, high = analysis.step_window(trace, step)
        parts = analysis.path_parts(trace, step)
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == high - low
        path = trace.critical_path(step)
        assert parts["compute"] + parts["stall"] == int(path["run_ns"].sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_late_tasks_of_a_step_are_those_that_blame_finds_one_by_one(seed):
    trace = random_trace(seed)
    for step in range(3):
        late = late_tasks(trace, step)
        for span in trace.spans_of(step):
            found = analysis.late_producer(trace, span)
            assert late[span["task"]] == (-1 if found is None else found["task"])


@pytest.mark.parametrize("seed", SEEDS)
def test_blame_is_the_last_signal_and_how_long_after_the_claim_it_came(seed):
    trace = random_trace(seed)
    for span in trace.spans_of(2):
        ends = [
            end_of(s)
            for s in trace.spans_of(2)
            if int(s["task"]) in trace.producers_of(int(span["task"])).tolist()
        ]
        blamed = analysis.blame(trace, span)
        assert blamed.wait_us == int(span["wait_ns"]) / 1e3
        if ends:
            assert blamed.late_us == max(0, max(ends) - int(span["begin_ns"])) / 1e3
        else:
            assert (blamed.late_task, blamed.why) == (-1, "it has no producer in the step")


@pytest.mark.parametrize("seed", SEEDS)
def test_waits_of_edges_are_all_waits_that_have_a_producer(seed):
    trace = random_trace(seed)
    keys = [o.name for o in trace.operators]
    rows = edge_rows(trace, [0, 1, 2], keys)
    total = 0
    for step in range(3):
        late = late_tasks(trace, step)
        total += sum(int(s["wait_ns"]) for s in trace.spans_of(step) if late[s["task"]] >= 0)
    assert sum(r.wait_us for r in rows) == pytest.approx(total / 1e3 / 3)


def test_edges_of_the_hand_trace():
    trace = hand_trace(4)
    keys = [o.name for o in trace.operators]
    rows = {(r.producer, r.consumer): r for r in edge_rows(trace, [0, 1, 2, 3], keys)}
    norm_up, up_advance = rows["norm", "up"], rows["up", "advance"]
    assert (norm_up.tasks, norm_up.wait_us, norm_up.hop_us) == (2, 0.11, 0.01)
    assert (up_advance.tasks, up_advance.wait_us, up_advance.hop_us) == (1, 0.5, 0.02)


def test_path_of_the_hand_trace_in_parts():
    parts = analysis.path_parts(hand_trace(), 0)
    # 0 [0..100), hop to 110, 2 [110..880) with 300 stalled, hop to 900, 3 [900..1000).
    assert parts == {"compute": 670, "stall": 300, "hop": 30, "worker": 0, "open": 0}


def test_spans_that_overlap_by_a_rounded_clock_still_split_without_a_rest():
    trace = hand_trace()
    row = np.flatnonzero(trace.spans["task"] == 1)[0]
    trace.spans["begin_ns"][row] -= 7  # claimed before task 0 had ended
    parts = analysis.split(trace)
    assert (parts >= 0).all()
    assert parts.sum(axis=1).tolist() == [1000, 1000]
    assert parts[0].tolist() == [493, 0, 500, 7, 0]


def test_a_step_without_a_dynamic_task_is_whole():
    dynamic = np.array([False, True, False, False])
    trace = hand_trace(2)
    absent = (trace.spans["step"] == 1) & (trace.spans["task"] == 1)
    kept = trace.spans[~absent]
    assert hand_trace(2, spans=kept).whole_steps.tolist() == [0]
    assert hand_trace(2, spans=kept, task_dynamic=dynamic).whole_steps.tolist() == [0, 1]
