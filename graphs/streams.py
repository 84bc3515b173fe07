"""Streams: rows of a residual stream, and their norm, which its maker can write beside them.

A matvec of such a row need not norm it, nor convert it, in every one of its tasks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gpurt.buffer import Buffer, DType
from gpurt.graph import Graph, Operand
from gpurt.graphs.collectives import like
from gpurt.graphs.ops.matvec import matvec


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
