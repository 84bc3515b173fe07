"""publish: this rank's part of a value to every rank. First half of a collective.

beside: the parts lie side by side in each row, [rows, ranks * W], in place for whoever reads rows:
an all-gather needs no second half. Else each rank has a slot of its own, and a sum follows.
scatter: only a share of the part goes to each rank, the columns that it will sum (reduce.py).

One rank alone, in loop-back: all slots lie in its own memory and get the same part, or in turn the
shares of its own, so one GPU moves exactly the bytes of one of `ranks`; the time of links is not in
it.

  part   [rows * per_row, W], with scatter [.., ranks * W]
  slots  [ranks, rows * per_row, W], or beside [rows * per_row, ranks * W]

Slots are columns of a symmetric buffer: its rows may be wider.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.buffer import Region
from gpurt.errors import GraphError
from gpurt.graphs.ops.regions import columns, part, region_of, required

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator

_TILE_COLUMNS = 1024
_TILE_FLOATS_CUDA = 1024  # of all rows, at least: a load of four by every second thread of a team
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
    """Add the copies; beside: if `slots` has two axes. sampled: `part` has a row a sampled row, not
    one a row of the step.

    Raises: GraphError if the shapes do not fit together.
    """
    shape, given = region_of(slots).shape, region_of(part).shape
    beside = len(shape) == 2
    ranks = shape[1] // given[-1] if beside else shape[0]
    rows, width = shape[-2], shape[1] // max(ranks, 1) if beside else shape[-1]
    wanted = (rows, width * ranks if scatter else width)
    if wanted != given or (beside and (scatter or width * ranks != shape[1])):
        msg = f"part is {list(given)}, but slots are {list(shape)}"
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
        beside=int(beside),
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
        writes = slot_columns(op, "slots", begin, end)
        size = (end - begin) * int(op.params["per_row"]) * (ranks + len(shares))
        tiles.append(Tile((begin, end, 0, 0), reads, writes, cost_bytes=4 * size))
    return tiles


def slot_columns(op: Operator, slots: str, begin: int, end: int) -> tuple[Region, ...]:
    """Columns [begin, end) of all ranks' slots of an argument, or of their parts of its rows."""
    region, width = op.args[slots], int(op.params["width"])
    if len(region.shape) == 3:
        return (columns(region, begin, end),)
    starts = range(0, region.shape[1], width)
    return tuple(columns(region, at + begin, at + end) for at in starts)


# Of a body that may store `y` on all ranks itself, as device/bodies/published.cuh does: how many,
# floats from a row to the next, from a rank's place to the next, and columns that go to one alone.
NOT_PUBLISHED = {"y_ranks": 0, "y_stride": 0, "y_part": 0, "y_share": 0}


def published_columns(op: Operator, y: Region, begin: int, end: int) -> tuple[Region, ...]:
    """What all ranks together write of `y` where each stores columns [begin, end) of its part.

    Shares: a task writes a place in ONE rank's memory, on each rank the same. Here that is the slot
    of the number of who gets it, so that all tasks together write each slot once.
    """
    share, part_columns = int(op.params["y_share"]), int(op.params["y_part"])
    if share:
        slot = part(y, 0, begin // share, begin // share + 1)
        return (columns(slot, begin % share, (end - 1) % share + 1),)
    if len(y.shape) == 3:
        return (columns(y, begin, end),)
    starts = range(0, y.shape[1], part_columns)
    return tuple(columns(y, at + begin, at + end) for at in starts)


def tile_columns(op: Operator, slots: str, target: Target) -> int:
    """Columns of a tile of any part of a collective, so that each waits for one of the part before.
    slots: the argument that is them.
    """
    if target.kind == "host":
        return _TILE_COLUMNS
    rows = op.args[slots].shape[-2]
    # Where each rank gets a share of its own, a thread has as many to move as there are ranks.
    shares = int(op.params["ranks"]) if op.params.get("scatter") or op.body.name == "reduce" else 1
    # At most half as many as workers: the next sum's wait beside them (planner: homes).
    most = max(1, target.workers // 2)
    columns = max(_TILE_FLOATS_CUDA // (rows * shares), -(-int(op.params["width"]) // most))
    return -(-columns // _GRANULE) * _GRANULE


def value_rows(op: Operator, step: StepRows) -> int:
    """Rows of the value that this step has."""
    rows = len(step.sample_rows) if op.params.get("sampled") else len(step.token)
    return rows * int(op.params["per_row"])


def publish_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """The contract above, of one rank alone."""
    rows, part = value_rows(op, step), required(op, arrays, "part")
    ranks, slots = int(op.params["ranks"]), required(op, arrays, "slots")
    if op.params["beside"]:
        slots[:rows] = np.tile(part[:rows], ranks)
        return
    shares = np.split(part[:rows], ranks, axis=1) if op.params["scatter"] else []
    slots[:, :rows] = shares or part[:rows]


PUBLISH = Body(
    name="publish",
    args=(Arg("part", "r"), Arg("slots", "w")),
    params=("width", "ranks", "per_row", "sampled", "stride", "scatter", "beside"),
    tile=tile_publish,
    reference=publish_reference,
    ranks=True,
    payload=True,
    payload_words=True,
    publishes=True,
)
