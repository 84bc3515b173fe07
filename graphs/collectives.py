"""Collectives of one rank's graph, see ops/publish.py.

    one shot    my part to all ranks     collect: the sum of all parts
    two shots   a share of it to each    reduce: the sum of my shares, to all, in its place in a row
    gather      my part to all ranks, in its place in a row

An all-reduce has both forms in the graph where the second could ever send less; the planner keeps
one (planner/forms.py). With one rank they add nothing, so a graph is written once for both. A part
has rows of the step, or of the table that its operators run over.
"""

from __future__ import annotations

from collections.abc import Callable

from gpurt.buffer import Buffer, DType
from gpurt.graph import Graph, Operand
from gpurt.graphs.ops.collect import collect
from gpurt.graphs.ops.publish import publish
from gpurt.graphs.ops.reduce import reduce
from gpurt.graphs.ops.regions import region_of

# Adds the operator that reads rows, or adds up slots.
Reader = Callable[[Operand], object]
SUMMED_BY_READER = 2  # ranks; whole rows of more take a reader longer than a collect and its hop
_FLOATS = 4  # of the smallest load: a share's rows begin at a multiple of it


def all_reduce(graph: Graph, part: Buffer, ranks: int, *, residual: Buffer | None = None) -> Buffer:
    """The sum of all ranks' parts, in rank order, behind `residual` if there is one: the same bits
    on every rank. part: [rows, W] f32, `rows` as it was made; so are residual and sum. The norm
    that may follow is the next operator's own, so no hop is between.
    """
    if ranks == 1:
        return part
    y = like(graph, part, f"{part.name}.sum")

    def read(slots: Operand) -> None:
        behind = residual if _are_slots(slots) else None  # `reduce` has it in its sums
        collect(graph, slots, y, per_row=part.per_row or 1, residual=behind)

    _forms(graph, part, ranks, read, residual)
    return y


def all_reduce_into(
    graph: Graph, part: Buffer, ranks: int, read: Reader, *, adds: bool = False
) -> None:
    """The sum for a reader that is added once a form, so that two shots need no task behind them;
    of one rank its part. adds: it takes slots, too, and adds them up where it reads little more so.
    """
    if ranks == 1:
        read(part.whole)
        return

    def read_or_collect(slots: Operand) -> None:
        if _are_slots(slots) and (ranks > SUMMED_BY_READER or not adds):
            y = like(graph, part, f"{part.name}.sum")
            collect(graph, slots, y, per_row=part.per_row or 1)
            slots = y
        read(slots)

    _forms(graph, part, ranks, read_or_collect)


def _forms(
    graph: Graph, part: Buffer, ranks: int, read: Reader, residual: Buffer | None = None
) -> None:
    """Both ways to all parts' sum; of slots, adding a residual is left to `read`."""
    width, per_row = part.shape[-1], part.per_row or 1
    with graph.form(part.name, "one shot"):
        slots = graph.symmetric(f"{part.name}.slots", part, slots=ranks)
        publish(graph, part, slots, per_row=per_row, name="one_shot")
        read(slots.whole)
    if ranks == 2 or width % (ranks * _FLOATS):
        return  # two ranks send as much in two shots
    with graph.form(part.name, "two shots"):
        shares = scattered(graph, part, ranks)
        sums = graph.symmetric(f"{part.name}.sums", part)
        reduce(graph, shares, sums, per_row=per_row, residual=residual)
        read(sums.whole)


def all_reduce_bytes(size_bytes: int, ranks: int) -> int:
    """Bytes that a rank sends to sum a value of so many, in the form that sends fewer."""
    return min((ranks - 1) * size_bytes, 2 * (ranks - 1) * size_bytes // ranks)


def scattered(graph: Graph, part: Buffer, ranks: int) -> Buffer:
    """All ranks' parts of this rank's columns, slots for who adds them up: the first shot of two.
    part: [rows, W]; slots: [ranks, rows, W / ranks], symmetric.
    """
    width, per_row = part.shape[-1] // ranks, part.per_row or 1
    shares = graph.symmetric(f"{part.name}.shares", part, slots=ranks, width=width)
    publish(graph, part, shares, per_row=per_row, scatter=True, name="scatter")
    return shares


def all_gather(graph: Graph, part: Buffer, ranks: int, *, sampled: bool = False) -> Buffer:
    """All ranks' parts side by side. part: [rows, W] of a dtype of four bytes, copied bit by bit;
    the whole: [rows, ranks * W], symmetric, so for bodies that may read such.
    """
    if ranks == 1:
        return part
    whole = graph.symmetric(f"{part.name}.all", part, width=ranks * part.shape[-1])
    publish(graph, part, whole, sampled=sampled, name="gather")
    return whole


def _are_slots(value: Operand) -> bool:
    """Whether there are parts to add."""
    return len(region_of(value).shape) == 3


def like(graph: Graph, part: Buffer, name: str, dtype: DType | None = None) -> Buffer:
    """An activation of the same shape; dtype: default the same."""
    if part.per_row:
        return graph.row_activation(name, part.shape[-1], dtype or part.dtype, part.per_row)
    return graph.activation(name, part.shape, dtype or part.dtype)
