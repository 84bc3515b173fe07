"""collect: all ranks' parts into one value. Second half of a collective; publish.py is the first.

kind 0  y = residual, if there is one, and the slots, added in rank order: an all-reduce
kind 1  y = the slots side by side, [rows * per_row, ranks * W]: an all-gather
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.publish import slots_stride, tile_columns, value_rows
from gpurt.graphs.ops.regions import array_of, columns, part, region_of, required

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator

SUM, SIDE_BY_SIDE = 0, 1  # `kind`


def collect(
    graph: Graph,
    slots: Operand,
    y: Operand,
    *,
    kind: int,
    per_row: int = 1,
    sampled: bool = False,
    residual: Operand | None = None,
    name: str = "collect",
) -> Operator:
    """Add it. slots: [ranks, rows * per_row, W] f32; residual: as y, only with kind SUM.

    Raises: GraphError if y or residual does not fit.
    """
    ranks, rows, width = region_of(slots).shape
    wanted = (rows, width if kind == SUM else ranks * width)
    if region_of(y).shape != wanted:
        msg = f"slots are {[ranks, rows, width]}, but y {list(region_of(y).shape)}"
        raise GraphError(f"{msg} - at {graph.name}.{name} - y needs {list(wanted)}")
    if residual is not None and (kind != SUM or region_of(residual).shape != wanted):
        msg = f"residual is {list(region_of(residual).shape)}, kind {kind}"
        raise GraphError(f"{msg} - at {graph.name}.{name} - a sum needs {list(wanted)}")
    return graph.op(
        COLLECT,
        {"slots": slots, "y": y, "residual": residual},
        name=name,
        width=width,
        ranks=ranks,
        kind=kind,
        per_row=per_row,
        sampled=int(sampled),
        stride=slots_stride(slots),
    )


def tile_collect(op: Operator, target: Target) -> list[Tile]:
    """Ranges of y's columns; each of one rank's columns if they lie side by side."""
    width, ranks = int(op.params["width"]), int(op.params["ranks"])
    at_once = tile_columns(op, "slots", target)
    slots, y, tiles = op.args["slots"], op.args["y"], []
    summed = op.params["kind"] == SUM
    for rank in range(1 if summed else ranks):
        for begin in range(0, width, at_once):
            end = min(begin + at_once, width)
            out = (rank * width + begin, rank * width + end)
            source = slots if summed else part(slots, 0, rank, rank + 1)
            size = (end - begin) * int(op.params["per_row"]) * (ranks + 1 if summed else 2)
            reads = [columns(source, begin, end)]
            if "residual" in op.args:
                reads.append(columns(op.args["residual"], begin, end))
            writes = (columns(y, *out),)
            tiles.append(Tile((*out, 0, 0), tuple(reads), writes, cost_bytes=4 * size))
    return tiles


def assembled(slots: NDArray[Any], kind: int, residual: NDArray[Any] | None = None) -> NDArray[Any]:
    """The value of slots [ranks, rows, W], behind a residual if there is one."""
    if kind == SIDE_BY_SIDE:
        return np.concatenate(list(slots), axis=-1)
    total = slots[0] if residual is None else residual + slots[0]
    for part_of_rank in slots[1:]:
        total = total + part_of_rank
    return np.asarray(total)


def collect_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """The contract above."""
    rows = value_rows(op, step)
    residual = array_of(op, arrays, "residual")
    behind = None if residual is None else residual[:rows]
    slots = required(op, arrays, "slots")[:, :rows]
    required(op, arrays, "y")[:rows] = assembled(slots, int(op.params["kind"]), behind)


COLLECT = Body(
    name="collect",
    args=(Arg("slots", "r"), Arg("y", "w"), Arg("residual", "r", optional=True)),
    params=("width", "ranks", "kind", "per_row", "sampled", "stride"),
    tile=tile_collect,
    reference=collect_reference,
    ranks=True,
)
