"""The bodies' numpy references, composed by graphs/llama.py, against transformers in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpurt.graphs.llama import build
from gpurt.graphs.reference import llama as plain
from gpurt.loaders import load_model
from tests.helpers.checkpoints import make_model, save_model
from tests.helpers.oracle import GraphOracle, step_rows

pytestmark = pytest.mark.reference

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 20}),
    "llama-rope-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
}


def reference_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def assert_close(seen, wanted, tolerance=1e-4):
    error = np.abs(seen - wanted).max() / np.abs(wanted).max()
    at = np.unravel_index(np.abs(seen - wanted).argmax(), wanted.shape)
    assert error < tolerance, f"relative error {error:.2e} at {at}: {seen[at]} != {wanted[at]}"


@pytest.mark.parametrize("case", CASES)
def test_composed_references_equal_transformers(case, tmp_path):
    model_type, changes = CASES[case]
    model = save_model(make_model(model_type, **changes), tmp_path)
    loaded = load_model(tmp_path)
    tokens = list(np.random.default_rng(1).integers(0, 301, 70))
    oracle = GraphOracle(build(loaded.config, loaded.weights, rows=16, context=128))
    wanted = reference_logits(model, tokens)
    for begin in range(0, len(tokens), 16):
        chunk = tokens[begin : begin + 16]
        positions = list(range(begin, begin + len(chunk)))
        oracle.step(step_rows(chunk, positions, sample_rows=list(range(len(chunk)))))
        seen = oracle.arrays["logits"][: len(chunk)]
        assert_close(seen, wanted[begin : begin + len(chunk)])


@pytest.mark.parametrize("case", CASES)
def test_the_plain_torch_model_equals_transformers(case, tmp_path):
    model_type, changes = CASES[case]
    model = save_model(make_model(model_type, **changes), tmp_path)
    loaded = load_model(tmp_path)
    tokens = np.random.default_rng(2).integers(0, 301, 90).tolist()
    seen = plain.forward(loaded.config, plain.dequantised(loaded.weights), tokens)
    assert_close(seen.numpy(), reference_logits(model, tokens))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_shards_equal_transformers_on_the_rounded_weights(dtype, tmp_path):
    model = save_model(make_model("llama"), tmp_path, dtype, shard="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = load_model(tmp_path)
    oracle = GraphOracle(build(loaded.config, loaded.weights, rows=16, context=64))
    tokens = list(range(7, 19))
    oracle.step(step_rows(tokens, list(range(12)), sample_rows=list(range(12))))
    assert_close(oracle.arrays["logits"][:12], reference_logits(model, tokens))


def test_rows_of_two_slots_in_one_step_equal_each_alone(tmp_path):
    save_model(make_model("qwen3", head_dim=16), tmp_path)
    loaded = load_model(tmp_path)
    first, second = list(range(5, 14)), list(range(60, 53, -1))
    both = GraphOracle(build(loaded.config, loaded.weights, rows=16, slots=2, context=96))
    both.step(
        step_rows(
            first + second,
            list(range(9)) + list(range(7)),
            [0] * 9 + [1] * 7,
            sample_rows=[8, 15],
        )
    )
    for row, tokens in enumerate((first, second)):
        alone = GraphOracle(build(loaded.config, loaded.weights, rows=16, context=96))
        alone.step(step_rows(tokens, list(range(len(tokens)))))
        assert_close(both.arrays["logits"][row], alone.arrays["logits"][0], 1e-5)


@pytest.mark.parametrize("kv_dtype", ["f16", "bf16"])
def test_a_half_precision_cache_stays_near_float32(kv_dtype, tmp_path):
    model = save_model(make_model("llama"), tmp_path)
    loaded = load_model(tmp_path)
    graph = build(loaded.config, loaded.weights, rows=16, context=64, kv_dtype=kv_dtype)
    oracle = GraphOracle(graph)
    tokens = list(range(16))
    oracle.step(step_rows(tokens, tokens, sample_rows=tokens))
    # bf16 keeps 8 bits: 2^-8 a value, averaged over positions
    assert_close(oracle.arrays["logits"], reference_logits(model, tokens), 2e-2)
