"""combine_columns: what combine.py does, of this rank's columns: y = sum over a row's experts of
weight * R(x), where the norm of a pair runs over the columns of all ranks.

  x        [R * T, W] of reduce_squares.py: d * gain      squares  [R, ranks * T * 4], of all ranks
  y        [R, W]

  R(x) = x * rsqrt(sum of squares / (ranks * W) + eps): first a rank's four sums of a pair, then
  ranks in ascending order, so all ranks find the same bits

Every pair has its expert here: ranks share each one's inner width. See route.py for `routes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.publish import NOT_PUBLISHED, published_columns
from gpurt.graphs.ops.reduce_squares import SUMS, published_to_all
from gpurt.graphs.ops.regions import columns, part, region_of, required
from gpurt.graphs.ops.route import RoutesLayout
from gpurt.graphs.ops.rows_cuda import row_blocks

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator

_TOP_MAX_CUDA = 32  # a pair a lane
_RANKS_MAX_CUDA = 32


def combine_columns(
    graph: Graph,
    x: Operand,
    squares: Operand,
    routes: Operand,
    y: Operand,
    *,
    ranks: int,
    experts: int,
    top_k: int,
    eps: float,
    name: str = "combine",
) -> Operator:
    """Add it. x, squares, y: f32. Raises: GraphError if the shapes do not fit together."""
    pairs, width = region_of(x).shape
    rows = pairs // top_k
    wanted = [(rows, width), (rows, ranks * top_k * SUMS)]
    given = [region_of(y).shape, region_of(squares).shape]
    if given != wanted:
        msg = f"x is {[pairs, width]} of {ranks} ranks, but y and squares are {given}"
        raise GraphError(f"{msg} - at {graph.name}.{name} - they need {wanted}")
    return graph.op(
        COMBINE_COLUMNS,
        {"x": x, "squares": squares, "routes": routes, "y": y},
        name=name,
        width=width,
        ranks=ranks,
        top_k=top_k,
        eps=float(eps),
        experts=experts,
        **NOT_PUBLISHED,
    )


def tile_combine_columns(op: Operator, target: Target) -> list[Tile]:
    """All of a rank's columns, row by row."""
    args, top_k, width = op.args, int(op.params["top_k"]), int(op.params["width"])
    if target.kind == "cuda":
        _check_cuda(op)
    tiles = []
    for row, end in row_blocks(op, "y", 1) if target.kind == "cuda" else _rows(op):
        reads = [
            part(args["x"], 0, row * top_k, end * top_k),
            part(args["squares"], 0, row, end),
            args["routes"],
        ]
        y = part(args["y"], 0, row, end)
        span = (0, width)
        writes = published_columns(op, y, *span) if op.params["y_ranks"] else (columns(y, *span),)
        cost_bytes = 4 * (end - row) * width * (top_k + 1)
        tiles.append(Tile((0, width, row, end), tuple(reads), writes, cost_bytes=cost_bytes))
    return tiles


def _rows(op: Operator) -> list[tuple[int, int]]:
    return [(row, row + 1) for row in range(op.args["y"].shape[0])]


def combine_columns_reference(
    op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows
) -> None:
    """The contract above, in float32."""
    y, top_k, rows = required(op, arrays, "y"), int(op.params["top_k"]), len(step.token)
    layout = RoutesLayout(y.shape[0], int(op.params["experts"]), top_k)
    pairs, ranks = rows * top_k, int(op.params["ranks"])
    routes = required(op, arrays, "routes")
    weights = routes[layout.pair(0) + 1 : layout.pair(pairs) : 2].copy().view(np.float32)
    sums = required(op, arrays, "squares")[:rows].reshape(rows, ranks, top_k, SUMS).sum(axis=3)
    mean = sums.sum(axis=1).reshape(pairs) / np.float32(ranks * int(op.params["width"]))
    factors = weights / np.sqrt(mean + np.float32(op.params["eps"]))
    x = required(op, arrays, "x")[:pairs]
    y[:rows] = (x * factors[:, None]).reshape(rows, top_k, -1).sum(axis=1)


def _check_cuda(op: Operator) -> None:
    for name, most in (("top_k", _TOP_MAX_CUDA), ("ranks", _RANKS_MAX_CUDA)):
        if int(op.params[name]) > most:
            what = "ranks" if name == "ranks" else "experts a row"
            msg = f"{int(op.params[name])} {what}, the CUDA body takes {most} - at {op.path}"
            raise GraphError(f'{msg} - use device="host"')


COMBINE_COLUMNS = Body(
    name="combine_columns",
    args=(Arg("x", "r"), Arg("squares", "r"), Arg("routes", "r"), Arg("y", "w")),
    params=("width", "ranks", "top_k", "eps", "experts", *NOT_PUBLISHED),
    tile=tile_combine_columns,
    reference=combine_columns_reference,
    ranks=True,
    payload=True,
    payload_words=True,
    published=published_to_all,
)
