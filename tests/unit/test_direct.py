"""Matvecs that store on all ranks themselves: where they may, and what they declare."""

from __future__ import annotations

import pytest

from gpurt.body import Target
from gpurt.graph import Graph
from gpurt.graphs.collectives import all_gather, all_reduce
from gpurt.graphs.ops.matvec import matvec
from gpurt.plan import sent_bytes
from gpurt.planner import forms, plan
from gpurt.planner.check_ranks import check_group

CUDA = Target("cuda", 7, 16, "sm_90a", 232448, 60 << 20)


def product(graph, of, name, n, **options):
    dtype = "f32" if options.get("exact") else "bf16"
    w = graph.weight(f"{name}.w", [n, of.shape[-1]], dtype, lambda: None)
    y = graph.row_activation(name, n, "f32")
    matvec(graph, of, w, y, name=name, **options)
    return y


def gathered(rank=0, count=4, n=64, reads_part=False, **options):
    graph = Graph("gathered", rows=3, rank=rank, rank_count=count)
    part = product(graph, graph.input("x", [3, 256], "f32"), "part", n, **options)
    product(graph, all_gather(graph, part, count), "out", 16)
    if reads_part:
        product(graph, part, "more", 16)
    return graph


def reduced(rank=0, count=8, width=512):
    graph = Graph("reduced", rows=3, rank=rank, rank_count=count)
    part = product(graph, graph.input("x", [3, 256], "f32"), "part", width)
    product(graph, all_reduce(graph, part, count), "out", 16)
    return graph


def bodies(made):
    return {task.body for task in made.tasks}


@pytest.mark.parametrize("edges", ["counter", "auto"])
@pytest.mark.parametrize("exact", [False, True])
def test_a_part_that_only_a_gather_reads_goes_to_all_ranks(edges, exact):
    made = plan(gathered(exact=exact), CUDA, edges=edges)
    assert "publish" not in bodies(made)
    assert sum(sent_bytes(made, task) for task in made.tasks) == 3 * 4 * 3 * 64
    (memory,) = (b.memory for b in made.buffers if b.name == "part")
    assert memory == "none"


@pytest.mark.parametrize("first_form_bytes", [1 << 20, -1], ids=["one-shot", "two-shots"])
def test_a_part_of_a_sum_goes_to_the_slots_or_shares_of_it(first_form_bytes, monkeypatch):
    monkeypatch.setattr(forms, "FIRST_FORM_BYTES", first_form_bytes)
    made = plan(reduced(), CUDA, edges="auto")
    assert "publish" not in bodies(made)
    shots = 7 * 512 if first_form_bytes > 0 else 2 * 7 * 64
    assert sum(sent_bytes(made, task) for task in made.tasks) == 4 * 3 * shots
    check_group([plan(reduced(rank), CUDA, edges="auto") for rank in range(8)])


@pytest.mark.parametrize(("width", "is_read"), [(64, True), (64, False), (6, False)])
def test_a_sum_that_only_a_next_one_adds_goes_to_all_ranks_itself(width, is_read):
    graphs = [chained(rank, width, is_read) for rank in range(2)]
    made = [plan(graph, CUDA, edges="auto") for graph in graphs]
    check_group(made)
    publishes = {task.op for task in made[0].tasks if task.body == "publish"}
    assert len(publishes) == 1 + is_read  # of x, and of what `more` reads
    ends = {e.producer_op: e.consumer_op for e in made[0].edges if e.kind == "payload"}
    sums = [i for i, op in enumerate(made[0].operators) if op.body == "collect"]
    assert ends[sums[0]] == sums[1]
    assert (ends[sums[1]] == sums[2]) == (not is_read)
    assert sum(sent_bytes(made[0], task) for task in made[0].tasks) == 4 * 3 * 3 * width


def chained(rank, width, is_read):
    """Three sums. is_read: the second one also by another operator."""
    graph = Graph("chained", rows=3, rank=rank, rank_count=2)
    first = all_reduce(graph, graph.input("x", [3, width], "f32"), 2)
    second = all_reduce(graph, first, 2)
    all_reduce(graph, second, 2)
    if is_read:
        product(graph, second, "more", 16)
    return graph


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        (gathered(reads_part=True), "another reads the part"),
        (gathered(n=20, exact=True), "no whole granules"),
    ],
)
def test_otherwise_a_publish_copies(graph, why):
    assert "publish" in bodies(plan(graph, CUDA, edges="auto")), why


def test_a_task_with_columns_of_two_shares_is_copied(monkeypatch):
    monkeypatch.setattr(forms, "FIRST_FORM_BYTES", -1)
    assert "publish" in bodies(plan(reduced(width=64), CUDA))


def test_the_host_copies():
    assert "publish" in bodies(plan(gathered(), Target("host", 2)))
