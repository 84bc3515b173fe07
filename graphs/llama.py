"""Llama-type models as a Graph: six operators a layer, five of them one after another.

Covers model_type llama and qwen3: RMSNorm, rotary embedding, grouped-query attention over a paged
cache, SwiGLU, tied or untied head, and Qwen3's norm of queries and keys.

One layer, as the critical path sees it (q and kv are independent of each other):

  x -> [norm, Wq] -> q  -.                                                           .-> x'
  x -> [norm, Wkv] -> kv -> attention -> [Wo] + x -> h -> [norm, Wgu, swiglu] -> m -> [Wd] + h

Every layer has its own activation buffers, never reused, so a payload edge may carry any of them.
Legend: B rows, H heads, K kv heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.buffer import DTYPES, Buffer, f32
from gpurt.graph import Graph
from gpurt.graphs.bounds import empty_graph
from gpurt.graphs.drafters import add_drafter
from gpurt.graphs.ops.attention import attention
from gpurt.graphs.ops.embed import embed
from gpurt.graphs.ops.matvec import matvec
from gpurt.graphs.ops.sample import sample
from gpurt.graphs.weights import converted, rotary_frequencies, rotary_table, stack
from gpurt.wire import PROPOSALS_PER_SLOT

if TYPE_CHECKING:
    from gpurt.loaders.model import WeightSource

# Positions of a cache page, and of a chunk of attention's sums. Fixed, so that a token's bits
# depend on no bound of the plan.
PAGE = 64


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of low rotary frequencies. Source: the Llama 3.1 reference code."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class LlamaConfig:
    """What a checkpoint's config says, in the field's terms."""

    architecture: str  # "llama" or "qwen3"
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    rope_theta: float
    context: int  # positions the model was made for
    tied: bool
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint must hold."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden)
        }
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            shapes[f"{at}.input_layernorm.weight"] = (self.hidden,)
            shapes[f"{at}.self_attn.q_proj.weight"] = (q, self.hidden)
            shapes[f"{at}.self_attn.k_proj.weight"] = (kv, self.hidden)
            shapes[f"{at}.self_attn.v_proj.weight"] = (kv, self.hidden)
            if self.qk_norm:
                shapes[f"{at}.self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{at}.self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[f"{at}.self_attn.o_proj.weight"] = (self.hidden, q)
            shapes[f"{at}.post_attention_layernorm.weight"] = (self.hidden,)
            shapes[f"{at}.mlp.gate_proj.weight"] = (self.intermediate, self.hidden)
            shapes[f"{at}.mlp.up_proj.weight"] = (self.intermediate, self.hidden)
            shapes[f"{at}.mlp.down_proj.weight"] = (self.hidden, self.intermediate)
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes

    def tensor_dtypes(self) -> dict[str, str]:
        """Tensors that must be stored in one dtype: none, any that is read will do."""
        return {}

    def ignored_tensors(self) -> list[str]:
        """Tensors that older exports carry and that follow from the config."""
        names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(self.layers)]
        return [*names, "lm_head.weight"] if self.tied else names


def build(
    config: LlamaConfig,
    weights: Mapping[str, WeightSource],
    *,
    rows: int = 16,
    slots: int = 1,
    context: int | None = None,
    kv_dtype: str = "f32",
    weight_dtype: str | None = None,
    draft: str = "none",
    proposals: int = PROPOSALS_PER_SLOT,
) -> Graph:
    """The Graph of one step.

    rows: tokens one step can carry. slots: sequences one step can mix. context: positions of one
    sequence; default: the model's, at most 2048. kv_dtype: f32, bf16 or f16. weight_dtype: f32,
    f16 or bf16 for all matrices; default: as stored. draft: none, or ngram, which proposes up to
    `proposals` tokens a step. Weights are read when the plan is loaded.
    Raises: BoundError if context exceeds the model's; GraphError for an unknown dtype or drafter.
    """
    graph = empty_graph(config, "llama.build", rows, slots, context, kv_dtype, weight_dtype)
    LlamaBuilder(graph, config, weights, kv_dtype, weight_dtype).build()
    return add_drafter(graph, draft, proposals)


def rope_table(config: LlamaConfig, context: int) -> NDArray[np.float32]:
    """[context, D]: cosines of the D/2 angles, then their sines. Source: RoFormer, 2104.09864."""
    frequencies = rotary_frequencies(config.rope_theta, config.head_dim)
    if config.rope_scaling is not None:
        frequencies = _llama3_frequencies(frequencies, config.rope_scaling)
    return rotary_table(frequencies, context)


class LlamaBuilder:
    """One call of `build`: the graph under construction and what all layers share. A model that
    differs in its MLP overrides `mlp`.
    """

    def __init__(
        self,
        graph: Graph,
        config: LlamaConfig,
        weights: Mapping[str, WeightSource],
        kv_dtype: str,
        weight_dtype: str | None,
    ) -> None:
        self.graph, self.config, self.weights = graph, config, weights
        self.kv_dtype = kv_dtype
        self.weight_dtype = None if weight_dtype is None else DTYPES[weight_dtype]
        self.pages_per_slot = -(-graph.context // PAGE)
        pages = graph.slots * self.pages_per_slot
        self.page_table = graph.state(
            "page_table",
            [graph.slots, self.pages_per_slot],
            "u32",
            source=np.arange(pages, dtype=np.uint32).reshape(graph.slots, -1),
        )
        self.rope = graph.weight(
            "rope",
            [graph.context, config.head_dim],
            f32,
            lambda: rope_table(config, graph.context),
        )

    def build(self) -> Graph:
        """All operators, from tokens to tokens."""
        graph, config = self.graph, self.config
        x = self.activation("embed.x", config.hidden)
        table = self.matrix("embed.table", "model.embed_tokens")
        embed(graph, table, x)
        for layer in range(config.layers):
            with graph.at(f"layers[{layer}]", layer=layer):
                x = self.layer(layer, x)
        with graph.at("head", layer=config.layers):
            head = table if config.tied else self.matrix("head.w", "lm_head")
            logits = self.activation("logits", config.vocab)
            matvec(
                graph,
                x,
                head,
                logits,
                norm=self.vector("head.norm", "model.norm"),
                sampled=True,
                eps=config.eps,
                name="head",
            )
            sample(graph, logits)
        return graph

    def layer(self, layer: int, x: Buffer) -> Buffer:
        """One layer: the next x."""
        graph, config = self.graph, self.config
        at, source = f"layers[{layer}]", f"model.layers.{layer}"
        out = self.attention(layer, x)
        h = self.activation(f"{at}.h", config.hidden)
        o_proj = self.matrix(f"{at}.o.w", f"{source}.self_attn.o_proj")
        matvec(graph, out, o_proj, h, residual=x, name="o")
        return self.mlp(layer, h)

    def mlp(self, layer: int, h: Buffer) -> Buffer:
        """H plus the MLP of its norm: the layer's output."""
        graph, config = self.graph, self.config
        at, source = f"layers[{layer}]", f"model.layers.{layer}"
        m = self.activation(f"{at}.m", config.intermediate)
        matvec(
            graph,
            h,
            self.matrix(
                f"{at}.gate_up.w",
                f"{source}.mlp.gate_proj",
                f"{source}.mlp.up_proj",
                interleaved=True,
            ),
            m,
            norm=self.vector(f"{at}.mlp.norm", f"{source}.post_attention_layernorm"),
            swiglu=True,
            eps=config.eps,
            name="gate_up",
        )
        y = self.activation(f"{at}.y", config.hidden)
        down = self.matrix(f"{at}.down.w", f"{source}.mlp.down_proj")
        matvec(graph, m, down, y, residual=h, name="down")
        return y

    def attention(self, layer: int, x: Buffer) -> Buffer:
        """The heads' outputs, before Wo."""
        graph, config = self.graph, self.config
        at, source = f"layers[{layer}]", f"model.layers.{layer}"
        head_dim = config.head_dim
        norm = self.vector(f"{at}.attention.norm", f"{source}.input_layernorm")
        q = self.activation(f"{at}.q", config.heads * head_dim)
        q_proj = self.matrix(f"{at}.q.w", f"{source}.self_attn.q_proj")
        matvec(graph, x, q_proj, q, norm=norm, eps=config.eps, name="q")
        kv = self.activation(f"{at}.kv", 2 * config.kv_heads * head_dim)
        kv_proj = self.matrix(
            f"{at}.kv.w", f"{source}.self_attn.k_proj", f"{source}.self_attn.v_proj"
        )
        matvec(graph, x, kv_proj, kv, norm=norm, eps=config.eps, name="kv")
        cache = [self.page_table.shape[0] * self.pages_per_slot, config.kv_heads, PAGE, head_dim]
        out = self.activation(f"{at}.attention.out", config.heads * head_dim)
        attention(
            graph,
            q,
            kv,
            graph.state(f"{at}.k_cache", cache, self.kv_dtype),
            graph.state(f"{at}.v_cache", cache, self.kv_dtype),
            self.page_table,
            self.rope,
            out,
            heads=config.heads,
            qk_norm=self.qk_norm(f"{at}.qk_norm", source) if config.qk_norm else None,
            eps=config.eps,
        )
        return out

    def activation(self, name: str, width: int) -> Buffer:
        """A float32 buffer of one row a token."""
        return self.graph.row_activation(name, width, f32)

    def matrix(self, name: str, *tensors: str, interleaved: bool = False) -> Buffer:
        """One or more matrices, stacked by rows. Mixed dtypes are all read as float32: exact."""
        sources = [self.weights[f"{tensor}.weight"] for tensor in tensors]
        stored = {source.dtype.name for source in sources}
        dtype = self.weight_dtype or (sources[0].dtype if len(stored) == 1 else f32)
        rows = sum(source.shape[0] for source in sources)
        load = stack(sources, dtype, interleaved=interleaved)
        return self.graph.weight(name, [rows, sources[0].shape[1]], dtype, load)

    def vector(self, name: str, tensor: str) -> Buffer:
        """A vector as float32."""
        source = self.weights[f"{tensor}.weight"]
        return self.graph.weight(name, source.shape, f32, stack([source], f32))

    def qk_norm(self, name: str, source: str) -> Buffer:
        """Norm weights of queries and of keys."""
        pair = [self.weights[f"{source}.self_attn.{which}_norm.weight"] for which in "qk"]

        def load() -> NDArray[Any]:
            return np.stack([converted(part, f32) for part in pair])

        return self.graph.weight(name, [2, self.config.head_dim], f32, load)


def _llama3_frequencies(
    frequencies: NDArray[np.float32], scaling: RopeScaling
) -> NDArray[np.float32]:
    """Long waves are slowed by `factor`, short ones kept, those between are blended."""
    waves = 2 * math.pi / frequencies
    low = scaling.original_context / scaling.low_freq_factor
    high = scaling.original_context / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = (scaling.original_context / waves - scaling.low_freq_factor) / span
    mixed = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    slowed = np.where(waves > low, frequencies / scaling.factor, mixed)
    return np.where(waves < high, frequencies, slowed).astype(np.float32)
