"""Several ranks on emulated GPUs: each kernel is a thread with symmetric memory for all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpurt.buffer import DTYPES
from gpurt.errors import FaultError
from gpurt.graphs.llama import build
from gpurt.loaders import WeightSource
from gpurt.planner import forms
from gpurt.ranks import group
from gpurt.runtime import Runtime
from tests.emu.device import EmulatedDevice
from tests.gpu import test_rank_rounds, tiny_llama

COUNT = 3
PROMPT = [int(t) for t in np.random.default_rng(1).integers(0, 208, 7)]
CONFIG = replace(
    tiny_llama.CONFIG, hidden=128, layers=1, heads=2, kv_heads=2, intermediate=256, vocab=256
)


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are asked for."""
    monkeypatch.setattr(EmulatedDevice, "open", staticmethod(lambda *_: EmulatedDevice()))
    monkeypatch.setattr(EmulatedDevice, "can_reach", lambda *_: True, raising=False)
    monkeypatch.setattr(EmulatedDevice, "reach", lambda *_: None, raising=False)


def weights(config):
    return {
        name: WeightSource(name, DTYPES["f32"], shape, tiny_llama.Weights(shape, i).load)
        for i, (name, shape) in enumerate(config.tensors().items())
    }


def tokens(devices, graph, edges="auto"):
    with Runtime(devices, workers=1, wait_timeout_ms=60000, edges=edges) as runtime:
        seen = list(runtime.submit(graph, PROMPT, max_tokens=COUNT, ignore_eos=True))
        runtime.park()  # rank 0's tokens may come before another has ended the step
        ranks = runtime._find(graph).executor.ranks
        polled = any(b.memory == "symmetric_payload" for b in ranks[0].plan.buffers)
        assert polled == (len(ranks) > 1 and edges != "counter")
        name = "logits" if len(ranks) == 1 else "logits.all"
        return seen, [one.read(name)[0] for one in ranks]


@pytest.mark.parametrize("edges", ["counter", "auto"])
def test_three_ranks_in_two_shots_make_the_bits_of_one_shot(edges, monkeypatch):
    config = replace(CONFIG, hidden=96, heads=3, kv_heads=3, intermediate=96, vocab=288)
    given = weights(config)
    options = {"rows": 16, "context": 64, "kv_dtype": "bf16", "weight_dtype": "bf16"}
    graphs = [build(config, given, tp_size=3, tp_rank=rank, **options) for rank in range(3)]
    seen = []
    for most in (1 << 20, -1):
        monkeypatch.setattr(forms, "FIRST_FORM_BYTES", most)
        seen.append(tokens([f"cuda:{rank}" for rank in range(3)], group(graphs), edges))
    left_out = {graphs[0].operators[i].body.name for i in forms.left_out(graphs[0])}
    assert "reduce" not in left_out  # the second run had two shots
    assert seen[0][0] == seen[1][0]
    for logits in (*seen[0][1], *seen[1][1]):
        assert np.array_equal(logits.view(np.uint32), seen[0][1][0].view(np.uint32))


@pytest.mark.parametrize("reaches", [True, False])
def test_two_ranks_make_the_tokens_of_one(reaches, monkeypatch):
    monkeypatch.setattr(EmulatedDevice, "can_reach", lambda *_: reaches)
    options = {"rows": 16, "context": 64, "kv_dtype": "bf16", "weight_dtype": "bf16"}
    given = weights(CONFIG)
    wanted, _ = tokens("cuda:0", build(CONFIG, given, **options))
    graphs = [build(CONFIG, given, tp_size=2, tp_rank=rank, **options) for rank in range(2)]
    seen, logits = tokens(["cuda:0", "cuda:1"], group(graphs))
    assert seen == wanted
    assert np.array_equal(*logits)


@pytest.mark.parametrize(
    ("names", "floats"),
    [("cuda:0", 256), (["cuda:0", "cuda:1"], 256), (["cuda:0", "cuda:1"], 2)],
    ids=["looped back", "two", "two floats"],
)
def test_no_sum_of_a_chain_is_lost(names, floats, monkeypatch):
    monkeypatch.setattr(test_rank_rounds, "FLOATS", floats)
    test_rank_rounds.check(names, count=3, steps=8, stream=64)


def test_a_rank_that_faults_takes_along_who_polls_for_its_data(monkeypatch):
    faults = """
    if (rank == 1 && context.round == 3 && task.param[0] == 1) {
      if (context.thread == 0) report_fault(context, task, kFaultNonFinite, 0, 0, 0);
      return;
    }
    context.sync();"""
    source = test_rank_rounds.MIX.replace("    context.sync();", faults, 1)
    monkeypatch.setattr(test_rank_rounds, "MIX", source)
    with pytest.raises(FaultError, match=r"rank 1"):
        test_rank_rounds.check(["cuda:0", "cuda:1"], count=3, steps=8, stream=64)
