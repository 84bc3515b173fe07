"""reduce_squares: sums all ranks' parts of this rank's columns of each pair, times a gain, and sums
the squares of that, for the norm of pairs whose columns lie on all ranks (combine_columns.py).

Legend: R rows, T experts a row, so R * T pairs, W columns a rank.

  parts  [ranks, R * T, W], slots      x  [R * T, W]: (the sum of parts in rank order) * gain
  y      [R, T * 4]: squares of x, four sums a pair, of every fourth block of 128 columns each

Ranks exchange y, 16 bytes a pair, where all of x was what each must have to norm it. The four have
an order of their own and are added by who reads them: so a warp of the GPU sums one alone, without
a barrier, and bits hang on W only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.buffer import Region
from gpurt.errors import GraphError
from gpurt.graphs.ops.collect import added
from gpurt.graphs.ops.publish import NOT_PUBLISHED, published_columns, slots_stride
from gpurt.graphs.ops.regions import columns, part, region_of, required
from gpurt.graphs.ops.rows_cuda import FLOATS

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator

SUMS = 4  # of squares, a pair: one granule
_BLOCK = 128  # columns: a granule a lane of a warp
# Pairs of a tile: SUMS times as many warps are a team. Of few pairs each has an SM of its own.
_PAIRS_AT_ONCE = 4
_TILES = 32
_TILES_MAX = 128  # more would stand in line for workers


def reduce_squares(
    graph: Graph,
    parts: Operand,
    gain: Operand,
    x: Operand,
    y: Operand,
    *,
    name: str = "reduce_squares",
) -> Operator:
    """Add it. All f32. Raises: GraphError if the shapes do not fit together."""
    ranks, pairs, width = region_of(parts).shape
    rows, sums = region_of(y).shape
    shapes = region_of(x).shape, region_of(gain).shape, (rows * (sums // SUMS) * SUMS)
    if shapes != ((pairs, width), (width,), pairs * SUMS):
        msg = f"parts are {[ranks, pairs, width]}, but x {list(shapes[0])}, gain {list(shapes[1])}"
        needs = f"x needs {[pairs, width]}, gain {[width]}, y {SUMS} floats a pair"
        raise GraphError(f"{msg}, y {[rows, sums]} - at {graph.name}.{name} - {needs}")
    return graph.op(
        REDUCE_SQUARES,
        {"parts": parts, "gain": gain, "x": x, "y": y},
        name=name,
        width=width,
        ranks=ranks,
        per_row=sums // SUMS,
        stride=slots_stride(parts),
        **NOT_PUBLISHED,
    )


def tile_reduce_squares(op: Operator, target: Target) -> list[Tile]:
    """Ranges of pairs: of a row, or of whole rows."""
    width, ranks, per_row = (int(op.params[name]) for name in ("width", "ranks", "per_row"))
    pairs = op.args["x"].shape[0]
    if target.kind == "cuda" and width % FLOATS:
        msg = f"{width} columns a rank, the CUDA body takes multiples of {FLOATS} - at {op.path}"
        raise GraphError(f'{msg} - use device="host"')
    most = min(_PAIRS_AT_ONCE, max(1, pairs // _TILES))
    at_once = max(n for n in range(1, most + 1) if per_row % n == 0)
    if pairs > at_once * _TILES_MAX:
        at_once = -(-pairs // (_TILES_MAX * per_row)) * per_row
    tiles = []
    for begin in range(0, pairs, at_once):
        end = min(begin + at_once, pairs)
        reads = part(op.args["parts"], 1, begin, end), op.args["gain"]
        writes = part(op.args["x"], 0, begin, end), *_sums(op, begin, end)
        cost_bytes = 4 * (end - begin) * width * (ranks + 1)
        tiles.append(Tile((begin, end, 0, 0), reads, writes, cost_bytes=cost_bytes))
    return tiles


def _sums(op: Operator, begin: int, end: int) -> tuple[Region, ...]:
    """What a tile writes of y."""
    per_row = int(op.params["per_row"])
    y = part(op.args["y"], 0, begin // per_row, -(-end // per_row))
    first = begin % per_row
    span = SUMS * first, SUMS * (first + min(end - begin, per_row))
    return published_columns(op, y, *span) if op.params["y_ranks"] else (columns(y, *span),)


def published_to_all(op: Operator, share: int) -> bool:
    """Whether its tasks can store y themselves: on all ranks, not shares of it."""
    del op
    return not share


def reduce_squares_reference(
    op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows
) -> None:
    """The contract above, in float32."""
    rows, per_row = len(step.token), int(op.params["per_row"])
    pairs = rows * per_row
    total = added(required(op, arrays, "parts")[:, :pairs]) * required(op, arrays, "gain")
    required(op, arrays, "x")[:pairs] = total
    squares = np.zeros((pairs, SUMS), np.float32)
    for block, begin in enumerate(range(0, total.shape[1], _BLOCK)):
        of_block = total[:, begin : begin + _BLOCK]
        squares[:, block % SUMS] += np.sum(of_block * of_block, axis=1)
    required(op, arrays, "y")[:rows] = squares.reshape(rows, per_row * SUMS)


REDUCE_SQUARES = Body(
    name="reduce_squares",
    args=(Arg("parts", "r"), Arg("gain", "r"), Arg("x", "w"), Arg("y", "w")),
    params=("width", "ranks", "per_row", "stride", *NOT_PUBLISHED),
    tile=tile_reduce_squares,
    reference=reduce_squares_reference,
    ranks=True,
    payload=True,
    payload_words=True,
    published=published_to_all,
)
