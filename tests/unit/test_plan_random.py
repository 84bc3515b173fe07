"""Random graphs under every policy and worker count: planned, proved, and run in random orders."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpurt.body import Target
from gpurt.errors import PlanError
from gpurt.planner import plan
from tests.helpers.random_graphs import (
    CUDA,
    POLLING,
    graphs,
    legal_order,
    policies,
    run,
    unordered_pairs,
)

WORKERS = (1, 2, 3, 7, 132)
calm = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@calm
@given(graph=graphs(), policy=policies, seed=st.integers(0, 1 << 30))
def test_every_legal_order_of_tasks_gives_what_program_order_gives(graph, policy, seed):
    if isinstance(policy, dict):
        names = {op.body.name for op in graph.operators}
        policy = {k: v for k, v in policy.items() if k in names}
    for workers in WORKERS:
        made = plan(graph, Target("host", workers), policy=policy)
        assert not unordered_pairs(made)
        expected = run(made, list(range(len(made.tasks))))
        for a, b in zip(expected, run(made, legal_order(made, seed)), strict=True):
            np.testing.assert_array_equal(a, b)


@calm
@given(graph=graphs())
def test_tiles_depend_neither_on_workers_nor_on_policy(graph):
    def tiles(made):
        kept = [t for t in made.tasks if t.body not in ("noop", "advance")]
        return [(t.op, t.coords, t.reads, t.writes, t.addr, t.params) for t in kept]

    first = tiles(plan(graph, Target("host", 1)))
    for workers in WORKERS[1:]:
        for policy in ("static", "claim", "ready"):
            assert tiles(plan(graph, Target("host", workers), policy=policy)) == first


@calm
@given(graph=graphs(), policy=policies, data=st.data())
def test_the_checker_agrees_with_brute_force_on_plans_that_lost_a_wait(graph, policy, data):
    names = {op.body.name for op in graph.operators}
    if isinstance(policy, dict):
        policy = {k: v for k, v in policy.items() if k in names}
    made = plan(graph, Target("host", data.draw(st.sampled_from([1, 2, 3]))), policy=policy)
    waiting = [i for i, t in enumerate(made.tasks) if t.waits]
    if not waiting:
        return
    index = data.draw(st.sampled_from(waiting))
    counter = data.draw(st.sampled_from(made.tasks[index].waits))[0]
    broken = without_wait(made, index, counter)
    wrong = unordered_pairs(broken)
    if wrong:
        with pytest.raises(PlanError, match=r"^task \d+ \("):
            broken.check()
    else:
        broken.check()


@calm
@given(graph=graphs(POLLING, reuse=False), edges=st.sampled_from(["payload", "auto"]))
def test_payload_plans_pass_and_every_payload_buffer_is_rearmed(graph, edges):
    made = plan(graph, CUDA, edges=edges)
    assert not unordered_pairs(made)
    polled = [b for b in made.buffers if b.memory == "payload"]
    assert any(t.body == "rearm" for t in made.tasks) == bool(polled)


@calm
@given(graph=graphs(), policy=st.sampled_from(["static", "claim", "ready"]))
def test_a_plan_is_a_function_of_its_inputs(graph, policy):
    target = Target("host", 3)
    assert plan(graph, target, policy=policy) == plan(graph, target, policy=policy)


def without_wait(made, index, counter):
    """The plan where one task no longer waits for a counter; all else agrees with that."""
    task = made.tasks[index]
    tasks = list(made.tasks)
    tasks[index] = replace(task, waits=tuple(w for w in task.waits if w[0] != counter))
    counters = list(made.counters)
    old = counters[counter]
    counters[counter] = replace(old, successors=tuple(s for s in old.successors if s != index))
    return replace(made, tasks=tuple(tasks), counters=tuple(counters))
