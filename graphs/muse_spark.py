"""Muse Spark Open as a Graph: sliding and global attention, and a latent mixture of experts.

One layer; every arrow is one operator, and what stands in brackets is computed by the next one:

  s -> [C, Wq Wg] -> qg -.                                    .-----------------------.
  s -> [C, Wk Wv] -> kv -> attention -> out -> [Wo] -> b -> gated residual with s -> t
  t -> [C, Wr] -> logits -> route -> routes --.
  t -> [C, Wpre] -> z -> [C, W1[e], swiglu] -> h -> [W2[e]] -> d -> combine -> y
  y -> [Wpost] -> b -> gated residual with t -> s'

C is an RMS norm with gain 1 + w, folded at load like the constants of the residual gates. The
stream s is float32. Sliding layers rotate q and k and keep a ring of pages that holds their window;
global layers do neither. Experts: only those that some row chose are computed; see ops/route.py.
A layer may have a dense MLP in the experts' place. Source: transformers' models/muse_spark.
With bf16 matrices a gated residual also writes C of its stream, in bf16, for the matvecs behind it.

With tp_size > 1 a graph is one rank's share: its heads (of K/V at least one, which neighbours may
both have), its part of every expert's inner width, or whole experts (expert_split.py), its part of
a dense MLP's inner width, of the rows of Wpre, Wpost and the head. b and d, or y, are then summed
over ranks (d by columns, expert_sum.py), z, the widened y and the logits gathered, also a wide
router's; the embedding and a small router are whole on every rank.
Legend: B rows, H heads, K kv heads, D head dimension, E experts, M width of an expert's input.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from gpurt.buffer import DTYPES, Buffer, DType, Region, bf16, f32, nvfp4
from gpurt.graph import Graph, Operand
from gpurt.graphs import weights as read
from gpurt.graphs.bounds import KV_DTYPES, check_shares, empty_graph
from gpurt.graphs.collectives import all_gather, all_reduce_into
from gpurt.graphs.dflash import DraftModel, DraftTarget
from gpurt.graphs.drafters import add_drafter
from gpurt.graphs.expert_split import choose
from gpurt.graphs.expert_sum import sum_experts
from gpurt.graphs.muse_spark_config import PREFIX, MuseSparkConfig
from gpurt.graphs.ops.attention import attention, ring_pages, slot_pages
from gpurt.graphs.ops.embed import embed
from gpurt.graphs.ops.expert_matvec import expert_matvec
from gpurt.graphs.ops.gated_residual import gated_residual
from gpurt.graphs.ops.matvec import matvec
from gpurt.graphs.ops.route import RoutesLayout, forced_table, route
from gpurt.graphs.ops.sample import sample
from gpurt.graphs.streams import Stream, normed_matvec, with_normed
from gpurt.wire import PROPOSALS_PER_SLOT

if TYPE_CHECKING:
    from gpurt.loaders.model import WeightSource

# Positions of a cache page, and of a chunk of attention's sums. Fixed, so that a token's bits
# depend on no bound of the plan.
PAGE = 64
_ROUTER_BYTES = 6 << 20  # saved by sharing a router: memory moves it in about the gather's time
_GATE_FLOOR = 1e-3  # a constant of the model's code, of no config


def build(
    config: MuseSparkConfig,
    weights: Mapping[str, WeightSource],
    *,
    rows: int = 16,
    slots: int = 1,
    context: int | None = None,
    kv_dtype: str = "f32",
    weight_dtype: str | None = None,
    page: int = PAGE,
    tp_size: int = 1,
    tp_rank: int = 0,
    routing: str = "natural",
    expert_split: str = "width",
    draft: str = "none",
    proposals: int = PROPOSALS_PER_SLOT,
    draft_model: DraftModel | None = None,
    draft_tree: bool = False,
) -> Graph:
    """The Graph of one step; parameters and errors as in `llama.build`, and beside them:

    page: positions of a cache page. tp_size, tp_rank: one rank's share, collectives looped back.
    expert_split: width, expert or auto, how ranks share experts: expert_split.py.
    routing: natural, or for benches random or repeat, see ops/route.py. weight_dtype leaves experts
    in nvfp4 as they are; the router is always f32. Raises also: GraphError for an unknown routing,
    or if the model has no tp_size equal parts.
    """
    ranks, where = {"rank": tp_rank, "rank_count": tp_size}, "muse_spark.build"
    sizes = {"heads": config.heads, "vocab": config.vocab}
    check_shares(sizes, tp_size, where, config.kv_heads)
    graph = empty_graph(config, where, rows, slots, context, kv_dtype, weight_dtype, **ranks)
    builder = _Builder(graph, config, weights, kv_dtype, weight_dtype, page, tp_size, tp_rank)
    builder.routing = routing
    builder.choose_split(expert_split, where)
    return add_drafter(graph, draft, proposals, builder.build(), draft_model, draft_tree)


def gate_constants(
    gate: NDArray[np.float32], temperature: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Alpha and beta of a residual gate: stream' = alpha * stream + beta * branch. Where alpha is
    above its floor, alpha^2 + beta^2 = 1.
    """
    with np.errstate(over="ignore"):
        beta = 1 / (1 + np.exp(-gate.astype(np.float64) / temperature))
    alpha = np.sqrt(np.maximum((1 - beta) * (1 + beta), _GATE_FLOOR))
    return alpha.astype(np.float32), beta.astype(np.float32)


class _Builder:
    """One call of `build`: the graph under construction and what all layers share."""

    def __init__(
        self,
        graph: Graph,
        config: MuseSparkConfig,
        weights: Mapping[str, WeightSource],
        kv_dtype: str,
        weight_dtype: str | None,
        page: int,
        ranks: int,
        rank: int,
    ) -> None:
        self.graph, self.config, self.weights = graph, config, weights
        self.kv_dtype, self.page, self.ranks, self.rank = kv_dtype, page, ranks, rank
        self.routing = "natural"
        self.by_expert = False  # ranks have whole experts, not parts of every one
        self.weight_dtype = None if weight_dtype is None else DTYPES[weight_dtype]
        # float32 activations stay what they are: on the host, within 1e-5 of the model's own.
        self.reads = bf16 if self.weight_dtype == bf16 else f32  # what matvecs read of the stream
        self.page_tables = {w: self.page_table(w) for w in sorted(set(config.windows))}
        self.ropes = {theta: self.rope(theta) for theta in sorted(set(config.thetas)) if theta}

    def build(self) -> DraftTarget:
        graph, config, streams = self.graph, self.config, []
        x, options = self.stream("embed.s", self.input_norm(0))
        table = self.matrix("embed.table", f"{PREFIX}.embed_tokens")
        embed(graph, table, x.s, eps=config.eps, **options)
        for layer in range(config.layers):
            with graph.at(f"layers[{layer}]", layer=layer):
                at, source = f"layers[{layer}]", f"{PREFIX}.layers.{layer}"
                x = self.attention_half(layer, at, source, x)
                x = self.mlp_half(layer, at, source, x)
                streams.append(x.s)
        with graph.at("head", layer=config.layers):
            logits = self.activation("logits", config.vocab // self.ranks)
            head = self.head(table)
            self.normed_matvec(
                x,
                head,
                logits,
                sampled=True,
                scale=config.output_multiplier,
                softcap=config.softcap,
                name="head",
            )
            sample(graph, all_gather(graph, logits, self.ranks, sampled=True))
        kinds = (self.kv_dtype, self.weight_dtype, self.reads)
        return DraftTarget(streams, table, head, self.page, *kinds)

    def head(self, table: Buffer) -> Buffer | Region:
        if not self.config.tied:
            return self.matrix("head.w", "lm_head", cut=0)
        width = table.shape[0] // self.ranks
        return table[self.rank * width : (self.rank + 1) * width]

    def choose_split(self, wanted: str, where: str) -> None:
        """How ranks share the experts, see expert_split.py. Raises: GraphError."""
        config = self.config
        if not any(config.sparse):
            return
        shape = config.moe_hidden, config.moe_intermediate
        # The ends may be kept in another dtype: a layer in the middle stands for all.
        layer = [i for i, sparse in enumerate(config.sparse) if sparse][sum(config.sparse) // 2]
        source = self.weights[f"{PREFIX}.layers.{layer}.mlp.experts.gate_up_proj"]
        dtype = nvfp4 if layer in config.quantised else self.weight_dtype or source.dtype
        split, note = choose(
            wanted,
            self.ranks,
            where,
            experts=config.experts,
            inner=config.moe_intermediate,
            rows=self.graph.rows,
            top_k=config.top_k,
            width=config.moe_hidden,
            expert_bytes=3 * shape[1] * dtype.row_bytes(shape[0]),
        )
        self.by_expert = split == "expert"
        self.graph.notes += [note] if note else []

    # ---- halves of a layer -----------------------------------------------------------------
    def attention_half(self, layer: int, at: str, source: str, x: Stream) -> Stream:
        graph, config = self.graph, self.config
        out = self.attention(layer, at, source, x)
        b = self.activation(f"{at}.attention.b", config.hidden)
        o = self.matrix(f"{at}.o.w", f"{source}.self_attn.o_proj", cut=1)
        matvec(graph, out, o, b, name="o")
        gate = f"{source}.post_attention_residual_gate"
        norm = self.gain(f"{at}.mlp.norm", f"{source}.pre_feedforward_layernorm.weight")
        return self.residual(f"{at}.t", gate, b, x.s, "attention_residual", norm)

    def mlp_half(self, layer: int, at: str, source: str, x: Stream) -> Stream:
        sparse = self.config.sparse[layer]
        half = self.experts if sparse else self.dense
        b = half(layer, at, f"{source}.mlp", x)
        return self.residual(
            f"{at}.s",
            f"{source}.post_feedforward_residual_gate",
            b,
            x.s,
            "mlp_residual",
            norm=self.input_norm(layer + 1),
            gain=self.gain(f"{at}.mlp.gain", f"{source}.post_feedforward_layernorm.weight"),
            gathered=sparse,
        )

    def attention(self, layer: int, at: str, source: str, x: Stream) -> Buffer:
        graph, config = self.graph, self.config
        part = read.head_part(config.kv_heads, self.rank, self.ranks)
        heads, kv_heads = config.heads // self.ranks, config.kv_heads // part[1]
        width, window = heads * config.head_dim, config.windows[layer]
        own = f"{source}.self_attn"
        kv = self.activation(f"{at}.kv", 2 * kv_heads * config.head_dim)
        kv_w = self.matrix(f"{at}.kv.w", f"{own}.k_proj", f"{own}.v_proj", cut=0, part=part)
        self.normed_matvec(x, kv_w, kv, name="kv")
        # Behind kv: its last tiles, some with one of kv before them in a list, are of the gate,
        # which attention needs last.
        qg = self.activation(f"{at}.qg", 2 * width)
        qg_w = self.matrix(f"{at}.qg.w", f"{own}.q_proj", f"{own}.gate_proj", cut=0)
        self.normed_matvec(x, qg_w, qg, name="qg")
        pages = self.page_tables[window]
        cache = [pages.shape[0] * pages.shape[1], kv_heads, self.page, config.head_dim]
        out = self.activation(f"{at}.attention.out", width)
        attention(
            graph,
            qg,
            kv,
            graph.state(f"{at}.k_cache", cache, KV_DTYPES[self.kv_dtype]),
            graph.state(f"{at}.v_cache", cache, KV_DTYPES[self.kv_dtype]),
            pages,
            self.ropes.get(config.thetas[layer]),
            out,
            heads=heads,
            scale=config.qk_scale * config.head_dim**-0.5,
            eps=config.eps,
            window=window,
            weightless_qk_norm=True,
            gated=True,
            out_eps=config.eps,
        )
        return out

    def dense(self, layer: int, at: str, source: str, x: Stream) -> Buffer:
        del layer
        graph, config = self.graph, self.config
        m = self.activation(f"{at}.mlp.m", config.intermediate // self.ranks)
        pair = (f"{source}.gate_proj", f"{source}.up_proj")
        gate_up = self.matrix(f"{at}.gate_up.w", *pair, interleaved=True, cut=0)
        self.normed_matvec(x, gate_up, m, swiglu=True, name="gate_up")
        b = self.activation(f"{at}.mlp.b", config.hidden)
        down = self.matrix(f"{at}.down.w", f"{source}.down_proj", cut=1)
        matvec(graph, m, down, b, name="down")
        return b

    def experts(self, layer: int, at: str, source: str, x: Stream) -> Buffer:
        graph, config = self.graph, self.config
        # The router first: the choice of experts is the longer way, and where both have tasks on a
        # worker, the second waits for the first.
        logits = self.router(at, source, x)
        z = self.activation(f"{at}.z", config.moe_hidden // self.ranks)
        pre = self.matrix(f"{at}.pre.w", f"{source}.pre_expert_proj", cut=0)
        self.normed_matvec(x, pre, z, name="pre_expert")
        z = all_gather(graph, z, self.ranks)
        routes = self.routes(at, source, logits)
        top_k = config.top_k
        inner = config.moe_intermediate // (1 if self.by_expert else self.ranks)
        h = graph.row_activation(f"{at}.h", inner, f32, top_k)
        w, scale = self.expert_weight(layer, f"{at}.up", f"{source}.experts.gate_up_proj", 2)
        expert_matvec(
            graph,
            z,
            w,
            routes,
            h,
            top_k=top_k,
            norm=self.gain(f"{at}.z.norm", f"{source}.pre_expert_norm.weight"),
            w_scale=scale,
            swiglu=True,
            eps=config.eps,
            name="expert_up",
        )
        d = graph.row_activation(f"{at}.d", config.moe_hidden, f32, top_k)
        w, scale = self.expert_weight(layer, f"{at}.down", f"{source}.experts.down_proj", 1)
        expert_matvec(
            graph, h, w, routes, d, top_k=top_k, w_scale=scale, x_per_pair=True, name="expert_down"
        )
        b = self.activation(f"{at}.mlp.b", config.hidden // self.ranks)
        post = self.matrix(f"{at}.post.w", f"{source}.post_expert_proj", cut=0)
        tensor = f"{source}.experts.post_expert_norm.weight"
        cut = self.ranks > 1 and not self.by_expert

        def widen(y: Operand) -> None:
            matvec(graph, y, post, b, name="post_expert")

        given: dict[str, Any] = {"top_k": top_k, "ranks": self.ranks, "by_columns": cut}
        given |= {"experts": self.own_experts()[1], "eps": config.post_eps}
        gain = self.gain(f"{at}.d.gain", tensor, cut=cut)
        sum_experts(graph, d, routes, f"{at}.y", widen, gain=gain, **given)
        return b

    def own_experts(self) -> tuple[int, int]:
        """The first expert of which this rank computes something, and how many."""
        count = self.config.experts // (self.ranks if self.by_expert else 1)
        return (self.rank * count if self.by_expert else 0), count

    # ---- operators -----------------------------------------------------------------------
    def normed_matvec(self, x: Stream, w: Operand, y: Buffer, **options: Any) -> None:
        normed_matvec(self.graph, x, w, y, self.config.eps, **options)

    def router(self, at: str, source: str, x: Stream) -> Buffer:
        """The logits of all experts, on every rank; of a wide router each rank computes a part."""
        graph, config = self.graph, self.config
        ranks = self.ranks if self.shares_router() else 1
        logits = self.activation(f"{at}.router.logits", config.experts // ranks)
        matvec(
            graph,
            x.s,
            self.matrix(
                f"{at}.router.w", f"{source}.gate", dtype=f32, cut=0 if ranks > 1 else None
            ),
            logits,
            norm=x.norm,
            eps=config.eps,
            scale=config.output_multiplier,
            exact=True,
            name="router",
        )
        return all_gather(graph, logits, ranks)

    def shares_router(self) -> bool:
        """Whether it pays: a row's logit is the same sum on any rank, so bits are."""
        config, ranks = self.config, self.ranks
        saved_bytes = 4 * config.experts * config.hidden * (ranks - 1) // ranks
        return config.experts % ranks == 0 and saved_bytes >= _ROUTER_BYTES

    def routes(self, at: str, source: str, logits: Buffer) -> Buffer:
        graph, config = self.graph, self.config
        layout = RoutesLayout(graph.rows, self.own_experts()[1], config.top_k)
        routes = graph.activation(f"{at}.routes", [layout.words], "u32")
        route(
            graph,
            logits,
            routes,
            top_k=config.top_k,
            bias=self.vector(f"{at}.router.bias", f"{source}.gate.e_score_correction_bias"),
            factor=config.routed_factor,
            forced=self.forced(at),
            own=self.own_experts(),
        )
        return routes

    def forced(self, at: str) -> Buffer | None:
        if self.routing == "natural":
            return None
        experts, top_k = self.config.experts, self.config.top_k
        table = forced_table(self.routing, experts, top_k, crc32(at.encode()), self.graph.rows)
        return self.graph.weight(f"{at}.router.forced", table.shape, "u32", table)

    def residual(
        self,
        y: str,
        gate: str,
        branch: Buffer,
        stream: Buffer,
        name: str,
        norm: Buffer,
        gain: Buffer | None = None,
        gathered: bool = False,
    ) -> Stream:
        """The gated residual of a branch of which each rank has a term, or, gathered, columns."""
        graph, config, source = self.graph, self.config, self.weights[f"{gate}.gate"]
        out, options = self.stream(y, norm)
        options |= {"gain": gain, "eps": config.post_eps, "name": name}

        def constant(which: int) -> NDArray[Any]:
            return gate_constants(read.converted(source, f32), config.gate_temperature)[which]

        alpha, beta = (
            graph.weight(f"{y}.{letter}", [config.hidden], f32, partial(constant, which))
            for which, letter in enumerate(("alpha", "beta"))
        )

        def add(b: Operand) -> None:
            gated_residual(graph, b, stream, alpha, beta, out.s, **options)

        if gathered:
            add(all_gather(graph, branch, self.ranks))
        else:
            all_reduce_into(graph, branch, self.ranks, add, adds=True)
        return out

    # ---- buffers ---------------------------------------------------------------------------
    def stream(self, name: str, norm: Buffer) -> tuple[Stream, dict[str, Any]]:
        """Rows of the stream, and how who makes them norms them, too, if that is read in bf16."""
        x = Stream(self.activation(name, self.config.hidden), norm)
        return with_normed(self.graph, x, bf16, self.config.eps) if self.reads == bf16 else (x, {})

    def activation(self, name: str, width: int) -> Buffer:
        return self.graph.row_activation(name, width, f32)

    def matrix(
        self,
        name: str,
        *tensors: str,
        interleaved: bool = False,
        dtype: DType | None = None,
        cut: int | None = None,
        part: tuple[int, int] | None = None,
    ) -> Buffer:
        """One or more matrices, stacked by rows; of each this rank's part along axis `cut`."""
        sources = [self.weights[f"{tensor}.weight"] for tensor in tensors]
        if cut is not None:
            part = part or (self.rank, self.ranks)
            sources = [read.cut(source, cut, *part) for source in sources]
        dtype = dtype or self.weight_dtype
        return read.stacked(self.graph, name, sources, dtype, interleaved=interleaved)

    def vector(self, name: str, tensor: str) -> Buffer:
        source = self.weights[tensor]
        return self.graph.weight(name, source.shape, f32, read.stack([source], f32))

    def input_norm(self, layer: int) -> Buffer:
        """Of a layer, or behind the last one the head's."""
        if layer == self.config.layers:
            return self.vector("head.norm", f"{PREFIX}.norm.weight")
        tensor = f"{PREFIX}.layers.{layer}.input_layernorm.weight"
        return self.gain(f"layers[{layer}].attention.norm", tensor)

    def gain(self, name: str, tensor: str, *, cut: bool = False) -> Buffer:
        source = self.weights[tensor]
        if cut:
            source = read.cut(source, 0, self.rank, self.ranks)
        return self.graph.weight(name, source.shape, f32, read.one_plus(source))

    def expert_weight(
        self, layer: int, name: str, tensor: str, halves: int
    ) -> tuple[Buffer, Buffer | None]:
        """The matrices of all experts, and the second-level scales of nvfp4."""
        graph, source = self.graph, self.expert_part(tensor, halves)
        if layer not in self.config.quantised:
            dtype = self.weight_dtype or source.dtype
            load = read.expert_rows(source, dtype, halves=halves == 2)
            return graph.weight(f"{name}.w", source.shape, dtype, load), None
        experts, n, half_k = source.shape
        blocks = self.expert_part(f"{tensor}_weight_scale", halves)
        load = read.nvfp4_rows(source, blocks, halves=halves == 2)
        second = self.weights[f"{tensor}_weight_scale_2"]
        if self.by_expert:
            second = read.cut(second, 0, self.rank, self.ranks)
        scales = read.pair_of_scales(second)
        w = graph.weight(f"{name}.w", [experts, n, 2 * half_k], nvfp4, load)
        return w, graph.weight(f"{name}.scale", [experts, 2], f32, scales)

    def expert_part(self, tensor: str, halves: int) -> WeightSource:
        """This rank's share: whole experts; or of all, rows of both halves, or columns."""
        source = self.weights[tensor]
        if self.by_expert:
            return read.cut(source, 0, self.rank, self.ranks)
        if halves == 2:
            return read.cut_halves(source, self.rank, self.ranks)
        return read.cut(source, 2, self.rank, self.ranks)

    def page_table(self, window: int) -> Buffer:
        """A slot's pages: of the whole context, or a ring that holds a window."""
        graph = self.graph
        name = f"page_table.window{window}" if window else "page_table"
        return slot_pages(graph, name, ring_pages(window, graph.rows, graph.context, self.page))

    def rope(self, theta: float) -> Buffer:
        context, head_dim = self.graph.context, self.config.head_dim
        name = "rope" if len(set(self.config.thetas) - {0}) == 1 else f"rope.theta{theta:g}"
        load = partial(read.rotary_table, read.rotary_frequencies(theta, head_dim), context)
        return self.graph.weight(name, [context, head_dim], f32, load)
