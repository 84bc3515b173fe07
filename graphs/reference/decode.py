"""Llama-type decoding in plain torch over a static cache: one step, as a CUDA graph captures it.

The peer of every llama-like case: the same shapes, fused qkv and gate/up, greedy choice, token and
position fed back on the device. Runs on a CPU too, where tests hold it to reference/llama.py.
Legend: H heads, K kv heads, D head dimension, C positions of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from gpurt.graphs.llama import LlamaConfig, rope_table
from gpurt.graphs.qwen3_moe import Qwen3MoeConfig


class Decoder:
    """A model and its cache. Weights are given by their checkpoint names, or made on the device."""

    def __init__(
        self,
        config: LlamaConfig,
        context: int,
        weights: Mapping[str, torch.Tensor] | None = None,
        *,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.config, self.context, self.device, self.dtype = config, context, device, dtype
        self._weights = weights
        self._generator = torch.Generator(device).manual_seed(1)
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.table = self._matrix("model.embed_tokens", config.vocab, config.hidden)
        self.layers = [self._layer(i, q, kv) for i in range(config.layers)]
        self.norm = self._vector("model.norm.weight", config.hidden)
        head = self.table if config.tied else self._matrix("lm_head", config.vocab, config.hidden)
        self.head = head
        shape = (config.layers, 2, config.kv_heads, context, config.head_dim)
        self.cache = torch.zeros(shape, dtype=dtype, device=device)
        self.rope = torch.from_numpy(rope_table(config, context)).to(device, dtype)
        self.columns = torch.arange(context, device=device)
        self.token = torch.zeros(1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self._forward: Callable[..., torch.Tensor] = self.forward

    # ---- use ---------------------------------------------------------------------------------
    def compile(self) -> Decoder:
        """Let torch fuse what it can."""
        self._forward = torch.compile(self.forward, dynamic=False)
        return self

    def step(self) -> None:
        """Decode one token; token and position move on."""
        logits = self._forward(self.token, self.position)
        self.token.copy_(logits[-1:].argmax(-1))
        self.position.add_(1)

    def prefill(self, tokens: torch.Tensor) -> None:
        """Choose the token that follows a whole prompt; its K/V go to the cache."""
        positions = self.columns[: len(tokens)]
        self.token.copy_(self._forward(tokens, positions, whole=True)[-1:].argmax(-1))
        self.position.fill_(len(tokens))

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, *, whole: bool = False
    ) -> torch.Tensor:
        """Logits of rows of one sequence at `positions`, [T, vocab]; their K/V go to the cache.

        whole: the rows are all of a prompt, of which only the last row's logits are wanted.
        """
        x = self.table[tokens]
        rope = self.rope[positions]
        mask = None if whole else self.columns <= positions[:, None]
        for layer, own in enumerate(self.layers):
            x = x + self._attention(layer, own, x, positions, rope, mask)
            normed = self._rms(x, own["mlp.norm"])
            x = x + (self._experts(own, normed) if "router" in own else self._mlp(own, normed))
        x = x[-1:] if whole else x
        return functional.linear(self._rms(x, self.norm), self.head)

    # ---- layers ------------------------------------------------------------------------------
    def _attention(
        self,
        layer: int,
        own: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        positions: torch.Tensor,
        rope: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        config, rows = self.config, x.shape[0]
        heads, kv_heads = config.heads, config.kv_heads
        qkv = functional.linear(self._rms(x, own["norm"]), own["qkv"])
        qkv_THD = qkv.view(rows, heads + 2 * kv_heads, config.head_dim)
        q_THD, k_TKD, v_TKD = qkv_THD.split([heads, kv_heads, kv_heads], 1)
        if config.qk_norm:
            q_THD, k_TKD = self._rms(q_THD, own["q_norm"]), self._rms(k_TKD, own["k_norm"])
        keys, values = _rotate(k_TKD, rope).transpose(0, 1), v_TKD.transpose(0, 1)
        cache = self.cache[layer]
        cache[0].index_copy_(1, positions, keys)
        cache[1].index_copy_(1, positions, values)
        if mask is not None:
            keys, values = cache[0], cache[1]
        out = functional.scaled_dot_product_attention(
            _rotate(q_THD, rope).transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=None if mask is None else mask[None, None],
            is_causal=mask is None,
            enable_gqa=True,
        )
        return functional.linear(out[0].transpose(0, 1).reshape(rows, -1), own["o"])

    def _mlp(self, own: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(x, own["gate_up"]).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, own["down"])

    def _experts(self, own: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Of every row the chosen experts' matrices, gathered: shapes are static, so a graph can
        hold it.
        """
        config = self.config
        assert isinstance(config, Qwen3MoeConfig)
        p = functional.linear(x.float(), own["router"].float()).softmax(-1)
        weight, chosen = p.topk(config.top_k, -1)
        if config.norm_topk:
            weight = weight / weight.sum(-1, keepdim=True)
        gate, up = torch.einsum("tenk,tk->ten", own["experts.up"][chosen], x).chunk(2, -1)
        d = torch.einsum("tenk,tek->ten", own["experts.down"][chosen], functional.silu(gate) * up)
        return (d * weight[..., None].to(d.dtype)).sum(1)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.config.eps)

    # ---- weights -----------------------------------------------------------------------------
    def _layer(self, layer: int, q: int, kv: int) -> dict[str, torch.Tensor]:
        config, at = self.config, f"model.layers.{layer}"
        hidden = config.hidden
        own = {
            "norm": self._vector(f"{at}.input_layernorm.weight", hidden),
            "mlp.norm": self._vector(f"{at}.post_attention_layernorm.weight", hidden),
            "qkv": self._stack(
                [(f"{at}.self_attn.{n}_proj", r) for n, r in (("q", q), ("k", kv), ("v", kv))],
                hidden,
            ),
            "o": self._matrix(f"{at}.self_attn.o_proj", hidden, q),
        }
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                vector = self._vector(f"{at}.self_attn.{name}.weight", config.head_dim)
                own[name] = vector
        if isinstance(config, Qwen3MoeConfig) and config.sparse[layer]:
            return own | self._expert_weights(config, at)
        inner = config.intermediate
        pair = [(f"{at}.mlp.{n}_proj", inner) for n in ("gate", "up")]
        own["gate_up"] = self._stack(pair, hidden)
        own["down"] = self._matrix(f"{at}.mlp.down_proj", hidden, inner)
        return own

    def _expert_weights(self, config: Qwen3MoeConfig, at: str) -> dict[str, torch.Tensor]:
        inner, hidden, mlp = config.moe_intermediate, config.hidden, f"{at}.mlp"
        if self._weights is None:
            count = config.experts
            return {
                "router": self._made((config.experts, hidden)),
                "experts.up": self._made((count, 2 * inner, hidden)),
                "experts.down": self._made((count, hidden, inner)),
            }
        ups, downs = [], []
        for expert in range(config.experts):
            one = f"{mlp}.experts.{expert}"
            ups.append(self._stack([(f"{one}.{n}_proj", inner) for n in ("gate", "up")], hidden))
            downs.append(self._matrix(f"{one}.down_proj", hidden, inner))
        router = self._matrix(f"{mlp}.gate", config.experts, hidden)
        return {
            "router": router,
            "experts.up": torch.stack(ups),
            "experts.down": torch.stack(downs),
        }

    def _stack(self, parts: list[tuple[str, int]], columns: int) -> torch.Tensor:
        return torch.cat([self._matrix(name, rows, columns) for name, rows in parts])

    def _matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        if self._weights is None:
            return self._made((rows, columns))
        return self._weights[f"{name}.weight"].to(self.device, self.dtype)

    def _vector(self, name: str, size: int) -> torch.Tensor:
        if self._weights is None:
            return torch.ones(size, dtype=self.dtype, device=self.device)
        return self._weights[name].to(self.device, self.dtype)

    def _made(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Numbers with which activations keep their size; nothing in memory beside them."""
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        return out.normal_(0, shape[-1] ** -0.5, generator=self._generator)


def _rotate(x_THD: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the pairs (i, i + D/2); rope: [T, D], cosines then sines."""
    half = x_THD.shape[-1] // 2
    cos, sin = rope[:, None, :half], rope[:, None, half:]
    low, high = x_THD[..., :half], x_THD[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
