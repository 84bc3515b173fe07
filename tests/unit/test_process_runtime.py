"""Runtime in a process group: what each rank may do and when, and what is refused.

The ranks are threads here, each with a group and a Runtime of its own.
"""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import gpurt
from gpurt.errors import (
    ConfigError,
    DeviceError,
    FaultError,
    GraphError,
    PlanError,
    RankError,
    RequestError,
)
from gpurt.graph import Graph
from gpurt.graphs.collectives import all_reduce
from gpurt.runtime import Runtime
from tests.helpers.rank_process import chooser
from tests.helpers.rank_threads import together

pytestmark = pytest.mark.timeout(60)


def runtime(group, **options):
    return Runtime("host", workers=1, group=group, **options)


def test_plans_that_differ_are_refused_on_all_ranks(tmp_path):
    def act(group):
        graph = chooser(group, width=8 + group.rank)
        with runtime(group) as ranks:
            ranks.prepare(graph)

    for error in together(tmp_path, 2, act):
        assert isinstance(error, PlanError)
        assert str(error).startswith("the plans of ranks 0 and 1 differ - at plan choose - start")


def test_what_is_not_a_ranks_part_is_refused(tmp_path):
    def act(group):
        graph = chooser(group)
        refused = []
        with runtime(group) as ranks:
            for wrong in (
                lambda: ranks.submit(graph, [1]) if group.rank else ranks.follow(),
                lambda: ranks.prepare(Graph("other", rank=1 - group.rank, rank_count=2)),
                lambda: Runtime(["host", "host"], group=group),
            ):
                with pytest.raises((RequestError, GraphError, ConfigError)) as caught:
                    wrong()
                refused.append(str(caught.value))
        return refused

    first, second = together(tmp_path, 2, act)
    assert first[0].startswith("rank 0 follows nobody - at Runtime.follow")
    assert second[0].startswith("rank 1 takes no requests - at Runtime.submit")
    assert second[1].startswith("other is rank 0 of 2, this process rank 1 of 2 - at Runtime.prep")
    assert second[2].startswith("2 devices for rank 1 of 2 processes - at Runtime(device=[...])")
    with Runtime("host") as alone, pytest.raises(RequestError, match=r"^no process group follows"):
        alone.follow()


def sum_of(rank):
    """y: the sum over ranks of x + rank."""
    graph = Graph("sum", rank=rank, rank_count=2)
    x, part = graph.input("x", [1, 8], "f32"), graph.activation("part", [1, 8], "f32")
    y = graph.output("y", [1, 8], "f32")
    graph.task(gpurt.body("add", lambda a, out: np.copyto(out, a + rank)), [x], [part])
    graph.task(
        gpurt.body("copy", lambda a, out: np.copyto(out, a)), [all_reduce(graph, part, 2)], [y]
    )
    return graph


def test_inputs_reach_all_ranks_and_one_left_out_keeps_its_content(tmp_path):
    def act(group):
        graph, x = sum_of(group.rank), np.arange(8, dtype=np.float32)
        with runtime(group) as ranks:
            ranks.prepare(graph)
            if group.rank:
                return ranks.follow()
            sums = []
            for inputs in ({"x": [x]}, {"x": [10 * x]}, {}):
                request = ranks.submit(graph, inputs=inputs, steps=2)
                sums.append(request.result().outputs["y"][0].tolist())
            return sums

    first, second = together(tmp_path, 2, act)
    assert second is None
    assert first == [[2 * n * x + 1 for x in range(8)] for n in (1, 10, 10)]


def test_an_input_waits_for_a_rank_until_it_has_left(tmp_path):
    """Rank 1 prepares, and leaves without following."""

    def act(group):
        graph = sum_of(group.rank)
        with runtime(group) as ranks:
            ranks.prepare(graph)
            if group.rank == 0:
                ranks.submit(graph, inputs={"x": np.zeros((1, 8), np.float32)})

    first, second = together(tmp_path, 2, act)
    assert second is None
    assert str(first).startswith("rank 1 has left - at rank 0, input x - every other rank must be")


def test_a_trace_has_the_spans_of_all_ranks_as_of_threads(tmp_path):
    def act(group):
        graph = chooser(group)
        with runtime(group) as ranks:
            ranks.prepare(graph)
            if group.rank:
                return ranks.follow()
            request = ranks.submit(graph, [1], max_tokens=5)
            request.result()
            return request.trace(), ranks.trace()

    (trace, whole), _ = together(tmp_path, 2, act)
    graph = gpurt.ranks.group([chooser(SimpleNamespace(rank=rank, size=2)) for rank in range(2)])
    with Runtime(["host", "host"], workers=1) as ranks:
        request = ranks.submit(graph, [1], max_tokens=5)
        request.result()
        ranks.park()
        wanted = request.trace()
    for seen in (trace, whole):
        assert (seen.ranks, seen.workers) == (2, 2)
        assert seen.whole_steps[:4].tolist() == wanted.whole_steps[:4].tolist() == [0, 1, 2, 3]
        for step in range(4):
            rows, of_threads = (np.sort(t.spans_of(step), order="task") for t in (seen, wanted))
            for name in ("task", "worker", "op"):
                assert rows[name].tolist() == of_threads[name].tolist()
            ends = rows["begin_ns"] + rows["wait_ns"] + rows["run_ns"]
            begins = rows["begin_ns"] + rows["wait_ns"]
            given = np.array([trace.operators[op].name == "give" for op in rows["op"]])
            chosen = np.array([trace.operators[op].name == "choose" for op in rows["op"]])
            assert begins[chosen].min() >= ends[given].max(), "one clock"


def test_a_trace_without_another_ranks_spans_is_of_rank_0_and_says_why(tmp_path, caplog):
    def act(group):
        graph = chooser(group)
        with runtime(group) as ranks:
            ranks.prepare(graph)
            if group.rank:
                return ranks.follow()
            request = ranks.submit(graph, [1], max_tokens=3)
            request.result()
            call, check = group._call, group._store.check
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(group, "_gone", {1})
                # Or its spans might be there before anyone asks.
                patch.setattr(group, "_call", lambda ask, *a: ask != check and call(ask, *a))
                return request.trace().ranks

    assert together(tmp_path, 2, act) == [1, None]
    assert re.search(r"the process of rank 1 .* is gone .*; the trace is of rank 0 al", caplog.text)


def test_a_graph_that_comes_while_others_follow_is_refused(tmp_path):
    def act(group):
        one, two = chooser(group), chooser(group)
        with runtime(group) as ranks:
            ranks.prepare(one)
            if group.rank:
                return ranks.follow()
            tokens = list(ranks.submit(one, [1], max_tokens=2))
            with pytest.raises(GraphError, match=r"^choose comes late: another rank follows al"):
                ranks.submit(two, [1])
            return tokens

    assert together(tmp_path, 2, act) == [[1, 2], None]


def test_ranks_take_several_graphs_in_turns_and_launch_again(tmp_path):
    def act(group):
        graphs = [chooser(group) for _ in range(2)]
        with runtime(group, linger_ms=1) as ranks:
            for graph in graphs:
                ranks.prepare(graph)
            if group.rank:
                return ranks.follow()
            tokens = []
            for graph in graphs * 2:
                tokens += ranks.submit(graph, [1], max_tokens=2)
                assert ranks._find(graph).executor.join(30)
            return tokens, ranks.launches

    assert together(tmp_path, 2, act) == [([1, 2, 1, 2, 3, 4, 3, 4], 4), None]


def test_rank_0_waits_for_workers_of_others_that_still_run(tmp_path):
    """Rank 1 is held in a body when rank 0 fails: a next launch must not begin beside it."""
    reached, gate = threading.Event(), threading.Event()

    def act(group):
        def work(step):
            if step == 2:
                if group.rank == 0:
                    assert reached.wait(30)
                    raise ValueError("no such luck")
                reached.set()
                assert gate.wait(30)

        graph = chooser(group, work)
        with runtime(group) as ranks:
            ranks.prepare(graph)
            if group.rank:
                ranks.follow()
            request = ranks.submit(graph, [1], max_tokens=3)
            executor = ranks._find(graph).executor
            assert executor._own.join(30)
            assert executor.running()
            gate.set()
            return list(request)

    for rank, error in enumerate(together(tmp_path, 2, act)):
        assert isinstance(error, FaultError)
        assert str(error).startswith(f"rank {rank}: ")
        assert rank == 0 or "because rank 0 gave up" in str(error)


def test_a_gpu_that_fails_since_a_process_is_gone_says_so(tmp_path):
    def act(group):
        with runtime(group) as ranks:
            ranks.prepare(graph := chooser(group))
            executor = ranks._find(graph).executor

            def fail(*_):
                raise DeviceError("an illegal memory access - at device cuda - look")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(executor._own, "running", fail)
                with pytest.raises(DeviceError, match=r"^an illegal"):
                    executor.running()
                patch.setattr(group, "_gone", {1 - group.rank})
                for call in (executor.running, lambda: executor.join(1)):
                    with pytest.raises(RankError, match=r"^the process of rank . \(\d+\) is gone"):
                        call()
            group.exchange("done", None)

    assert together(tmp_path, 2, act) == [None, None]


def test_a_launch_that_was_given_up_is_not_joined(tmp_path):
    """Rank 0 closes before rank 1 follows: it waits for nobody, and rank 1 finds it gone."""
    closed = threading.Event()

    def act(group):
        graph = chooser(group)
        with runtime(group, wait_timeout_ms=60_000) as ranks:
            ranks.prepare(graph)
            if group.rank:
                assert closed.wait(30)
                ranks.follow()
                return ranks._find(graph).executor.launches
            ranks.submit(graph, [1], max_tokens=3)
        closed.set()
        return None

    assert together(tmp_path, 2, act) == [None, 1]
