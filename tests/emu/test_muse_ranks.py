"""Muse Spark on four emulated GPUs: sums in two shots, which experts' tasks store themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpurt.graphs.ops import expert_matvec_cuda
from gpurt.planner import direct, forms
from gpurt.ranks import group
from gpurt.runtime import Runtime
from tests.emu.device import EmulatedDevice
from tests.gpu import tiny_muse

RANKS = 4
PROMPT = list(range(40, 43))
CONFIG = replace(
    tiny_muse.CONFIG,
    hidden=128,
    heads=4,
    kv_heads=1,
    vocab=256,
    intermediate=256,
    experts=7,
    top_k=4,
    moe_hidden=1024,
    moe_intermediate=64,
)


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are asked for, and experts cut so small that no task has columns of two shares."""
    monkeypatch.setattr(EmulatedDevice, "open", staticmethod(lambda *_: EmulatedDevice()))
    monkeypatch.setattr(EmulatedDevice, "can_reach", lambda *_: True, raising=False)
    monkeypatch.setattr(EmulatedDevice, "reach", lambda *_: None, raising=False)
    monkeypatch.setattr(tiny_muse, "CONFIG", CONFIG)
    monkeypatch.setattr(expert_matvec_cuda, "_TASK_BYTES", 1)
    expert_matvec_cuda._best_cut.cache_clear()
    yield
    expert_matvec_cuda._best_cut.cache_clear()


def run(edges, policy="static"):
    """(tokens, each rank's logits, the bodies of a step's tasks)."""
    graph = group([tiny_muse.tiny_muse(tp_size=RANKS, tp_rank=rank) for rank in range(RANKS)])
    names = [f"cuda:{rank}" for rank in range(RANKS)]
    options = {"workers": 1, "team_warps": 1, "wait_timeout_ms": 60000}
    with Runtime(names, edges=edges, policy=policy, **options) as runtime:
        seen = list(runtime.submit(graph, PROMPT, max_tokens=2, ignore_eos=True))
        runtime.park()  # rank 0's tokens may come before another has ended the step
        ranks = runtime._find(graph).executor.ranks
        bodies = {task.body for task in ranks[0].plan.tasks}
        return seen, [one.read("logits.all")[0] for one in ranks], bodies


def test_what_experts_store_on_ranks_has_the_bits_of_one_shot(monkeypatch):
    with monkeypatch.context() as copied:
        copied.setattr(forms, "FIRST_FORM_BYTES", 1 << 30)
        copied.setattr(direct, "_COLUMNS", 1 << 30)
        wanted, logits, bodies = run("counter")
        assert {"publish", "reduce_squares", "combine_columns"} <= bodies
    monkeypatch.setattr(forms, "FIRST_FORM_BYTES", -1)
    for edges in ("auto", "counter"):
        seen, others, bodies = run(edges, {"expert_matvec": "claim"})
        assert "publish" not in bodies
        assert seen == wanted
        for one in (*logits, *others):
            assert np.array_equal(one.view(np.uint32), logits[0].view(np.uint32))
