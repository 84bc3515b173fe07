"""Qwen3-MoE as a Graph: a Qwen3 whose MLP is, in most layers, a mixture of experts.

  h -> [norm, Wr] -> logits -> route -> routes --.
  h -> [norm, W1[e], swiglu] -> e.h -> [W2[e]] -> e.d -> combine + h

With tp_size > 1 a graph is one rank's share, as a llama's; of every expert its part of the inner
width. A row's sum over experts is then summed over ranks, behind h: no norm lies between the two.

The norm of h is computed by the router and again by every expert's tile. See llama.py for the rest
of a layer and ops/route.py for the choice. Source: transformers' models/qwen3_moe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpurt.buffer import DTYPES, Buffer, f32
from gpurt.graph import Graph
from gpurt.graphs.bounds import check_shares, empty_graph
from gpurt.graphs.collectives import all_reduce
from gpurt.graphs.dflash import DraftModel
from gpurt.graphs.drafters import add_drafter
from gpurt.graphs.llama import LlamaBuilder, LlamaConfig
from gpurt.graphs.ops.combine import combine
from gpurt.graphs.ops.expert_matvec import expert_matvec
from gpurt.graphs.ops.matvec import matvec
from gpurt.graphs.ops.route import SOFTMAX, RoutesLayout, route
from gpurt.graphs.weights import cut, stack, stack_experts
from gpurt.wire import PROPOSALS_PER_SLOT

if TYPE_CHECKING:
    from gpurt.loaders.model import WeightSource


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(LlamaConfig):
    """What a checkpoint's config says. `sparse` has one value a layer."""

    experts: int
    top_k: int
    moe_intermediate: int
    norm_topk: bool
    sparse: tuple[bool, ...]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint must hold."""
        shapes = super().tensors()
        inner, hidden = self.moe_intermediate, self.hidden
        for layer, sparse in enumerate(self.sparse):
            if not sparse:
                continue
            at = f"model.layers.{layer}.mlp"
            for name in ("gate_proj", "up_proj", "down_proj"):
                del shapes[f"{at}.{name}.weight"]
            shapes[f"{at}.gate.weight"] = (self.experts, hidden)
            for expert in range(self.experts):
                shapes[f"{at}.experts.{expert}.gate_proj.weight"] = (inner, hidden)
                shapes[f"{at}.experts.{expert}.up_proj.weight"] = (inner, hidden)
                shapes[f"{at}.experts.{expert}.down_proj.weight"] = (hidden, inner)
        return shapes


def build(
    config: Qwen3MoeConfig,
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
) -> Graph:
    """The Graph of one step; parameters and errors as in `llama.build`. The router is float32."""
    where, ranks = "qwen3_moe.build", {"rank": tp_rank, "rank_count": tp_size}
    sizes = {"heads": config.heads, "kv heads": config.kv_heads, "vocab": config.vocab}
    sizes["inner width of an expert"] = config.moe_intermediate
    if not all(config.sparse):
        sizes["inner width"] = config.intermediate
    check_shares(sizes, tp_size, where)
    graph = empty_graph(config, where, rows, slots, context, kv_dtype, weight_dtype, **ranks)
    target = _Builder(graph, config, weights, kv_dtype, weight_dtype).build()
    return add_drafter(graph, draft, proposals, target, draft_model, draft_tree)


class _Builder(LlamaBuilder):
    config: Qwen3MoeConfig

    def mlp(self, layer: int, h: Buffer) -> Buffer:
        if not self.config.sparse[layer]:
            return super().mlp(layer, h)
        graph, config = self.graph, self.config
        at, source = f"layers[{layer}]", f"model.layers.{layer}"
        norm = self.vector(f"{at}.mlp.norm", f"{source}.post_attention_layernorm")
        routes = self.routes(at, f"{source}.mlp.gate", h, norm)
        width = config.moe_intermediate // self.share_count
        inner = graph.row_activation(f"{at}.e.h", width, f32, config.top_k)
        expert_matvec(
            graph,
            h,
            self.experts(f"{at}.up.w", f"{source}.mlp.experts", ("gate_proj", "up_proj")),
            routes,
            inner,
            top_k=config.top_k,
            norm=norm,
            swiglu=True,
            eps=config.eps,
            name="expert_up",
        )
        outer = graph.row_activation(f"{at}.e.d", config.hidden, f32, config.top_k)
        expert_matvec(
            graph,
            inner,
            self.experts(f"{at}.down.w", f"{source}.mlp.experts", ("down_proj",)),
            routes,
            outer,
            top_k=config.top_k,
            x_per_pair=True,
            name="expert_down",
        )
        y = self.activation(f"{at}.y", config.hidden)
        experts, top_k = config.experts, config.top_k
        behind = h if graph.rank_count == 1 else None
        combine(graph, outer, routes, y, experts=experts, top_k=top_k, residual=behind)
        return all_reduce(graph, y, graph.rank_count, residual=h)

    def routes(self, at: str, source: str, h: Buffer, norm: Buffer) -> Buffer:
        graph, config = self.graph, self.config
        gate = self.weights[f"{source}.weight"]
        router = graph.weight(f"{at}.router.w", gate.shape, f32, stack([gate], f32))
        logits = self.activation(f"{at}.router.logits", config.experts)
        matvec(graph, h, router, logits, norm=norm, eps=config.eps, exact=True, name="router")
        layout = RoutesLayout(graph.rows, config.experts, config.top_k)
        routes = graph.activation(f"{at}.routes", [layout.words], "u32")
        route(
            graph,
            logits,
            routes,
            top_k=config.top_k,
            kind=SOFTMAX,
            norm_topk=config.norm_topk,
        )
        return routes

    def experts(self, name: str, source: str, parts: tuple[str, ...]) -> Buffer:
        """One or two matrices of every expert, [E, N, K], their rows in turn; of a rank its rows of
        gate and up, its columns of down.
        """
        count, share = self.config.experts, (self.graph.rank, self.share_count)
        axis = 0 if len(parts) == 2 else 1
        sources = [
            [cut(self.weights[f"{source}.{expert}.{part}.weight"], axis, *share) for part in parts]
            for expert in range(count)
        ]
        stored = {part.dtype.name for row in sources for part in row}
        dtype = self.weight_dtype or (DTYPES[stored.pop()] if len(stored) == 1 else f32)
        rows, k = sources[0][0].shape
        shape = [count, len(parts) * rows, k]
        return self.graph.weight(name, shape, dtype, stack_experts(sources, dtype))
