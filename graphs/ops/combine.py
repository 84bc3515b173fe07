"""combine: y = sum over a row's experts of weight * R(d * gain), plus a residual.

Legend: R rows, T experts a row, M columns. See route.py for pairs and `routes`. The sum runs over
a row's pairs in ascending order, first the first pair's product, the residual last.

  R(v) = v * rsqrt(mean(v^2) + eps), over all M columns of one pair, BEFORE the sum; without a gain
  there is no norm: y = sum of weight * d

A pair without a slot is another rank's: it adds nothing, and its row of d is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.regions import array_of, columns, part, region_of, required
from gpurt.graphs.ops.route import NO_SLOT, RoutesLayout
from gpurt.graphs.ops.rows_cuda import row_blocks

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator

_TILE_COLUMNS = 1024  # a tile with a gain reads whole pairs for their norms
_TASKS_CUDA = 64  # that rows are cut for: each reads whole pairs for their norms
_TILE_COLUMNS_CUDA = 512
_TOP_MAX_CUDA = 32


def combine(
    graph: Graph,
    d: Operand,
    routes: Operand,
    y: Operand,
    *,
    experts: int,
    top_k: int,
    gain: Operand | None = None,
    residual: Operand | None = None,
    eps: float = 0.0,
    name: str = "combine",
) -> Operator:
    """Add the weighted sum over experts.

    d: [rows*top_k, M] f32. gain: [M] f32, with eps. residual, y: [rows, M] f32.
    Raises: GraphError if the shapes do not fit together.
    """
    pairs, width = region_of(d).shape
    if region_of(y).shape != (pairs // top_k, width):
        msg = f"d is [{pairs}, {width}], but y {list(region_of(y).shape)}"
        raise GraphError(f"{msg} - at {graph.name}.{name} - y needs [{pairs // top_k}, {width}]")
    return graph.op(
        COMBINE,
        {"d": d, "routes": routes, "gain": gain, "residual": residual, "y": y},
        name=name,
        width=width,
        top_k=top_k,
        eps=float(eps),
        experts=experts,
    )


def tile_combine(op: Operator, target: Target) -> list[Tile]:
    """Ranges of columns; on cuda of a row each, and of few rows fewer columns."""
    rows, width = op.args["y"].shape
    blocks: list[tuple[int, int] | None] = [None]
    at_once = _TILE_COLUMNS
    if target.kind == "cuda":
        _check_cuda(op)
        blocks = [*row_blocks(op, "y", 1)]
        at_once = max(_TILE_COLUMNS_CUDA, -(-width * rows // _TASKS_CUDA // 4) * 4)
    return [
        make_combine_tile(op, begin, min(begin + at_once, width), block)
        for block in blocks
        for begin in range(0, width, at_once)
    ]


def make_combine_tile(
    op: Operator, begin: int, end: int, rows: tuple[int, int] | None = None
) -> Tile:
    """The tile of columns [begin, end), and of a range of rows; default: all.

    It reads all rows of d whatever its own: those of `expert_matvec` stand for slots, not for rows.
    """
    args = op.args
    low, high = rows or (0, args["y"].shape[0])
    normed = "gain" in args
    reads = [args["d"] if normed else columns(args["d"], begin, end), args["routes"]]
    if normed:
        reads.append(args["gain"])
    if "residual" in args:
        reads.append(columns(part(args["residual"], 0, low, high), begin, end))
    width = args["d"].shape[-1] if normed else end - begin
    cost_bytes = 4 * (int(op.params["top_k"]) * width + 2 * (end - begin))
    writes = (columns(part(args["y"], 0, low, high), begin, end),)
    coords = (begin, end, *(rows or (0, 0)))
    return Tile(coords, tuple(reads), writes, cost_bytes=cost_bytes)


def combine_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """The contract above, in float32, pair by pair."""
    y, top_k = required(op, arrays, "y"), int(op.params["top_k"])
    layout = RoutesLayout(y.shape[0], int(op.params["experts"]), top_k)
    rows, routes = len(step.token), required(op, arrays, "routes")
    pairs = rows * top_k
    weights = routes[layout.pair(0) + 1 : layout.pair(pairs) : 2].copy().view(np.float32)
    d = required(op, arrays, "d")[:pairs].astype(np.float32)
    gain = array_of(op, arrays, "gain")
    if gain is not None:
        scaled = d * gain
        square = np.mean(scaled * scaled, axis=-1, keepdims=True)
        d = scaled / np.sqrt(square + np.float32(op.params["eps"]))
    here = routes[layout.pair(0) : layout.pair(pairs) : 2] != NO_SLOT
    terms = np.where(here[:, None], d * weights[:, None], 0).reshape(rows, top_k, -1)
    total = terms[:, 0]
    for i in range(1, top_k):
        total = total + terms[:, i]
    residual = array_of(op, arrays, "residual")
    y[:rows] = total if residual is None else total + residual[:rows]


def _check_cuda(op: Operator) -> None:
    top_k = int(op.params["top_k"])
    if top_k > _TOP_MAX_CUDA:
        msg = f"{top_k} experts a row, the CUDA body takes {_TOP_MAX_CUDA} - at {op.path}"
        raise GraphError(f'{msg} - use device="host"')


COMBINE = Body(
    name="combine",
    args=(
        Arg("d", "r"),
        Arg("routes", "r"),
        Arg("gain", "r", optional=True),
        Arg("residual", "r", optional=True),
        Arg("y", "w", payload=True),
    ),
    params=("width", "top_k", "eps", "experts"),
    tile=tile_combine,
    reference=combine_reference,
)
