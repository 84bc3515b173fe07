"""Streams: rows of a residual stream, and their norm, which its maker can write beside them.

A matvec of such a row need not norm it, nor convert it, in every one of its tasks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gpurt.buffer import Buffer, DType, f32
from gpurt.graph import Graph, Operand
from gpurt.graphs.collectives import like
from gpurt.graphs.ops.block_conv import block_conv
from gpurt.graphs.ops.matvec import matvec

_GROUP = 2048  # columns that share a coefficient, at most


class Stream(NamedTuple):
    """Rows [rows, hidden] f32, the gain of their next norm, and that norm where it was written."""

    s: Buffer
    norm: Buffer
    normed: Buffer | None = None


def with_normed(graph: Graph, x: Stream, dtype: DType, eps: float) -> tuple[Stream, dict[str, Any]]:
    """X with its norm in a dtype, and what its maker must be told to write that."""
    normed = like(graph, x.s, f"{x.s.name}.normed", dtype)
    return x._replace(normed=normed), {"norm": x.norm, "normed": normed, "norm_eps": eps}


def normed_matvec(
    graph: Graph, x: Stream, w: Operand, y: Operand, eps: float, **options: Any
) -> None:
    """W R(x): of what x's maker wrote, else normed on the way."""
    if x.normed is None:
        options |= {"norm": x.norm, "eps": eps}
    matvec(graph, x.normed or x.s, w, y, **options)


def passed_on(graph: Graph, x: Buffer, y: Buffer, *, name: str, **options: Any) -> None:
    """Y = x of the step's rows, in y's dtype: a convolution of one tap that is 1. options: a norm,
    as `with_normed` gives them.
    """
    hidden = y.shape[-1]
    one = _constant(graph, "streams.one", [2, 1, hidden], 1.0)
    none = _constant(graph, "streams.none", [graph.rows, 2 * hidden // math.gcd(hidden, _GROUP)], 0)
    block_conv(graph, x, none, one, y, side=0, name=name, **options)


def _constant(graph: Graph, name: str, shape: list[int], value: float) -> Buffer:
    there = next((b for b in graph.buffers if b.name == name), None)
    return there or graph.weight(name, shape, f32, partial(np.full, shape, value, np.float32))
