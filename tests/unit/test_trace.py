"""How raw rings become a Trace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpurt import wire
from gpurt.errors import TraceError
from gpurt.executors.base import RawTrace
from gpurt.graph import Graph
from gpurt.plan import PlanBuffer, PlanDynamic, PlanSegment
from gpurt.trace import Trace
from gpurt.trace.trace import row
from tests.helpers.fake_executor import toy_plan


def raw_of(rows, tick_ns=1.0, sampled=(), dropped=0, chosen=0):
    """Rows: of wire.SPAN, with the worker in the place of `chosen`."""

    def rings(spans):
        own = [[(*s[:-1], chosen) for s in spans if s[-1] == w] for w in (0, 1)]
        return [np.array(r, wire.SPAN) for r in own]

    steps = sorted({r[2] for r in rows})
    summaries = np.array([(s, 10 + s, 20 + s, 1, 2, 0) for s in steps], wire.STEP_SUMMARY)
    return RawTrace(rings(rows), rings(sampled), summaries, tick_ns, dropped)


def test_both_rings_are_merged_once_and_ticks_become_nanoseconds():
    plan = toy_plan(Graph("toy", vocab=5))
    rows = [(100, 0, 4, 0, 0, 8, 0), (110, 1, 4, 2, 1, 8, 1), (120, 2, 4, 3, 0, 8, 0)]
    trace = Trace.from_raw(plan, raw_of(rows, 2.5, sampled=rows[:2]), first_step=4)
    assert trace.spans["task"].tolist() == [0, 1, 2]
    assert trace.spans["begin_ns"].tolist() == [0, 25, 50]
    assert trace.spans["wait_ns"].tolist() == [0, 5, 8]
    assert trace.spans["run_ns"].tolist() == [20, 20, 20]
    assert trace.whole_steps.tolist() == [4]


def test_steps_beyond_32_bits_keep_their_number():
    plan = toy_plan(Graph("toy", vocab=5))
    first = (1 << 32) - 1
    rows = [(s * 10, 0, (first + s) & 0xFFFFFFFF, 0, 0, 5, 0) for s in range(3)]
    trace = Trace.from_raw(plan, raw_of(rows), first_step=first)
    assert trace.spans["step"].tolist() == [first, first + 1, first + 2]


def test_only_the_steps_of_the_request_are_taken():
    plan = toy_plan(Graph("toy", vocab=5))
    rows = [(s * 10, 0, s, 0, 0, 5, 0) for s in range(10)]
    trace = Trace.from_raw(plan, raw_of(rows), first_step=3, last_step=6)
    assert trace.spans["step"].tolist() == [3, 4, 5, 6]
    assert trace.steps["step"].tolist() == [3, 4, 5, 6]


def test_no_spans_is_an_error_that_says_how_to_get_some():
    with pytest.raises(TraceError, match=r"^no spans were kept - at plan toy - open the Runtime"):
        Trace.from_raw(toy_plan(Graph("toy", vocab=5)), raw_of([]))


def test_regions_of_the_plan_are_named_once_and_dynamic_segments_marked():
    plan = toy_plan(Graph("toy", vocab=5))
    buffer = PlanBuffer("x", (4, 8), "f32", "activation", "", 128, "activation", 0)
    whole, part = (0, ((0, 4), (0, 8))), (0, ((0, 4), (2, 4)))
    tasks = [replace(plan.tasks[0], writes=(whole,)), replace(plan.tasks[1], reads=(whole, part))]
    dynamic = PlanDynamic(0, 0, (0, 0), 1, ())
    segments = (PlanSegment("static", 0, 1), PlanSegment("claim", 1, 2, dynamic))
    changed = replace(plan, buffers=(buffer,), tasks=(*tasks, plan.tasks[2]), segments=segments)
    trace = Trace.from_raw(changed, raw_of([(0, 0, 0, 0, 0, 5, 0)]))
    assert trace.regions == ("x[0:4, 0:8] f32", "x[0:4, 2:4] f32")
    assert [row(trace.task_reads, t).tolist() for t in range(3)] == [[], [0, 1], []]
    assert row(trace.task_writes, 0).tolist() == [0]
    assert trace.task_dynamic.tolist() == [False, True, False]


def test_a_task_of_an_expert_says_which_and_for_how_many_rows():
    plan = toy_plan(Graph("toy", vocab=5))
    trace = Trace.from_raw(plan, raw_of([(0, 0, 0, 0, 0, 5, 0)], chosen=3 << 16 | 127))
    assert (trace.spans["expert"].tolist(), trace.spans["expert_rows"].tolist()) == ([127], [3])
