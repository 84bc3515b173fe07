"""The bench of all-reduces: two ranks or one looped back, what it says, and when NCCL is absent."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from gpurt.bench import cases, peers_ranks
from gpurt.bench.cases_ranks import Sums, sums
from gpurt.bench.machine import Machine, UnavailableError
from gpurt.body import Target
from gpurt.plan import sent_bytes
from gpurt.planner import plan

HOST = Machine("host", "test", Target("host", 2), "", "", "abc", "2026-01-01", 1e10)
GPU = Target("cuda", 132, 16, "sm_90a", 232448, 60 << 20)


def opened(name="allreduce-4K"):
    (case,) = cases.find([name])
    return case.make(True), case


def test_two_ranks_sum_what_was_there_before():
    workload, case = opened()
    side = case.ours(HOST, workload, lambda *_: None)
    try:
        assert side.measure() > 0
        assert side.note().startswith("2 devices; ")
        x = side.runtime.read(side.graph, "x")
        assert np.array_equal(side.runtime.read(side.graph, "y"), x * 2**3)
    finally:
        side.close()


def test_one_device_is_looped_back_and_says_so(monkeypatch):
    def place(self, _):
        self.graph.group = (self.graph,)
        return "host"

    monkeypatch.setattr(Sums, "place", place)
    workload, case = opened("allreduce-32K-load")
    side = case.ours(HOST, workload, lambda *_: None)
    try:
        assert side.measure() > 0
        assert side.note().startswith("one GPU, looped back: no link in it; ")
    finally:
        side.close()


def test_an_all_reduce_sends_the_bytes_of_its_name():
    made = plan(sums(0, 2, count=4, floats=8192, stream_k=64), GPU, edges="auto")
    assert sum(sent_bytes(made, task) for task in made.tasks) == 4 * (32 << 10)
    assert any(task.stream for task in made.tasks)


def test_nccl_without_two_gpus_says_why():
    workload, _ = opened()
    with pytest.raises(UnavailableError, match=r"^NCCL is measured on 2 GPUs, which are not here"):
        peers_ranks.nccl(HOST, workload)


def test_nccl_that_fails_is_no_figure(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UnavailableError, match=r"^NCCL failed"):
        peers_ranks.Nccl(2, 8)
