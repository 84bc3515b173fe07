"""publish: this rank's part of a value into its slot on every rank. First half of a collective.

scatter: only a share of the part goes to each rank, the columns that it will sum (reduce.py).

One rank alone, in loop-back: all slots lie in its own memory and get the same part, or in turn the
shares of its own, so one GPU moves exactly the bytes of one of `ranks`; the time of links is not in
it. See collect.py for the second half.

  part  [rows * per_row, W], with scatter [.., ranks * W]     slots  [ranks, rows * per_row, W]

Slots are columns of a symmetric buffer: its rows may be wider.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
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
    scatter: bool = False,
    name: str = "publish",
) -> Operator:
    """Add the copies. sampled: `part` has a row a sampled row, not one a row of the step.

    Raises: GraphError if the shapes do not fit together.
    """
    ranks, rows, width = region_of(slots).shape
    wanted = (rows, width * ranks if scatter else width)
    if wanted != region_of(part).shape:
        msg = f"part is {list(region_of(part).shape)}, but slots are {[ranks, rows, width]}"
        raise GraphError(f"{msg} - at {graph.name}.{name} - part needs {list(wanted)}")
    return graph.op(
        PUBLISH,
        {"part": part, "slots": slots},
        name=name,
        width=width,
        ranks=ranks,
        per_row=per_row,
        sampled=int(sampled),
        stride=slots_stride(slots),
        scatter=int(scatter),
    )


def slots_stride(slots: Operand) -> int:
    """Floats between two rows of slots."""
    return region_of(slots).buffer.shape[-1]


def tile_publish(op: Operator, target: Target) -> list[Tile]:
    """Ranges of a slot's columns."""
    width, ranks = int(op.params["width"]), int(op.params["ranks"])
    at_once = tile_columns(op, "slots", target)
    shares = [s * width for s in range(ranks)] if op.params["scatter"] else [0]
    tiles = []
    for begin in range(0, width, at_once):
        end = min(begin + at_once, width)
        reads = tuple(columns(op.args["part"], at + begin, at + end) for at in shares)
        writes = (columns(op.args["slots"], begin, end),)
        size = (end - begin) * int(op.params["per_row"]) * (ranks + len(shares))
        tiles.append(Tile((begin, end, 0, 0), reads, writes, cost_bytes=4 * size))
    return tiles


def tile_columns(op: Operator, slots: str, target: Target) -> int:
    """Columns of a tile of any part of a collective, so that each waits for one of the part before.
    slots: the argument that is them.
    """
    if target.kind == "host":
        return _TILE_COLUMNS
    rows = op.args[slots].shape[1]
    # Where each rank gets a share of its own, a thread has as many to move as there are ranks.
    shares = int(op.params["ranks"]) if op.params.get("scatter") or op.body.name == "reduce" else 1
    columns = max(_TILE_FLOATS_CUDA // (rows * shares), -(-int(op.params["width"]) // _TILES_CUDA))
    return -(-columns // _GRANULE) * _GRANULE


def value_rows(op: Operator, step: StepRows) -> int:
    """Rows of the value that this step has."""
    rows = len(step.sample_rows) if op.params.get("sampled") else len(step.token)
    return rows * int(op.params["per_row"])


def publish_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """The contract above, of one rank alone."""
    rows, part = value_rows(op, step), required(op, arrays, "part")
    shares = np.split(part[:rows], int(op.params["ranks"]), axis=1) if op.params["scatter"] else []
    required(op, arrays, "slots")[:, :rows] = shares or part[:rows]


PUBLISH = Body(
    name="publish",
    args=(Arg("part", "r"), Arg("slots", "w")),
    params=("width", "ranks", "per_row", "sampled", "stride", "scatter"),
    tile=tile_publish,
    reference=publish_reference,
    ranks=True,
)
