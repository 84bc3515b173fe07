"""A trace of several ranks: lanes, tasks and waits of each, and waits for another one."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from gpurt.graph import Graph
from gpurt.plan import PlanBuffer, PlanEdge
from gpurt.trace import Trace, analysis
from gpurt.trace.clocks import late_ranks
from gpurt.trace.view import show
from tests.helpers.fake_executor import toy_plan
from tests.helpers.rank_trace import WORKERS, plan_of_ranks, raw_of_rank, trace_of


def test_every_rank_has_lanes_and_tasks_of_its_own():
    trace = trace_of()
    assert (trace.ranks, trace.workers, trace.dropped) == (2, 4, 6)
    assert [trace.lane_name(w) for w in range(4)] == [
        f"rank {rank} worker {worker}" for rank in (0, 1) for worker in (0, 1)
    ]
    spans = trace.spans_of(1)
    assert sorted(spans["task"].tolist()) == [0, 1, 2, 3, 4, 5]
    assert (spans["worker"] // WORKERS == spans["task"] // 3).all()
    assert trace.whole_steps.tolist() == [0, 1, 2]
    assert [o.name for o in trace.operators] == 2 * ["first", "second", "advance"]


def test_a_step_is_whole_with_the_spans_of_all_ranks():
    raw = raw_of_rank(1)
    lacks = replace(raw, spans=[raw.spans[0], raw.spans[1][1:]])
    trace = Trace.from_raw(plan_of_ranks(), raw_of_rank(0), lacks)
    assert trace.whole_steps.tolist() == [1, 2]


def test_a_wait_is_blamed_on_the_rank_that_was_late():
    trace = trace_of()
    assert trace.producers_of(1).tolist() == [0, 3]  # a counter of all ranks
    assert trace.producers_of(5).tolist() == [4]  # one of its own
    second = trace.spans_of(0)[trace.spans_of(0)["task"] == 1][0]
    blame = analysis.blame(trace, second)
    assert (blame.late_task, blame.late_worker, blame.late_us) == (3, 2, 0.14)
    path = trace.critical_path(0)["task"].tolist()
    assert path[0] == 3
    assert path[-1] in (2, 5)


@pytest.mark.parametrize("ahead", [7_000_000_000, -5_000])
def test_a_clock_that_is_apart_is_moved_beside_that_of_rank_0(ahead):
    base = Trace.from_raw(plan_of_ranks(), raw_of_rank(0), raw_of_rank(1))
    raw0 = raw_of_rank(0, 10_000)  # begins are unsigned
    moved = Trace.from_raw(plan_of_ranks(), raw0, raw_of_rank(1, 10_000 + ahead))
    assert moved.spans.tolist() == base.spans.tolist()


def test_a_clock_less_than_a_step_apart_is_left():
    spans = trace_of(ahead=200).spans_of(0)
    begins = {int(s["task"]): int(s["begin_ns"]) for s in spans}
    assert begins[3] - begins[0] == 200


@pytest.mark.parametrize("ahead", [0, 200, -350, 7_000_000_000])
def test_clocks_of_gpus_are_bounded_by_what_ranks_waited_for(ahead, tmp_path):
    """Starts of `second` lie 50 ns behind the end of the other rank's `first`, and 10 ns."""
    plan = plan_of_ranks()
    on_gpus = replace(plan, target=replace(plan.target, kind="cuda"))
    trace = Trace.from_raw(on_gpus, raw_of_rank(0, 10_000), raw_of_rank(1, 10_000 + ahead))
    assert trace.clock_error_ns == 30
    spans = {(int(s["step"]), int(s["task"])): int(s["begin_ns"]) for s in trace.spans}
    for step in range(3):
        assert spans[step, 3] - spans[step, 0] == -20  # together: within the error
    begins = trace.spans["begin_ns"].astype(np.int64)
    assert (np.diff(begins[trace.spans["step"] == 1]) >= 0).all()
    trace.save(tmp_path / "a.trace")
    assert Trace.load(tmp_path / "a.trace").clock_error_ns == 30
    out = io.StringIO()
    show(trace, Console(file=out, width=120))
    assert "2 ranks (clocks within 0.03 us)" in out.getvalue()


def test_steps_whose_clocks_were_wrong_do_not_move_the_others():
    """As the first step of a launch on GPUs, whose SMs' rates are not known yet."""
    plan = plan_of_ranks()
    on_gpus = replace(plan, target=replace(plan.target, kind="cuda"))
    raw = raw_of_rank(1, 10_200)
    wrong = [spans.copy() for spans in raw.spans]
    for spans in wrong:
        spans["begin"][spans["step"] == 0] += 30_000
    trace = Trace.from_raw(on_gpus, raw_of_rank(0, 10_000), replace(raw, spans=wrong))
    spans = {(int(s["step"]), int(s["task"])): int(s["begin_ns"]) for s in trace.spans}
    assert [spans[step, 3] - spans[step, 0] for step in (1, 2)] == [-20, -20]
    assert trace.clock_error_ns > 20_000  # one step of three is more than one of ten


def test_the_late_rank_of_collectives_is_named():
    late = late_ranks(trace_of())
    assert late is not None
    assert (late.shares, late.median_us) == ((0.0, 1.0), 0.04)
    out = io.StringIO()
    show(trace_of(), Console(file=out, width=120))
    assert "last to a collective: rank 0 0%, rank 1 100%, by 0.0 us in the median" in out.getvalue()
    alone = Trace.from_raw(toy_plan(Graph("toy", vocab=5)), raw_of_rank(0))
    assert late_ranks(alone) is None


def polling():
    """`second` of every rank polls what `first` of both stores; no counter of ranks."""
    plan = plan_of_ranks()
    slots = PlanBuffer("slots", (2, 1), "f32", "symmetric", "", 8, "symmetric_payload", 0)
    number, whole = len(plan.buffers), ((0, 2), (0, 1))
    tasks = list(plan.tasks)
    tasks[0] = replace(tasks[0], writes=((number, whole),))
    tasks[1] = replace(tasks[1], reads=((number, whole),))
    return replace(
        plan,
        target=replace(plan.target, kind="cuda"),
        buffers=(*plan.buffers, slots),
        tasks=tuple(tasks),
        counters=tuple(replace(c, ranks=False) for c in plan.counters),
        edges=(PlanEdge("payload", tasks[0].op, tasks[1].op, 1, "slots"),),
    )


@pytest.mark.parametrize("ahead", [0, 200, 7_000_000_000])
def test_what_ranks_poll_bounds_their_clocks_and_names_the_late_one(ahead):
    trace = Trace.from_raw(polling(), raw_of_rank(0, 10_000), raw_of_rank(1, 10_000 + ahead))
    assert trace.clock_error_ns == 350  # `second` ends 350 ns after `first` of the other began
    spans = {(int(s["step"]), int(s["task"])): int(s["begin_ns"]) for s in trace.spans}
    assert spans[1, 3] == spans[1, 0]
    assert set(trace.payload_edges) == {(0, 1), (3, 1), (0, 4), (3, 4)}
    late = late_ranks(trace)
    assert late is not None
    assert late.shares == (0.0, 1.0)
    assert late.median_us == pytest.approx(0.04)


def test_file_and_views_keep_the_ranks(tmp_path):
    trace_of().save(tmp_path / "a.trace")
    again = Trace.load(tmp_path / "a.trace")
    assert again.spans.tolist() == trace_of().spans.tolist()
    assert again.task_variant.tolist() == trace_of().task_variant.tolist()
    assert again.producers_of(4).tolist() == [0, 3]
    out = io.StringIO()
    show(again, Console(file=out, width=120))
    assert "toy on host, 4 workers of 2 ranks: 18 spans of 3 whole steps, 6 dropped" in (
        out.getvalue()
    )
    assert "rank 1 worker 1" in out.getvalue()
