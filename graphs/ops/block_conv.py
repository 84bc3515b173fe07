"""block_conv: a short convolution along the rows of a block, with coefficients of each row's own.

  y[t]      residual[t] + sum over taps i of (base[side, i] + d[t, side, i]) * x[t - i]
  d         [rows, 2 * taps * hidden / group]: side, tap, group; `group` channels share a value
  base      [2, taps, hidden]
  normed    y * rsqrt(mean(y^2) + norm_eps) * norm, optional: normed.py

x, y and normed are float32 or bf16: matvecs behind round what they read to bf16, so then they read
half the bytes and convert nothing.
x before a block's first row is zero. A block is a run of rows of one sequence at positions one
after another. A tile is a range of columns and of rows, on cuda one row; with `normed` it has all
columns, since y's own mean square is in it.
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
from gpurt.graphs.ops.normed import float_code, normed_code, rms_normed
from gpurt.graphs.ops.regions import array_of, columns, part, region_of, required

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator

_TILE_COLUMNS = 512
_TILE_COLUMNS_CUDA = 2048  # of one row: a granule a thread


def block_conv(
    graph: Graph,
    x: Operand,
    d: Operand,
    base: Operand,
    y: Operand,
    *,
    side: int,
    residual: Operand | None = None,
    norm: Operand | None = None,
    normed: Operand | None = None,
    norm_eps: float = 0.0,
    name: str = "block_conv",
) -> Operator:
    """Add the convolution. x, y, normed: [rows, hidden] f32 or bf16. residual: the same in f32.
    norm: [hidden] f32, with norm_eps.

    side: 0 or 1. Raises: GraphError if d does not fit base and hidden, for other dtypes, or if one
    of norm and normed is absent.
    """
    where = f"at {graph.name}.{name}"
    y_dtype, normed_dtype = float_code(y, "y", where), normed_code(norm, normed, where)
    if normed is not None and y_dtype != dtype_code(f32):
        raise GraphError(f"y is bf16 beside normed - {where} - make it f32")
    hidden, (_, taps, width) = region_of(x).shape[-1], region_of(base).shape
    per_tap = region_of(d).shape[-1] // (2 * taps)
    if width != hidden or hidden % per_tap or region_of(d).shape[-1] != 2 * taps * per_tap:
        msg = f"d has {region_of(d).shape[-1]} columns and base {width}, x has {hidden}"
        raise GraphError(f"{msg} - {where} - d needs 2 x {taps} x a part of {hidden}")
    args = {"x": x, "d": d, "base": base, "residual": residual, "y": y}
    return graph.op(
        BLOCK_CONV,
        {**args, "norm": norm, "normed": normed},
        name=name,
        hidden=hidden,
        taps=taps,
        group=hidden // per_tap,
        side=side,
        norm_eps=float(norm_eps),
        x_dtype=float_code(x, "x", where),
        x_fragments=0,
        y_dtype=y_dtype,
        y_fragments=0,
        normed_dtype=normed_dtype,
        normed_fragments=0,
    )


def tile_block_conv(op: Operator, target: Target) -> list[Tile]:
    """Ranges of columns; on cuda, and where rows are normed, of single rows. Raises: GraphError for
    what the CUDA body does not take.
    """
    rows, width = op.args["y"].shape
    group = int(op.params["group"])
    if target.kind == "cuda" and (width % 4 or group & (group - 1) or group > _TILE_COLUMNS_CUDA):
        msg = f"{width} columns in groups of {group}, the CUDA body takes multiples of 4"
        need = f"powers of two up to {_TILE_COLUMNS_CUDA}"
        raise GraphError(f'{msg} and {need} - at {op.path} - use device="host"')
    at_once = _TILE_COLUMNS if target.kind == "host" else _TILE_COLUMNS_CUDA
    if "normed" in op.args:
        at_once = width
    by_row = target.kind != "host" or "normed" in op.args
    blocks = [(row, row + 1) for row in range(rows)] if by_row else [(0, rows)]
    return [
        _tile(op, begin, at_once, *block) for block in blocks for begin in range(0, width, at_once)
    ]


def _tile(op: Operator, begin: int, size: int, first: int, last: int) -> Tile:
    """Columns from `begin` on, of rows [first, last)."""
    args, width = op.args, op.args["y"].shape[-1]
    end = min(begin + size, width)
    before = max(0, first - int(op.params["taps"]) + 1)
    reads = [columns(part(args["x"], 0, before, last), begin, end)]
    reads += [part(args["d"], 0, first, last), part(args["base"], 2, begin, end)]
    reads += [args["norm"]] if "norm" in args else []
    made = [name for name in ("y", "normed") if name in args]
    own = {
        name: columns(part(args[name], 0, first, last), begin, end)
        for name in ("residual", *made)
        if name in args
    }
    reads += [own["residual"]] if "residual" in own else []
    row_bytes = 4 * (args["d"].shape[-1] + 5 * (end - begin))
    writes = tuple(own[name] for name in made)
    coords = (begin, end, first, last)
    return Tile(coords, tuple(reads), writes, cost_bytes=(last - first) * row_bytes)


def fragments_block_conv(op: Operator, arg: str) -> bool:
    """Whether its tasks find that argument in any order: floats are read as they lie."""
    return op.params.get(f"{arg}_dtype") == dtype_code(bf16)


def block_conv_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """The contract above, in float32."""
    rows, (side, taps) = len(step.token), (int(op.params["side"]), int(op.params["taps"]))
    x, base = required(op, arrays, "x")[:rows].astype(np.float32), required(op, arrays, "base")
    residual = array_of(op, arrays, "residual")
    groups = int(op.params["hidden"]) // int(op.params["group"])
    d = required(op, arrays, "d")[:rows].reshape(rows, 2, taps, groups)[:, side]
    y = np.zeros_like(x) if residual is None else residual[:rows].copy()
    for tap in range(taps):
        kernel = base[side, tap] + np.repeat(d[:, tap], int(op.params["group"]), axis=-1)
        for row in range(tap, rows):
            same = step.slot[row - tap] == step.slot[row]
            if same and step.position[row - tap] + tap == step.position[row]:
                y[row] += kernel[row] * x[row - tap]
    required(op, arrays, "y")[:rows] = y
    if "normed" in op.args:
        normed = rms_normed(y, op.params["norm_eps"]) * required(op, arrays, "norm")
        required(op, arrays, "normed")[:rows] = normed


BLOCK_CONV = Body(
    name="block_conv",
    args=(
        Arg("x", "r", payload=True),
        Arg("d", "r", payload=True),
        Arg("base", "r"),
        Arg("residual", "r", optional=True),
        Arg("y", "w", payload=True),
        Arg("norm", "r", optional=True),
        Arg("normed", "w", optional=True, payload=True),
    ),
    params=(
        *("hidden", "taps", "group", "side", "norm_eps"),
        *("x_dtype", "x_fragments", "y_dtype", "y_fragments", "normed_dtype", "normed_fragments"),
    ),
    tile=tile_block_conv,
    reference=block_conv_reference,
    ranks=True,
    fragments=fragments_block_conv,
)
