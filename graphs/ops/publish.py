"""publish: this rank's part of a value into its slot on every rank. First half of a collective.

One rank alone, in loop-back: all slots lie in its own memory and get the same part, so one GPU
moves exactly the bytes of one of `ranks`; the time of links is not in it. See collect.py for the
second half.

  part  [rows * per_row, W]          slots  [ranks, rows * per_row, W], symmetric
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.regions import columns, region_of, required

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator

_TILE_COLUMNS = 1024
_TILE_FLOATS_CUDA = 2048  # of all rows: one load of four a thread of a team
_TILES_CUDA = 128  # at most: more would stand in line for workers
_GRANULE = 32  # columns: whole lines of memory


def publish(
    graph: Graph,
    part: Operand,
    slots: Operand,
    *,
    per_row: int = 1,
    sampled: bool = False,
    name: str = "publish",
) -> Operator:
    """Add the copies. sampled: `part` has a row a sampled row, not one a row of the step.

    Raises: GraphError if the shapes do not fit together.
    """
    ranks, *rest = region_of(slots).shape
    if tuple(rest) != region_of(part).shape:
        msg = f"part is {list(region_of(part).shape)}, but a slot {rest}"
        raise GraphError(f"{msg} - at {graph.name}.{name} - give both the same shape")
    return graph.op(
        PUBLISH,
        {"part": part, "slots": slots},
        name=name,
        width=rest[-1],
        ranks=ranks,
        per_row=per_row,
        sampled=int(sampled),
    )


def tile_publish(op: Operator, target: Target) -> list[Tile]:
    """Ranges of columns."""
    width, ranks = int(op.params["width"]), int(op.params["ranks"])
    tiles, at_once = [], tile_columns(op, target)
    for begin in range(0, width, at_once):
        end = min(begin + at_once, width)
        reads = (columns(op.args["part"], begin, end),)
        writes = (columns(op.args["slots"], begin, end),)
        cost_bytes = 4 * (end - begin) * int(op.params["per_row"]) * (ranks + 1)
        tiles.append(Tile((begin, end, 0, 0), reads, writes, cost_bytes=cost_bytes))
    return tiles


def tile_columns(op: Operator, target: Target) -> int:
    """Columns of a tile of either half, so that a tile of collect waits for one of publish."""
    if target.kind == "host":
        return _TILE_COLUMNS
    rows = op.args["slots"].shape[1]
    columns = max(_TILE_FLOATS_CUDA // rows, -(-int(op.params["width"]) // _TILES_CUDA))
    return -(-columns // _GRANULE) * _GRANULE


def value_rows(op: Operator, step: StepRows) -> int:
    """Rows of the value that this step has."""
    rows = len(step.sample_rows) if op.params["sampled"] else len(step.token)
    return rows * int(op.params["per_row"])


def publish_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """The contract above."""
    rows = value_rows(op, step)
    required(op, arrays, "slots")[:, :rows] = required(op, arrays, "part")[:rows]


PUBLISH = Body(
    name="publish",
    args=(Arg("part", "r"), Arg("slots", "w")),
    params=("width", "ranks", "per_row", "sampled"),
    tile=tile_publish,
    reference=publish_reference,
    ranks=True,
)
