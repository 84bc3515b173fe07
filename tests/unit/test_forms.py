"""Forms of an all-reduce: which one a plan has, what it sends, and that both have the same bits."""

from __future__ import annotations

import itertools
import os
import time

import numpy as np
import pytest

import gpurt
from gpurt.body import Target
from gpurt.errors import GraphError
from gpurt.graph import Graph
from gpurt.graphs.collectives import SUMMED_BY_READER, all_reduce, all_reduce_into
from gpurt.graphs.ops.gated_residual import gated_residual
from gpurt.graphs.ops.publish import publish
from gpurt.graphs.ops.reduce import reduce
from gpurt.plan import sent_bytes
from gpurt.planner import forms, plan
from gpurt.planner.check_ranks import check_group
from gpurt.ranks import group
from gpurt.runtime import Runtime

pytestmark = pytest.mark.timeout(60)

ROWS, WIDTH, EPS = 3, 4128, 1e-5  # shares of 4 ranks: two tiles of columns


def sum_graph(rank, count, ending="residual", rows=ROWS, width=WIDTH):
    """Outputs y: the sum of what ranks made of x, behind x, or through a gated residual with x."""
    graph = Graph("sum", rows=rows, rank=rank, rank_count=count)
    x, y = (make(n, [rows, width], "f32") for n, make in (("x", graph.input), ("y", graph.output)))
    part = graph.row_activation("part", width, "f32")

    def of_rank(source, to):
        to[:] = np.roll(source, rank, axis=1) * np.float32(1.1) ** rank

    graph.task(gpurt.body("of_rank", of_rank), [x], [part])
    if ending == "residual":
        total = all_reduce(graph, part, count, residual=x)
        graph.task(gpurt.body("copy", lambda a, b: np.copyto(b, a)), [total], [y])
        return graph
    ones = np.ones(width, np.float32)
    alpha, beta = (graph.weight(n, [width], "f32", ones) for n in ("alpha", "beta"))

    def read(slots):
        gated_residual(graph, slots, x, alpha, beta, y, eps=EPS)

    if ending == "fused":
        all_reduce_into(graph, part, count, read, adds=True)
    else:
        read(all_reduce(graph, part, count))
    return graph


def bodies(made):
    return {task.body for task in made.tasks}


def run(count, ending, x):
    graph = group([sum_graph(rank, count, ending) for rank in range(count)])
    with Runtime(["host"] * count, workers=2, policy="claim") as runtime:
        runtime.submit(graph, inputs={"x": x}, steps=3).result()
        return [one.read("y") for one in runtime._find(graph).executor.ranks]


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)


@pytest.mark.parametrize(
    ("count", "rows", "body"), [(2, 4096, "one"), (4, 4, "one"), (4, 16, "two"), (8, 16, "two")]
)
def test_the_planner_takes_two_shots_where_they_send_less(count, rows, body):
    made = plan(sum_graph(0, count, rows=rows, width=4096), Target("host", 2))
    assert ("reduce" in bodies(made)) == (body == "two")
    size = 4 * rows * 4096
    sent = (count - 1) * size if body == "one" else 2 * (count - 1) * size // count
    assert sum(sent_bytes(made, task) for task in made.tasks) == sent
    names = ["one shot x1"] if body == "one" else ["scatter x1", "reduce x1"]
    line = next(row for row in str(made).splitlines() if row.startswith("links: "))
    assert all(name in line for name in names), line
    assert f"a step to {count - 1} other" in line


def test_a_step_of_few_rows_has_another_form_than_one_of_many():
    graph = Graph("steps", rows=64, context=64, vocab=8, rank_count=4)
    part = graph.row_activation("part", 4096, "f32")
    graph.task(gpurt.body("zero", lambda to: to.fill(0)), [], [part])
    total = all_reduce(graph, part, 4)
    graph.task(gpurt.body("choose", lambda _, to: to.fill(0)), [total], [graph.sampled])
    made = plan(graph, Target("host", 2), rows=(4, 64))
    few, many = ({made.tasks[i].body for i in range(v.begin, v.end)} for v in made.step_variants())
    assert ("reduce" in few, "reduce" in many) == (False, True)
    assert len([row for row in str(made).splitlines() if row.startswith("links: ")]) == 2


@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize("ending", ["residual", "fused"])
def test_both_forms_have_the_same_bits_on_every_rank(count, ending, x, monkeypatch):
    one = run(count, ending, x)
    monkeypatch.setattr(forms, "FIRST_FORM_BYTES", -1)
    assert "reduce" in bodies(plan(sum_graph(0, count, ending), Target("host", 1)))
    for y in (*one, *run(count, ending, x)):
        assert np.array_equal(y.view(np.uint32), one[0].view(np.uint32))


@pytest.mark.parametrize("first_form_bytes", [1 << 20, -1], ids=["one-shot", "two-shots"])
def test_no_round_is_lost_under_random_delays(first_form_bytes, monkeypatch):
    """Every round has another sum, which every rank checks. ROUNDS=1000000 for a long run."""
    monkeypatch.setattr(forms, "FIRST_FORM_BYTES", first_form_bytes)
    rounds, count, wrong = int(os.environ.get("ROUNDS", "2000")), 4, []

    def rank_graph(rank):
        graph = Graph("rounds", rows=1, rank=rank, rank_count=count)
        x = graph.input("x", [1, 1], "f32")  # a graph of steps needs one to be asked with
        part = graph.row_activation("part", 64, "f32")
        made, seen = itertools.count(1), itertools.count(1)
        rng = np.random.default_rng(rank)

        def fill(_, to):
            if rng.random() < 0.3:
                time.sleep(rng.random() * 2e-4)
            to[:] = next(made) * (rank + 1) + np.arange(64)

        def check(total):
            number = next(seen)
            if not np.array_equal(total[0], number * 10 + count * np.arange(64)):
                wrong.append((rank, number))
            if rng.random() < 0.3:
                time.sleep(rng.random() * 2e-4)

        graph.task(gpurt.body("fill", fill), [x], [part])
        total = all_reduce(graph, part, count)
        graph.task(gpurt.body("check", check), [total], [])
        return graph

    graph = group([rank_graph(rank) for rank in range(count)])
    with Runtime(["host"] * count, workers=2, wait_timeout_ms=30000) as runtime:
        runtime.submit(graph, inputs={"x": np.zeros((1, 1), np.float32)}, steps=rounds).result()
    assert not wrong


@pytest.mark.parametrize("count", [2, 4])
def test_a_fused_gated_residual_has_the_bits_of_a_collect_before_it(count, x):
    fused, apart = run(count, "fused", x), run(count, "apart", x)
    for y in (*fused, *apart):
        assert np.array_equal(y.view(np.uint32), apart[0].view(np.uint32))
    tasks = [bodies(plan(sum_graph(0, count, e), Target("host", 1))) for e in ("fused", "apart")]
    assert tasks[1] - tasks[0] == ({"collect"} if count <= SUMMED_BY_READER else set())


def test_ranks_choose_the_same_form(monkeypatch):
    monkeypatch.setattr(forms, "FIRST_FORM_BYTES", -1)
    check_group([plan(sum_graph(rank, 4), Target("host", 2)) for rank in range(4)])


def test_shapes_that_do_not_fit_are_refused():
    graph = Graph("shapes", rows=2, rank_count=4)
    part = graph.row_activation("part", 32, "f32")
    parts = graph.symmetric("parts", part, slots=4, width=8)
    sums, r = graph.symmetric("sums", part), graph.row_activation("r", 8, "f32")
    with pytest.raises(GraphError, match=r"^part is \[2, 32\], but slots are \[4, 2, 4\]"):
        publish(graph, part, parts[:, :, :4], scatter=True)
    with pytest.raises(GraphError, match=r"^part is \[2, 32\], but slots are \[2, 36\]"):
        publish(graph, part, graph.symmetric("odd", part, width=36))
    with pytest.raises(GraphError, match=r"^parts are \[4, 2, 8\], but sums \[2, 16\]"):
        reduce(graph, parts, sums[:, :16])
    with pytest.raises(GraphError, match=r"^parts are \[4, 2, 8\], but residual \[2, 8\]"):
        reduce(graph, parts, sums, residual=r)
