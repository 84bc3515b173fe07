"""Collectives of one rank's graph: each is a publish and a collect, see ops/publish.py.

    one shot    my part to all ranks     the sum of all parts
    two shots   a share of it to each    reduce: the sum of my shares, to all    all sums in a row
    gather      my part to all ranks     all parts in a row

An all-reduce has both forms in the graph where the second could ever send less; the planner keeps
one (planner/forms.py). With one rank they add nothing, so a graph is written once for both. A part
has rows of the step, or of the table that its operators run over.
"""

from __future__ import annotations

from collections.abc import Callable

from gpurt.buffer import Buffer
from gpurt.graph import Graph, Operand
from gpurt.graphs.ops.collect import SIDE_BY_SIDE, SUM, collect
from gpurt.graphs.ops.publish import publish
from gpurt.graphs.ops.reduce import reduce

# Adds the operator that reads slots as SUM or SIDE_BY_SIDE: `collect`, or one that needs no more.
Reader = Callable[[Operand, int], object]
SUMMED_BY_READER = 2  # ranks; whole rows of more take a reader longer than a collect and its hop
_FLOATS = 4  # of the smallest load: a share's rows begin at a multiple of it


def all_reduce(graph: Graph, part: Buffer, ranks: int, *, residual: Buffer | None = None) -> Buffer:
    """The sum of all ranks' parts, in rank order, behind `residual` if there is one: the same bits
    on every rank. part: [rows, W] f32, `rows` as it was made; so are residual and sum. The norm
    that may follow is the next operator's own, so no hop is between.
    """
    if ranks == 1:
        return part
    y = _like(graph, part, f"{part.name}.sum", part.shape[-1])

    def read(slots: Operand, kind: int) -> None:
        behind = residual if kind == SUM else None  # `reduce` has it in its sums
        collect(graph, slots, y, kind=kind, per_row=part.per_row or 1, residual=behind)

    _forms(graph, part, ranks, read, residual)
    return y


def all_reduce_into(graph: Graph, part: Buffer, ranks: int, read: Reader) -> None:
    """The sum for a reader of whole rows, which puts slots together itself where it reads little
    more so: one task and its edges less. `read` is called once a form.
    """

    def read_or_collect(slots: Operand, kind: int) -> None:
        if kind == SUM and ranks > SUMMED_BY_READER:
            y = _like(graph, part, f"{part.name}.sum", part.shape[-1])
            collect(graph, slots, y, kind=kind, per_row=part.per_row or 1)
            slots = y
        read(slots, kind)

    _forms(graph, part, ranks, read_or_collect)


def _forms(
    graph: Graph, part: Buffer, ranks: int, read: Reader, residual: Buffer | None = None
) -> None:
    """Both ways to all parts' sum; with kind SUM, adding a residual is left to `read`."""
    width, per_row = part.shape[-1], part.per_row or 1
    slots = graph.symmetric(f"{part.name}.slots", ranks, part)
    with graph.form(part.name, "one shot"):
        publish(graph, part, slots, per_row=per_row, name="one_shot")
        read(slots.whole, SUM)
    if ranks == 2 or width % (ranks * _FLOATS):
        return  # two ranks send as much in two shots
    share = width // ranks
    with graph.form(part.name, "two shots"):
        parts, sums = slots[:, :, :share], slots[:, :, share : 2 * share]
        publish(graph, part, parts, per_row=per_row, scatter=True, name="scatter")
        reduce(graph, parts, sums, per_row=per_row, residual=residual)
        read(sums, SIDE_BY_SIDE)


def all_reduce_bytes(size_bytes: int, ranks: int) -> int:
    """Bytes that a rank sends to sum a value of so many, in the form that sends fewer."""
    return min((ranks - 1) * size_bytes, 2 * (ranks - 1) * size_bytes // ranks)


def all_gather(graph: Graph, part: Buffer, ranks: int, *, sampled: bool = False) -> Buffer:
    """All ranks' parts side by side. part: [rows, W] of a dtype of four bytes, copied bit by bit;
    the whole: [rows, ranks * W].
    """
    if ranks == 1:
        return part
    y = _like(graph, part, f"{part.name}.all", ranks * part.shape[-1])

    def read(slots: Operand, kind: int) -> None:
        collect(graph, slots, y, kind=kind, sampled=sampled)

    all_gather_into(graph, part, ranks, read, sampled=sampled)
    return y


def all_gather_into(
    graph: Graph, part: Buffer, ranks: int, read: Reader, *, sampled: bool = False
) -> None:
    """The same for a reader of its own in `collect`'s place."""
    slots = graph.symmetric(f"{part.name}.slots", ranks, part)
    publish(graph, part, slots, sampled=sampled, name="gather")
    read(slots.whole, SIDE_BY_SIDE)


def _like(graph: Graph, part: Buffer, name: str, width: int) -> Buffer:
    """An activation of as many rows."""
    if part.per_row:
        return graph.row_activation(name, width, part.dtype, part.per_row)
    return graph.activation(name, [part.shape[0], width], part.dtype)
