"""GGUF files written here, in llama.cpp's row order and several formats, against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpurt.errors import ModelError
from gpurt.graphs.llama import build
from gpurt.loaders import load_model
from tests.helpers.checkpoints import make_model
from tests.helpers.oracle import GraphOracle, step_rows

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.reference

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2}


def gguf_name(name):
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def neighbours(rows, heads):
    """llama.cpp's order of q and k rows: the pairs (i, i + D/2) of a head side by side."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, model, kinds, **values):
    """Write a llama GGUF. kinds: tensor name part to type; the rest is float32. Returns the model
    with its weights rounded as stored, by the gguf package.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    for key, value in values.items():
        writer.add_string(key.replace("__", "."), value)
    for name, tensor in model.state_dict().items():
        kind = next((k for part, k in kinds.items() if part in name), "F32")
        stored_kind = gguf.GGMLQuantizationType[kind]
        stored = gguf.quants.quantize(tensor.numpy(), stored_kind)
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(stored, stored_kind).copy()))
        for part, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if part in name:
                stored = neighbours(stored, heads)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=stored_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"proj": "Q8_0", "embed": "Q4_1"},
        {"q_proj": "Q4_1", "k_proj": "Q4_1", "v_proj": "Q8_0", "gate": "F16", "up": "Q8_0"},
        {"proj": "F16", "embed": "BF16", "lm_head": "Q8_0"},
    ],
    ids=["f32", "quantised", "mixed", "half"],
)
def test_a_gguf_equals_transformers_on_its_dequantised_weights(kinds, tmp_path):
    model = write_gguf(tmp_path / "model.gguf", make_model("llama", **SIZES), kinds)
    loaded = load_model(tmp_path / "model.gguf")
    assert loaded.tokenizer is None
    assert not loaded.config.tied
    tokens = list(range(3, 27))
    oracle = GraphOracle(build(loaded.config, loaded.weights, rows=24, context=64))
    oracle.step(step_rows(tokens, range(24), sample_rows=range(24)))
    with torch.no_grad():
        wanted = model(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(oracle.arrays["logits"] - wanted).max() / np.abs(wanted).max() < 1e-4


def test_rope_scaling_in_a_gguf_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, make_model("llama", **SIZES), {}, llama__rope__scaling__type="linear")
    with pytest.raises(ModelError, match=r"^rope scaling 'linear' is not supported in GGUF"):
        load_model(path)


def test_progress_counts_every_tensor(tmp_path):
    model = write_gguf(tmp_path / "model.gguf", make_model("llama", **SIZES), {})
    calls = []
    load_model(tmp_path / "model.gguf", lambda *call: calls.append(call))
    total = len(model.state_dict())
    assert calls == [("reading the tensor directory", i + 1, total) for i in range(total)]
