"""A drafter's folder: what it says, what it may leave out, and one clear line for what is wrong."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import safetensors.torch
from safetensors.numpy import load_file, save_file

from gpurt.errors import ModelError
from gpurt.graphs.ops.dtypes import to_float32
from gpurt.loaders.hf_dflash import load_draft
from tests.helpers.dflash import CASES, make_dflash, save_dflash

pytestmark = pytest.mark.reference


@pytest.fixture
def folder(tmp_path):
    save_dflash(make_dflash(layers=1, windows=(7,), causal=(False,), taps=(1, 3)), tmp_path)
    return tmp_path


def edit_config(folder, own=None, **changes):
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    values["dflash_config"] |= own or {}
    for record in (values, values["dflash_config"]):
        for key in [key for key, value in record.items() if value is ...]:
            del record[key]
    path.write_text(json.dumps(values))


def edit_tensors(folder, **changes):
    tensors = dict(load_file(folder / "model.safetensors"))
    for name, value in changes.items():
        tensors.pop(name) if value is None else tensors.__setitem__(name, value)
    save_file(tensors, folder / "model.safetensors")


def refused(folder, start):
    with pytest.raises(ModelError, match=f"^{re.escape(start)}") as caught:
        load_draft(folder)
    assert re.fullmatch(r".+ - at .+ - .+", str(caught.value))


@pytest.mark.parametrize("name", CASES)
def test_a_folder_says_what_the_model_is(name, tmp_path):
    model = make_dflash(**CASES[name])
    loaded = load_draft(save_dflash(model, tmp_path))
    assert loaded.config == model.config
    for tensor, weight in model.state_dict().items():
        assert np.array_equal(loaded.weights[tensor].load(), weight.numpy()), tensor


def test_tensors_in_bf16_and_the_package_s_names_of_codebooks_load(tmp_path):
    model = make_dflash()
    save_dflash(model, tmp_path, "bfloat16")
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    at = "candidate_selector.successor_codebook"
    tensors[f"{at}.weight"] = tensors.pop(at)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    source = load_draft(tmp_path).weights[at]
    wanted = model.candidate_selector.successor_codebook.detach().bfloat16().float().numpy()
    assert np.array_equal(to_float32(source.load(), source.dtype), wanted)


def test_what_a_config_may_leave_out(folder):
    edit_config(folder, {"block_size": ..., "target_layer_ids": ..., "input_embedding_scale": ...})
    edit_config(folder, {"output_multiplier": ..., "final_logit_softcapping": ...}, is_causal=...)
    edit_tensors(folder, **{"fc.weight": np.zeros((48, 48), np.float32)})
    config = load_draft(folder).config
    assert (config.block, config.taps, config.softcap) == (16, (2,), 0.0)
    assert config.causal == (True,)  # its layer slides
    edit_tensors(folder, **{"embed_tokens.weight": np.zeros((211, 48), np.float32)})
    assert "embed_tokens.weight" not in load_draft(folder).weights


@pytest.mark.parametrize(
    ("own", "changes", "start"),
    [
        ({"mask_token_id": ...}, {}, "mask_token_id is None"),
        ({"mask_token_id": 211}, {}, "mask_token_id is 211"),
        ({"block_size": 1}, {}, "block_size is 1"),
        ({"conv_group_size": 7}, {}, "conv_group_size is 7"),
        ({"conv_kernel_size": ...}, {}, "conv_kernel_size is missing"),
        ({"selector_top_k": "16"}, {}, "selector_top_k is '16'"),
        ({"target_layer_ids": []}, {}, "target_layer_ids is []"),
        ({"target_layer_ids": ...}, {"num_target_layers": ...}, "num_target_layers is missing"),
        ({}, {"hidden_size": ...}, "hidden_size is missing"),
        ({}, {"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of"),
        ({}, {"layer_types": ["strange"]}, "layer_types has ['strange']"),
        ({}, {"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries"),
        ({}, {"sliding_window": None}, "sliding_window is missing"),
        ({}, {"attention_bias": True}, "attention_bias is True"),
        ({}, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({}, {"intermediate_size": 57}, "tensor layers.0.mlp.gate_proj.weight is [56, 48]"),
    ],
)
def test_a_config_that_cannot_be_is_refused(folder, own, changes, start):
    edit_config(folder, own, **changes)
    refused(folder, start)


def test_tensors_that_are_missing_extra_or_misshapen_are_refused(folder):
    edit_tensors(folder, **{"layers.0.mlp_conv.base_kernel": None})
    refused(folder, "tensor layers.0.mlp_conv.base_kernel [2, 2, 48] is missing")
    edit_tensors(folder, **{"layers.0.mlp_conv.base_kernel": np.zeros((2, 3, 48), np.float32)})
    refused(folder, "tensor layers.0.mlp_conv.base_kernel is [2, 3, 48]")
    edit_tensors(folder, **{"layers.0.mlp_conv.base_kernel": np.zeros((2, 2, 48), np.float32)})
    edit_tensors(folder, **{"layers.1.mlp.up_proj.weight": np.zeros((56, 48), np.float32)})
    refused(folder, "tensor layers.1.mlp.up_proj.weight [56, 48] has no place in a dflash model")


def test_a_folder_that_is_none_is_refused(tmp_path):
    refused(tmp_path / "nowhere", "no such folder")
    refused(tmp_path, "config.json is missing")
