"""Packings: how weights are laid out at load so that a task's bytes are one contiguous range.

Owns: every layout by name, as a pair of numpy functions: `pack` and `packed_bytes`. The executors
pack a weight once, when a plan is loaded; device/bodies/X.cuh reads the layout.

`mma16gGxR` (bf16, for mma.sync m16n8k16; G in 4, 8; R in 1, 2, 4, 8, 16): W [N, K] is cut into
tiles of R row tiles of 16 rows; what remains is cut into smaller powers of two. A tile is

    for each chunk of 64 columns, for each of its row tiles: a unit of 16 rows x 64 columns, 2 KB
    unit: for each 8 of its rows (high), for each mma j and half of its k, a core of 8 rows x 8
          columns as the tensor cores of sm_90 take them from shared memory: 16 bytes a row g,
          in which lane (g, c) of an mma has elements 2 c and 2 c + 1, e of them:
          element (g, c, e) = W[g + 8 high, column(c, 4 j + 2 half + e)]
          column(c, q) = 4 G (q / G) + G c + q % G

so lane c owns every fourth group of G columns: G = 8 for bf16 x and 4 for f32 x, one granule of 16
bytes, and the four lanes of a step row read whole sectors. K is padded to whole chunks with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt import _native
from gpurt.buffer import DType
from gpurt.errors import PlanError
from gpurt.graphs.ops.dtypes import to_bf16, to_float32

ROW_TILE = 16  # rows of W in one mma: its m
CHUNK = 64  # columns of a unit: four mma of k = 16
UNIT_BYTES = ROW_TILE * CHUNK * 2
STAGE_UNITS = 16  # kStageBytes of device/shared_memory.cuh holds as many
_BLOCK_BYTES = 64 << 20  # packed at once: bounds the float32 copy beside a large weight


@dataclass(frozen=True)
class Packer:
    """One layout. bytes(shape): of a packed weight. pack(stored, shape, dtype): the bytes."""

    bytes: Callable[[Sequence[int]], int]
    pack: Callable[[NDArray[Any], Sequence[int], DType], NDArray[np.uint8]]


def mma16_tiles(n: int, tile_rows: int) -> list[tuple[int, int]]:
    """The row ranges of W's tiles: `tile_rows` each, then smaller powers of two of 16 rows."""
    tiles, begin, rows = [], 0, tile_rows
    while begin < n:
        while rows > ROW_TILE and begin + rows > _round_up(n, ROW_TILE):
            rows //= 2
        tiles.append((begin, min(begin + rows, n)))
        begin += rows
    return tiles


def mma16_tile_bytes(rows: int, k: int) -> int:
    """Packed bytes of a tile of `rows` rows, padding included."""
    return _round_up(rows, ROW_TILE) // ROW_TILE * (_round_up(k, CHUNK) // CHUNK) * UNIT_BYTES


def mma16_name(group: int, tiles: int) -> str:
    """The packing whose lanes own groups of `group` columns, `tiles` row tiles a task."""
    return f"mma16g{group}x{tiles}"


def mma16_units(w_NK: NDArray[np.uint16], group: int, out: NDArray[np.uint8]) -> None:
    """One tile of bf16 bit patterns [rows, K] in mma16 order, rows and K padded with zeros.

    group: 4, 8 or 16. out: `mma16_tile_bytes`, written; fresh memory costs more than the packing.
    """
    n, k = w_NK.shape
    rows, columns = _round_up(n, ROW_TILE), _round_up(k, CHUNK)
    if (rows, columns) != (n, k):
        padded = np.zeros((rows, columns), np.uint16)
        padded[:n, :k] = w_NK
        w_NK = padded
    w_NK = np.ascontiguousarray(w_NK)
    assert out.nbytes == w_NK.nbytes
    _native.pack_mma16_units(w_NK.ctypes.data, rows, columns, group, out.ctypes.data)


def packed_bytes(name: str, shape: Sequence[int], dtype: DType) -> int:
    """Bytes of a weight of `shape` in packing `name`. Raises: PlanError for an unknown name."""
    del dtype  # a packing's name says in what it stores
    return _packer(name).bytes(shape)


def pack(name: str, stored: NDArray[Any], shape: Sequence[int], dtype: DType) -> NDArray[np.uint8]:
    """A weight's stored elements (or blocks) in packing `name`, as bytes.

    stored: any layout of the row-major bytes of `shape` in `dtype`. Raises: PlanError.
    """
    return _packer(name).pack(stored, shape, dtype)


def _packer(name: str) -> Packer:
    from gpurt.graphs.ops.packing_experts import EXPERT_PACKERS

    packers = PACKERS | EXPERT_PACKERS
    if name not in packers:
        raise PlanError(f"unknown packing {name!r} - at weights - use one of {sorted(packers)}")
    return packers[name]


def _mma16(group: int, tile_rows: int) -> Packer:
    def size(shape: Sequence[int]) -> int:
        n, k = shape
        return sum(mma16_tile_bytes(end - begin, k) for begin, end in mma16_tiles(n, tile_rows))

    def pack_all(stored: NDArray[Any], shape: Sequence[int], dtype: DType) -> NDArray[np.uint8]:
        n, k = shape
        rows = stored.reshape(-1).view(dtype.storage).reshape(n, -1)
        out = np.empty(size(shape), np.uint8)
        at = 0
        for begin, end in _runs(mma16_tiles(n, tile_rows), k):
            block = to_bf16_bits(rows[begin:end], dtype)
            for first, last in mma16_tiles(n, tile_rows):
                if begin <= first and last <= end:
                    size_bytes = mma16_tile_bytes(last - first, k)
                    tile = block[first - begin : last - begin]
                    mma16_units(tile, group, out[at : at + size_bytes])
                    at += size_bytes
        return out

    return Packer(size, pack_all)


def _runs(tiles: Sequence[tuple[int, int]], k: int) -> list[tuple[int, int]]:
    """Whole tiles in runs of about _BLOCK_BYTES of float32."""
    runs: list[tuple[int, int]] = []
    for begin, end in tiles:
        if runs and (end - runs[-1][0]) * k * 4 <= _BLOCK_BYTES:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs


def to_bf16_bits(stored: NDArray[Any], dtype: DType) -> NDArray[np.uint16]:
    """Stored elements as bf16 bit patterns, rounded where they have more digits."""
    return stored if dtype.name == "bf16" else to_bf16(to_float32(stored, dtype))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


PACKERS: dict[str, Packer] = {
    mma16_name(group, tiles): _mma16(group, tiles * ROW_TILE)
    for group in (4, 8)
    for tiles in (1, 2, 4, 8, 16)
}
