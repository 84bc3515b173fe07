"""Muse Spark folders: both layouts, shards, towers, and what is wrong with a checkpoint by name."""

from __future__ import annotations

import json
import re
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpurt.buffer import nvfp4, u8
from gpurt.errors import ModelError
from gpurt.graphs.muse_spark import build
from gpurt.graphs.ops.dtypes import e4m3_to_float32, to_float32
from gpurt.graphs.reference import muse_spark as plain
from gpurt.graphs.weights import nvfp4_rows
from gpurt.loaders import WeightSource, load_model
from tests.helpers.muse import make_muse, quantise_folder, save_muse

pytestmark = [pytest.mark.reference, pytest.mark.timeout(120)]

AT = "model.language_model.layers.1"
EXPERTS = f"{AT}.mlp.experts"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two layers, bf16, as transformers writes them."""
    folder = tmp_path_factory.mktemp("saved")
    save_muse(make_muse(num_hidden_layers=2), folder, "bfloat16")
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def edit_config(folder, **changes):
    values = json.loads((folder / "config.json").read_text())
    values["text_config"] |= changes
    values["text_config"] = {k: v for k, v in values["text_config"].items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(values))


def refused(folder, start):
    with pytest.raises(ModelError, match=f"^{re.escape(start)}") as caught:
        load_model(folder)
    assert re.search(r" - at .+ - .+", str(caught.value))
    assert "\n" not in str(caught.value)


def test_towers_are_skipped_with_a_notice(folder):
    model = load_model(folder)
    count = sum("vision" in name or "audio" in name for name in load_file_names(folder))
    assert count > 50
    expected = f"vision and audio towers skipped ({count} tensors): gpurt takes text and gives text"
    assert model.notices == (expected,)
    assert not any("tower" in name for name in model.weights)


def load_file_names(folder):
    return list(load_file(folder / "model.safetensors"))


def test_a_folder_in_shards_equals_the_same_in_one_file(tmp_path, folder):
    save_muse(make_muse(num_hidden_layers=2), tmp_path / "shards", "bfloat16", shard="60KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 3
    one, many = load_model(folder), load_model(tmp_path / "shards")
    assert one.config == many.config
    assert list(one.weights) == list(many.weights)
    for name, source in one.weights.items():
        assert np.array_equal(source.load(), many.weights[name].load()), name


def test_what_exporters_add_is_not_an_extra_tensor(folder):
    def add(tensors):
        for name in (
            "self_attn.k_scale",
            "mlp.num_tokens_per_expert",
            "mlp.norm_weight",
            "self_attn.rotary_emb.inv_freq",
        ):
            tensors[f"{AT}.{name}"] = torch.ones(3)
        tensors["model.language_model.embed_tokens.embed_norm.weight"] = torch.ones(3)
        tensors[f"{AT}.self_attn.q_scale"] = torch.tensor(0.5)
        tensors[f"{AT}.mlp.num_tokens_per_expert"] = torch.ones(3, dtype=torch.int64)
        tensors["model.audio_tower.steps"] = torch.tensor(4)

    edit(folder, add)
    weights = load_model(folder).weights
    assert not any(source.shape in ((), (3,)) for source in weights.values())


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        (torch.ones(48, dtype=torch.int64), "[48] is stored as I64, the config asks for [48] in a"),
        (torch.tensor(1.0), "is [], the config asks for [48]"),
    ],
)
def test_what_no_model_computes_with_is_refused_where_it_is_asked_for(stored, found, folder):
    name = f"{AT}.input_layernorm.weight"
    edit(folder, lambda tensors: tensors.update({name: stored}))
    refused(folder, f"tensor {name} {found}")


def test_nvfp4_experts_equal_their_definition_bit_for_bit(folder):
    wanted = quantise_folder(folder, [1])
    model = load_model(folder)
    assert model.config.quantised == {1}
    seen = plain.dequantised(model.weights)
    assert len(wanted) == 2
    for name, tensor in wanted.items():
        assert torch.equal(seen[name].view(torch.int32), tensor.view(torch.int32)), name


def test_nvfp4_buffers_hold_the_same_numbers_gate_and_up_in_turn(folder):
    wanted = quantise_folder(folder, [1])
    model = load_model(folder)
    graph = build(model.config, model.weights, rows=2)
    buffers = {buffer.name: buffer for buffer in graph.buffers}
    assert buffers["layers[0].up.w"].dtype.name == "bf16"
    for half in ("up", "down"):
        w, scale = buffers[f"layers[1].{half}.w"], buffers[f"layers[1].{half}.scale"]
        assert (w.dtype, scale.shape) == (nvfp4, (7, 2))
        values = to_float32(w.source(), nvfp4)
        assert w.source().nbytes == w.size_bytes
        scales = scale.source()
        if half == "up":
            gate, up = values[:, 0::2] * scales[:, :1, None], values[:, 1::2] * scales[:, 1:, None]
            seen = np.concatenate([gate, up], axis=1)
        else:
            seen = values * scales[:, :1, None]
        name = "gate_up_proj" if half == "up" else "down_proj"
        assert np.array_equal(seen.view(np.uint32), wanted[f"{EXPERTS}.{name}"].numpy().view("u4"))


def test_e4m3_equals_torch_on_every_code():
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.view(torch.float8_e4m3fn).float().numpy()
    seen = e4m3_to_float32(codes.numpy())
    nan = np.isnan(wanted)
    assert nan.sum() == 2
    assert np.array_equal(np.isnan(seen), nan)
    assert np.array_equal(seen[~nan].view(np.uint32), wanted[~nan].view(np.uint32))


def test_packing_experts_takes_little_memory_beside_the_result():
    codes = np.zeros((32, 128, 256), np.uint8)
    scales = np.zeros((32, 128, 32), np.uint8)
    sources = [WeightSource("w", u8, a.shape, lambda a=a: a) for a in (codes, scales)]
    load = nvfp4_rows(*sources, halves=True)
    tracemalloc.start()
    packed = load()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert packed.nbytes <= peak < 1.1 * packed.nbytes


# ---- what is wrong, by name -------------------------------------------------------------------
def test_a_missing_tensor_is_named_with_its_shape(folder):
    edit(folder, lambda t: t.pop(f"{EXPERTS}.down_proj"))
    refused(folder, f"tensor {EXPERTS}.down_proj [7, 32, 16] is missing")


def test_an_extra_tensor_is_named_with_its_shape(folder):
    edit(folder, lambda t: t.update({f"{AT}.self_attn.q_proj.bias": torch.ones(48)}))
    refused(folder, f"tensor {AT}.self_attn.q_proj.bias [48] has no place in a muse_spark model")


def test_a_misshapen_tensor_is_named_with_both_shapes(folder):
    edit(folder, lambda t: t.update({f"{AT}.mlp.gate.weight": torch.ones(6, 48)}))
    refused(folder, f"tensor {AT}.mlp.gate.weight is [6, 48], the config asks for [7, 48]")


def test_a_tensor_of_another_dtype_is_named_with_both(folder):
    name = f"{AT}.self_attn.o_proj.weight"
    edit(folder, lambda t: t.update({name: torch.ones(48, 48, dtype=torch.uint8)}))
    refused(
        folder, f"tensor {name} [48, 48] is stored as u8, the config asks for [48, 48] in a float"
    )


@pytest.mark.parametrize(
    ("change", "start"),
    [
        (
            lambda t: t.pop(f"{EXPERTS}.gate_up_proj_weight_scale"),
            f"tensor {EXPERTS}.gate_up_proj_weight_scale [7, 32, 2] is missing",
        ),
        (
            lambda t: t.pop(f"{EXPERTS}.down_proj_weight_scale_2"),
            f"tensor {EXPERTS}.down_proj_weight_scale_2 [7] is missing",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj_weight_scale": torch.ones(7, 32, 1)}),
            f"tensor {EXPERTS}.down_proj_weight_scale [7, 32, 1] is stored as f32, the config asks "
            "for [7, 32, 1] in e4m3",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.down_proj": torch.ones(7, 32, 16)}),
            f"tensor {EXPERTS}.down_proj is [7, 32, 16], the config asks for [7, 32, 8]",
        ),
        (
            lambda t: t.update({f"{EXPERTS}.gate_up_proj": torch.ones(7, 32, 32)}),
            f"tensor {EXPERTS}.gate_up_proj is [7, 32, 32], the config asks for [7, 32, 16]",
        ),
        (
            lambda t: t.pop(f"{EXPERTS}.gate_up_proj"),
            f"tensor {EXPERTS}.gate_up_proj [7, 32, 16] is missing",
        ),
    ],
    ids=["no-scale", "no-second-scale", "scale-in-f32", "down-in-f32", "up-in-f32", "no-codes"],
)
def test_half_an_nvfp4_layer_is_refused(change, start, folder):
    quantise_folder(folder, [1])
    edit(folder, change)
    refused(folder, start)


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"num_local_experts": ...}, "num_local_experts is missing"),
        ({"num_experts_per_tok": 8}, "num_experts_per_tok 8 exceeds num_local_experts 7"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types has 1 entries"),
        ({"layer_types": ["full_attention", "linear"]}, "layer_types has ['linear']"),
        ({"layer_rope_theta": [0, -1]}, "layer_rope_theta has -1"),
        ({"num_shared_experts": 1}, "text_config.num_shared_experts is 1"),
        ({"hidden_act": "gelu"}, "text_config.hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"qk_scale_factor": -1}, "qk_scale_factor is -1"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_by_key(changes, start, folder):
    edit_config(folder, **changes)
    refused(folder, start)


@pytest.mark.parametrize(
    ("quantisation", "start"),
    [
        ({"quant_algo": "FP8"}, "quantization_config.quant_algo is 'FP8'"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "quantization_config has group_size 32"),
        ("NVFP4", "quantization_config is 'NVFP4'"),
    ],
)
def test_another_quantisation_is_refused(quantisation, start, folder):
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = quantisation
    (folder / "config.json").write_text(json.dumps(values))
    refused(folder, start)


def test_a_context_beyond_the_model_is_refused(folder):
    model = load_model(folder)
    with pytest.raises(Exception, match=r"^context is 513, the model was made for 512 positions"):
        build(model.config, model.weights, context=513)
