"""The checker on a rank's plan of thousands of tasks: errors far from its start are found, too."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from gpurt.bench.made_up import weights
from gpurt.bench.shapes import MUSE_SPARK, muse_layers
from gpurt.body import Target
from gpurt.errors import PlanError
from gpurt.graphs.muse_spark import build
from gpurt.planner import plan
from gpurt.planner.boxes import are_disjoint
from tests.unit.test_plan_random import without_wait

GPU = Target("cuda", 132, 16, "sm_90a", 232448, 60 << 20)
DYNAMIC = {"expert_up": "claim", "expert_down": "claim"}


@pytest.fixture(scope="module")
def made():
    """Six layers of a rank's slice; 32 experts; its part of the head ends in half a row tile."""
    config = replace(muse_layers(MUSE_SPARK, 0, 6), vocab=16064, experts=32)
    graph = build(config, weights(config), rows=4, tp_size=8, kv_dtype="bf16", context=512)
    result = plan(graph, GPU, policy=DYNAMIC, edges="auto")
    assert len(result.tasks) > 9000
    assert sum(s.dynamic is not None for s in result.segments) == 12
    return result


def waits_of(made, seed, count):
    """Of any tasks; but not for their decider, which a dynamic segment waits for anyway."""
    pairs = [
        (i, c)
        for i, task in enumerate(made.tasks)
        for c, _ in task.waits
        if task.expert is None or c != task.expert.wait[0]
    ]
    return random.Random(seed).sample(pairs, count)


def test_dropped_waits_anywhere_are_found(made):
    for index, counter in waits_of(made, 1, 6):
        with pytest.raises(PlanError, match=r"in no order|does not precede|which its compensator"):
            without_wait(made, index, counter).check()


def test_a_wait_for_an_earlier_layer_instead_is_found(made):
    single = [i for i, task in enumerate(made.tasks) if len(task.waits) == 1]
    early, late = single[len(single) // 2], single[-200]
    counter = made.tasks[early].waits[0][0]
    tasks = list(made.tasks)
    tasks[late] = replace(tasks[late], waits=((counter, len(made.counters[counter].producers)),))
    with pytest.raises(PlanError, match=rf"^task {late} \(.*in no order with task"):
        replace(made, tasks=tuple(tasks)).check()


def test_a_write_that_overlaps_another_tasks_is_found(made):
    up = [i for i, t in enumerate(made.tasks) if made.operators[t.op].name == "expert_up"]
    one, two = up[-1], up[-40]
    tasks = list(made.tasks)
    tasks[one] = replace(tasks[one], writes=tasks[two].writes)
    with pytest.raises(PlanError, match=rf"^task {one} .* in no order with task {two} "):
        replace(made, tasks=tuple(tasks)).check()


@pytest.mark.parametrize("seed", range(6))
def test_disjoint_boxes_are_told_from_others(seed):
    rng = random.Random(seed)
    rows = [0, *sorted(rng.sample(range(1, 60), 9)), 60]
    columns = [0, *sorted(rng.sample(range(1, 90), 12)), 90]
    tiles = [((a, b), (c, d)) for a, b in pairwise(rows) for c, d in pairwise(columns)]
    rng.shuffle(tiles)
    assert are_disjoint(tiles)
    (low, _), (left, right) = tiles[0]
    assert not are_disjoint([*tiles[1:], ((low, 60), (left, right)), ((59, 60), (0, 90))])
    assert not are_disjoint([*tiles, ((low, low + 1), (left, left + 1))])
