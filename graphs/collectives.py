"""Collectives of one rank's graph: each is a publish and a collect, see ops/publish.py.

With one rank they add nothing, so a graph is written once for both.
"""

from __future__ import annotations

from gpurt.buffer import Buffer, f32
from gpurt.graph import Graph
from gpurt.graphs.ops.collect import SIDE_BY_SIDE, SUM, collect
from gpurt.graphs.ops.publish import publish


def all_reduce(
    graph: Graph, part: Buffer, ranks: int, *, per_row: int = 1, residual: Buffer | None = None
) -> Buffer:
    """The sum of all ranks' parts, in rank order, behind `residual` if there is one: the same bits
    on every rank. part: [rows * per_row, W] f32; so are residual and sum. The norm that may follow
    is the next operator's own, so no hop is between.
    """
    if ranks == 1:
        return part
    width = part.shape[-1]
    slots = graph.symmetric(f"{part.name}.slots", ranks, width, f32, per_row)
    publish(graph, part, slots, per_row=per_row)
    y = graph.row_activation(f"{part.name}.sum", width, f32, per_row)
    collect(graph, slots, y, kind=SUM, per_row=per_row, residual=residual)
    return y


def all_gather(graph: Graph, part: Buffer, ranks: int, *, sampled: bool = False) -> Buffer:
    """All ranks' parts side by side. part: [rows, W] f32; the whole: [rows, ranks * W]."""
    if ranks == 1:
        return part
    width = part.shape[-1]
    slots = graph.symmetric(f"{part.name}.slots", ranks, width, f32)
    publish(graph, part, slots, sampled=sampled)
    y = graph.row_activation(f"{part.name}.all", ranks * width, f32)
    collect(graph, slots, y, kind=SIDE_BY_SIDE, sampled=sampled)
    return y
