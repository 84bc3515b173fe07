"""expert_matvec on cuda: which rows of an expert make a task, and in which packing they lie.

device/bodies/expert_matvec.cuh computes R x 16 rows a task. R fixes the order of sums, so it hangs
on the matrix alone: as many rows as make a task worth its overhead. Slots are tasks of their own,
so that even one row of top-8 gives every SM of a large GPU something to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpurt.body import Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.expert_matvec import expert_tiles, layout_of
from gpurt.graphs.ops.packing import ROW_TILE, mma16_tiles
from gpurt.graphs.ops.packing_experts import ROW_TILES, expert_name, expert_tile_bytes

if TYPE_CHECKING:
    from gpurt.graph import Operator

ROWS_MAX = 16  # two mma of 8 pairs: all rows of a step may choose one expert
_TASK_BYTES = 96 << 10


def tile_experts(op: Operator, target: Target) -> list[Tile]:
    """Tiles slot by slot. Raises: GraphError for what the body cannot compute."""
    del target
    _check(op)
    w = op.args["w"]
    _, n, k = w.shape
    ranges = mma16_tiles(n, expert_row_tiles(op) * ROW_TILE)
    dtype = w.buffer.dtype.name
    return expert_tiles(
        op, ranges, [expert_tile_bytes(end - begin, k, dtype) for begin, end in ranges]
    )


def packing_experts(op: Operator, arg: str) -> str:
    """The packing of `w`; other weights stay as stored."""
    if arg != "w":
        return ""
    return expert_name(op.args["w"].buffer.dtype.name, expert_row_tiles(op))


def expert_row_tiles(op: Operator) -> int:
    """R: row tiles of 16 rows in a task, a power of two."""
    w = op.args["w"]
    _, n, k = w.shape
    one = expert_tile_bytes(ROW_TILE, k, w.buffer.dtype.name)
    return next(
        (r for r in ROW_TILES if r * one >= _TASK_BYTES or 2 * r * ROW_TILE > n), ROW_TILES[-1]
    )


def _check(op: Operator) -> None:
    where = f"at {op.path}"
    _, n, k = op.args["w"].shape
    if n % ROW_TILE or k % ROW_TILE:
        msg = f"an expert's W is [{n}, {k}], the CUDA body takes multiples of {ROW_TILE} - {where}"
        raise GraphError(f'{msg} - pad W, or use device="host"')
    rows = layout_of(op).rows
    if rows > ROWS_MAX:
        msg = f"{rows} rows a step, the CUDA body takes {ROWS_MAX} - {where}"
        raise GraphError(f"{msg} - build the graph with rows={ROWS_MAX} or fewer")
    for name in ("x", "y", "norm", "w_scale"):
        if name in op.args and op.args[name].buffer.dtype.name != "f32":
            raise GraphError(f"{name} is {op.args[name].buffer.dtype} - {where} - use f32")
