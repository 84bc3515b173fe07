"""The bench of two GPUs against one: what its note says, and when there is no second one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpurt import doctor
from gpurt.bench import cases, cases_speedup
from gpurt.bench.cases_speedup import Pair
from gpurt.bench.machine import Machine, UnavailableError
from gpurt.bench.ours import Decode
from gpurt.body import Target
from gpurt.errors import DeviceError

HOST = Machine("host", "test", Target("host", 2), "", "", "abc", "2026-01-01", 1e10)


def workload_of(name):
    (case,) = cases.find([name])
    return case.make(True)


def quiet(what, done, total):
    del what, done, total


@pytest.mark.parametrize("name", ["tp2-llama-8b", "tp2-muse-4"])
def test_both_steps_are_measured_and_the_note_has_what_two_gain(name, monkeypatch):
    figures = iter([900.0, 500.0, 800.0, 400.0, 1000.0, 250.0])
    side = Pair(HOST, workload_of(name), quiet)
    try:
        assert (len(side.runtime.config.devices), len(side.alone.runtime.config.devices)) == (2, 1)
        assert side.measure() == side.steps[0][1]
        side.steps.clear()
        monkeypatch.setattr(Decode, "measure", lambda _: next(figures))
        assert [side.measure() for _ in range(3)] == [500.0, 400.0, 250.0]
        side.floor_us = 100.0
        note = side.note()
    finally:
        side.close()
    assert note.startswith(
        "one GPU 900 us, two 400 us: 2.25 times as fast (1.8 to 4), 25.0% of both GPUs' bandwidth; "
    )
    assert re.search(r"; path compute [0-9.]+ us, ", note)


def test_a_rank_has_half_of_what_one_gpu_reads():
    workload = workload_of("tp2-llama-8b")
    (alone,) = workload.parts
    assert workload.bytes_moved() == pytest.approx(alone.bytes_moved() / 2, rel=0.01)
    workload.settings["policy"] = "claim"
    assert alone.settings["policy"] == "claim", "an option of the command line reaches both"


def test_one_gpu_is_no_pair(monkeypatch):
    gpu, probe = replace(HOST, kind="cuda"), doctor.probe_cuda(0)
    monkeypatch.setattr(
        doctor, "probe_cuda", lambda i: replace(probe, usable=i == 0, reason="there is one")
    )
    with pytest.raises(UnavailableError, match=r"^no usable GPU 1: there is one"):
        Pair(gpu, workload_of("tp2-llama-8b"), quiet)


def test_ranks_are_given_back_when_one_gpu_cannot_be_opened(monkeypatch):
    closed = []

    def refuse(*_):
        raise DeviceError("no memory - at a test - none")

    monkeypatch.setattr(cases_speedup, "Decode", refuse)
    monkeypatch.setattr(Pair, "close", lambda self: closed.append(self.runtime.close()))
    with pytest.raises(DeviceError, match="no memory"):
        Pair(HOST, workload_of("tp2-llama-8b"), quiet)
    assert closed == [None]
