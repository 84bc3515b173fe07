"""reduce: sums all ranks' parts of this rank's columns, and gives the sum to every rank. The second
shot of an all-reduce in two: publish scatters before it.

  parts  [ranks, rows * per_row, W], slots      residual  [rows * per_row, ranks * W]
  sums   [rows * per_row, ranks * W]: this rank's columns, on every rank

The sum is the one of collect.py, element by element: the residual, if there is one, and the parts
in rank order. So one shot and two have the same bits. One rank alone, in loop-back, sums the first
columns and fills all columns with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.collect import added
from gpurt.graphs.ops.publish import slot_columns, slots_stride, tile_columns, value_rows
from gpurt.graphs.ops.regions import array_of, columns, region_of, required

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator


def reduce(
    graph: Graph,
    parts: Operand,
    sums: Operand,
    *,
    per_row: int = 1,
    residual: Operand | None = None,
    name: str = "reduce",
) -> Operator:
    """Add it. parts, sums: symmetric. Raises: GraphError for other shapes."""
    ranks, rows, width = region_of(parts).shape
    for what, operand in (("sums", sums), ("residual", residual)):
        if operand is not None and region_of(operand).shape != (rows, ranks * width):
            msg = f"parts are {[ranks, rows, width]}, but {what} {list(region_of(operand).shape)}"
            raise GraphError(f"{msg} - at {graph.name}.{name} - it needs {[rows, ranks * width]}")
    return graph.op(
        REDUCE,
        {"parts": parts, "residual": residual, "sums": sums},
        name=name,
        width=width,
        ranks=ranks,
        per_row=per_row,
        stride=slots_stride(parts),
        sums_stride=slots_stride(sums),
    )


def tile_reduce(op: Operator, target: Target) -> list[Tile]:
    """Ranges of a slot's columns. Which of the residual's a rank reads is its own affair: all ranks
    have the same tasks, so a tile declares the columns of every rank.
    """
    width, ranks = int(op.params["width"]), int(op.params["ranks"])
    at_once = tile_columns(op, "parts", target)
    tiles = []
    for begin in range(0, width, at_once):
        end = min(begin + at_once, width)
        reads = [columns(op.args["parts"], begin, end)]
        if "residual" in op.args:
            behind = op.args["residual"]
            reads += [columns(behind, r * width + begin, r * width + end) for r in range(ranks)]
        writes = slot_columns(op, "sums", begin, end)
        size = (end - begin) * int(op.params["per_row"]) * (2 * ranks + ("residual" in op.args))
        tiles.append(Tile((begin, end, 0, 0), tuple(reads), writes, cost_bytes=4 * size))
    return tiles


def reduce_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """The contract above, of one rank alone."""
    rows, width = value_rows(op, step), int(op.params["width"])
    residual = array_of(op, arrays, "residual")
    own = None if residual is None else residual[:rows, :width]
    parts = required(op, arrays, "parts")[:, :rows]
    required(op, arrays, "sums")[:rows] = np.tile(added(parts, own), len(parts))


REDUCE = Body(
    name="reduce",
    args=(Arg("parts", "r"), Arg("residual", "r", optional=True), Arg("sums", "w")),
    params=("width", "ranks", "per_row", "stride", "sums_stride"),
    tile=tile_reduce,
    reference=reduce_reference,
    ranks=True,
    payload=True,
    payload_words=True,
    publishes=True,
)
