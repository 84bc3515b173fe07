"""matvec: y = epilogue(W norm(x)) + residual, for every row of a step. The body of all weights.

Legend: B rows of a step, K columns of W, N rows of W. A tile is a range of rows of W; it never
cuts K, so the order of a row's sum is fixed by K (host) or by the packing (cuda), and not by the
number of rows, tiles or workers.

  norm      xn = x * rsqrt(mean(x^2) + eps) * norm        RMSNorm, arXiv 1910.07467
  swiglu    y[i] = silu(z[2i]) * z[2i+1]                  rows of W interleaved by the loader
  sampled   only rows whose logits are wanted; y row j belongs to sample row j
  exact     float32 from end to end on cuda too, where else W and x are rounded to bf16: for a
            router, whose choices a rounding would change. It takes a norm, scale and softcap only
  scale     z is multiplied by it first; then, above 0, softcap: z = softcap * tanh(z / softcap)
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
from gpurt.graphs.ops.publish import NOT_PUBLISHED, published_columns
from gpurt.graphs.ops.regions import array_of, columns, part, region_of, required

if TYPE_CHECKING:
    from gpurt.graph import Graph, Operand, Operator
    from gpurt.planner.lower import Lowering

# Host tiles: some ten microseconds of one core, so that taking a task (0.1 us) and its two barriers
# are cheap beside it: 32 KB tiles cost 7 % more CPU time a token than 64 KB ones. Their number is a
# multiple of 4, because an odd one leaves one of 2 or 4 cores idle at every layer's end.
_TILE_BYTES_SMALL = 64 << 10
_TILE_BYTES_LARGE = 256 << 10
_LARGE_MATRIX_BYTES = 8 << 20
_TILE_COUNT_MULTIPLE = 4
_TILE_ROWS_MULTIPLE = 16


def matvec(
    graph: Graph,
    x: Operand,
    w: Operand,
    y: Operand,
    *,
    norm: Operand | None = None,
    residual: Operand | None = None,
    swiglu: bool = False,
    sampled: bool = False,
    eps: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    exact: bool = False,
    name: str = "matvec",
) -> Operator:
    """Add y = epilogue(W norm(x)) + residual.

    x: [rows, K]. w: [N, K]. y: [rows, N], or [rows, N/2] with swiglu. norm: [K] f32, with eps.
    residual: like y, f32. Raises: GraphError if the shapes do not fit together.
    """
    x_BK, w_NK, y_BN = region_of(x), region_of(w), region_of(y)
    n, k = w_NK.shape
    width = n // 2 if swiglu else n
    if x_BK.shape[-1] != k or y_BN.shape[-1] != width:
        msg = f"W is [{n}, {k}], but x has {x_BK.shape[-1]} columns and y {y_BN.shape[-1]}"
        raise GraphError(f"{msg} - at {graph.name}.{name} - x needs {k}, y needs {width}")
    if residual is not None and region_of(residual).shape[-1] != width:
        msg = f"residual has {region_of(residual).shape[-1]} columns, y has {width}"
        raise GraphError(f"{msg} - at {graph.name}.{name} - give both the same shape")
    return graph.op(
        MATVEC,
        {"x": x, "w": w, "norm": norm, "residual": residual, "y": y},
        name=name,
        n=n,
        k=k,
        epilogue=int(swiglu),
        eps=float(eps),
        sampled=int(sampled),
        w_dtype=dtype_code(w_NK.buffer.dtype),
        x_dtype=dtype_code(x_BK.buffer.dtype),
        y_dtype=dtype_code(y_BN.buffer.dtype),
        scale=float(scale),
        softcap=float(softcap),
        exact=int(exact),
        **NOT_PUBLISHED,
        x_fragments=0,
        y_fragments=0,
    )


def tile_matvec(op: Operator, target: Target) -> list[Tile]:
    """Ranges of rows of W. On cuda graphs/ops/matvec_cuda.py fits them to the packed stages."""
    if target.kind == "cuda" and (cuda := _cuda_module()) is not None:
        tiles: list[Tile] = cuda.tile_cuda(op, target)
        return tiles
    rows = host_tile_rows(op)
    n = op.args["w"].shape[0]
    return [make_tile(op, begin, min(begin + rows, n)) for begin in range(0, n, rows)]


def host_tile_rows(op: Operator) -> int:
    """Rows of W in one host tile, from the matrix alone."""
    w = op.args["w"]
    return tile_rows_of(w.shape[0], w.buffer.dtype.row_bytes(w.shape[-1]))


def tile_rows_of(rows: int, row_bytes: int) -> int:
    """Rows in one host tile of a matrix of `rows` rows: a multiple of 16."""
    size_bytes = row_bytes * rows
    large = size_bytes >= _LARGE_MATRIX_BYTES
    count = -(-size_bytes // (_TILE_BYTES_LARGE if large else _TILE_BYTES_SMALL))
    count = -(-count // _TILE_COUNT_MULTIPLE) * _TILE_COUNT_MULTIPLE
    return -(-rows // (count * _TILE_ROWS_MULTIPLE)) * _TILE_ROWS_MULTIPLE


def make_tile(op: Operator, begin: int, end: int, step_rows: tuple[int, int] | None = None) -> Tile:
    """The tile of rows [begin, end) of W, for a range of rows of x, or all: what it reads, what it
    writes, and its bytes.
    """
    args, divisor = op.args, 2 if op.params["epilogue"] == 1 else 1
    w, out = args["w"], (begin // divisor, end // divisor)
    x, y = args["x"], args["y"]
    if step_rows is not None:
        x, y = part(x, 0, *step_rows), part(y, len(y.shape) - 2, *step_rows)
    reads = [
        x,
        part(w, 0, begin, end),
    ]
    if "norm" in args:
        reads.append(args["norm"])
    if "residual" in args:
        reads.append(columns(args["residual"], *out))
    row_bytes = w.buffer.dtype.row_bytes(w.shape[-1])
    cost_bytes = (end - begin) * row_bytes + 4 * (w.shape[-1] + end - begin)
    writes = published_columns(op, y, *out) if op.params["y_ranks"] else (columns(y, *out),)
    coords = (begin, end, *(step_rows or (0, 0)))
    return Tile(coords, tuple(reads), writes, cost_bytes=cost_bytes)


def published_matvec(op: Operator, share: int) -> bool:
    """Whether its tasks can store y on all ranks, or shares of it on one each."""
    if op.params["y_dtype"] != dtype_code(f32):
        return False
    cuda = _cuda_module()
    return cuda is not None and bool(cuda.published_cuda(op, share))


def fragments_matvec(op: Operator, arg: str) -> bool:
    """Whether its tasks read or write that argument in any order: x and y in bf16, whose granules
    hold eight columns however they lie.
    """
    return arg in ("x", "y") and op.params[f"{arg}_dtype"] == dtype_code(bf16)


def packing_matvec(op: Operator, arg: str, target: Target) -> str:
    """Row-major as stored on the host; on cuda the order in which the tensor cores read."""
    if target.kind == "cuda" and (cuda := _cuda_module()) is not None:
        packing: str = cuda.packing_cuda(op, arg, target)
        return packing
    return ""


def lower_matvec(op: Operator, target: Target, lowering: Lowering) -> bool:
    """On cuda steps of many rows take two operators."""
    if target.kind != "cuda" or (cuda := _cuda_module()) is None:
        return False
    return bool(cuda.lower_cuda(op, lowering))


def variant_matvec(op: Operator, target: Target) -> str:
    """On cuda an exact matvec is a body of its own."""
    return "matvec_f32" if target.kind == "cuda" and op.params["exact"] else "matvec"


def matvec_reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: StepRows) -> None:
    """The contract above, in float32."""
    rows = len(step.token)
    x = required(op, arrays, "x")[:rows].astype(np.float32)
    if op.params["sampled"]:
        x = x[step.sample_rows]
    norm = array_of(op, arrays, "norm")
    if norm is not None:
        scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(op.params["eps"]))
        x = x * scale * norm
    z = x @ required(op, arrays, "w").astype(np.float32).T
    z = z * np.float32(op.params["scale"])
    softcap = np.float32(op.params["softcap"])
    if softcap > 0:
        z = softcap * np.tanh(z / softcap)
    if op.params["epilogue"] == 1:
        gate, up = z[:, 0::2], z[:, 1::2]
        z = gate / (1.0 + np.exp(-gate)) * up
    residual = array_of(op, arrays, "residual")
    if residual is not None:
        z = z + residual[: len(z)]
    required(op, arrays, "y")[: len(z)] = z


MATVEC = Body(
    name="matvec",
    args=(
        Arg("x", "r"),
        Arg("w", "r"),
        Arg("norm", "r", optional=True),
        Arg("residual", "r", optional=True),
        Arg("y", "w"),
    ),
    params=(
        "n",
        "k",
        "epilogue",
        "eps",
        "sampled",
        "w_dtype",
        "x_dtype",
        "y_dtype",
        "scale",
        "softcap",
        "exact",
        *NOT_PUBLISHED,
        "x_fragments",
        "y_fragments",
    ),
    tile=tile_matvec,
    reference=matvec_reference,
    ranks=True,
    published=published_matvec,
    packing=packing_matvec,
    variant=variant_matvec,
    payload=True,
    lower=lower_matvec,
    fragments=fragments_matvec,
)


def _cuda_module() -> Any:
    try:
        from gpurt.graphs.ops import matvec_cuda
    except ImportError:
        return None
    return matvec_cuda
