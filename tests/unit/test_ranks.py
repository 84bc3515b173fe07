"""Ranks on the host: sums of all ranks, late and slow and dying ones, and what each reports."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import gpurt
from gpurt.errors import ConfigError, FaultError, GraphError
from gpurt.graph import Graph
from gpurt.graphs.collectives import all_reduce
from gpurt.ranks import group
from gpurt.runtime import Runtime

pytestmark = pytest.mark.timeout(60)

ROWS, WIDTH = 2, 1500  # two tiles of columns


def sum_graph(rank, count, work=None):
    """Y = the sum over ranks of (rank + 1) * x. work: called as (rank, x, part) in its stead."""
    graph = Graph("sum", rows=ROWS, rank=rank, rank_count=count)
    x, y = (make(n, [ROWS, WIDTH], "f32") for n, make in (("x", graph.input), ("y", graph.output)))
    part = graph.activation("part", [ROWS, WIDTH], "f32")

    def scale(source, to):
        np.multiply(source, rank + 1, out=to)
        if work is not None:
            work(rank, source, to)

    graph.task(gpurt.body("scale", scale), [x], [part])
    total = all_reduce(graph, part, count)
    graph.task(gpurt.body("copy", lambda a, b: np.copyto(b, a)), [total], [y])
    return graph


def sum_group(count, work=None):
    return group([sum_graph(rank, count, work) for rank in range(count)])


def runtime(count, **options):
    return Runtime(["host"] * count, workers=2, **options)


def expected(x, count):
    total = x * np.float32(1)
    for rank in range(1, count):
        total = total + x * np.float32(rank + 1)
    return total


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("policy", ["static", "claim", "ready"])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_all_ranks_get_the_same_sum_in_every_step(count, policy, x):
    graph = sum_group(count)
    with runtime(count, policy=policy) as ranks:
        seen = [
            ranks.submit(graph, inputs={"x": x}, steps=steps).result().outputs["y"]
            for steps in (1, 2, 50)
        ]
        for one in ranks._find(graph).executor.ranks:
            assert np.array_equal(one.read("y"), expected(x, count))
        assert ranks.launches == 1
    assert all(np.array_equal(y, expected(x, count)) for y in seen)


def test_a_slow_rank_is_waited_for_and_read_in_its_own_step(x):
    """Rank 1 stands still in the middle of step 2 until rank 0 can do no more."""
    gate, reached = threading.Event(), threading.Event()
    counts = [0, 0]

    def work(rank, _, to):
        counts[rank] += 1
        to += counts[rank]  # another sum in every step
        if rank == 1 and counts[1] == 2:
            reached.set()
            assert gate.wait(30)

    graph = sum_group(2, work)
    with runtime(2, wait_timeout_ms=30000) as ranks:
        request = ranks.submit(graph, inputs={"x": x}, steps=5)
        assert reached.wait(30)
        assert counts[0] <= 2  # a step needs both
        gate.set()
        y = request.result().outputs["y"]
    assert np.array_equal(y, (x * np.float32(1) + 5) + (x * np.float32(2) + 5))


def test_a_rank_that_starts_late_is_waited_for_however_long(x, monkeypatch):
    """Three wait time-outs pass before rank 1 is there; none has begun."""
    graph, gate = sum_group(2), threading.Event()
    with runtime(2, wait_timeout_ms=60) as ranks:
        ranks.prepare(graph)
        executor = ranks._find(graph).executor
        late, launch = executor.ranks[1], executor.ranks[1].launch
        thread = threading.Thread(target=lambda: (gate.wait(30), launch()))
        monkeypatch.setattr(late, "launch", thread.start)
        request = ranks.submit(graph, inputs={"x": x})
        with pytest.raises(TimeoutError):
            request.result(timeout_s=0.2)
        assert int(executor.host.control["ranks_in"]) == 1
        assert executor.host.fault() is None
        gate.set()
        assert np.array_equal(request.result().outputs["y"], expected(x, 2))
        thread.join()


@pytest.mark.parametrize("dead", [0, 1])
def test_a_body_that_fails_on_one_rank_ends_all_with_a_report_each(dead, x):
    def work(rank, *_):
        if rank == dead:
            raise ValueError("no such luck")

    graph = sum_group(2, work)
    with runtime(2) as ranks:
        with pytest.raises(FaultError) as caught:
            ranks.submit(graph, inputs={"x": x}).result()
        text = str(caught.value)
        assert text.startswith(f"rank {dead}: task 0 (scale)")
        assert f"rank {1 - dead}: it ended because rank {dead} gave up" in text
        assert isinstance(caught.value.__cause__, ValueError)
        good = sum_group(2)
        y = ranks.submit(good, inputs={"x": x}).result().outputs["y"]
    assert np.array_equal(y, expected(x, 2))


def test_a_rank_that_stops_is_named_by_the_one_that_waits_for_it(x):
    gate, reached = threading.Event(), threading.Event()

    def work(rank, *_):
        if rank == 1:
            reached.set()
            assert gate.wait(30)

    graph = sum_group(2, work)
    # One worker a rank: rank 1's own would wait for the body too, and might give up first.
    with Runtime(["host"] * 2, workers=1, wait_timeout_ms=100) as ranks:
        request = ranks.submit(graph, inputs={"x": x})
        assert reached.wait(30)
        executor = ranks._find(graph).executor
        assert executor.ranks[0].join(30)  # it gave up
        gate.set()
        with pytest.raises(FaultError, match=r"rank 0: task .*collect.*rank 1 did not signal"):
            request.result()


def test_ranks_that_sample_other_tokens_are_a_fault_that_names_them():
    def chooser(rank, count):
        graph = Graph("choose", rows=1, context=64, vocab=10, rank=rank, rank_count=count)
        part = graph.activation("part", [1, 8], "f32")
        graph.task(gpurt.body("zero", lambda to: to.fill(0)), [], [part])
        total = all_reduce(graph, part, count)
        # The third token of rank 1 is another one.
        tokens = iter([3, 4, 5 + rank, 6, 7, 8])

        def choose(_, sampled):
            sampled[:] = next(tokens)

        graph.task(gpurt.body("choose", choose), [total], [graph.sampled])
        return graph

    graph = group([chooser(rank, 2) for rank in range(2)])
    with runtime(2) as ranks:
        request = ranks.submit(graph, [1], max_tokens=5)
        with pytest.raises(FaultError) as caught:
            request.result()
        text = str(caught.value)
        assert "rank 1: in step 2 it sampled other tokens than rank 0" in text
        assert "rank 0: it ended because rank 1 gave up" in text
        assert request.tokens[:3] == [3, 4, 5]


def test_a_cancel_and_a_close_end_all_ranks(x):
    graph = sum_group(2)
    with runtime(2) as ranks:
        request = ranks.submit(graph, inputs={"x": x}, steps=1 << 30)
        request.cancel()
        assert request.result().finish_reason == "cancelled"
        executor = ranks._find(graph).executor
        ranks.submit(graph, inputs={"x": x}, steps=1 << 30)
    assert not executor.running()


def test_a_group_that_lingers_and_ends_is_launched_again(x):
    graph = sum_group(2)
    with runtime(2, linger_ms=1) as ranks:
        for launch in (1, 2, 3):
            y = ranks.submit(graph, inputs={"x": x}).result().outputs["y"]
            assert np.array_equal(y, expected(x, 2))
            assert ranks.launches == launch
            assert ranks._find(graph).executor.join(30)


def test_what_is_no_group_of_the_devices_is_refused(x):
    with runtime(2) as ranks, pytest.raises(GraphError, match=r"of 1 ranks, the Runtime has 2 dev"):
        ranks.submit(sum_graph(0, 2), inputs={"x": x})
    with pytest.raises(GraphError, match=r"^graph 1 of 2 is of rank 0 of 2"):
        group([sum_graph(0, 2), sum_graph(0, 2)])
    with pytest.raises(GraphError, match=r"^rank 8 of 9"):
        sum_graph(8, 9)
    with pytest.raises(ConfigError, match=r"^0 devices"):
        Runtime([])


def test_one_rank_alone_is_looped_back(x):
    graph = sum_graph(1, 2)
    with Runtime("host", workers=2) as one:
        y = one.submit(graph, inputs={"x": x}, steps=3).result().outputs["y"]
    assert np.array_equal(y, x * np.float32(2) + x * np.float32(2))
