"""Muse Spark in plain torch: one forward over a whole sequence, to read beside muse_spark.py.

No cache, no pages, no tasks. The stream and the norms are float32, as is the router; everything
else computes in the matrices' own dtype, float32 or bf16.
Legend: T positions, H heads, K kv heads, D head dimension, E experts, I an expert's inner width.
tests/models holds it to transformers' MuseSparkTextModel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from gpurt.graphs.muse_spark_config import PREFIX, MuseSparkConfig
from gpurt.graphs.ops.dtypes import to_float32
from gpurt.graphs.weights import nvfp4_rows, rotary_frequencies, rotary_table

if TYPE_CHECKING:
    from gpurt.loaders.model import WeightSource

Weights = Mapping[str, torch.Tensor]
_GATE_FLOOR = 1e-3
_SUM_FLOOR = 1e-15


def dequantised(weights: Mapping[str, WeightSource]) -> dict[str, torch.Tensor]:
    """All tensors as float32; experts in nvfp4 multiplied out, under their bf16 names."""
    tensors: dict[str, torch.Tensor] = {}
    for name, source in weights.items():
        if name.endswith(("_weight_scale", "_weight_scale_2")):
            continue
        if source.dtype.name == "u8":
            tensors[name] = _experts(weights, name)
        else:
            tensors[name] = torch.from_numpy(np.array(to_float32(source.load(), source.dtype)))
    return tensors


def forward(config: MuseSparkConfig, weights: Weights, tokens: list[int]) -> torch.Tensor:
    """Logits [T, vocab] of a sequence."""
    s = embedded(config, weights, tokens)
    for layer in range(config.layers):
        s = layer_forward(config, layer, layer_weights(weights, layer), s)
    x = rms(s, config.eps) * weights[f"{PREFIX}.norm.weight"].float()
    head = f"{PREFIX}.embed_tokens.weight" if config.tied else "lm_head.weight"
    logits = (x.to(weights[head].dtype) @ weights[head].T).float() * config.output_multiplier
    return config.softcap * torch.tanh(logits / config.softcap)


def embedded(config: MuseSparkConfig, weights: Weights, tokens: list[int]) -> torch.Tensor:
    """The stream before the first layer: normed rows of the embedding, [T, hidden]."""
    return rms(weights[f"{PREFIX}.embed_tokens.weight"][tokens], config.eps)


def layer_weights(weights: Weights, layer: int) -> dict[str, torch.Tensor]:
    """A layer's tensors by their names within it."""
    at = f"{PREFIX}.layers.{layer}."
    return {name.removeprefix(at): w for name, w in weights.items() if name.startswith(at)}


def layer_forward(
    config: MuseSparkConfig, layer: int, own: Weights, s: torch.Tensor
) -> torch.Tensor:
    """The stream after one layer, from the stream before it, [T, hidden]."""
    dtype = own["self_attn.q_proj.weight"].dtype
    a = centred(s, own["input_layernorm.weight"], config.eps).to(dtype)
    b = attention(config, layer, own, a)
    n = rms(b, config.post_eps).to(b.dtype)
    s = gated(config, own["post_attention_residual_gate.gate"], s, n)
    f = centred(s, own["pre_feedforward_layernorm.weight"], config.eps).to(dtype)
    b = experts(config, own, f) if config.sparse[layer] else dense(own, f)
    n = scaled(b, own["post_feedforward_layernorm.weight"], config.post_eps)
    return gated(config, own["post_feedforward_residual_gate.gate"], s, n)


def attention(config: MuseSparkConfig, layer: int, own: Weights, a: torch.Tensor) -> torch.Tensor:
    """Attention of one layer with its norms and gate, output projection included."""
    length, head_dim, eps = len(a), config.head_dim, config.eps
    q_THD = (a @ own["self_attn.q_proj.weight"].T).view(length, config.heads, head_dim)
    k_TKD = (a @ own["self_attn.k_proj.weight"].T).view(length, config.kv_heads, head_dim)
    v_TKD = (a @ own["self_attn.v_proj.weight"].T).view(length, config.kv_heads, head_dim)
    q_THD, k_TKD = rms(q_THD, eps).to(a.dtype), rms(k_TKD, eps).to(a.dtype)
    if config.thetas[layer]:
        frequencies = rotary_frequencies(config.thetas[layer], head_dim)
        table = torch.from_numpy(rotary_table(frequencies, length)).to(a.device)
        q_THD, k_TKD = rotate(q_THD, table), rotate(k_TKD, table)
    group = config.heads // config.kv_heads
    k_THD = k_TKD.repeat_interleave(group, dim=1)
    v_THD = v_TKD.repeat_interleave(group, dim=1)
    scores_HTT = torch.einsum("qhd,khd->hqk", q_THD, k_THD).float()
    scores_HTT = scores_HTT * (config.qk_scale * head_dim**-0.5)
    hidden = ~visible(length, config.windows[layer]).to(a.device)
    weights_HTT = scores_HTT.masked_fill(hidden, float("-inf")).softmax(-1).to(a.dtype)
    out_THD = torch.einsum("hqk,khd->qhd", weights_HTT, v_THD)
    out = rms(out_THD, eps).to(a.dtype).reshape(length, -1)
    out = out * torch.sigmoid(a @ own["self_attn.gate_proj.weight"].T)
    return out @ own["self_attn.o_proj.weight"].T


def visible(length: int, window: int) -> torch.Tensor:
    """[T, T]: whether row i sees key j: j <= i, and with a window i - j < window."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & ((distance < window) if window else (distance >= 0))


def dense(own: Weights, f: torch.Tensor) -> torch.Tensor:
    """SwiGLU."""
    gate = functional.silu(f @ own["mlp.gate_proj.weight"].T)
    return (gate * (f @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T


def experts(config: MuseSparkConfig, own: Weights, f: torch.Tensor) -> torch.Tensor:
    """The mixture: narrow, choose, norm every expert's output, sum, widen."""
    z = f @ own["mlp.pre_expert_proj.weight"].T
    z = centred(z, own["mlp.pre_expert_norm.weight"], config.eps)
    chosen, weight = route(config, own, f)
    y = torch.zeros_like(z)
    for expert in range(config.experts):
        rows, rank = torch.where(chosen == expert)
        if not len(rows):
            continue
        gate, up = (z[rows] @ own["mlp.experts.gate_up_proj"][expert].T).chunk(2, dim=-1)
        d = (functional.silu(gate) * up) @ own["mlp.experts.down_proj"][expert].T
        d = scaled(d, own["mlp.experts.post_expert_norm.weight"], config.post_eps)
        y[rows] += (d * weight[rows, rank, None]).to(y.dtype)
    return y @ own["mlp.post_expert_proj.weight"].T


def route(
    config: MuseSparkConfig, own: Weights, f: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of every row and their weights, [T, top_k]. The bias only selects."""
    logits = (f.float() @ own["mlp.gate.weight"].float().T) * config.output_multiplier
    p = torch.sigmoid(logits)
    scores = p + own["mlp.gate.e_score_correction_bias"].float()
    chosen = scores.argsort(dim=-1, descending=True, stable=True)[:, : config.top_k]
    weight = p.gather(1, chosen)
    weight = weight / (weight.sum(-1, keepdim=True) + _SUM_FLOOR)
    return chosen, weight * config.routed_factor


def gated(
    config: MuseSparkConfig, gate: torch.Tensor, s: torch.Tensor, n: torch.Tensor
) -> torch.Tensor:
    """The residual gate: alpha * stream + beta * branch, alpha^2 + beta^2 = 1 above a floor."""
    w = gate.float() / config.gate_temperature
    beta = torch.sigmoid(w)
    alpha = torch.sqrt((torch.sigmoid(-w) * (1 + beta)).clamp(min=_GATE_FLOOR))
    return (alpha * s + beta * n).to(s.dtype)


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """X / sqrt(mean(x^2) + eps) in float32. Source: arXiv 1910.07467."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def centred(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """A norm whose gain is 1 + w."""
    return (rms(x, eps) * (1 + w.float())).to(x.dtype)


def scaled(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """A norm of x times its gain 1 + w: the gain comes first, and the product is rounded."""
    return rms((x.float() * (1 + w.float())).to(x.dtype), eps).to(x.dtype)


def rotate(x_THD: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the pairs (i, i + D/2). table: [T, D], cosines then sines; both may have
    the same axes in front.
    """
    half = x_THD.shape[-1] // 2
    cos, sin = table[..., None, :half], table[..., None, half:]
    low, high = x_THD[..., :half].float(), x_THD[..., half:].float()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x_THD.dtype)


def _experts(weights: Mapping[str, WeightSource], name: str) -> torch.Tensor:
    """Code * block scale * second-level scale; the latter of gate rows, of up rows, or of all."""
    from gpurt.buffer import nvfp4

    blocks = nvfp4_rows(weights[name], weights[f"{name}_weight_scale"], halves=False)()
    values = torch.from_numpy(to_float32(blocks, nvfp4))
    second = torch.from_numpy(np.array(weights[f"{name}_weight_scale_2"].load(), np.float32))
    count, rows = len(values), values.shape[1]
    per_half = second.reshape(count, -1)
    return values * per_half.repeat_interleave(rows // per_half.shape[1], dim=1)[..., None]
