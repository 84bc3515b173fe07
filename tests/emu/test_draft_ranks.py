"""The dflash drafter's share of a rank on emulated GPUs: two ranks, and a bench case in small."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpurt.bench.cases import find
from gpurt.bench.machine import Machine
from gpurt.body import Target
from gpurt.ranks import group
from gpurt.runtime import Runtime
from tests.emu.device import EmulatedDevice
from tests.gpu import tiny_dflash, tiny_muse

VOCAB = 208
PROMPT = list(range(40, 51))
MUSE = replace(
    tiny_muse.CONFIG,
    hidden=128,
    heads=2,
    kv_heads=1,
    vocab=VOCAB,
    intermediate=160,
    experts=7,
    moe_intermediate=64,
)
DRAFT = replace(
    tiny_dflash.DRAFT, hidden=128, heads=2, kv_heads=1, vocab=VOCAB, intermediate=160, block=5
)
EMULATED = Target("cuda", 2, 1, "sm_90a", 232448, 50 << 20)


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are asked for."""
    monkeypatch.setattr(EmulatedDevice, "open", staticmethod(lambda *_: EmulatedDevice()))
    monkeypatch.setattr(EmulatedDevice, "can_reach", lambda *_: True, raising=False)
    monkeypatch.setattr(EmulatedDevice, "reach", lambda *_: None, raising=False)
    monkeypatch.setattr(tiny_muse, "CONFIG", MUSE)
    monkeypatch.setattr(tiny_dflash, "DRAFT", DRAFT)


def run(devices, graph):
    """(tokens, how often each proposal was accepted, each rank's last proposals)."""
    with Runtime(devices, workers=1, team_warps=1, wait_timeout_ms=60000) as runtime:
        request = runtime.submit(graph, PROMPT, max_tokens=6, ignore_eos=True)
        tokens = list(request)
        runtime.park()  # rank 0's tokens may come before another has ended the step
        ranks = runtime._find(graph).executor.ranks
        return tokens, request.accepted, [one.read("step.proposals").tolist() for one in ranks]


def test_two_ranks_draft_alike_and_make_the_tokens_of_one():
    wanted, accepted, [proposals] = run("cuda:0", tiny_dflash.drafted_muse(4))
    graph = group([tiny_dflash.drafted_muse(4, tp_size=2, tp_rank=rank) for rank in range(2)])
    seen = run(["cuda:0", "cuda:1"], graph)
    assert seen == (wanted, accepted, [proposals] * 2)


def test_a_draft_step_alone_runs_in_small():
    (case,) = find(["draft-slice"])
    workload = case.make(True)
    workload.settings["team_warps"] = 1
    machine = Machine("cuda", "emulated", EMULATED, "", "", "abc", "2026-01-01", 1e10)
    side = case.ours(machine, workload, lambda *_: None)
    try:
        assert side.measure() > 0
        assert "tokens a step of made-up weights" in side.note()
    finally:
        side.close()
