"""DFlash, a block drafter: its config, and its operators behind a target's `sample`.

It reads the target's residual stream after some layers, and in one pass proposes a block: the
anchor (the token just decided) and masks in, one proposal a mask out. DFlash 2 adds a convolution
around every sublayer and a selector that walks a path through each slot's best candidates.
The embedding and the head are the target's. Source: arXiv 2602.06036; the `dflash` package.

With tp_size > 1 a graph is one rank's share: its heads, its part of the MLP's inner width, of the
rows of fc, of the convolutions' projections, of the head and of P. What Wo and down give is summed
over ranks, the rest gathered; of the head only the best candidates. So all ranks walk one path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.buffer import Buffer, DType, bf16, f32, u32
from gpurt.errors import GraphError
from gpurt.graph import Graph, Operand
from gpurt.graphs import weights as read
from gpurt.graphs.bounds import check_shares
from gpurt.graphs.collectives import all_gather, all_reduce, all_reduce_into
from gpurt.graphs.ops.attention import attention, ring_pages, slot_pages
from gpurt.graphs.ops.attention_commit import commit_paths
from gpurt.graphs.ops.block_conv import block_conv
from gpurt.graphs.ops.candidates import candidates, chunk_count
from gpurt.graphs.ops.draft_rows import draft_rows
from gpurt.graphs.ops.draft_walk import draft_walk
from gpurt.graphs.ops.embed import embed
from gpurt.graphs.ops.matvec import matvec
from gpurt.graphs.streams import Stream, normed_matvec, passed_on, with_normed
from gpurt.graphs.weights import rotary_frequencies, rotary_table

if TYPE_CHECKING:
    from gpurt.loaders.model import WeightSource

# Candidates of a slot without a selector: greedy needs one, a sampled choice those that matter.
_PLAIN_TOP_K = 16


@dataclass(frozen=True)
class DFlashConfig:
    """The tuples `windows` and `causal` have one value a layer."""

    hidden: int  # the target's
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int  # the target's
    context: int  # positions the drafter was made for
    eps: float
    theta: float
    windows: tuple[int, ...]  # 0: all positions
    causal: tuple[bool, ...]  # whether a row of a block sees only those before it
    taps: tuple[int, ...]  # layers of the target after which its stream is read
    block: int  # the anchor and its masks
    mask_token: int
    input_scale: float = 1.0  # of the target's embedding
    output_multiplier: float = 1.0  # of the target's logits
    softcap: float = 0.0  # 0: none
    conv_taps: int = 0  # rows that a convolution sees; 0: DFlash 1, as is selector_rank 0
    conv_group: int = 1  # channels that share a dynamic coefficient
    selector_rank: int = 0
    selector_top_k: int = 1  # candidates of a slot
    architecture: str = "dflash"

    @property
    def coefficients(self) -> int:
        """Of a row, for both sides of a convolution."""
        return 2 * self.conv_taps * (self.hidden // self.conv_group)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint must hold."""
        hidden, head_dim = self.hidden, self.head_dim
        q, kv, wide = self.heads * head_dim, self.kv_heads * head_dim, self.intermediate
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.taps) * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        own: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.k_norm.weight": (head_dim,),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (wide, hidden),
            "mlp.up_proj.weight": (wide, hidden),
            "mlp.down_proj.weight": (hidden, wide),
        }
        if self.conv_taps:
            for conv in ("attention_conv", "mlp_conv"):
                own[f"{conv}.base_kernel"] = (2, self.conv_taps, hidden)
                own[f"{conv}.kernel_projection.weight"] = (self.coefficients, hidden)
        for layer in range(self.layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
        if self.selector_rank:
            at, rank = "candidate_selector", self.selector_rank
            shapes[f"{at}.predecessor_codebook"] = (self.vocab, rank)
            shapes[f"{at}.successor_codebook"] = (self.vocab, rank)
            shapes[f"{at}.hidden_projection.weight"] = (rank, hidden)
        return shapes

    def tensor_dtypes(self) -> dict[str, str]:
        """Tensors that must be stored in one dtype: none."""
        return {}

    def ignored_tensors(self) -> list[str]:
        """Tensors that may be there and are not read: copies of the target's, as exporters add."""
        return ["embed_tokens.weight", "lm_head.weight"]


@dataclass(frozen=True)
class DraftModel:
    """A drafter's checkpoint."""

    config: DFlashConfig
    weights: Mapping[str, WeightSource]


@dataclass(frozen=True)
class DraftTarget:
    """What a drafter takes of its target's graph, and how it was built.

    streams: the residual stream after every layer, [rows, hidden] f32. table: the embedding.
    head: of a rank its rows. page: positions of a cache page. head_reads: what the head's x is in
    the target: matrices lie in memory as their x is read, so another would have a second head.
    """

    streams: Sequence[Buffer]
    table: Buffer
    head: Operand
    page: int
    kv_dtype: str
    weight_dtype: DType | None
    head_reads: DType


_Inner = Callable[[Stream, Buffer | None], Buffer]  # (x, residual) -> a rank's term of the sum


@dataclass(frozen=True)
class _Cache:
    """A layer's keys and values, and how they are made."""

    w: Buffer
    qk_norm: Buffer
    keys: Buffer
    values: Buffer
    pages: Buffer


def default_taps(target_layers: int, layers: int) -> tuple[int, ...]:
    """The target's layers that a config without a list means: evenly from 1 to the third last."""
    if layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (layers - 1)) for i in range(layers))


def add_dflash(
    graph: Graph, model: DraftModel, target: DraftTarget, proposals: int, *, tree: bool = False
) -> None:
    """Add a drafter behind `sample`, within the scope that is open.

    proposals: the most that are made; a chain is no longer than the model's own block. tree: when
    greedy they are one, not a chain.
    Raises: GraphError if the drafter is not one for this target, or has no equal shares for the
    graph's ranks.
    """
    _check(graph, model.config, target)
    block = min(model.config.block, proposals + 1)
    nodes = proposals if tree else 0
    _Builder(graph, model, target, block, nodes).build()


def _check(graph: Graph, config: DFlashConfig, target: DraftTarget) -> None:
    """Raises: GraphError."""
    vocab, hidden = target.table.shape
    for what, ours, theirs in (
        ("hidden", config.hidden, hidden),
        ("vocab", config.vocab, vocab),
        ("layers up to", max(config.taps) + 1, len(target.streams)),
    ):
        if ours != theirs if what != "layers up to" else ours > theirs:
            msg = f"the drafter wants a target of {what} {ours}, this one has {theirs}"
            raise GraphError(f"{msg} - at {graph.name}.draft - use the drafter of this model")
    sizes = {"heads": config.heads, "inner width": config.intermediate, "hidden": config.hidden}
    sizes |= {
        "convolution coefficients": config.coefficients,
        "selector rank": config.selector_rank,
    }
    check_shares(sizes, graph.rank_count, f"{graph.name}.draft", config.kv_heads)


class _Builder:
    """One call of `add_dflash`.

      step's rows   streams after the taps -> [fc, hidden_norm, Wk Wv] -> every layer's cache
      table         embed -> layers -> [norm, head] -> candidates -.
                                    -> [norm, P] ------------------> walk -> proposals

    K/V of all rows of the step are written: those of proposals that the target rejects lie at the
    anchor's position and behind, as do those of a block itself, and nobody reads them before the
    rows of later steps have overwritten them.
    """

    def __init__(
        self, graph: Graph, model: DraftModel, target: DraftTarget, block: int, nodes: int
    ) -> None:
        self.graph, self.config, self.weights = graph, model.config, model.weights
        self.target, self.block, self.nodes = target, block, nodes
        self.rank, self.ranks = graph.rank, graph.rank_count
        self.kv_part = read.head_part(model.config.kv_heads, self.rank, self.ranks)
        self.kv_heads = model.config.kv_heads // self.kv_part[1]
        config, self.context = model.config, graph.context + block
        self.capacity = min(graph.slots, graph.rows) * block
        # Of rows that matvecs read: they would round them to bf16 themselves.
        self.dtype = bf16 if target.weight_dtype == bf16 else f32
        self.rounds = self.dtype == bf16 and config.conv_taps > 0  # the body that does is there
        self.vectors: dict[str, Buffer] = {}
        self.page_tables = {w: self.page_table(w) for w in sorted(set(config.windows))}
        frequencies = rotary_frequencies(config.theta, config.head_dim)
        self.rope = graph.weight(
            "draft.rope",
            [self.context, config.head_dim],
            f32,
            lambda: rotary_table(frequencies, self.context),
        )

    def build(self) -> None:
        graph, config = self.graph, self.config
        proposals = graph.draft(self.nodes or self.block - 1, tree=self.nodes > 0)
        context = self.features()
        caches = [self.inject(layer, context) for layer in range(config.layers)]
        if self.nodes:
            commit_paths(graph)
        table = graph.row_table("draft.rows", self.capacity)
        draft_rows(graph, table, block=self.block, mask=config.mask_token)
        with graph.over(table):
            x, options = self.stream("draft.x", 0)
            embed(graph, self.target.table, x.s, scale=config.input_scale, **options)
            for layer, cache in enumerate(caches):
                with graph.at(f"layers[{layer}]"):
                    x = self.layer(layer, cache, x)
            self.propose(x, proposals)

    # ---- the context's keys and values -------------------------------------------------------
    def features(self) -> Stream:
        """The sum over taps of fc's part times the stream: fc of the streams beside each other.
        Where matvecs read bf16 taps are rounded once, and the sum is normed once.
        """
        graph, config, fc = self.graph, self.config, self.weights["fc.weight"]
        total: Buffer | None = None
        rounded: dict[int, Buffer] = {}
        for index, layer in enumerate(config.taps):
            part = self.share(read.cut(fc, 1, index, len(config.taps)), 0)
            y = graph.row_activation(f"draft.fc[{index}]", part.shape[0], f32)
            w = self.weight(f"draft.fc[{index}].w", [part])
            tap = self.target.streams[layer]
            if self.rounds and layer not in rounded:
                rounded[layer] = graph.row_activation(f"draft.tap[{index}]", config.hidden, bf16)
                passed_on(graph, tap, rounded[layer], name="tap")
            matvec(graph, rounded.get(layer, tap), w, y, residual=total, name="fc")
            total = y
        assert total is not None
        gain = self.vector("draft.hidden_norm", "hidden_norm.weight")
        whole = Stream(all_gather(graph, total, self.ranks), gain)
        if not self.rounds:
            return whole
        y = graph.row_activation("draft.context", config.hidden, f32)
        x, options = with_normed(graph, Stream(y, gain), bf16, config.eps)
        passed_on(graph, whole.s, y, name="context", **options)
        return x

    def inject(self, layer: int, context: Stream) -> _Cache:
        """Adds the keys and values of the step's rows to a layer's cache."""
        graph, config, at = self.graph, self.config, f"draft.layers[{layer}]"
        own, width = f"layers.{layer}.self_attn", self.kv_heads * config.head_dim
        pages = self.page_tables[config.windows[layer]]
        shape = [
            pages.shape[0] * pages.shape[1],
            self.kv_heads,
            self.target.page,
            config.head_dim,
        ]
        cache = _Cache(
            self.matrix(f"{at}.kv.w", f"{own}.k_proj", f"{own}.v_proj", part=self.kv_part),
            self.qk_norm(f"{at}.qk_norm", own),
            graph.state(f"{at}.k_cache", shape, self.target.kv_dtype),
            graph.state(f"{at}.v_cache", shape, self.target.kv_dtype),
            pages,
        )
        kv = graph.row_activation(f"{at}.context.kv", 2 * width, f32)
        self.normed_matvec(context, cache.w, kv, name="context_kv")
        self.attention(layer, cache, None, kv, None, name="inject")
        return cache

    def attention(
        self,
        layer: int,
        cache: _Cache,
        q: Buffer | None,
        kv: Buffer,
        out: Buffer | None,
        name: str = "attention",
    ) -> None:
        config = self.config
        attention(
            self.graph,
            q,
            kv,
            cache.keys,
            cache.values,
            cache.pages,
            self.rope,
            out,
            heads=config.heads // self.ranks,
            qk_norm=cache.qk_norm,
            eps=config.eps,
            window=config.windows[layer],
            block=not config.causal[layer],
            sequence_rows=self.graph.rows if q is None else self.block,
            name=name,
        )

    # ---- the block ---------------------------------------------------------------------------
    def layer(self, layer: int, cache: _Cache, x: Stream) -> Stream:
        """The rows of the table after a layer."""

        def attend(x: Stream, residual: Buffer | None) -> Buffer:
            return self.attend(layer, cache, x, residual)

        def mlp(x: Stream, residual: Buffer | None) -> Buffer:
            return self.mlp(layer, x, residual)

        return self.sublayer(2 * layer + 1, self.sublayer(2 * layer, x, attend), mlp)

    def sublayer(self, index: int, x: Stream, inner: _Inner) -> Stream:
        """X plus `inner` of its norm, both convolved if the drafter does: DFlash 2."""
        graph, at = self.graph, f"layers.{index // 2}.{('attention', 'mlp')[index % 2]}"
        if x.normed is None:
            y = inner(x, x.s if self.ranks == 1 else None)
            y = all_reduce(graph, y, self.ranks, residual=x.s)
            return Stream(y, self.gain(index + 1))
        base = self.vector(f"draft.{at}.conv", f"{at}_conv.base_kernel")
        w = self.matrix(f"draft.{at}.conv.w", f"{at}_conv.kernel_projection")
        d = self.activation(f"draft.{at}.conv.d", w.shape[0])
        self.normed_matvec(x, w, d, name="conv")
        d = all_gather(graph, d, self.ranks)
        a = graph.activation(f"draft.{at}.a", x.s.shape, self.dtype)
        block_conv(graph, x.normed, d, base, a, side=0, name="conv_in")
        out, options = self.stream(f"draft.{at}.y", index + 1)

        def add(z: Operand) -> None:
            block_conv(graph, z, d, base, out.s, side=1, residual=x.s, name="conv_out", **options)

        all_reduce_into(graph, inner(x._replace(normed=a), None), self.ranks, add)
        return out

    def stream(self, name: str, index: int) -> tuple[Stream, dict[str, Any]]:
        """What sublayer `index` reads, or the head, and how who makes it norms it, too."""
        x = Stream(self.activation(name, self.config.hidden), self.gain(index))
        is_last = index == 2 * self.config.layers
        if not self.config.conv_taps or (is_last and self.target.head_reads != self.dtype):
            return x, {}
        return with_normed(self.graph, x, self.dtype, self.config.eps)

    def gain(self, index: int) -> Buffer:
        """Of the norm that stands in front of sublayer `index`, or of the head."""
        if index == 2 * self.config.layers:
            return self.vector("draft.norm", "norm.weight")
        which = ("input_layernorm", "post_attention_layernorm")[index % 2]
        return self.vector(f"draft.norm[{index}]", f"layers.{index // 2}.{which}.weight")

    def normed_matvec(self, x: Stream, w: Operand, y: Buffer, **options: Any) -> None:
        normed_matvec(self.graph, x, w, y, self.config.eps, **options)

    def attend(self, layer: int, cache: _Cache, x: Stream, residual: Buffer | None) -> Buffer:
        config, at, own = self.config, f"draft.layers.{layer}", f"layers.{layer}.self_attn"
        width = config.heads // self.ranks * config.head_dim
        q = self.activation(f"{at}.q", width)
        kv = self.activation(f"{at}.kv", 2 * self.kv_heads * config.head_dim)
        self.normed_matvec(x, self.matrix(f"{at}.q.w", f"{own}.q_proj"), q, name="q")
        self.normed_matvec(x, cache.w, kv, name="kv")
        out = self.activation(f"{at}.out", width)
        self.attention(layer, cache, q, kv, out)
        return self.term(f"{at}.o", f"{own}.o_proj", out, residual)

    def mlp(self, layer: int, x: Stream, residual: Buffer | None) -> Buffer:
        at, own = f"draft.layers.{layer}", f"layers.{layer}.mlp"
        m = self.activation(f"{at}.m", self.config.intermediate // self.ranks)
        pair = (f"{own}.gate_proj", f"{own}.up_proj")
        w = self.matrix(f"{at}.gate_up.w", *pair, interleaved=True)
        self.normed_matvec(x, w, m, swiglu=True, name="gate_up")
        return self.term(f"{at}.down", f"{own}.down_proj", m, residual)

    def term(self, name: str, tensor: str, x: Buffer, residual: Buffer | None) -> Buffer:
        """A matrix of which a rank has the columns that x is for, times x."""
        y = self.activation(name, self.config.hidden)
        w = self.matrix(f"{name}.w", tensor, axis=1)
        matvec(self.graph, x, w, y, residual=residual, name=name.rsplit(".", 1)[-1])
        return y

    def propose(self, x: Stream, proposals: Buffer) -> None:
        """The target's head on every mask's row, the best of it, and a path through them."""
        graph, config = self.graph, self.config
        selector: tuple[Buffer, Buffer, Buffer] | None = None
        if config.selector_rank:
            at = "candidate_selector"
            p = self.activation("draft.selector.p", config.selector_rank // self.ranks)
            p_w = self.matrix("draft.selector.w", f"{at}.hidden_projection")
            self.normed_matvec(x, p_w, p, sampled=True, name="selector")
            p = all_gather(graph, p, self.ranks, sampled=True)
            books = [f"{at}.{which}_codebook" for which in ("predecessor", "successor")]
            a, b = (self.weight(f"draft.{book}", [self.weights[book]]) for book in books)
            selector = p, a, b
        width = config.vocab // self.ranks
        logits = self.activation("draft.logits", width)
        self.normed_matvec(
            x,
            self.target.head,
            logits,
            sampled=True,
            scale=config.output_multiplier,
            softcap=config.softcap,
            name="head",
        )
        top_k = config.selector_top_k if config.selector_rank else _PLAIN_TOP_K
        best = [self.capacity, chunk_count(width) * top_k]
        scores, ids = (
            graph.activation("draft.scores", best, f32),
            graph.activation("draft.ids", best, u32),
        )
        candidates(graph, logits, scores, ids, count=top_k, first=self.rank * width)
        scores, ids = (all_gather(graph, of, self.ranks, sampled=True) for of in (scores, ids))
        draft_walk(graph, scores, ids, proposals, top_k=top_k, selector=selector, nodes=self.nodes)

    # ---- buffers -----------------------------------------------------------------------------
    def activation(self, name: str, width: int) -> Buffer:
        """A buffer of one row a row of the table."""
        return self.graph.activation(name, [self.capacity, width], f32)

    def matrix(
        self,
        name: str,
        *tensors: str,
        axis: int = 0,
        part: tuple[int, int] | None = None,
        interleaved: bool = False,
    ) -> Buffer:
        """This rank's part of matrices, along an axis of each."""
        sources = [self.share(self.weights[f"{name}.weight"], axis, part) for name in tensors]
        return self.weight(name, sources, interleaved=interleaved)

    def share(
        self, source: WeightSource, axis: int, part: tuple[int, int] | None = None
    ) -> WeightSource:
        """One part of how many of a tensor; default: this rank's."""
        index, count = part or (self.rank, self.ranks)
        return source if count == 1 else read.cut(source, axis, index, count)

    def weight(
        self, name: str, sources: list[WeightSource], *, interleaved: bool = False
    ) -> Buffer:
        """Matrices stacked by rows."""
        dtype = self.target.weight_dtype
        return read.stacked(self.graph, name, sources, dtype, interleaved=interleaved)

    def vector(self, name: str, tensor: str) -> Buffer:
        """A tensor as float32; one that several operators read is one buffer."""
        if name not in self.vectors:
            source = self.weights[tensor]
            load = read.stack([source], f32)
            self.vectors[name] = self.graph.weight(name, source.shape, f32, load)
        return self.vectors[name]

    def qk_norm(self, name: str, own: str) -> Buffer:
        pair = [self.weights[f"{own}.{which}_norm.weight"] for which in "qk"]

        def load() -> NDArray[Any]:
            return np.stack([read.converted(part, f32) for part in pair])

        return self.graph.weight(name, [2, self.config.head_dim], f32, load)

    def page_table(self, window: int) -> Buffer:
        """A slot's pages: rings hold a window, and a step's or a block's rows behind it."""
        rows, page = max(self.graph.rows, self.block), self.target.page
        name = f"draft.page_table.window{window}" if window else "draft.page_table"
        return slot_pages(self.graph, name, ring_pages(window, rows, self.context, page))
