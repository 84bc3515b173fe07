"""gated_residual: y = alpha * stream + beta * R(branch * gain), the step from branch to stream.

  R(v) = v * rsqrt(mean(v^2) + eps) over the whole row; gain is applied before it, absent: 1
  alpha, beta: [H] constants of the model, one a channel, folded at load
  normed = R(y) * norm, optional: normed.py

The branch may be slots of a collective, [ranks, rows, H]: their sum, see collect.py. It is put
together here, by every tile for its whole rows, with collect's bits: reading a row of each of a few
ranks from L2 costs less than a task in between and its edges.

A tile is a range of columns; each computes the mean square of the whole row, in one fixed order.
On cuda also of rows: coords = (column begin, column end, row begin, row end). With `normed` a tile
has all columns, since y's own mean square is in it: on cuda one row, on the host all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import Arg, Body, StepRows, Target, Tile
from gpurt.buffer import bf16
from gpurt.errors import GraphError
from gpurt.graphs.ops.collect import added
from gpurt.graphs.ops.dtypes import dtype_code
from gpurt.graphs.ops.normed import normed_code, rms_normed
from gpurt.graphs.ops.publish import slots_stride
from gpurt.graphs.ops.regions import array_of, columns, part, region_of, required
from gpurt.graphs.ops.rows_cuda import FLOATS, row_blocks

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator

_TILE_COLUMNS = 2048  # few: every tile reads all of a row's branch
_TILE_ROWS_CUDA = 4


def gated_residual(
    graph: Graph,
    branch: Operand,
    stream: Operand,
    alpha: Operand,
    beta: Operand,
    y: Operand,
    *,
    gain: Operand | None = None,
    norm: Operand | None = None,
    normed: Operand | None = None,
    eps: float,
    norm_eps: float = 0.0,
    name: str = "gated_residual",
) -> Operator:
    """Add y = alpha * stream + beta * R(branch * gain), and normed = R(y) * norm if it is given.

    branch, stream, y: [rows, H] f32. gain, alpha, beta, norm: [H] f32. normed: [rows, H] f32 or
    bf16, with norm_eps.
    Raises: GraphError if the widths differ, or if one of norm and normed is absent.
    """
    normed_dtype = normed_code(norm, normed, f"at {graph.name}.{name}")
    *slots, _, width = region_of(branch).shape
    ranks = slots[0] if slots else 1
    optional = [operand for operand in (gain, norm, normed) if operand is not None]
    operands = (stream, alpha, beta, y, *optional)
    widths = [width, *(region_of(operand).shape[-1] for operand in operands)]
    if len(set(widths)) != 1:
        msg = f"widths {widths} of branch, stream, alpha, beta, y, then gain, norm, normed"
        raise GraphError(f"{msg} - at {graph.name}.{name} - they must be equal")
    return graph.op(
        GATED_RESIDUAL,
        {
            "branch": branch,
            "gain": gain,
            "stream": stream,
            "alpha": alpha,
            "beta": beta,
            "y": y,
            "norm": norm,
            "normed": normed,
        },
        name=name,
        hidden=width,
        eps=float(eps),
        ranks=ranks,
        stride=slots_stride(branch),
        norm_eps=float(norm_eps),
        normed_dtype=normed_dtype,
        normed_fragments=0,
    )


def tile_gated_residual(op: Operator, target: Target) -> list[Tile]:
    """Ranges of columns; on cuda of columns and rows."""
    width = op.args["y"].shape[-1]
    whole = "normed" in op.args
    at_once = width if whole else _TILE_COLUMNS
    if target.kind == "cuda":
        if width % FLOATS:
            msg = f"slots of {width} columns, the CUDA body takes multiples of"
            raise GraphError(f'{msg} {FLOATS} - at {op.path} - use device="host"')
        return [
            make_gated_tile(op, begin, min(begin + at_once, width), rows)
            for rows in row_blocks(op, "y", 1 if whole else _TILE_ROWS_CUDA)
            for begin in range(0, width, at_once)
        ]
    return [
        make_gated_tile(op, begin, min(begin + at_once, width))
        for begin in range(0, width, at_once)
    ]


def make_gated_tile(
    op: Operator, begin: int, end: int, rows: tuple[int, int] | None = None
) -> Tile:
    """The tile of columns [begin, end), and of a range of rows; default: all."""
    args = op.args
    low, high = rows or (0, args["y"].shape[0])
    branch = args["branch"]
    reads = [part(branch, len(branch.shape) - 2, low, high)]
    reads.append(columns(part(args["stream"], 0, low, high), begin, end))
    reads += [columns(args[name], begin, end) for name in ("alpha", "beta")]
    reads += [args[name] for name in ("gain", "norm") if name in args]
    of_row = branch.shape[-1] * int(op.params["ranks"])
    cost_bytes = 4 * (of_row + 4 * (end - begin))
    writes = [
        columns(part(args[name], 0, low, high), begin, end)
        for name in ("y", "normed")
        if name in args
    ]
    coords = (begin, end, *(rows or (0, 0)))
    return Tile(coords, tuple(reads), tuple(writes), cost_bytes=cost_bytes)


def fragments_gated_residual(op: Operator, arg: str) -> bool:
    """Whether its tasks write that argument in any order: as floats normed is nobody's operand."""
    return arg == "normed" and op.params["normed_dtype"] == dtype_code(bf16)


def gated_residual_reference(
    op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows
) -> None:
    """The contract above, in float32."""
    rows = len(step.token)
    slots = required(op, arrays, "branch")
    slots = slots.reshape(int(op.params["ranks"]), -1, slots.shape[-1])[:, :rows]
    branch = added(slots.astype(np.float32))
    gain = array_of(op, arrays, "gain")
    if gain is not None:
        branch = branch * gain
    stream = required(op, arrays, "stream")[:rows]
    alpha, beta = required(op, arrays, "alpha"), required(op, arrays, "beta")
    y = alpha * stream + beta * rms_normed(branch, op.params["eps"])
    required(op, arrays, "y")[:rows] = y
    if "normed" in op.args:
        normed = rms_normed(y, op.params["norm_eps"]) * required(op, arrays, "norm")
        required(op, arrays, "normed")[:rows] = normed


GATED_RESIDUAL = Body(
    name="gated_residual",
    args=(
        Arg("branch", "r", payload=True),
        Arg("gain", "r", optional=True),
        Arg("stream", "r"),
        Arg("alpha", "r"),
        Arg("beta", "r"),
        Arg("y", "w"),
        Arg("norm", "r", optional=True),
        Arg("normed", "w", optional=True),
    ),
    params=(
        *("hidden", "eps", "ranks", "stride"),
        *("norm_eps", "normed_dtype", "normed_fragments"),
    ),
    tile=tile_gated_residual,
    reference=gated_residual_reference,
    ranks=True,
    fragments=fragments_gated_residual,
)
