"""Whole experts on ranks, or parts of every one: tokens, hostile routing, and what a plan says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpurt.body import Target
from gpurt.errors import GraphError
from gpurt.graphs import muse_spark
from gpurt.graphs.expert_split import busiest_live, choose, moved
from gpurt.graphs.muse_spark import build
from gpurt.graphs.muse_spark_config import PREFIX
from gpurt.loaders import WeightSource, load_model
from gpurt.plan import Plan
from gpurt.planner import plan
from gpurt.ranks import group
from gpurt.runtime import Runtime
from tests.helpers.muse import make_muse, quantise_folder, save_muse

pytestmark = [pytest.mark.reference, pytest.mark.timeout(120)]

BOUNDS = {"rows": 8, "context": 64}
PROMPT = [504, 55, 282, 49, 314, 33, 34, 35, 33, 34]
TOKENS, EXPERTS, TOP_K = 12, 8, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A layer of float32 experts, one of nvfp4."""
    folder = tmp_path_factory.mktemp("split")
    sizes = {"vocab_size": 776, "num_local_experts": EXPERTS, "moe_intermediate_size": 32}
    layers = {"num_hidden_layers": 2, "mlp_layer_types": ["sparse", "sparse"]}
    save_muse(make_muse(**sizes, **layers), folder)
    quantise_folder(folder, [1])
    return load_model(folder)


def weights(model, favoured):
    """The model's; favoured: experts that every row chooses first."""
    if favoured is None:
        return model.weights
    changed = dict(model.weights)
    for layer in range(2):
        name = f"{PREFIX}.layers.{layer}.mlp.gate.e_score_correction_bias"
        bias = np.full(EXPERTS, -9, np.float32)
        bias[list(favoured)] = 9
        source = changed[name]
        changed[name] = WeightSource(name, source.dtype, source.shape, lambda bias=bias: bias)
    return changed


def run(model, ranks, favoured=None, **options):
    """(tokens, the last logits, live experts of every rank in the last step's first layer)."""
    found = weights(model, favoured)
    split = {"expert_split": "expert"} if ranks > 1 else {}
    graphs = [
        build(model.config, found, tp_size=ranks, tp_rank=rank, **split, **BOUNDS)
        for rank in range(ranks)
    ]
    name = "logits" if ranks == 1 else "logits.all"
    with Runtime(["host"] * ranks, workers=2, **options) as runtime:
        tokens = list(runtime.submit(group(graphs), PROMPT, max_tokens=TOKENS, ignore_eos=True))
        runtime.park()
        found_ranks = runtime._find(graphs[0]).executor.ranks
        logits = [one.read(name)[0] for one in found_ranks]
        live = [int(one.read("layers[0].routes")[0]) for one in found_ranks]
    assert all(np.array_equal(row, logits[0]) for row in logits)
    return tokens, logits[0], live


@pytest.mark.parametrize("policy", ["static", {"expert_up": "claim", "expert_down": "claim"}])
@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_experts_on_ranks_make_one_ranks_tokens(ranks, policy, model):
    wanted, logits, _ = run(model, 1)
    seen, close, live = run(model, ranks, policy=policy)
    assert seen == wanted  # no near tie among them: sums are in another order
    assert np.abs(close - logits).max() < 1e-4 * np.abs(logits).max()
    assert TOP_K <= sum(live) <= EXPERTS
    assert len(live) == ranks


@pytest.mark.parametrize("policy", ["ready", {"expert_up": "claim", "expert_down": "claim"}])
@pytest.mark.parametrize("favoured", [(0, 1, 2), (5, 6, 7)])
def test_all_rows_may_choose_one_ranks_experts(favoured, policy, model):
    wanted, _, _ = run(model, 1, favoured)
    seen, _, live = run(model, 2, favoured, policy=policy)
    assert seen == wanted
    assert live == ([TOP_K, 0] if favoured[0] == 0 else [0, TOP_K])


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_router_shared_by_ranks_changes_no_bit(ranks, model, monkeypatch):
    whole = run(model, ranks)
    monkeypatch.setattr(muse_spark, "_ROUTER_BYTES", 0)
    options = {"tp_size": ranks, "expert_split": "expert", **BOUNDS}
    shared = build(model.config, model.weights, **options)
    router = next(b for b in shared.buffers if b.name == "layers[1].router.w")
    assert router.shape[0] == EXPERTS // ranks
    seen = run(model, ranks)
    assert seen[0] == whole[0]
    assert seen[2] == whole[2]
    assert np.array_equal(seen[1].view(np.uint32), whole[1].view(np.uint32))


def test_the_plan_says_what_each_split_moves(model, tmp_path):
    made = {}
    for split in ("width", "expert", "auto"):
        options = {"tp_size": 2, "expert_split": split, **BOUNDS}
        made[split] = plan(build(model.config, model.weights, **options), Target("host", 1))
        line = next(row for row in str(made[split]).splitlines() if row.startswith("experts: "))
        assert f"split by {split}" in line or split == "auto"
        assert ("by expert" in line, "by width" in line) == (split != "width", split != "expert")
    made["auto"].save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan").notes == made["auto"].notes


def test_a_split_that_cannot_be_is_refused(model):
    with pytest.raises(GraphError, match=r"^expert_split is 'depth'"):
        build(model.config, model.weights, tp_size=2, expert_split="depth", **BOUNDS)
    odd = replace(model.config, experts=7)
    with pytest.raises(GraphError, match=r"^7 experts of inner width 32 have no 2 equal shares by"):
        build(odd, model.weights, tp_size=2, expert_split="expert", **BOUNDS)


def test_auto_weighs_an_uneven_choice_against_bytes_on_links():
    sizes = {"experts": 256, "top_k": 8, "width": 4096, "expert_bytes": 28 << 20}
    few, many = (
        {s: moved(s, 8, rows=rows, **sizes) for s in ("width", "expert")} for rows in (1, 16)
    )
    for both in (few, many):
        assert both["expert"].links * 8 == both["width"].links
        assert both["expert"].weights > both["width"].weights
    assert few["expert"].weights > 2 * few["width"].weights  # of 8 experts one rank has 2 or 3
    assert many["expert"].weights < 1.6 * many["width"].weights
    even = sizes | {"expert_bytes": 1 << 10}
    assert choose("auto", 8, "here", inner=4096, rows=1, **sizes)[0] == "width"
    assert choose("auto", 8, "here", inner=4096, rows=16, **even)[0] == "expert"
    assert busiest_live(8, 8, 4, 2) == 4
