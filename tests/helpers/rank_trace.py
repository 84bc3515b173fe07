"""A trace of two ranks of two workers, small enough to know every answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpurt import wire
from gpurt.executors.base import RawTrace
from gpurt.graph import Graph
from gpurt.plan import PlanCounter
from gpurt.trace import Trace
from tests.helpers.fake_executor import toy_plan

WORKERS, STEPS, STEP_NS = 2, 3, 1000


def plan_of_ranks():
    """first -> second -> advance; `second` of every rank waits for `first` of both."""
    plan = toy_plan(Graph("toy", vocab=5))
    return replace(plan, counters=(PlanCounter(1, (0,), (), ranks=True), PlanCounter(1, (1,), ())))


def raw_of_rank(rank, ahead=0):
    """Rank 1 is 40 ns slower with `first`. ahead: of its clock."""
    late = 40 * rank
    rings = [[], []]
    for step in range(STEPS):
        at = step * STEP_NS + ahead
        #                 begin     task step wait      stall run
        rings[0].append((at, 0, step, 0, 0, 100 + late, 0))
        rings[1].append((at, 1, step, 150, 0, 200, 0))
        rings[0].append((at + 100 + late, 2, step, 260 - late, 0, 50, 0))
    steps = [(s, s * STEP_NS + ahead, s * STEP_NS + 420 + ahead, 1, 2, 0) for s in range(STEPS)]
    spans = [np.array(ring, wire.SPAN) for ring in rings]
    nothing = [np.zeros(0, wire.SPAN)] * WORKERS
    return RawTrace(spans, nothing, np.array(steps, wire.STEP_SUMMARY), 1.0, 3)


def trace_of(ahead=0):
    return Trace.from_raw(plan_of_ranks(), raw_of_rank(0), raw_of_rank(1, ahead))
