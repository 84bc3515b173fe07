"""Muse Spark's step in plain torch over a static cache: one rank's share, as a CUDA graph captures
it, one kernel an operator. The baseline of the muse-slice cases.

torch.matmul for everything in bf16; the experts by a kernel that the caller gives, because torch
has none for nvfp4. Collectives are left out: a rank's part stands for the whole, repeated where
shapes ask for it. Runs on a CPU too, where tests hold it to reference/muse_spark.py.
Legend: B rows, H heads, K kv heads, D head dimension, C positions of the cache, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from gpurt.graphs.muse_spark_config import PREFIX, MuseSparkConfig
from gpurt.graphs.reference.muse_spark import centred, gated, rms, rotate, scaled
from gpurt.graphs.weights import rotary_frequencies, rotary_table

Weights = Mapping[str, torch.Tensor]
_SUM_FLOOR = 1e-15
_SCALE_FIRST, _SCALE_COUNT = 0x28, 16  # made-up scales: e4m3 from 0.25 to 0.94


@dataclass(frozen=True)
class Half:
    """One half of all experts, as the kernel takes it; rows of gate and up in turn with swiglu.

    w: [E, N, K] in the model's dtype, or codes [E, N, K / 2] u8. scales: [E, N, K / 16] u8, e4m3;
    second: [E, 2] f32; both None where w has a dtype of its own.
    """

    w: torch.Tensor
    scales: torch.Tensor | None
    second: torch.Tensor | None
    n: int
    k: int
    swiglu: bool


@dataclass(frozen=True)
class Routes:
    """Who uses which expert: counts [E]; users, pairs [E, B]: rows of x and of y, users first."""

    counts: torch.Tensor
    users: torch.Tensor
    pairs: torch.Tensor


# (half, x, routes, y): fills the rows of y that `pairs` names.
Experts = Callable[[Half, torch.Tensor, Routes, torch.Tensor], None]


def routes_of(chosen_BT: torch.Tensor, experts: int) -> Routes:
    """Who uses which expert, from every row's choice, ascending. Shapes are static: the users of an
    expert lie first in its row, the rest of which is not used.
    """
    rows, top_k = chosen_BT.shape
    mask = torch.zeros(rows, experts, dtype=torch.bool, device=chosen_BT.device)
    mask.scatter_(1, chosen_BT, True)
    users_EB = torch.argsort((~mask).int(), dim=0, stable=True).T.contiguous()
    rank_EB = (mask.cumsum(1) - 1).T.gather(1, users_EB)
    pairs_EB = (users_EB * top_k + rank_EB).clamp(min=0)
    return Routes(mask.sum(0).int(), users_EB.int(), pairs_EB.int())


def by_pair(routes: Routes) -> Routes:
    """The same where x has a row a pair, as y of the first half has."""
    return Routes(routes.counts, routes.pairs, routes.pairs)


class Maker:
    """Made-up weights on the device, with nothing in memory beside them."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(1)

    def matrix(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Numbers with which activations keep their size."""
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        return out.normal_(0, shape[-1] ** -0.5, generator=self._generator)

    def half(self, shape: tuple[int, int, int], swiglu: bool, *, quantised: bool) -> Half:
        """[E, N, K] of one half, in nvfp4 or the dtype."""
        experts, n, k = shape
        if not quantised:
            return Half(self.matrix(shape), None, None, n, k, swiglu)
        codes = self._bytes((experts, n, k // 2), 0, 256)
        scales = self._bytes((experts, n, k // 16), _SCALE_FIRST, _SCALE_FIRST + _SCALE_COUNT)
        second = torch.full((experts, 2), 0.6 * k**-0.5, device=self.device)
        return Half(codes, scales, second, n, k, swiglu)

    def experts(self, count: int, width: int, inner: int, *, quantised: bool) -> tuple[Half, Half]:
        """Both halves."""
        up = self.half((count, 2 * inner, width), True, quantised=quantised)
        return up, self.half((count, width, inner), False, quantised=quantised)

    def _bytes(self, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        out = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return out.random_(low, high, generator=self._generator)


class Slice:
    """One rank of `ranks`, decoding `rows` rows of one sequence a step."""

    def __init__(
        self,
        config: MuseSparkConfig,
        context: int,
        experts: Experts,
        *,
        rows: int,
        ranks: int = 1,
        weights: Weights | None = None,
        forced: Callable[[int], torch.Tensor] | None = None,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """weights: by their checkpoint names, for one rank; made on the device without. forced: of
        a layer, [any, top_k] ids that take the place of its choice, by position.
        """
        self.config, self.context, self.experts = config, context, experts
        self.rows, self.ranks, self.device, self.dtype = rows, ranks, device, dtype
        self._weights, self._maker = weights, Maker(device, dtype)
        self.table = self._matrix(f"{PREFIX}.embed_tokens.weight", config.vocab, config.hidden)
        self.layers = [self._layer(i) for i in range(config.layers)]
        self.norm = self._vector(f"{PREFIX}.norm.weight", config.hidden)
        self.head = self._matrix("lm_head.weight", config.vocab // ranks, config.hidden)
        self.forced = [None if forced is None else forced(i) for i in range(config.layers)]
        kv_heads = config.kv_heads // ranks
        shape = (config.layers, 2, kv_heads, context, config.head_dim)
        self.cache = torch.zeros(shape, dtype=dtype, device=device)
        self.columns = torch.arange(context, device=device)
        self.ropes = {theta: self._rope(theta) for theta in set(config.thetas) if theta}
        self.tokens = torch.zeros(rows, dtype=torch.long, device=device)
        self.positions = torch.arange(rows, device=device)

    def step(self) -> None:
        """All rows; positions move on."""
        self.logits = self.forward()
        self.tokens.copy_(self.logits.argmax(-1))
        self.positions.add_(self.rows)

    def forward(self) -> torch.Tensor:
        """Logits [B, vocab / ranks] of `tokens` at `positions`; their K/V go to the cache."""
        config = self.config
        s = rms(self.table[self.tokens], config.eps)
        for layer, own in enumerate(self.layers):
            a = centred(s, own["norm"], config.eps).to(self.dtype)
            b = self._attention(layer, own, a)
            s = gated(config, own["attention.gate"], s, rms(b, config.post_eps))
            f = centred(s, own["mlp.norm"], config.eps)
            b = self._mixture(layer, own, f)
            n = scaled(b, own["mlp.gain"], config.post_eps)
            s = gated(config, own["mlp.gate"], s, n)
        x = (rms(s, config.eps) * self.norm.float()).to(self.dtype)
        logits = functional.linear(x, self.head).float() * config.output_multiplier
        return config.softcap * torch.tanh(logits / config.softcap)

    # ---- layers ------------------------------------------------------------------------------
    def _attention(
        self, layer: int, own: Mapping[str, torch.Tensor], a: torch.Tensor
    ) -> torch.Tensor:
        config, rows, dim = self.config, self.rows, self.config.head_dim
        heads, kv_heads = config.heads // self.ranks, config.kv_heads // self.ranks
        q_BHD, g = functional.linear(a, own["qg"]).chunk(2, -1)
        k_BKD, v_BKD = functional.linear(a, own["kv"]).view(rows, 2 * kv_heads, dim).chunk(2, 1)
        q_BHD = rms(q_BHD.view(rows, heads, dim), config.eps).to(self.dtype)
        k_BKD = rms(k_BKD, config.eps).to(self.dtype)
        if config.thetas[layer]:
            rope = self.ropes[config.thetas[layer]][self.positions]
            q_BHD, k_BKD = rotate(q_BHD, rope), rotate(k_BKD, rope)
        keys, values = self.cache[layer]
        keys.index_copy_(1, self.positions, k_BKD.transpose(0, 1))
        values.index_copy_(1, self.positions, v_BKD.transpose(0, 1))
        distance = self.positions[:, None] - self.columns
        visible = distance >= 0
        if config.windows[layer]:
            visible = visible & (distance < config.windows[layer])
        out = functional.scaled_dot_product_attention(
            q_BHD.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=visible[None, None],
            scale=config.qk_scale * dim**-0.5,
            enable_gqa=True,
        )
        out = rms(out[0].transpose(0, 1), config.eps).to(self.dtype).reshape(rows, -1)
        return functional.linear(out * torch.sigmoid(g), own["o"])

    def _mixture(self, layer: int, own: Mapping[str, Any], f: torch.Tensor) -> torch.Tensor:
        config, pairs = self.config, self.rows * self.config.top_k
        chosen, weight = self._route(layer, own, f)
        routes = routes_of(chosen, config.experts)
        z = functional.linear(f.to(self.dtype), own["pre"])
        z = z.repeat(1, self.ranks).float()
        z = centred(z, own["z.norm"], config.eps)
        inner, width = config.moe_intermediate // self.ranks, config.moe_hidden
        h = torch.empty(pairs, inner, device=self.device)
        self.experts(own["up"], z, routes, h)
        d = torch.empty(pairs, width, device=self.device)
        self.experts(own["down"], h, by_pair(routes), d)
        d = scaled(d, own["d.gain"], config.post_eps).view(self.rows, config.top_k, width)
        y = (d * weight[..., None]).sum(1).to(self.dtype)
        return functional.linear(y, own["post"]).repeat(1, self.ranks)

    def _route(
        self, layer: int, own: Mapping[str, torch.Tensor], f: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        p = torch.sigmoid(functional.linear(f.float(), own["router"]) * config.output_multiplier)
        table = self.forced[layer]
        if table is None:
            chosen = (p + own["bias"]).topk(config.top_k, -1).indices.sort(-1).values
        else:
            chosen = table[self.positions % len(table)]
        weight = p.gather(1, chosen)
        weight = weight / (weight.sum(-1, keepdim=True) + _SUM_FLOOR)
        return chosen, weight * config.routed_factor

    # ---- weights -----------------------------------------------------------------------------
    def _layer(self, layer: int) -> dict[str, Any]:
        config, at, ranks = self.config, f"{PREFIX}.layers.{layer}", self.ranks
        hidden, width = config.hidden, config.moe_hidden
        q, kv = (n // ranks * config.head_dim for n in (config.heads, config.kv_heads))
        own, mlp = f"{at}.self_attn", f"{at}.mlp"
        sizes = {"q": q, "gate": q, "k": kv, "v": kv}
        w = {n: self._matrix(f"{own}.{n}_proj.weight", r, hidden) for n, r in sizes.items()}
        return {
            "norm": self._vector(f"{at}.input_layernorm.weight", hidden),
            "qg": torch.cat([w["q"], w["gate"]]),
            "kv": torch.cat([w["k"], w["v"]]),
            "o": self._matrix(f"{own}.o_proj.weight", hidden, q),
            "attention.gate": self._vector(f"{at}.post_attention_residual_gate.gate", hidden),
            "mlp.norm": self._vector(f"{at}.pre_feedforward_layernorm.weight", hidden),
            "mlp.gain": self._vector(f"{at}.post_feedforward_layernorm.weight", hidden),
            "mlp.gate": self._vector(f"{at}.post_feedforward_residual_gate.gate", hidden),
            "router": self._matrix(f"{mlp}.gate.weight", config.experts, hidden).float(),
            "bias": self._vector(f"{mlp}.gate.e_score_correction_bias", config.experts),
            "pre": self._matrix(f"{mlp}.pre_expert_proj.weight", width // ranks, hidden),
            "z.norm": self._vector(f"{mlp}.pre_expert_norm.weight", width),
            "d.gain": self._vector(f"{mlp}.experts.post_expert_norm.weight", width),
            "post": self._matrix(f"{mlp}.post_expert_proj.weight", hidden // ranks, width),
            "up": self._half(layer, f"{mlp}.experts.gate_up_proj", swiglu=True),
            "down": self._half(layer, f"{mlp}.experts.down_proj", swiglu=False),
        }

    def _half(self, layer: int, name: str, *, swiglu: bool) -> Half:
        config, count = self.config, self.config.experts
        inner = config.moe_intermediate // self.ranks
        n, k = (2 * inner, config.moe_hidden) if swiglu else (config.moe_hidden, inner)
        if self._weights is not None:
            w = self._weights[name].to(self.device, self.dtype)
            if swiglu:
                gate, up = w.chunk(2, 1)
                w = torch.stack([gate, up], 2).reshape(count, n, k)
            return Half(w, None, None, n, k, swiglu)
        return self._maker.half((count, n, k), swiglu, quantised=layer in config.quantised)

    def _matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        if self._weights is None:
            return self._maker.matrix((rows, columns))
        return self._weights[name].to(self.device, self.dtype)

    def _vector(self, name: str, size: int) -> torch.Tensor:
        if self._weights is None:
            return torch.zeros(size, device=self.device)
        return self._weights[name].to(self.device).float()

    def _rope(self, theta: float) -> torch.Tensor:
        frequencies = rotary_frequencies(theta, self.config.head_dim)
        return torch.from_numpy(rotary_table(frequencies, self.context)).to(self.device)


def plain_experts(half: Half, x: torch.Tensor, routes: Routes, y: torch.Tensor) -> None:
    """The kernel's contract in torch, expert by expert: for tests, and weights of a dtype only."""
    for expert, count in enumerate(routes.counts.tolist()):
        users, pairs = (part[expert, :count].long() for part in (routes.users, routes.pairs))
        z = functional.linear(x[users].to(half.w.dtype), half.w[expert]).float()
        if half.swiglu:
            z = functional.silu(z[:, 0::2]) * z[:, 1::2]
        y[pairs] = z
