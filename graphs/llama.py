"""Llama-type models as a Graph: six operators a layer, five of them one after another.

Covers model_type llama and qwen3: RMSNorm, rotary embedding, grouped-query attention over a paged
cache, SwiGLU, tied or untied head, and Qwen3's norm of queries and keys.

One layer, as the critical path sees it (q and kv are independent of each other):

  x -> [norm, Wq] -> q  -.                                                           .-> x'
  x -> [norm, Wkv] -> kv -> attention -> [Wo] + x -> h -> [norm, Wgu, swiglu] -> m -> [Wd] + h

With tp_size > 1 a graph is one rank's share: its heads, its part of the MLP's inner width, and its
rows of the head. Wo and Wd then give parts of a sum, which ranks add to x and h in their order; the
logits are gathered. With parts > 1 one rank computes all shares, one after another, and adds them
in the same order: the same bits as that many ranks.

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
from gpurt.errors import GraphError
from gpurt.graph import Graph
from gpurt.graphs import bounds
from gpurt.graphs.bounds import KV_DTYPES, empty_graph
from gpurt.graphs.collectives import all_gather, all_reduce
from gpurt.graphs.dflash import DraftModel, DraftTarget
from gpurt.graphs.drafters import add_drafter
from gpurt.graphs.ops.attention import attention, slot_pages
from gpurt.graphs.ops.embed import embed
from gpurt.graphs.ops.matvec import matvec
from gpurt.graphs.ops.sample import sample
from gpurt.graphs.weights import converted, rotary_frequencies, rotary_table, stack, stacked
from gpurt.graphs.weights import cut as cut_source
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
    draft_model: DraftModel | None = None,
    draft_tree: bool = False,
    tp_size: int = 1,
    tp_rank: int = 0,
    parts: int = 1,
) -> Graph:
    """The Graph of one step.

    rows: tokens one step can carry. slots: sequences one step can mix. context: positions of one
    sequence; default: the model's, at most 2048. kv_dtype: f32, f16, bf16, or fp8: e4m3 without
    scales. weight_dtype: f32, f16 or bf16 for all matrices; default: as stored. draft: one of
    `drafters.DRAFTERS`, which proposes up to `proposals` tokens a step; draft_model: what dflash
    runs; draft_tree: its proposals are a tree. tp_size, tp_rank: one rank's share. parts: shares of
    one rank alone. Weights are read when the plan is loaded.
    Raises: BoundError if context exceeds the model's; GraphError for an unknown dtype or drafter,
    or if the model has no tp_size or parts equal shares.
    """
    check_shares(config, tp_size, parts)
    ranks = {"rank": tp_rank, "rank_count": tp_size}
    where = "llama.build"
    graph = empty_graph(config, where, rows, slots, context, kv_dtype, weight_dtype, **ranks)
    target = LlamaBuilder(graph, config, weights, kv_dtype, weight_dtype, parts).build()
    return add_drafter(graph, draft, proposals, target, draft_model, draft_tree)


def check_shares(config: LlamaConfig, tp_size: int, parts: int) -> None:
    """Raises: GraphError, with the numbers, if ranks or parts cannot have equal shares."""
    if tp_size > 1 and parts > 1:
        msg = f"tp_size is {tp_size} and parts {parts}"
        raise GraphError(f"{msg} - at llama.build - parts are for one rank alone")
    count = max(tp_size, parts)
    sizes = {"heads": config.heads, "kv heads": config.kv_heads, "inner width": config.intermediate}
    if tp_size > 1:
        sizes["vocab"] = config.vocab
    bounds.check_shares(sizes, count, "llama.build")


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
        parts: int = 1,
    ) -> None:
        self.graph, self.config, self.weights = graph, config, weights
        self.kv_dtype = kv_dtype
        # Which shares of the model this graph computes, of how many.
        self.share_count = max(graph.rank_count, parts)
        self.shares = [graph.rank] if graph.rank_count > 1 else list(range(parts))
        self.weight_dtype = None if weight_dtype is None else DTYPES[weight_dtype]
        self.pages_per_slot = -(-graph.context // PAGE)
        self.page_table = slot_pages(graph, "page_table", self.pages_per_slot)
        self.rope = graph.weight(
            "rope",
            [graph.context, config.head_dim],
            f32,
            lambda: rope_table(config, graph.context),
        )

    def build(self) -> DraftTarget:
        """All operators, from tokens to tokens; what of them a drafter may read."""
        graph, config, streams = self.graph, self.config, []
        x = self.activation("embed.x", config.hidden)
        table = self.matrix("embed.table", "model.embed_tokens")
        embed(graph, table, x)
        for layer in range(config.layers):
            with graph.at(f"layers[{layer}]", layer=layer):
                x = self.layer(layer, x)
                streams.append(x)
        with graph.at("head", layer=config.layers):
            ranks = graph.rank_count
            head = table if config.tied and ranks == 1 else self.head()
            logits = self.activation("logits", config.vocab // ranks)
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
            sample(graph, all_gather(graph, logits, ranks, sampled=True))
        kinds = (self.kv_dtype, self.weight_dtype)
        return DraftTarget(streams, table, head, PAGE, *kinds, f32)

    def head(self) -> Buffer:
        """This rank's rows of the head; a tied one is in the table, too, which is whole."""
        name = "model.embed_tokens" if self.config.tied else "lm_head"
        share = self.graph.rank if self.graph.rank_count > 1 else None
        return self.matrix("head.w", name, cut=0, share=share)

    def layer(self, layer: int, x: Buffer) -> Buffer:
        """One layer: the next x."""
        at, source = f"layers[{layer}]", f"model.layers.{layer}"
        outs = [self.attention(layer, x, share) for share in self.shares]
        h = self.reduced(f"{at}.h", outs, f"{at}.o", f"{source}.self_attn.o_proj", x)
        return self.mlp(layer, h)

    def reduced(
        self, name: str, inputs: list[Buffer], weight: str, tensor: str, residual: Buffer
    ) -> Buffer:
        """The residual plus the product of a matrix with the inputs of all shares, added in their
        order. weight: as in "layers[3].o".
        """
        graph, op = self.graph, weight.rsplit(".", 1)[-1]
        if graph.rank_count > 1:
            part = self.activation(f"{name}.part", self.config.hidden)
            w = self.matrix(f"{weight}.w", tensor, cut=1, share=graph.rank)
            matvec(graph, inputs[0], w, part, name=op)
            return all_reduce(graph, part, graph.rank_count, residual=residual)
        for share, x in zip(self.shares, inputs, strict=True):
            last = share == self.shares[-1]
            y = self.activation(name if last else f"{name}{self.suffix(share)}", self.config.hidden)
            w = self.matrix(f"{weight}{self.suffix(share)}.w", tensor, cut=1, share=share)
            matvec(graph, x, w, y, residual=residual, name=op)
            residual = y
        return residual

    def suffix(self, share: int) -> str:
        """What names end with where one graph computes several shares."""
        return f".part{share}" if len(self.shares) > 1 else ""

    def mlp(self, layer: int, h: Buffer) -> Buffer:
        """H plus the MLP of its norm: the layer's output."""
        graph, config = self.graph, self.config
        at, source = f"layers[{layer}]", f"model.layers.{layer}"
        norm = self.vector(f"{at}.mlp.norm", f"{source}.post_attention_layernorm")
        inner = []
        for share in self.shares:
            m = self.activation(
                f"{at}{self.suffix(share)}.m", config.intermediate // self.share_count
            )
            pair = (f"{source}.mlp.gate_proj", f"{source}.mlp.up_proj")
            name = f"{at}{self.suffix(share)}.gate_up.w"
            w = self.matrix(name, *pair, interleaved=True, cut=0, share=share)
            matvec(graph, h, w, m, norm=norm, swiglu=True, eps=config.eps, name="gate_up")
            inner.append(m)
        return self.reduced(f"{at}.y", inner, f"{at}.down", f"{source}.mlp.down_proj", h)

    def attention(self, layer: int, x: Buffer, share: int) -> Buffer:
        """The outputs of a share's heads, before Wo."""
        graph, config = self.graph, self.config
        at, source = f"layers[{layer}]{self.suffix(share)}", f"model.layers.{layer}"
        head_dim = config.head_dim
        heads, kv_heads = config.heads // self.share_count, config.kv_heads // self.share_count
        norm = self.vector(f"{at}.attention.norm", f"{source}.input_layernorm")
        q = self.activation(f"{at}.q", heads * head_dim)
        q_proj = self.matrix(f"{at}.q.w", f"{source}.self_attn.q_proj", cut=0, share=share)
        matvec(graph, x, q_proj, q, norm=norm, eps=config.eps, name="q")
        kv = self.activation(f"{at}.kv", 2 * kv_heads * head_dim)
        pair = (f"{source}.self_attn.k_proj", f"{source}.self_attn.v_proj")
        kv_proj = self.matrix(f"{at}.kv.w", *pair, cut=0, share=share)
        matvec(graph, x, kv_proj, kv, norm=norm, eps=config.eps, name="kv")
        cache = [self.page_table.shape[0] * self.pages_per_slot, kv_heads, PAGE, head_dim]
        out = self.activation(f"{at}.attention.out", heads * head_dim)
        attention(
            graph,
            q,
            kv,
            graph.state(f"{at}.k_cache", cache, KV_DTYPES[self.kv_dtype]),
            graph.state(f"{at}.v_cache", cache, KV_DTYPES[self.kv_dtype]),
            self.page_table,
            self.rope,
            out,
            heads=heads,
            qk_norm=self.qk_norm(f"{at}.qk_norm", source) if config.qk_norm else None,
            eps=config.eps,
        )
        return out

    def activation(self, name: str, width: int) -> Buffer:
        """A float32 buffer of one row a token."""
        return self.graph.row_activation(name, width, f32)

    def matrix(
        self,
        name: str,
        *tensors: str,
        interleaved: bool = False,
        cut: int = 0,
        share: int | None = None,
    ) -> Buffer:
        """One or more matrices, stacked by rows. share: only that part of each, along `cut`."""
        sources = [self.weights[f"{tensor}.weight"] for tensor in tensors]
        if share is not None and self.share_count > 1:
            sources = [cut_source(s, cut, share, self.share_count) for s in sources]
        return stacked(self.graph, name, sources, self.weight_dtype, interleaved=interleaved)

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
