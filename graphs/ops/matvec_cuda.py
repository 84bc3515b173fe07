"""matvec on cuda: which rows of W make a task, and in which packing they are streamed.

device/bodies/matvec.cuh computes R x 16 rows a task, R in 1, 2, 4, 8, 16; a stage of the ring then
holds R row tiles x 16/R chunks of 64 columns. The choice fixes the order of sums, so it hangs on
the matrix alone, not on workers: as few rows as give enough tasks for the largest GPU of the
architecture, unless tasks would become so small that their overhead shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpurt.body import Stream, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.matvec import make_tile
from gpurt.graphs.ops.matvec_wide_cuda import widen
from gpurt.graphs.ops.packing import (
    CHUNK,
    ROW_TILE,
    UNIT_BYTES,
    mma16_name,
    mma16_tile_bytes,
    mma16_tiles,
)
from gpurt.graphs.ops.rows_cuda import row_blocks

if TYPE_CHECKING:
    from gpurt.graph import Operator
    from gpurt.planner.lower import Lowering

ROWS_MAX = 16  # two mma of 8 step rows; larger steps have bodies of their own
_EXACT_ROWS = 4  # of W in a task of an exact matvec
_EXACT_STEP_ROWS = 8  # of x in such a task, at most
_EXACT_TASKS = 64  # so many SMs read x at once; as many again are free for what runs beside it
_FLOATS = 4  # of one load
# Beyond this many tasks an operator fills every SM of sm_90 and sm_100 (132 and 148) more than
# once; then a task should stream this many bytes. One of 131 KB has 2.7 us of its own at one row
# (its start, trips of x, its outputs), and its weights take 4: less than twice that was too small.
_TASKS = 148
_TASK_BYTES = 144 << 10
_ROW_TILES_MAX = 16


def tile_cuda(op: Operator, target: Target) -> list[Tile]:
    """Tiles with their streams. Raises: GraphError for what the body cannot compute."""
    del target
    if op.params["exact"]:
        return _tile_exact(op)
    _check(op)
    n, k = op.args["w"].shape
    tiles, offset = [], 0
    for begin, end in mma16_tiles(n, row_tiles(n, k) * ROW_TILE):
        size = mma16_tile_bytes(end - begin, k)
        tile = make_tile(op, begin, end)
        tiles.append(replace(tile, stream=Stream("w", offset, size), cost_bytes=size))
        offset += size
    return tiles


def lower_cuda(op: Operator, lowering: Lowering) -> bool:
    """A step of more rows takes two operators: matvec_wide_cuda.py. Raises: GraphError."""
    if op.params["exact"] or op.rows is not None or op.args["x"].shape[0] <= ROWS_MAX:
        return False
    _check_matrix(op)
    if op.params["sampled"] and "residual" in op.args:
        msg = f"sampled rows with a residual, {op.args['x'].shape[0]} rows a step - at {op.path}"
        raise GraphError(f"{msg} - build the graph with rows={ROWS_MAX} or fewer")
    widen(op, lowering, row_tiles(*op.args["w"].shape))
    return True


def packing_cuda(op: Operator, arg: str, target: Target) -> str:
    """The packing of `w`; other weights stay as stored."""
    del target
    if arg != "w" or op.params["exact"]:
        return ""
    group = 8 if _is_bf16(op, "x") else 4
    return mma16_name(group, row_tiles(*op.args["w"].shape))


def row_tiles(n: int, k: int) -> int:
    """R: row tiles of 16 rows in a task, a power of two."""
    all_tiles, chunks = -(-n // ROW_TILE), -(-k // CHUNK)
    r = 1
    while r < _ROW_TILES_MAX and all_tiles > _TASKS * r and r * chunks * UNIT_BYTES < _TASK_BYTES:
        r *= 2
    return r


def published_cuda(op: Operator, share: int) -> bool:
    """Whether no task has columns of two shares, and its granules are whole."""
    if op.params["epilogue"]:
        return False
    if op.params["exact"]:
        return share == 0
    return share % (row_tiles(*op.args["w"].shape) * ROW_TILE) == 0


def _tile_exact(op: Operator) -> list[Tile]:
    """device/bodies/matvec_f32.cuh: a granule of y of some step rows a task, W as stored."""
    n, k = op.args["w"].shape
    where = f"at {op.path}"
    other = sorted(name for name, region in op.args.items() if region.buffer.dtype.name != "f32")
    if other or "residual" in op.args or op.params["epilogue"] or op.params["sampled"]:
        what = f"{other} of other dtypes" if other else "a residual, swiglu or sampled rows"
        msg = f"an exact matvec with {what} - {where}"
        raise GraphError(f"{msg} - it takes f32 x, w, norm and y")
    if k % _FLOATS:
        msg = f"W has {k} columns, the exact CUDA body takes multiples of {_FLOATS} - {where}"
        raise GraphError(f'{msg} - pad W, or use device="host"')
    blocks, step_rows = -(-n // _EXACT_ROWS), 1
    while step_rows < _EXACT_STEP_ROWS:
        if blocks * -(-op.args["x"].shape[0] // step_rows) <= _EXACT_TASKS:
            break
        step_rows *= 2
    return [
        make_tile(op, begin, min(begin + _EXACT_ROWS, n), rows)
        for begin in range(0, n, _EXACT_ROWS)
        for rows in row_blocks(op, "x", step_rows)
    ]


def _check_rows(op: Operator) -> None:
    rows = op.args["x"].shape[0]
    if rows > ROWS_MAX:
        msg = f"{rows} rows a step, the CUDA body takes {ROWS_MAX} - at {op.path}"
        if op.rows is not None:  # slots times a block
            raise GraphError(f"{msg} - propose fewer tokens, or build the graph with fewer slots")
        raise GraphError(f"{msg} - build the graph with rows={ROWS_MAX} or fewer")


def _is_bf16(op: Operator, arg: str) -> bool:
    return op.args[arg].buffer.dtype.name == "bf16"


def _check(op: Operator) -> None:
    _check_matrix(op)
    _check_rows(op)


def _check_matrix(op: Operator) -> None:
    n, k = op.args["w"].shape
    where = f"at {op.path}"
    # A last tile of half a row tile computes rows of zeros that nobody stores; a granule of y must
    # not be cut, though: the 8 f32 values, or pairs of swiglu, of two granules.
    multiple = ROW_TILE if op.params["epilogue"] or _is_bf16(op, "y") else ROW_TILE // 2
    if n % multiple or k % ROW_TILE:
        msg = f"W is [{n}, {k}], the CUDA body takes multiples of {multiple} and {ROW_TILE}"
        msg += f" - {where}"
        raise GraphError(f'{msg} - pad W, or use device="host"')
    for name in ("x", "y", "norm", "residual"):
        if name in op.args and op.args[name].buffer.dtype.name not in ("f32", "bf16"):
            dtype = op.args[name].buffer.dtype
            raise GraphError(f"{name} is {dtype} - {where} - use f32 or bf16")
    for name in ("norm", "residual"):
        if name in op.args and op.args[name].buffer.dtype.name != "f32":
            raise GraphError(f"{name} is {op.args[name].buffer.dtype} - {where} - use f32")
    if "norm" in op.args and op.args["x"].buffer.dtype.name != "f32":
        raise GraphError(f"a norm of bf16 x - {where} - keep x in f32")
