"""A row's sum over its experts: of each pair a norm over all columns, then their weighted sum.

Where each rank has a part of every expert's inner width, d is a sum over ranks:

    d -> scatter -> reduce_squares -> x ------------------> combine_columns -> y -> gather
                                   -> squares -> gather -->

So a rank makes its columns of all pairs and keeps them. Ranks exchange sums of squares, 16 bytes a
pair and rank, and columns of y: of 8 pairs of 4,096 columns the latter is 16 KB a row, where an
all-reduce of d gave 128 KB to every rank, each to be read twice by who combined.

Where ranks have whole experts each combines its own pairs, and y is a sum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from gpurt.buffer import Buffer, f32
from gpurt.graph import Graph, Operand
from gpurt.graphs.collectives import all_gather, all_reduce_into, scattered
from gpurt.graphs.ops.combine import combine
from gpurt.graphs.ops.combine_columns import combine_columns
from gpurt.graphs.ops.reduce_squares import SUMS, reduce_squares


def sum_experts(
    graph: Graph,
    d: Buffer,
    routes: Buffer,
    name: str,
    read: Callable[[Operand], object],
    *,
    ranks: int,
    by_columns: bool,
    gain: Buffer,
    experts: int,
    top_k: int,
    eps: float,
) -> None:
    """Add it: y, on every rank, is the sum over a row's pairs of weight * R(d * gain), [rows, W].

    d: [rows * top_k, W] f32. name: of y, or of this rank's columns of it. read: adds the operator
    that reads y, once a form. by_columns: d is a part of a sum over ranks; gain is [W / ranks] of
    this rank's columns then, else [W].
    """
    if not by_columns:
        y = graph.row_activation(name, d.shape[-1], f32)
        combine(graph, d, routes, y, experts=experts, top_k=top_k, gain=gain, eps=eps)
        all_reduce_into(graph, y, ranks, read)
        return
    width = d.shape[-1] // ranks
    x = graph.row_activation(f"{d.name}.x", width, f32, top_k)
    squares = graph.row_activation(f"{d.name}.squares", top_k * SUMS, f32)
    reduce_squares(graph, scattered(graph, d, ranks), gain, x, squares)
    y = graph.row_activation(name, width, f32)
    combine_columns(
        graph,
        x,
        all_gather(graph, squares, ranks),
        routes,
        y,
        ranks=ranks,
        experts=experts,
        top_k=top_k,
        eps=eps,
    )
    read(all_gather(graph, y, ranks))
