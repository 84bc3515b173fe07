"""block_conv: a short convolution along the rows of a block, with coefficients of each row's own.

  z         x * rsqrt(mean(x^2) + eps) * gain with a gain; else x itself
  y[t]      residual[t] + sum over taps i of (base[side, i] + d[t, side, i]) * z[t - i]
  d         [rows, 2 * taps * hidden / group]: side, tap, group; `group` channels share a value
  base      [2, taps, hidden]

z before a block's first row is zero. A block is a run of rows of one sequence at positions one
after another. A tile is a range of columns; each norms whole rows for itself, in one fixed order.
Source: the `dflash` package's GroupedDynamicCausalConv.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.regions import array_of, columns, region_of, required

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator

_TILE_COLUMNS = 512


def block_conv(
    graph: Graph,
    x: Operand,
    d: Operand,
    base: Operand,
    y: Operand,
    *,
    side: int,
    gain: Operand | None = None,
    residual: Operand | None = None,
    eps: float = 0.0,
    name: str = "block_conv",
) -> Operator:
    """Add the convolution. x, y, residual: [rows, hidden] f32. gain: [hidden] f32, with eps.

    side: 0 or 1. Raises: GraphError if d does not fit base and hidden.
    """
    hidden, (_, taps, width) = region_of(x).shape[-1], region_of(base).shape
    per_tap = region_of(d).shape[-1] // (2 * taps)
    if width != hidden or hidden % per_tap or region_of(d).shape[-1] != 2 * taps * per_tap:
        msg = f"d has {region_of(d).shape[-1]} columns and base {width}, x has {hidden}"
        raise GraphError(
            f"{msg} - at {graph.name}.{name} - d needs 2 x {taps} x a part of {hidden}"
        )
    return graph.op(
        BLOCK_CONV,
        {"x": x, "gain": gain, "d": d, "base": base, "residual": residual, "y": y},
        name=name,
        hidden=hidden,
        taps=taps,
        group=hidden // per_tap,
        side=side,
        eps=float(eps),
    )


def tile_block_conv(op: Operator, target: Target) -> list[Tile]:
    """Ranges of columns."""
    del target
    width, args = op.args["y"].shape[-1], op.args
    tiles = []
    for begin in range(0, width, _TILE_COLUMNS):
        end = min(begin + _TILE_COLUMNS, width)
        reads = [args["x"], args["d"], columns(args["base"], begin, end)]
        reads += [args["gain"]] if "gain" in args else []
        reads += [columns(args["residual"], begin, end)] if "residual" in args else []
        cost_bytes = 4 * (width + args["d"].shape[-1] + 4 * (end - begin))
        writes = (columns(args["y"], begin, end),)
        tiles.append(Tile((begin, end, 0, 0), tuple(reads), writes, cost_bytes=cost_bytes))
    return tiles


def block_conv_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """The contract above, in float32."""
    rows, (side, taps) = len(step.token), (int(op.params["side"]), int(op.params["taps"]))
    z, base = required(op, arrays, "x")[:rows], required(op, arrays, "base")
    gain, residual = array_of(op, arrays, "gain"), array_of(op, arrays, "residual")
    if gain is not None:
        square = np.mean(z * z, axis=-1, keepdims=True) + np.float32(op.params["eps"])
        z = z / np.sqrt(square) * gain
    groups = int(op.params["hidden"]) // int(op.params["group"])
    d = required(op, arrays, "d")[:rows].reshape(rows, 2, taps, groups)[:, side]
    y = np.zeros_like(z) if residual is None else residual[:rows].copy()
    for tap in range(taps):
        kernel = base[side, tap] + np.repeat(d[:, tap], int(op.params["group"]), axis=-1)
        for row in range(tap, rows):
            same = step.slot[row - tap] == step.slot[row]
            if same and step.position[row - tap] + tap == step.position[row]:
                y[row] += kernel[row] * z[row - tap]
    required(op, arrays, "y")[:rows] = y


BLOCK_CONV = Body(
    name="block_conv",
    args=(
        Arg("x", "r"),
        Arg("gain", "r", optional=True),
        Arg("d", "r"),
        Arg("base", "r"),
        Arg("residual", "r", optional=True),
        Arg("y", "w"),
    ),
    params=("hidden", "taps", "group", "side", "eps"),
    tile=tile_block_conv,
    reference=block_conv_reference,
)
