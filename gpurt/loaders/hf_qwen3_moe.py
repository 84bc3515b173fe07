"""Configs of model_type qwen3_moe. Tensors lie one matrix an expert, as the releases have them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from gpurt.graphs.llama import LlamaConfig
from gpurt.graphs.qwen3_moe import Qwen3MoeConfig
from gpurt.loaders.model import experts_of, integer


def config_from_json(values: dict[str, Any], path: str) -> Qwen3MoeConfig:
    """A Qwen3MoeConfig from a parsed config.json. Raises: ModelError naming the key at fault."""
    from gpurt.loaders import hf

    base = hf.config_from_json(values, path)
    key = "num_local_experts" if "num_experts" not in values else "num_experts"
    experts, top_k = experts_of(values, key, path)
    step = integer(values, "decoder_sparse_step", path, 1)
    dense = values.get("mlp_only_layers") or []
    shared = {field.name: getattr(base, field.name) for field in fields(LlamaConfig)}
    return Qwen3MoeConfig(
        **shared,
        experts=experts,
        top_k=top_k,
        moe_intermediate=integer(values, "moe_intermediate_size", path),
        norm_topk=bool(values.get("norm_topk_prob", False)),
        sparse=tuple(
            layer not in dense and (layer + 1) % step == 0 for layer in range(base.layers)
        ),
    )
