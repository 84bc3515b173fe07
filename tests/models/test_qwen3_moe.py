"""Qwen3-MoE, one file in graphs/, against transformers in float32."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from gpurt.errors import GraphError
from gpurt.graphs.qwen3_moe import build
from gpurt.loaders import load_model
from gpurt.ranks import group
from gpurt.runtime import Runtime
from tests.helpers.checkpoints import BASE, save_model
from tests.helpers.oracle import GraphOracle, step_rows
from tests.helpers.parity import compare

pytestmark = [pytest.mark.reference, pytest.mark.timeout(120)]

MOE = BASE | {
    "vocab_size": 211,
    "moe_intermediate_size": 24,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "head_dim": 12,
}
CASES = {
    "all-sparse": {"num_hidden_layers": 3},
    "weights-not-renormalised": {"norm_topk_prob": False},
    "some-dense": {"num_hidden_layers": 4, "mlp_only_layers": [2], "decoder_sparse_step": 2},
    "top-8-of-9": {"num_experts": 9, "num_experts_per_tok": 8, "num_key_value_heads": 1},
    "top-1-tied": {"num_experts_per_tok": 1, "tie_word_embeddings": True},
}


def make_qwen(**changes):
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**(MOE | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("gate.weight"):  # zero by default: every expert a tie
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("case", CASES)
def test_composed_references_equal_transformers(case, tmp_path):
    model = save_model(make_qwen(**CASES[case]), tmp_path, shard="60KB")
    loaded = load_model(tmp_path)
    tokens = np.random.default_rng(1).integers(0, 211, 40).tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0].numpy()
    oracle = GraphOracle(build(loaded.config, loaded.weights, rows=16, context=64))
    for begin in range(0, len(tokens), 16):
        positions = list(range(begin, min(begin + 16, len(tokens))))
        count = len(positions)
        chunk = [tokens[p] for p in positions]
        oracle.step(step_rows(chunk, positions, sample_rows=list(range(count))))
        error = np.abs(oracle.arrays["logits"][:count] - wanted[positions]).max()
        assert error / np.abs(wanted).max() < 1e-4


@pytest.mark.parametrize(
    "policy", ["static", {"expert_up": "claim", "expert_down": "claim"}], ids=str
)
@pytest.mark.parametrize("case", CASES)
def test_tokens_on_the_host_equal_transformers(case, policy, tmp_path):
    model = save_model(make_qwen(**CASES[case]), tmp_path, "bfloat16")
    loaded = load_model(tmp_path)
    graph = build(loaded.config, loaded.weights, rows=9, context=96)
    prompt = np.random.default_rng(2).integers(0, 211, 30).tolist()
    with Runtime("host", workers=2, policy=policy) as runtime:
        seen = list(runtime.submit(graph, prompt, max_tokens=24, ignore_eos=True))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + seen[:-1]]), logits_to_keep=len(seen)).logits[0]
    best = logits.topk(2)
    margins = (best.values[:, 0] - best.values[:, 1]).tolist()
    report = compare(seen, best.indices[:, 0].tolist(), margins)
    assert report.holds(0.02), str(report)


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_make_one_ranks_tokens(count, tmp_path):
    changes = {"num_key_value_heads": 4, "vocab_size": 212} | CASES["some-dense"]
    model = save_model(make_qwen(**changes), tmp_path, "bfloat16")
    loaded, prompt = load_model(tmp_path), list(range(40, 60))
    bounds = {"rows": 9, "context": 96}
    graphs = [
        build(loaded.config, loaded.weights, tp_size=count, tp_rank=rank, **bounds)
        for rank in range(count)
    ]
    with Runtime(["host"] * count, workers=1, policy={"expert_up": "claim"}) as runtime:
        seen = list(runtime.submit(group(graphs), prompt, max_tokens=16, ignore_eos=True))
        runtime.park()
        logits = [one.read("logits.all")[0] for one in runtime._find(graphs[0]).executor.ranks]
    assert all(np.array_equal(row, logits[0]) for row in logits)
    with torch.no_grad():
        wanted = model(torch.tensor([prompt + seen[:-1]]), logits_to_keep=len(seen)).logits[0]
    best = wanted.topk(2)
    margins = (best.values[:, 0] - best.values[:, 1]).tolist()
    report = compare(seen, best.indices[:, 0].tolist(), margins)
    assert report.holds(0.02), str(report)
    with pytest.raises(GraphError, match=r"^4 heads, .* have no 3 equal shares - at qwen3_moe"):
        build(loaded.config, loaded.weights, tp_size=3, **bounds)


def test_the_folder_holds_a_matrix_an_expert_as_the_releases_do(tmp_path):
    save_model(make_qwen(), tmp_path)
    loaded = load_model(tmp_path)
    assert "model.layers.1.mlp.experts.6.down_proj.weight" in loaded.weights
    assert loaded.config.sparse == (True, True)


def test_more_experts_a_token_than_there_are_is_refused(tmp_path):
    save_model(make_qwen(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_experts_per_tok": 8}))
    with pytest.raises(Exception, match=r"^num_experts_per_tok 8 exceeds num_(local_)?experts 7"):
        load_model(tmp_path)
