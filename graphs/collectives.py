"""Collectives of one rank's graph: each is a publish and a collect, see ops/publish.py.

With one rank they add nothing, so a graph is written once for both. A part has rows of the step, or
of the table that its operators run over.
"""

from __future__ import annotations

from gpurt.buffer import Buffer
from gpurt.graph import Graph
from gpurt.graphs.ops.collect import SIDE_BY_SIDE, SUM, collect
from gpurt.graphs.ops.publish import publish


def all_reduce(graph: Graph, part: Buffer, ranks: int, *, residual: Buffer | None = None) -> Buffer:
    """The sum of all ranks' parts, in rank order, behind `residual` if there is one: the same bits
    on every rank. part: [rows, W] f32, `rows` as it was made; so are residual and sum. The norm
    that may follow is the next operator's own, so no hop is between.
    """
    if ranks == 1:
        return part
    per_row = part.per_row or 1
    slots = graph.symmetric(f"{part.name}.slots", ranks, part)
    publish(graph, part, slots, per_row=per_row)
    y = _like(graph, part, f"{part.name}.sum", part.shape[-1])
    collect(graph, slots, y, kind=SUM, per_row=per_row, residual=residual)
    return y


def all_gather(graph: Graph, part: Buffer, ranks: int, *, sampled: bool = False) -> Buffer:
    """All ranks' parts side by side. part: [rows, W] of a dtype of four bytes, copied bit by bit;
    the whole: [rows, ranks * W].
    """
    if ranks == 1:
        return part
    slots = graph.symmetric(f"{part.name}.slots", ranks, part)
    publish(graph, part, slots, sampled=sampled)
    y = _like(graph, part, f"{part.name}.all", ranks * part.shape[-1])
    collect(graph, slots, y, kind=SIDE_BY_SIDE, sampled=sampled)
    return y


def _like(graph: Graph, part: Buffer, name: str, width: int) -> Buffer:
    """An activation of as many rows."""
    if part.per_row:
        return graph.row_activation(name, width, part.dtype, part.per_row)
    return graph.activation(name, [part.shape[0], width], part.dtype)
