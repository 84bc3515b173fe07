"""The bench of all-reduces: two ranks or one looped back, what it says, and when NCCL is absent."""

from __future__ import annotations

import re
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
    made = plan(sums(0, 2, count=4, floats=8192, stream_rows=64, stream_k=64), GPU, edges="auto")
    assert sum(sent_bytes(made, task) for task in made.tasks) == 4 * (32 << 10)
    assert any(task.stream for task in made.tasks)


# ---- NCCL, or gloo in its place -------------------------------------------------------------
def test_nccl_without_two_gpus_says_why():
    workload, case = opened()
    (peer,) = case.peers.values()
    with pytest.raises(UnavailableError, match=r"^NCCL is measured on 2 GPUs, which are not here"):
        peer(HOST, workload)


def test_one_pair_of_processes_measures_all_sizes_and_only_once(monkeypatch):
    pytest.importorskip("torch")
    pair = peers_ranks.measured("gloo", 2, (2, 1024))
    assert list(pair.figures) == [2, 1024], pair.report
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert peers_ranks.measured("gloo", 2, (2, 1024)) is pair
    side = peers_ranks.AllReduces(pair, 1024)
    assert [side.measure() for _ in range(6)] == [*pair.figures[1024], pair.figures[1024][-1]]


def test_a_pair_that_fails_is_no_figure_and_says_how_each_rank_ended(monkeypatch, tmp_path):
    pair = faked(monkeypatch, tmp_path, 'echo "rank $3 failed" >&2; exit $((5 + $3))')
    with pytest.raises(UnavailableError, match=r"^no figure of 8 bytes: ") as caught:
        peers_ranks.AllReduces(pair, 2)
    assert str(caught.value).endswith(
        "rank 0 ended with 5: rank 0 failed; rank 1 ended with 6: rank 1 failed"
    )


def test_a_pair_that_hangs_is_ended_and_keeps_what_it_had_measured(monkeypatch, tmp_path):
    hangs = 'if [ $3 = 0 ]; then printf "2 1.5 1.25\\n8 3." > $4/figures; fi; exec sleep 600'
    pair = faked(monkeypatch, tmp_path, hangs, limit_s=1.0)
    assert pair.figures == {2: [1.5, 1.25]}
    assert pair.report == "rank 0 had not ended in time: ; rank 1 had not ended in time: "
    with pytest.raises(UnavailableError, match=r"^no figure of 32 bytes: rank 0 had not ended"):
        peers_ranks.AllReduces(pair, 8)


def test_a_rank_that_hangs_says_where(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(peers_ranks, "_DUMP_S", 59.9)  # while it imports torch
    pair = peers_ranks.measured("gloo", 2, (4,))
    assert not pair.figures
    assert re.search(r"rank 0 ended with 1: .*line \d+ in run_rank", pair.report, re.DOTALL)


def faked(monkeypatch, folder, script, **options):
    """A pair whose processes are shell scripts: $3 is the rank, $4 the folder."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return peers_ranks.measured.__wrapped__("nccl", 2, (2, 8), **options)
