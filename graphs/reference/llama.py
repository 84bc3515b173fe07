"""Llama-type models in plain torch: one forward over whole sequences, to read beside llama.py.

No cache, no pages, no tasks. Legend: T positions, H heads, K kv heads, G heads a kv head, D head
dimension. tests/models holds it to transformers, and tools/ takes it as the model without a
framework around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpurt.graphs.llama import LlamaConfig, rope_table
from gpurt.graphs.ops.dtypes import to_float32

if TYPE_CHECKING:
    from gpurt.loaders.model import WeightSource

Weights = Mapping[str, torch.Tensor]


def dequantised(weights: Mapping[str, WeightSource]) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint as float32."""
    return {
        name: torch.from_numpy(np.array(to_float32(source.load(), source.dtype)))
        for name, source in weights.items()
    }


def forward(config: LlamaConfig, weights: Weights, tokens: list[int]) -> torch.Tensor:
    """Logits [T, vocab] of a sequence."""
    x = weights["model.embed_tokens.weight"][tokens]
    rope = torch.from_numpy(rope_table(config, len(tokens)))
    for layer in range(config.layers):
        at = f"model.layers.{layer}."
        own = {name.removeprefix(at): w for name, w in weights.items() if name.startswith(at)}
        x = x + attention(config, own, rms_norm(x, own["input_layernorm.weight"], config.eps), rope)
        normed = rms_norm(x, own["post_attention_layernorm.weight"], config.eps)
        gate = torch.nn.functional.silu(normed @ own["mlp.gate_proj.weight"].T)
        x = x + (gate * (normed @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    x = rms_norm(x, weights["model.norm.weight"], config.eps)
    head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    return x @ weights[head].T


def attention(
    config: LlamaConfig, own: Weights, x: torch.Tensor, rope: torch.Tensor
) -> torch.Tensor:
    """Causal grouped-query attention of one layer, output projection included."""
    length, head_dim = len(x), config.head_dim
    q_THD = (x @ own["self_attn.q_proj.weight"].T).view(length, config.heads, head_dim)
    k_TKD = (x @ own["self_attn.k_proj.weight"].T).view(length, config.kv_heads, head_dim)
    v_TKD = (x @ own["self_attn.v_proj.weight"].T).view(length, config.kv_heads, head_dim)
    if config.qk_norm:
        q_THD = rms_norm(q_THD, own["self_attn.q_norm.weight"], config.eps)
        k_TKD = rms_norm(k_TKD, own["self_attn.k_norm.weight"], config.eps)
    group = config.heads // config.kv_heads
    k_THD = rotate(k_TKD, rope).repeat_interleave(group, dim=1)
    v_THD = v_TKD.repeat_interleave(group, dim=1)
    scores_HTT = torch.einsum("qhd,khd->hqk", rotate(q_THD, rope), k_THD) * head_dim**-0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores_HTT = scores_HTT.masked_fill(future, float("-inf"))
    out_THD = torch.einsum("hqk,khd->qhd", scores_HTT.softmax(-1), v_THD)
    return out_THD.reshape(length, -1) @ own["self_attn.o_proj.weight"].T


def rotate(x_THD: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the pairs (i, i + D/2); rope: [T, D], cosines then sines."""
    half = x_THD.shape[-1] // 2
    cos, sin = rope[:, None, :half], rope[:, None, half:]
    low, high = x_THD[..., :half], x_THD[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight. Source: arXiv 1910.07467."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
