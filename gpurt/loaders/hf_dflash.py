"""A drafter's folder: config.json and safetensors of a DFlash or DFlash 2 checkpoint.

Its own settings lie in `dflash_config`, or beside the others. The embedding and the head are the
target's; copies of them in the folder are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpurt.graphs.dflash import DFlashConfig, DraftModel, default_taps
from gpurt.loaders.hf import read_json, rope_of
from gpurt.loaders.model import check_heads, check_tensors, integer, need, number, only_setting
from gpurt.loaders.safetensors_file import read_folder
from gpurt.progress import Progress

_ONLY = {"hidden_act": "silu", "attention_bias": False, "quantization_config": None}
_CODEBOOK = "_codebook.weight"  # as the `dflash` package saves what releases call "_codebook"


def load_draft(folder: Path, progress: Progress | None = None) -> DraftModel:
    """Open a drafter's folder. Tensors are memory-mapped and read when a plan is loaded.

    Raises: ModelError if a file is missing or damaged, or if a tensor contradicts the config.
    """
    at = str(folder / "config.json")
    need(folder.is_dir(), "no such folder", str(folder), "give the path of a drafter's folder")
    config = config_from_json(read_json(folder / "config.json"), at)
    found = {
        name.removesuffix(".weight") if name.endswith(_CODEBOOK) else name: source
        for name, source in read_folder(folder, progress).items()
    }
    return DraftModel(config, check_tensors(found, config, str(folder)))


def config_from_json(values: dict[str, Any], path: str) -> DFlashConfig:
    """A DFlashConfig from a parsed config.json. Raises: ModelError naming the key at fault."""
    own = values.get("dflash_config", {})
    need(isinstance(own, dict), f"dflash_config is {own!r}", path, "it must be an object")
    only_setting(values, _ONLY, path)
    settings = {**values, **own}
    hidden, layers = (
        integer(values, "hidden_size", path),
        integer(values, "num_hidden_layers", path),
    )
    heads = integer(values, "num_attention_heads", path)
    kv_heads = integer(values, "num_key_value_heads", path, heads)
    head_dim = integer(values, "head_dim", path, hidden // heads)
    check_heads(heads, kv_heads, head_dim, path)
    theta, scaling = rope_of(values, path)
    need(scaling is None, "rope scaling", path, "gpurt runs drafters with rope type default")
    windows = _windows(values, layers, path)
    causal = settings.get("is_causal")
    mask, vocab = settings.get("mask_token_id"), integer(values, "vocab_size", path)
    need(
        isinstance(mask, int) and 0 <= mask < vocab,
        f"mask_token_id is {mask!r}",
        path,
        f"the config must state a token below {vocab}",
    )
    softcap = settings.get("final_logit_softcapping")
    block = integer(settings, "block_size", path, 16)
    need(block > 1, f"block_size is {block}", path, "a block has an anchor and a mask or more")
    second = settings.get("selector_rank") is not None  # and convolutions: DFlash 2
    group = integer(settings, "conv_group_size", path) if second else 1
    need(hidden % group == 0, f"conv_group_size is {group}", path, f"use a divisor of {hidden}")
    return DFlashConfig(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=integer(values, "intermediate_size", path),
        vocab=vocab,
        context=integer(values, "max_position_embeddings", path),
        eps=number(values, "rms_norm_eps", path, 1e-6),
        theta=theta,
        windows=windows,
        # as SGLang: without a word on it, sliding layers are causal and full ones are not
        causal=tuple(bool(w) if causal is None else bool(causal) for w in windows),
        taps=_taps(settings, layers, path),
        block=block,
        mask_token=int(mask or 0),
        input_scale=number(settings, "input_embedding_scale", path, 1.0),
        output_multiplier=number(settings, "output_multiplier", path, 1.0),
        softcap=number(settings, "final_logit_softcapping", path) if softcap else 0.0,
        conv_taps=integer(settings, "conv_kernel_size", path) if second else 0,
        conv_group=group,
        selector_rank=integer(settings, "selector_rank", path) if second else 0,
        selector_top_k=integer(settings, "selector_top_k", path) if second else 1,
    )


def _taps(settings: Mapping[str, Any], layers: int, path: str) -> tuple[int, ...]:
    listed = settings.get("target_layer_ids")
    if listed is None:
        return default_taps(integer(settings, "num_target_layers", path), layers)
    good = (
        isinstance(listed, list) and listed and all(isinstance(i, int) and i >= 0 for i in listed)
    )
    need(bool(good), f"target_layer_ids is {listed!r}", path, "give the target's layers, from 0")
    return tuple(listed)


def _windows(values: Mapping[str, Any], layers: int, path: str) -> tuple[int, ...]:
    kinds = values.get("layer_types") or ["full_attention"] * layers
    need(len(kinds) == layers, f"layer_types has {len(kinds)} entries", path, f"give {layers}")
    strange = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    need(not strange, f"layer_types has {strange[:1]}", path, "gpurt runs full and sliding ones")
    if "sliding_attention" not in kinds:
        return (0,) * layers
    window = integer(values, "sliding_window", path)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
