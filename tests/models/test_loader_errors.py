"""Bad checkpoints get one clear line: missing, truncated, misshapen, extra, unknown."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest

from gpurt.errors import ModelError
from gpurt.loaders import load_model
from gpurt.loaders.gguf_file import GgufFile
from gpurt.loaders.smollm2 import smollm2_path
from tests.helpers.tiny import tiny_folder, write_safetensors

HEADER_BYTES = 1_785_664  # of SmolLM2's GGUF: where tensor bytes begin


def edit_config(folder, **changes):
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


@pytest.fixture
def folder(tmp_path):
    return tiny_folder(tmp_path / "model")


def refused(path, start):
    with pytest.raises(ModelError, match=f"^{re.escape(start)}") as caught:
        load_model(path)
    assert str(caught.value).count("\n") == 0
    assert re.search(r" - at .+ - .+", str(caught.value))


def test_the_tiny_folder_itself_loads(folder):
    model = load_model(folder)
    assert model.config.hidden == 8
    assert model.tokenizer is None
    assert model.stop_ids == (7,)


def test_a_model_that_is_not_there_is_refused(tmp_path):
    refused(tmp_path / "nothing", "no model")


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is unknown"),
        ({"model_type": ...}, "model_type None is unknown"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "8"}, "hidden_size is '8'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads 2 is no multiple of"),
        ({"head_dim": 3}, "head_dim is 3"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has ['sliding_attention']"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope scaling 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_theta": 0}, "rope_theta is 0"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_by_key(folder, changes, start):
    edit_config(folder, **changes)
    refused(folder, start)


def test_a_config_that_is_missing_or_no_json_is_refused(folder):
    (folder / "config.json").write_text("{")
    refused(folder, "cannot read config.json")
    (folder / "config.json").unlink()
    refused(folder, "config.json is missing")


def test_a_shape_that_contradicts_the_config_names_the_tensor_and_both_shapes(folder):
    edit_config(folder, intermediate_size=16)
    refused(
        folder,
        "tensor model.layers.0.mlp.gate_proj.weight is [12, 8], the config asks for [16, 8]",
    )


def test_a_missing_tensor_is_named_with_its_shape(folder):
    edit_config(folder, num_hidden_layers=2)
    refused(folder, "tensor model.layers.1.input_layernorm.weight [8] is missing")


def test_an_extra_tensor_is_named(folder):
    edit_config(folder, model_type="llama", num_hidden_layers=1, tie_word_embeddings=False)
    write_safetensors(folder / "model.safetensors", {"q_proj.bias": np.ones(4, np.float32)}, True)
    refused(folder, "tensor q_proj.bias [4] has no place in a llama model (1 such)")


@pytest.mark.parametrize("keep", [0, 4, 100, 2000])
def test_truncated_safetensors_are_refused(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"header|truncated|cannot read it"):
        load_model(folder)


def test_safetensors_truncated_in_the_data_name_the_tensor(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    refused(folder, "tensor lm_head.weight [20, 8] f32 ends at byte")


@pytest.mark.parametrize("noise", [b"\xff" * 64, b"\x10" + b"\0" * 7 + b'{"a": 1}' + b" " * 8])
def test_a_file_that_is_no_safetensors_is_refused(folder, noise):
    (folder / "model.safetensors").write_bytes(noise)
    refused(folder, "the header")


def test_a_dtype_that_is_not_read_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(ModelError, match=r"^tensor .* is stored as I32"):
        load_model(folder)


def test_missing_weights_and_shards_are_refused(folder):
    shutil.move(folder / "model.safetensors", folder / "a.safetensors")
    refused(folder, "neither model.safetensors nor")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    refused(folder, "tensor x is not in shard a.safetensors")
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors"}}))
    refused(folder, "shard b.safetensors is missing")
    index.write_text("[]")
    refused(folder, "cannot read weight_map")


@pytest.fixture
def gguf_head():
    with smollm2_path(fetch=False).open("rb") as file:
        return file.read(HEADER_BYTES + 4096)


@pytest.mark.parametrize(
    ("keep", "start"),
    [
        (0, "cannot read it"),
        (3, "the header runs past the end"),
        (20, "the header runs past the end"),
        (60_000, "the header runs past the end"),
        (HEADER_BYTES - 4096, "the header runs past the end"),
        (HEADER_BYTES + 4096, "tensor token_embd.weight [49152, 576] q8_0 ends at byte"),
    ],
)
def test_a_truncated_gguf_is_refused(tmp_path, gguf_head, keep, start):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_head[:keep])
    refused(path, start)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"#!/bin/sh\n")
    refused(path, "the file does not begin with GGUF")
    path.write_bytes(b"GGUF" + b"\x09\0\0\0" + b"\0" * 16)
    refused(path, "GGUF version 9")


def test_a_gguf_of_another_architecture_is_refused(tmp_path, gguf_head):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_head.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    with path.open("r+b") as file:
        file.truncate(98_362_432)  # sparse: the tensors' bytes are never read
    refused(path, "architecture 'mamba' is unknown")


def test_a_gguf_tensor_type_that_is_not_run_is_named(tmp_path, gguf_head):
    name = b"token_embd.weight"
    at = gguf_head.index(name) + len(name) + 4 + 16
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_head[:at] + b"\x0c\0\0\0" + gguf_head[at + 4 :])
    refused(path, "tensor token_embd.weight is stored as Q4_K")


def test_the_gguf_parser_agrees_with_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    ours, theirs = GgufFile(smollm2_path(fetch=False)), gguf.GGUFReader(smollm2_path(fetch=False))
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.values[key] == field.contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors[:9]:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(n) for n in tensor.shape[::-1])
        assert np.array_equal(
            ours.data(mine).view(np.uint8).ravel(), tensor.data.view(np.uint8).ravel()
        )
