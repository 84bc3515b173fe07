"""block_conv: a short convolution along the rows of a block, with coefficients of each row's own.

  z         x * rsqrt(mean(x^2) + eps) * gain with a gain; else x itself
  y[t]      residual[t] + sum over taps i of (base[side, i] + d[t, side, i]) * z[t - i]
  d         [rows, 2 * taps * hidden / group]: side, tap, group; `group` channels share a value
  base      [2, taps, hidden]

y is float32 or bf16: matvecs behind it round what they read to bf16, so then they read half the
bytes and convert nothing.
z before a block's first row is zero. A block is a run of rows of one sequence at positions one
after another. A tile is a range of columns and of rows; each norms whole rows for itself, in one
fixed order. On cuda that is most of its time, so a tile with a norm has one row.
Source: the `dflash` package's GroupedDynamicCausalConv.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.buffer import bf16, f32
from gpurt.errors import GraphError
from gpurt.graphs.ops.dtypes import dtype_code
from gpurt.graphs.ops.regions import array_of, columns, part, region_of, required

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator

_TILE_COLUMNS = 512
_NORMED_COLUMNS = 2048  # on cuda: few tiles norm the same row


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
    """Add the convolution. x, residual: [rows, hidden] f32. y: the same, or bf16. gain: [hidden]
    f32, with eps.

    side: 0 or 1. Raises: GraphError if d does not fit base and hidden, or for another dtype of y.
    """
    dtype = region_of(y).buffer.dtype
    if dtype not in (f32, bf16):
        raise GraphError(f"y is {dtype} - at {graph.name}.{name} - use f32 or bf16")
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
        y_dtype=dtype_code(dtype),
        y_fragments=0,
    )


def tile_block_conv(op: Operator, target: Target) -> list[Tile]:
    """Ranges of columns; on cuda with a norm of single rows, too."""
    rows, width = op.args["y"].shape
    if target.kind == "host" or "gain" not in op.args:
        return [
            _tile(op, begin, _TILE_COLUMNS, 0, rows) for begin in range(0, width, _TILE_COLUMNS)
        ]
    begins = range(0, width, _NORMED_COLUMNS)
    return [
        _tile(op, begin, _NORMED_COLUMNS, row, row + 1) for row in range(rows) for begin in begins
    ]


def _tile(op: Operator, begin: int, size: int, first: int, last: int) -> Tile:
    """Columns from `begin` on, of rows [first, last)."""
    args, width = op.args, op.args["y"].shape[-1]
    end = min(begin + size, width)
    before = max(0, first - int(op.params["taps"]) + 1)
    reads = [part(args["x"], 0, before, last), part(args["d"], 0, first, last)]
    reads.append(part(args["base"], 2, begin, end))
    reads += [args["gain"]] if "gain" in args else []
    if "residual" in args:
        reads.append(columns(part(args["residual"], 0, first, last), begin, end))
    row_bytes = 4 * (width + args["d"].shape[-1] + 4 * (end - begin))
    writes = (columns(part(args["y"], 0, first, last), begin, end),)
    coords = (begin, end, first, last)
    return Tile(coords, tuple(reads), writes, cost_bytes=(last - first) * row_bytes)


def fragments_block_conv(op: Operator, arg: str) -> bool:
    """Whether its tasks write that argument in any order: as floats y is read as it lies."""
    return arg == "y" and op.params["y_dtype"] == dtype_code(bf16)


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
    params=("hidden", "taps", "group", "side", "eps", "y_dtype", "y_fragments"),
    tile=tile_block_conv,
    reference=block_conv_reference,
    ranks=True,
    fragments=fragments_block_conv,
)
