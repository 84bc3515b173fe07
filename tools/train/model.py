"""The target, made to train: the reference's layers over batches of packed chats.

Parameters have the checkpoint's names. Norms, gates and rotation are those of the plain reference
(graphs/reference/muse_spark.py); attention takes batches and masks, and experts are computed in one
of two ways that agree: `dense` (every expert for every row, the unchosen ones times zero; no
sorting, static shapes) and `grouped` (rows sorted by expert, one grouped product).
Weights are float32; matrices are used in bf16 on a GPU. The stream and the router stay float32.
Legend: B rows of a batch, T positions, N = B T, E experts, I an expert's inner width, M its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gpurt.graphs.muse_spark_config import PREFIX, MuseSparkConfig
from gpurt.graphs.reference.muse_spark import centred, gated, layer_weights, rms, rotate, scaled
from gpurt.graphs.weights import rotary_frequencies, rotary_table
from tools.train.quantise import rounded

Weights = Mapping[str, torch.Tensor]
EXPERTS = ("dense", "grouped")
_ALIGNED_ROWS = 8  # of a group: 16 bytes of bf16, which grouped products ask for
_GATE_BEGIN = -0.33  # beta 0.25: a branch begins as a sixteenth of the stream's power
_ROUTER_BEGIN = 0.02


@dataclass(frozen=True)
class Inputs:
    """A batch on the device. document and position as in data.Batch; seen: one mask a window,
    [B, 1, T, T], added to the scores.
    """

    ids: torch.Tensor
    position: torch.Tensor
    seen: Mapping[int, torch.Tensor]


class Target(nn.Module):
    """A Muse Spark. quantised: layers whose experts are rounded to NVFP4 as they are used."""

    def __init__(
        self,
        config: MuseSparkConfig,
        *,
        seed: int = 0,
        experts: str = "dense",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """dtype: of the matrices as they are used."""
        super().__init__()
        self.config, self.dtype, self.kind = config, dtype, experts
        self.quantised: Sequence[int] = ()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in config.tensors().items():
            learnt = not name.endswith("e_score_correction_bias")  # moved by its experts' loads
            tensor = nn.Parameter(_begin(name, shape, generator), requires_grad=learnt)
            self.register_parameter(name.replace(".", "/"), tensor)
        for theta in sorted({theta for theta in config.thetas if theta}):
            table = rotary_table(rotary_frequencies(theta, config.head_dim), config.context)
            self.register_buffer(f"rope_{theta:g}", torch.from_numpy(table), persistent=False)
        self._layer: Callable[..., tuple[torch.Tensor, torch.Tensor]] = self.layer

    @property
    def tensors(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in a checkpoint."""
        return {name.replace("/", "."): tensor for name, tensor in self.named_parameters()}

    def compile(self) -> None:
        """Fuse each layer; layers of a kind share one program."""
        self._layer = torch.compile(self.layer, dynamic=False)

    def used(self) -> dict[str, torch.Tensor]:
        """All weights as a forward pass uses them: rounded where the release rounds them."""
        weights: dict[str, torch.Tensor] = {}
        for name, tensor in self.tensors.items():
            if any(name.startswith(f"{PREFIX}.layers.{i}.mlp.experts.") for i in self.quantised):
                if name.endswith("gate_up_proj"):
                    weights[name] = rounded(tensor, 2).to(self.dtype)
                    continue
                if name.endswith("down_proj"):
                    weights[name] = rounded(tensor, 1).to(self.dtype)
                    continue
            matrix = tensor.ndim > 1 and not name.endswith("mlp.gate.weight")
            weights[name] = tensor.to(self.dtype) if matrix else tensor
        return weights

    def forward(
        self, inputs: Inputs, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Logits [B, T, vocab] float32, the stream after each tap, and rows routed to each expert
        of each layer, [layers, E].
        """
        config, weights = self.config, self.used()
        table = weights[f"{PREFIX}.embed_tokens.weight"]
        s = rms(functional.embedding(inputs.ids, table), config.eps)
        # Fused for training alone: probes have other shapes, and a program for each takes long.
        run = self._layer if torch.is_grad_enabled() else self.layer
        streams, loads = [], []
        for layer in range(config.layers):
            theta = config.thetas[layer]
            rope = getattr(self, f"rope_{theta:g}")[inputs.position] if theta else None
            own = layer_weights(weights, layer)
            s, load = run(own, s, rope, inputs.seen[config.windows[layer]])
            loads.append(load)
            if layer in taps:
                streams.append(s)
        x = (rms(s, config.eps) * weights[f"{PREFIX}.norm.weight"]).to(self.dtype)
        logits = (x @ weights["lm_head.weight"].T).float() * config.output_multiplier
        return config.softcap * torch.tanh(logits / config.softcap), streams, torch.stack(loads)

    def layer(
        self, own: Weights, s: torch.Tensor, rope: torch.Tensor | None, seen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer: the stream [B, T, hidden] after it, and its experts' loads."""
        config = self.config
        a = centred(s, own["input_layernorm.weight"], config.eps).to(self.dtype)
        n = rms(self.attention(own, a, rope, seen), config.post_eps).to(self.dtype)
        s = gated(config, own["post_attention_residual_gate.gate"], s, n)
        f = centred(s, own["pre_feedforward_layernorm.weight"], config.eps).to(self.dtype)
        b, load = self.experts(own, f.flatten(0, 1))
        n = scaled(b, own["post_feedforward_layernorm.weight"], config.post_eps).view_as(f)
        return gated(config, own["post_feedforward_residual_gate.gate"], s, n), load

    def attention(
        self, own: Weights, a: torch.Tensor, rope: torch.Tensor | None, seen: torch.Tensor
    ) -> torch.Tensor:
        """As `reference.attention`, for batches."""
        config = self.config
        shape = (*a.shape[:2], -1, config.head_dim)
        q = (a @ own["self_attn.q_proj.weight"].T).view(shape)
        k = (a @ own["self_attn.k_proj.weight"].T).view(shape)
        v = (a @ own["self_attn.v_proj.weight"].T).view(shape)
        q, k = rms(q, config.eps).to(a.dtype), rms(k, config.eps).to(a.dtype)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        group = config.heads // config.kv_heads
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(
            q,
            k.repeat_interleave(group, 1),
            v.repeat_interleave(group, 1),
            attn_mask=seen,
            scale=config.qk_scale * config.head_dim**-0.5,
        )
        out = rms(out.transpose(1, 2), config.eps).to(a.dtype).flatten(2)
        out = out * torch.sigmoid(a @ own["self_attn.gate_proj.weight"].T)
        return out @ own["self_attn.o_proj.weight"].T

    def experts(self, own: Weights, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `reference.experts`, for rows f [N, hidden]; and how many rows each expert has."""
        config = self.config
        z = f @ own["mlp.pre_expert_proj.weight"].T
        z = centred(z, own["mlp.pre_expert_norm.weight"], config.eps)
        logits = (f.float() @ own["mlp.gate.weight"].T) * config.output_multiplier
        p = torch.sigmoid(logits)
        bias = own["mlp.gate.e_score_correction_bias"]
        chosen = (p.detach() + bias).topk(config.top_k, -1).indices
        weight = p.gather(1, chosen)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-15) * config.routed_factor
        load = torch.zeros_like(bias).scatter_add_(
            0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=bias.dtype)
        )
        mix = grouped if self.kind == "grouped" else dense
        return mix(config, own, z, chosen, weight) @ own["mlp.post_expert_proj.weight"].T, load


def dense(
    config: MuseSparkConfig,
    own: Weights,
    z: torch.Tensor,
    chosen: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """The chosen experts' sum [N, M], by computing all of them."""
    share = torch.zeros(len(z), config.experts, device=z.device).scatter(1, chosen, weight)
    rows = z.expand(config.experts, -1, -1)
    gate, up = (rows @ own["mlp.experts.gate_up_proj"].transpose(1, 2)).chunk(2, -1)
    d = (functional.silu(gate) * up) @ own["mlp.experts.down_proj"].transpose(1, 2)
    d = scaled(d, own["mlp.experts.post_expert_norm.weight"], config.post_eps)
    return torch.einsum("enm,ne->nm", d, share.to(d.dtype))


def grouped(
    config: MuseSparkConfig,
    own: Weights,
    z: torch.Tensor,
    chosen: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """The same by sorting: each (row, expert) pair has a slot, and an expert's slots lie together,
    a multiple of eight of them, the rest zeros.
    """
    pairs, experts = chosen.numel(), config.experts
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    one = torch.ones_like(flat)
    counts = torch.zeros(experts, dtype=flat.dtype, device=flat.device).scatter_add_(0, flat, one)
    padded = (counts + _ALIGNED_ROWS - 1) // _ALIGNED_ROWS * _ALIGNED_ROWS
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    slot_of_sorted = torch.arange(pairs, device=flat.device) + shift[flat[order]]
    slots = pairs + experts * _ALIGNED_ROWS
    slot_of_pair = torch.empty_like(flat).scatter_(0, order, slot_of_sorted)
    pair_of_slot = torch.full((slots,), pairs, device=flat.device, dtype=flat.dtype)
    pair_of_slot = pair_of_slot.scatter(0, slot_of_sorted, order)
    # The last expert takes what is left: its rows are zeros too, and no row stays unwritten.
    offsets = torch.where(torch.arange(experts, device=flat.device) == experts - 1, slots, ends)
    offsets = offsets.to(torch.int32)
    x = _ToSlots.apply(z, pair_of_slot, slot_of_pair, config.top_k)
    gate_up = own["mlp.experts.gate_up_proj"].transpose(1, 2)
    gate, up = functional.grouped_mm(x, gate_up, offs=offsets).chunk(2, -1)
    h = functional.silu(gate) * up
    d = functional.grouped_mm(h, own["mlp.experts.down_proj"].transpose(1, 2), offs=offsets)
    d = scaled(d, own["mlp.experts.post_expert_norm.weight"], config.post_eps)
    d = _FromSlots.apply(d, pair_of_slot, slot_of_pair).unflatten(0, (-1, config.top_k))
    return (d * weight[..., None].to(d.dtype)).sum(1)


class _ToSlots(torch.autograd.Function):
    """Rows to the slots of their pairs. Backward gathers too: no atomics, the same bits again."""

    @staticmethod
    def forward(
        ctx: Any, z: torch.Tensor, pair_of_slot: torch.Tensor, slot_of_pair: torch.Tensor, k: int
    ) -> torch.Tensor:
        ctx.save_for_backward(slot_of_pair)
        ctx.top_k = k
        return functional.pad(z, (0, 0, 0, 1))[pair_of_slot // k]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slot_of_pair,) = ctx.saved_tensors
        return grads[0][slot_of_pair].unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class _FromSlots(torch.autograd.Function):
    """Slots back to pairs, in the order of rows."""

    @staticmethod
    def forward(
        ctx: Any, d: torch.Tensor, pair_of_slot: torch.Tensor, slot_of_pair: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(pair_of_slot)
        return d[slot_of_pair]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (pair_of_slot,) = ctx.saved_tensors
        return functional.pad(grads[0], (0, 0, 0, 1))[pair_of_slot], None, None


def masks(
    document: torch.Tensor, position: torch.Tensor, windows: Sequence[int], dtype: torch.dtype
) -> dict[int, torch.Tensor]:
    """For each window, what a row adds to its scores: 0 where it sees, -inf elsewhere; itself
    always, so that padding has a softmax. [B, 1, T, T].
    """
    distance = position[:, :, None] - position[:, None]
    same = document[:, :, None] == document[:, None]
    same = (same & (document > 0)[:, None]) | torch.eye(
        document.shape[1], dtype=torch.bool, device=document.device
    )
    found = {}
    for window in sorted(set(windows)):
        seen = same & (distance >= 0)
        if window:
            seen = seen & (distance < window)
        zero = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        found[window] = zero.masked_fill(~seen, float("-inf"))[:, None]
    return found


def _begin(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A tensor's first values."""
    if name.endswith("embed_tokens.weight"):
        return torch.randn(shape, generator=generator)
    if name.endswith("mlp.gate.weight"):
        return _ROUTER_BEGIN * torch.randn(shape, generator=generator)
    if name == "lm_head.weight" or len(shape) == 1:
        gate, norm = name.endswith("residual_gate.gate"), name == f"{PREFIX}.norm.weight"
        return torch.full(shape, _GATE_BEGIN if gate else float(norm))
    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5
