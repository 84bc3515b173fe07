"""A Hugging Face folder of a few hundred bytes, written without torch: for loaders and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpurt.loaders import WeightSource, hf_qwen3_moe
from gpurt.loaders.hf import config_from_json

CONFIG = {
    "model_type": "llama",
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
}
# Changes for up to eight ranks, a head each.
EIGHT_HEADS = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "vocab_size": 776,
    "head_dim": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
}


def tiny_folder(folder: Path, seed: int = 0, **changes: object) -> Path:
    """config.json and model.safetensors with random float32 weights; no tokenizer."""
    values = CONFIG | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    rng = np.random.default_rng(seed)
    is_mixture = values["model_type"] == "qwen3_moe"
    read = hf_qwen3_moe.config_from_json if is_mixture else config_from_json
    shapes = read(values, str(folder)).tensors()
    tensors = {
        name: rng.normal(1.0 if "norm" in name else 0.0, 0.3, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def repetitive_folder(folder: Path, vocab_size: int) -> Path:
    """The same of a model whose greedy texts soon repeat themselves: drafters can be right."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 2}
    return tiny_folder(folder, vocab_size=vocab_size, max_position_embeddings=256, **sizes)


def write_safetensors(
    path: Path, tensors: dict[str, NDArray[np.float32]], append: bool = False
) -> None:
    """Write float32 tensors; append: keep those that the file has."""
    kept: dict[str, NDArray[np.float32]] = {}
    if append:
        from gpurt.loaders.safetensors_file import read_file

        kept = {name: source.load().copy() for name, source in read_file(path).items()}
    header, offset = {}, 0
    for name, array in (kept | tensors).items():
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(np.ascontiguousarray(a).tobytes() for a in (kept | tensors).values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def write_sharded(folder: Path, weights: Mapping[str, WeightSource], shard_bytes: int) -> None:
    """A folder of safetensors shards with an index, written tensor by tensor as they are stored."""
    stored = {"f32": "F32", "bf16": "BF16", "u8": "U8", "e4m3": "F8_E4M3"}
    shards: list[list[str]] = [[]]
    size = 0
    for name, source in weights.items():
        if size and size + source.size_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += source.size_bytes
    places = {}
    for number, names in enumerate(shards):
        header, offset = {}, 0
        for name in names:
            source = weights[name]
            end = offset + source.size_bytes
            entry = {"dtype": stored[source.dtype.name], "shape": list(source.shape)}
            header[name] = entry | {"data_offsets": [offset, end]}
            offset, places[name] = end, f"model-{number:05}.safetensors"
        text = json.dumps(header).encode()
        with (folder / f"model-{number:05}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                file.write(np.ascontiguousarray(weights[name].load()).tobytes())
    index = {"weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
