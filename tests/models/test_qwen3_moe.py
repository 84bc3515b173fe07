"""Qwen3-MoE, one file in graphs/, against transformers in float32."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from gpurt.graphs.qwen3_moe import build
from gpurt.loaders import load_model
from tests.helpers.checkpoints import BASE, save_model
from tests.helpers.oracle import GraphOracle, step_rows

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
