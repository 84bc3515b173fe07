"""Graphs that are no model: a dependency chain, empty stages, a mixture of experts alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.bench import made_up
from gpurt.body import Arg, Body, Target, Tile
from gpurt.buffer import Buffer
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.combine import combine
from gpurt.graphs.ops.expert_matvec import expert_matvec
from gpurt.graphs.ops.matvec import matvec
from gpurt.graphs.ops.route import RoutesLayout, route


def chain(layers: int, k: int, rows: int = 1, *, dependent: bool = True) -> Graph:
    """Layers y = W x in bf16: each needs all of the one before, or only x. x stays as given."""
    graph = Graph(f"chain {layers} x {k}^2", rows=rows)
    x = graph.input("x", [rows, k], "bf16")
    for layer in range(layers):
        with graph.at(f"layers[{layer}]", layer=layer):
            w = graph.weight(f"w[{layer}]", [k, k], "bf16", pending)
            last = layer == layers - 1
            make = graph.output if last else graph.activation
            y = make("y" if last else f"h[{layer}]", [rows, k], "bf16")
            matvec(graph, x, w, y, name="matvec")
            x = y if dependent else x
    made_up.share_matrices(graph)
    return graph


def stages(count: int, width: int) -> Graph:
    """`count` stages of `width` empty tasks, each of which needs the whole stage before."""
    graph = Graph(f"{count} stages of {width}")
    x = graph.state("stages.begin", [width], "u32")
    for stage in range(count):
        y = graph.activation(f"stage[{stage}]", [width], "u32")
        with graph.at(f"stages[{stage}]", layer=stage):
            graph.op(_STAGE, {"x": x, "y": y}, name="stage")
        x = y
    return graph


def experts_alone(
    *, layers: int, experts: int, top_k: int, width: int, inner: int, rows: int, routed: bool
) -> Graph:
    """The experts of a layer, layer after layer, in nvfp4: up, down, weighted sum with its norm.

    routed: a router in front of every layer decides on the device, once its x is there; else all
    layers' scores are given, and their routes decided before the first layer.
    """
    graph = Graph("experts", rows=rows)
    x = graph.input("x", [rows, width], "f32")
    layout = RoutesLayout(rows, experts, top_k)
    gain = graph.weight("gain", [width], "f32", np.ones(width, np.float32))
    known: list[Buffer] = []
    for layer in range(0 if routed else layers):
        with graph.at(f"layers[{layer}]", layer=layer):
            scores = graph.state(
                f"layers[{layer}].scores",
                [rows, experts],
                "f32",
                source=drawn_scores(experts, top_k, rows, layer),
            )
            known.append(_route(graph, f"layers[{layer}]", scores, layout))
    for layer in range(layers):
        with graph.at(f"layers[{layer}]", layer=layer):
            at = f"layers[{layer}]"
            routes = _router(graph, at, x, layout) if routed else known[layer]
            x = _experts(graph, at, x, routes, gain, layout, inner, last=layer == layers - 1)
    made_up.share_matrices(graph)
    return graph


def drawn_scores(experts: int, top_k: int, rows: int, seed: int) -> NDArray[np.float32]:
    """Logits with which rows choose the experts of `drawn_choice`."""
    scores = np.full((rows, experts), -1, np.float32)
    np.put_along_axis(scores, drawn_choice(experts, top_k, rows, seed), np.float32(1), axis=1)
    return scores


def drawn_choice(experts: int, top_k: int, rows: int, seed: int) -> NDArray[np.int64]:
    """[rows, top_k]: experts that rows choose at random, ascending."""
    numbers = np.random.default_rng(seed).random((rows, experts))
    return np.sort(np.argsort(numbers, axis=1)[:, :top_k], axis=1)


def pending() -> NDArray[Any]:
    """Stands in for a matrix until `share_matrices` gives it a content."""
    raise AssertionError("a matrix without content - at gpurt.bench.graphs - share_matrices first")


# ---- helpers ---------------------------------------------------------------------------------
def _router(graph: Graph, at: str, x: Buffer, layout: RoutesLayout) -> Buffer:
    w = graph.weight(f"{at}.router.w", [layout.experts, x.shape[-1]], "f32", pending)
    logits = graph.activation(f"{at}.logits", [layout.rows, layout.experts], "f32")
    matvec(graph, x, w, logits, exact=True, name="router")
    return _route(graph, at, logits, layout)


def _route(graph: Graph, at: str, scores: Buffer, layout: RoutesLayout) -> Buffer:
    routes = graph.activation(f"{at}.routes", [layout.words], "u32")
    route(graph, scores, routes, top_k=layout.top_k)
    return routes


def _experts(
    graph: Graph,
    at: str,
    x: Buffer,
    routes: Buffer,
    gain: Buffer,
    layout: RoutesLayout,
    inner: int,
    *,
    last: bool,
) -> Buffer:
    width, pairs = x.shape[-1], layout.rows * layout.top_k
    sizes = {"up": (2 * inner, width), "down": (width, inner)}
    w, scale = {}, {}
    for name, (n, k) in sizes.items():
        w[name] = graph.weight(f"{at}.{name}.w", [layout.experts, n, k], "nvfp4", pending)
        content = np.full((layout.experts, 2), made_up.nvfp4_scale(k), np.float32)
        scale[name] = graph.weight(f"{at}.{name}.scale", [layout.experts, 2], "f32", content)
    h = graph.activation(f"{at}.h", [pairs, inner], "f32")
    d = graph.activation(f"{at}.d", [pairs, width], "f32")
    given: dict[str, Any] = {"top_k": layout.top_k}
    expert_matvec(
        graph, x, w["up"], routes, h, w_scale=scale["up"], swiglu=True, name="expert_up", **given
    )
    expert_matvec(
        graph,
        h,
        w["down"],
        routes,
        d,
        w_scale=scale["down"],
        x_per_pair=True,
        name="expert_down",
        **given,
    )
    make = graph.output if last else graph.activation
    y = make("y" if last else f"{at}.y", [layout.rows, width], "f32")
    combine(graph, d, routes, y, experts=layout.experts, gain=gain, eps=1e-8, **given)
    return y


def _tile_stage(op: Operator, target: Target) -> list[Tile]:
    del target
    x, y = op.args["x"], op.args["y"].buffer
    return [Tile((i, i + 1, 0, 0), (x,), (y[i : i + 1],)) for i in range(y.shape[0])]


_STAGE = Body(name="noop", args=(Arg("x", "r"), Arg("y", "w")), tile=_tile_stage)
