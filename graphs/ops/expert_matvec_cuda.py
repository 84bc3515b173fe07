"""expert_matvec on cuda: which rows of an expert make a task, and in which packing they lie.

device/bodies/expert_matvec.cuh deals a task's rows and columns to 16 virtual warps. The cut fixes
the order of sums, so it hangs on the matrix alone. Each row tile of a virtual warp uses the same
activations, so as many of them as make tasks that are worth their overhead, and not so large that
one row of top-8 leaves most SMs of a large GPU without one: Muse Spark's experts, a rank of 8, are
cut into 16 up tasks of 64 rows x 4096 and 8 down tasks of 512 rows x 512, 147 KB each, where the
prototype measured 4.0 TB/s (3.5 at half of that).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from gpurt.body import Stream, Target, Tile
from gpurt.errors import GraphError
from gpurt.graphs.ops.expert_matvec import expert_tiles, layout_of
from gpurt.graphs.ops.packing import ROW_TILE
from gpurt.graphs.ops.packing_experts import EXPERT_CUTS, ExpertCut, stage_bytes

if TYPE_CHECKING:
    from gpurt.graph import Operator

_TASK_BYTES = 200 << 10
_WARP_TILES_PLACE = 8  # in tile[3]: log2 of the K groups, then row tiles a virtual warp


def tile_experts(op: Operator, target: Target) -> list[Tile]:
    """Tiles slot by slot, with their streams. Raises: GraphError for what the body cannot compute.

    A team of one warp goes through its weights more than once, so it reads them from memory.
    """
    _check(op)
    w, layout, cut = op.args["w"], layout_of(op), expert_cut(op)
    _, n, k = w.shape
    dtype, ranges = w.buffer.dtype.name, cut.tiles(n)
    size, stride = cut.tile_bytes(k, dtype), cut.expert_bytes(n, k, dtype)
    code = cut.k_groups.bit_length() - 1 | cut.warp_tiles << _WARP_TILES_PLACE

    def streams(slot: int) -> list[Stream]:
        id_bytes, stage = 4 * layout.slot(slot), stage_bytes(dtype)
        places = range(0, stride, size)
        return [Stream("w", at, size, stride, id_bytes, stage) for at in places]

    sizes = [size] * len(ranges)
    return expert_tiles(op, ranges, sizes, code, streams if target.team_warps > 1 else None)


def packing_experts(op: Operator, arg: str) -> str:
    """The packing of `w`; other weights stay as stored."""
    return expert_cut(op).name(op.args["w"].buffer.dtype.name) if arg == "w" else ""


def expert_cut(op: Operator) -> ExpertCut:
    """The cut with the least padding; of those the largest tasks within bounds, by most row tiles
    for each activation.
    """
    w = op.args["w"]
    _, n, k = w.shape
    return _best_cut(n, k, w.buffer.dtype.name)


@cache
def _best_cut(n: int, k: int, dtype: str) -> ExpertCut:
    """Asked for by every task of a plan."""

    def rank(cut: ExpertCut) -> tuple[int, bool, int, int]:
        size = cut.tile_bytes(k, dtype)
        fits = size <= _TASK_BYTES
        worth = (-size, -cut.warp_tiles) if fits else (size, cut.warp_tiles)
        return (cut.expert_bytes(n, k, dtype), not fits, *worth)

    return min(EXPERT_CUTS, key=rank)


def _check(op: Operator) -> None:
    where = f"at {op.path}"
    _, n, k = op.args["w"].shape
    if n % ROW_TILE or k % ROW_TILE:
        msg = f"an expert's W is [{n}, {k}], the CUDA body takes multiples of {ROW_TILE} - {where}"
        raise GraphError(f'{msg} - pad W, or use device="host"')
    for name in ("x", "y", "norm", "w_scale"):
        if name in op.args and op.args[name].buffer.dtype.name != "f32":
            raise GraphError(f"{name} is {op.args[name].buffer.dtype} - {where} - use f32")
