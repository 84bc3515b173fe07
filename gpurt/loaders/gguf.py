"""Llama models in GGUF: config from the metadata, tensors as stored, llama.cpp's row order undone.

llama.cpp stores the rows of q and k so that rotary pairs are neighbours (i, i + 1); the graphs
rotate (i, i + D/2), as the original weights do. Whole rows move, so stored blocks stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.errors import ModelError
from gpurt.graphs.llama import LlamaConfig
from gpurt.loaders.gguf_file import GgufFile, GgufTensor
from gpurt.loaders.model import Model, WeightSource, check_tensors, integer, need, number
from gpurt.progress import Progress
from gpurt.tokenizer import chat_template, tokenizer_from_gguf

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def load_gguf(path: Path, progress: Progress | None = None) -> Model:
    """Open a GGUF file of architecture llama. Tensors are read when a plan is loaded.

    progress: called as (what, done, total) over the file's tensors.
    Raises: ModelError if the file is missing, truncated, of another architecture, or if a tensor
    does not fit the metadata.
    """
    file = GgufFile(path)
    config = _config(file)
    found: dict[str, WeightSource] = {}
    stored: dict[str, str] = {}
    for index, tensor in enumerate(file.tensors.values()):
        name = _hf_name(tensor.name)
        stored[name] = tensor.name
        found[name] = WeightSource(
            tensor.name, tensor.dtype, tensor.shape, _loader(file, tensor, name, config)
        )
        if progress is not None:
            progress("reading the tensor directory", index + 1, len(file.tensors))
    weights = check_tensors(found, config, str(path), lambda name: stored.get(name, _gguf(name)))
    tokenizer = tokenizer_from_gguf(file.values, str(path))
    if tokenizer is not None and tokenizer.vocab_size > config.vocab:
        msg = f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding {config.vocab}"
        raise ModelError(f"{msg} - at {path} - tokenizer and weights are of different models")
    template = file.values.get("tokenizer.chat_template")
    return Model(
        name=str(file.values.get("general.name", path.stem)),
        path=str(path),
        config=config,
        weights=weights,
        tokenizer=tokenizer,
        chat=chat_template(template) if tokenizer is not None else None,
        stop_ids=() if tokenizer is None else tokenizer.stop_ids,
    )


def _config(file: GgufFile) -> LlamaConfig:
    values, path = file.values, str(file.path)
    architecture = values.get("general.architecture")
    need(
        architecture == "llama",
        f"architecture {architecture!r} is unknown",
        path,
        "gpurt runs GGUF files of architecture llama",
    )
    scaling = values.get("llama.rope.scaling.type", "none")
    need(
        scaling == "none",
        f"rope scaling {scaling!r} is not supported in GGUF",
        path,
        "use the Hugging Face folder of the model",
    )
    need(
        not values.get("llama.expert_count"),
        f"{values.get('llama.expert_count')} experts",
        path,
        "gpurt runs dense llama models",
    )
    hidden = integer(values, "llama.embedding_length", path)
    heads = integer(values, "llama.attention.head_count", path)
    kv_heads = integer(values, "llama.attention.head_count_kv", path, heads)
    need(
        heads % kv_heads == 0,
        f"{heads} heads do not divide into {kv_heads} kv heads",
        path,
        "the metadata is wrong",
    )
    head_dim = integer(values, "llama.attention.key_length", path, hidden // heads)
    rotated = integer(values, "llama.rope.dimension_count", path, head_dim)
    need(
        rotated == head_dim and head_dim % 2 == 0,
        f"rotary embedding of {rotated} of {head_dim} dimensions",
        path,
        "gpurt rotates whole heads of even size",
    )
    embedding = file.tensors.get("token_embd.weight")
    vocab = integer(values, "llama.vocab_size", path, embedding.shape[0] if embedding else None)
    return LlamaConfig(
        architecture="llama",
        hidden=hidden,
        layers=integer(values, "llama.block_count", path),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=integer(values, "llama.feed_forward_length", path),
        vocab=vocab,
        eps=number(values, "llama.attention.layer_norm_rms_epsilon", path),
        rope_theta=number(values, "llama.rope.freq_base", path, 10000.0),
        context=integer(values, "llama.context_length", path),
        tied="output.weight" not in file.tensors,
    )


def _loader(
    file: GgufFile, tensor: GgufTensor, name: str, config: LlamaConfig
) -> Callable[[], NDArray[Any]]:
    heads = 0
    if name.endswith("self_attn.q_proj.weight"):
        heads = config.heads
    elif name.endswith("self_attn.k_proj.weight"):
        heads = config.kv_heads

    def load() -> NDArray[Any]:
        data = file.data(tensor)
        if not heads:
            return data
        pairs = data.reshape(heads, data.shape[0] // heads // 2, 2, data.shape[1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(data.shape)

    return load


def _hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name without one is kept, and then refused."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP_NAMES and suffix == "weight":
        return f"{_TOP_NAMES[stem]}.weight"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES and suffix == "weight":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
    return name


def _gguf(name: str) -> str:
    """The GGUF name of a tensor that is missing: the inverse of `_hf_name`."""
    for ours, theirs in _TOP_NAMES.items():
        if name == f"{theirs}.weight":
            return f"{ours}.weight"
    parts = name.removesuffix(".weight").split(".", 3)
    inverse = {theirs: ours for ours, theirs in _LAYER_NAMES.items()}
    return f"blk.{parts[2]}.{inverse.get(parts[3], parts[3])}.weight"
