"""collect: y = the residual, if there is one, and all ranks' parts, added in rank order. The second
half of an all-reduce; publish.py is the first, and the order is that of the additions.

On the GPU it may store y on all ranks itself, where it is only a part of the next sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.publish import (
    NOT_PUBLISHED,
    published_columns,
    slots_stride,
    tile_columns,
    value_rows,
)
from gpurt.graphs.ops.regions import array_of, columns, region_of, required

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator


def collect(
    graph: Graph,
    slots: Operand,
    y: Operand,
    *,
    per_row: int = 1,
    sampled: bool = False,
    residual: Operand | None = None,
    name: str = "collect",
) -> Operator:
    """Add it. slots: [ranks, rows * per_row, W] f32, or rows of a single part; y, residual: [rows *
    per_row, W]. Raises: GraphError if y or residual does not fit.
    """
    *parts, rows, width = region_of(slots).shape
    for what, operand in (("y", y), ("residual", residual)):
        if operand is not None and region_of(operand).shape != (rows, width):
            msg = f"slots are {[*parts, rows, width]}, but {what} {list(region_of(operand).shape)}"
            raise GraphError(f"{msg} - at {graph.name}.{name} - it needs {[rows, width]}")
    return graph.op(
        COLLECT,
        {"slots": slots, "y": y, "residual": residual},
        name=name,
        width=width,
        ranks=parts[0] if parts else 1,
        per_row=per_row,
        sampled=int(sampled),
        stride=slots_stride(slots),
        **NOT_PUBLISHED,
    )


def tile_collect(op: Operator, target: Target) -> list[Tile]:
    """Ranges of y's columns."""
    width, ranks = int(op.params["width"]), int(op.params["ranks"])
    at_once = tile_columns(op, "slots", target)
    tiles = []
    for begin in range(0, width, at_once):
        end = min(begin + at_once, width)
        size = (end - begin) * int(op.params["per_row"]) * (ranks + 1)
        reads = tuple(
            columns(op.args[n], begin, end) for n in ("slots", "residual") if n in op.args
        )
        y, published = op.args["y"], op.params["y_ranks"]
        writes = published_columns(op, y, begin, end) if published else (columns(y, begin, end),)
        tiles.append(Tile((begin, end, 0, 0), reads, writes, cost_bytes=4 * size))
    return tiles


def added(slots: NDArray[Any], residual: NDArray[Any] | None = None) -> NDArray[Any]:
    """The sum of slots [ranks, rows, W], behind a residual if there is one."""
    total = slots[0] if residual is None else residual + slots[0]
    for part_of_rank in slots[1:]:
        total = total + part_of_rank
    return np.asarray(total)


def collect_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """The contract above."""
    rows = value_rows(op, step)
    residual = array_of(op, arrays, "residual")
    behind = None if residual is None else residual[:rows]
    slots = required(op, arrays, "slots")
    slots = slots.reshape(int(op.params["ranks"]), *slots.shape[-2:])[:, :rows]
    required(op, arrays, "y")[:rows] = added(slots, behind)


COLLECT = Body(
    name="collect",
    args=(Arg("slots", "r"), Arg("y", "w"), Arg("residual", "r", optional=True)),
    params=("width", "ranks", "per_row", "sampled", "stride", *NOT_PUBLISHED),
    tile=tile_collect,
    reference=collect_reference,
    ranks=True,
    payload=True,
    payload_words=True,
    published=lambda _, share: share == 0,
)
