"""Configs and tensors of model_type muse_spark: the text model of a multimodal checkpoint.

Two layouts: bf16 (Hugging Face), and ModelOpt NVFP4, where the experts of some layers are codes,
block scales and second-level scales. Which layers: those with a half that is stored as u8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpurt.buffer import nvfp4
from gpurt.errors import ModelError
from gpurt.graphs.muse_spark_config import PREFIX, MuseSparkConfig
from gpurt.loaders.model import (
    WeightSource,
    check_heads,
    experts_of,
    integer,
    need,
    number,
    only_setting,
)

_TOWERS = ("model.vision_tower.", "model.vision_adapter.", "model.vision_projection", "model.audio")
# What exporters add: constants that follow from the config, and scales of an fp8 cache.
_UNREAD = re.compile(
    r"rotary_emb|\.num_tokens_per_expert$|\.mlp\.norm_weight$|\.embed_norm\.weight$"
    r"|\.self_attn\.[qkv]_scale$"
)
_ONLY = {"hidden_act": "silu", "attention_bias": False, "num_shared_experts": 0}
_CODES = re.compile(re.escape(PREFIX) + r"\.layers\.(\d+)\.mlp\.experts\.\w+_proj")


def text_tensors(
    found: Mapping[str, WeightSource],
) -> tuple[dict[str, WeightSource], list[str]]:
    """The text model's tensors, and a notice of the towers that were left out."""
    kept = {name: source for name, source in found.items() if not _UNREAD.search(name)}
    towers = [name for name in kept if name.startswith(_TOWERS)]
    for name in towers:
        del kept[name]
    if not towers:
        return kept, []
    skipped = f"vision and audio towers skipped ({len(towers)} tensors)"
    return kept, [f"{skipped}: gpurt takes text and gives text"]


def config_from_json(
    values: Mapping[str, Any], path: str, found: Mapping[str, WeightSource]
) -> MuseSparkConfig:
    """A MuseSparkConfig from a parsed config.json. Raises: ModelError naming the key at fault."""
    text = values.get("text_config")
    need(isinstance(text, dict), "text_config is missing", path, "the config must hold an object")
    assert isinstance(text, dict)
    only_setting(text, _ONLY, path, "text_config.")
    _check_quantisation(values, path)
    layers = integer(text, "num_hidden_layers", path)
    heads = integer(text, "num_attention_heads", path)
    kv_heads = integer(text, "num_key_value_heads", path)
    head_dim = integer(text, "head_dim", path)
    check_heads(heads, kv_heads, head_dim, path)
    experts, top_k = experts_of(text, "num_local_experts", path)
    kinds = _per_layer(text, "mlp_layer_types", layers, ["sparse"] * layers, path)
    _known(kinds, "mlp_layer_types", ("sparse", "dense"), path)
    stored = {name: match for name in found if (match := _CODES.fullmatch(name))}
    return MuseSparkConfig(
        hidden=integer(text, "hidden_size", path),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=integer(text, "vocab_size", path),
        context=integer(text, "max_position_embeddings", path),
        eps=number(text, "rms_norm_eps", path, 1e-5),
        post_eps=number(text, "post_norm_eps", path, 1e-8),
        thetas=_thetas(text, layers, path),
        windows=_windows(text, layers, path),
        sparse=tuple(kind == "sparse" for kind in kinds),
        qk_scale=number(text, "qk_scale_factor", path),
        output_multiplier=number(text, "output_multiplier", path),
        softcap=number(text, "final_logit_softcapping", path),
        gate_temperature=number(text, "residual_gate_temperature", path, 0.3),
        intermediate=integer(text, "intermediate_size", path),
        experts=experts,
        top_k=top_k,
        moe_hidden=integer(text, "moe_hidden_size", path),
        moe_intermediate=integer(text, "moe_intermediate_size", path),
        routed_factor=number(text, "routed_scaling_factor", path, 1.0),
        quantised=frozenset(
            int(match.group(1)) for name, match in stored.items() if found[name].dtype.name == "u8"
        ),
        tied=bool(text.get("tie_word_embeddings", False)),
    )


def _check_quantisation(values: Mapping[str, Any], path: str) -> None:
    """ModelOpt's own words for it, where the config carries them."""
    quantisation = values.get("quantization_config")
    if quantisation is None:
        return
    need(
        isinstance(quantisation, dict),
        f"quantization_config is {quantisation!r}",
        path,
        "it must be an object",
    )
    algorithm = quantisation.get("quant_algo")
    need(
        algorithm == "NVFP4",
        f"quantization_config.quant_algo is {algorithm!r}",
        path,
        "gpurt runs bf16 and ModelOpt NVFP4 checkpoints",
    )
    groups = quantisation.get("config_groups") or {}
    sizes = [g.get("weights", {}).get("group_size") for g in groups.values()]
    sizes.append(quantisation.get("group_size"))
    for size in sizes:
        need(
            size in (None, nvfp4.block),
            f"quantization_config has group_size {size}",
            path,
            f"NVFP4 has one scale a block of {nvfp4.block}",
        )


def _windows(text: Mapping[str, Any], layers: int, path: str) -> tuple[int, ...]:
    """Sliding layers' window. Default: every fourth layer, counted from the last, is global."""
    default = ["sliding_attention" if local else "full_attention" for local in _locals(layers)]
    kinds = _per_layer(text, "layer_types", layers, default, path)
    _known(kinds, "layer_types", ("full_attention", "sliding_attention"), path)
    if "sliding_attention" not in kinds:
        return (0,) * layers
    window = integer(text, "sliding_window", path)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _thetas(text: Mapping[str, Any], layers: int, path: str) -> tuple[float, ...]:
    """Rotary base of every layer, 0 for none. Default: as `_windows`."""
    rope = text.get("rope_parameters") or {}
    need(isinstance(rope, dict), f"rope_parameters is {rope!r}", path, "it must be an object")
    kind = rope.get("rope_type", "default")
    need(kind == "default", f"rope_type is {kind!r}", path, "gpurt runs rope type default")
    theta = number(rope, "rope_theta", path, 500000.0)
    default = [theta if local else 0.0 for local in _locals(layers)]
    thetas = _per_layer(text, "layer_rope_theta", layers, default, path)
    for value in thetas:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            msg = f"layer_rope_theta has {value!r}"
            raise ModelError(f"{msg} - at {path} - use a number of 0 or more a layer")
    return tuple(float(value) for value in thetas)


def _locals(layers: int) -> list[bool]:
    return [(layers - 1 - layer) % 4 != 0 for layer in range(layers)]


def _per_layer(
    text: Mapping[str, Any], key: str, layers: int, default: list[Any], path: str
) -> list[Any]:
    values = text.get(key)
    if values is None:
        return default
    count = len(values) if isinstance(values, list) else 0
    need(count == layers, f"{key} has {count} entries", path, f"give one a layer: {layers}")
    return list(values)


def _known(kinds: list[Any], key: str, known: tuple[str, ...], path: str) -> None:
    strange = [kind for kind in kinds if kind not in known]
    need(not strange, f"{key} has {strange[:1]}", path, f"gpurt runs {' and '.join(known)}")
