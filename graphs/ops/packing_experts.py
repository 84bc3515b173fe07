"""Packings of expert weights [E, N, K], as device/bodies/expert_matvec.cuh streams them.

`expert_bf16kGwT` and `expert_nvfp4kGwT` (G K groups in 1, 2, 4, 8, 16; T row tiles a virtual warp
in 1, 2, 4; 16 / G row groups): experts one after another, each cut into tiles of 16 T 16/G rows. N
is padded to whole tiles and K to whole rounds of 64 G columns, with zeros, so all tiles are of one
size. A tile is what one task streams:

    for each round q, for each i < T: 16 units, one a virtual warp
        for each K group g, for each row group r: a unit of 16 rows x 64 columns
        its columns: 64 (q G + g) .. +63         its rows: 16 (i 16/G + r) .. +15
    lane (g = lane / 4, c = lane % 4) of a unit owns columns 16c .. 16c+15 of rows g and g + 8
    bf16   2048 bytes: mma16's unit with groups of 16 columns
    nvfp4  64 bytes: for each lane the scale of row g, then of row g + 8
           then for each lane 16 bytes: codes of row g, columns 0-7 and 8-15; of row g + 8 the same

A stage of the ring holds as many such sixteens as fit: four of nvfp4, codes and scales together,
or one of bf16; one bulk copy each.

nvfp4 is re-coded, exactly. A scale becomes five bits of exponent (bias 9) and three of mantissa, so
that e4m3's denormals need no case of their own. The bits of a word of eight codes are placed so
that a rotation or one product, then a mask, bring two of them into the places of two bf16; see
`_PLACES`. A scale of zero has no such code: its codes lose their magnitude; a negative one flips
their signs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt import _native
from gpurt.body import STAGE_ROOM_BYTES
from gpurt.buffer import DType
from gpurt.errors import PlanError
from gpurt.graphs.ops.packing import (
    CHUNK,
    ROW_TILE,
    UNIT_BYTES,
    Packer,
    mma16_units,
    to_bf16_bits,
)
from gpurt.graphs.parts import each_part

LANE_COLUMNS = 16
NVFP4_SCALE_BYTES = 2 * 32
NVFP4_UNIT_BYTES = NVFP4_SCALE_BYTES + 16 * 32
VIRTUAL_WARPS = 16
K_GROUPS = (1, 2, 4, 8, 16)
WARP_TILES = (1, 2, 4)
_BLOCK_BYTES = 9  # of nvfp4: eight of codes, one scale
# Where the bits of code 2 i + e of a word go, by i, then e: mantissa, low and high bit of the
# exponent, sign.
_PLACES = (
    ((6, 7, 8, 15), (22, 23, 24, 31)),
    ((9, 10, 11, 18), (25, 26, 27, 2)),
    ((12, 13, 14, 21), (28, 29, 30, 5)),
    ((4, 0, 1, 3), (20, 16, 17, 19)),
)
_SCALE_NAN = 19 << 3 | 4  # its bf16 is a NaN


def unit_bytes(dtype: str) -> int:
    """Packed bytes of 16 rows x 64 columns of weights stored as `dtype`."""
    return NVFP4_UNIT_BYTES if dtype == "nvfp4" else UNIT_BYTES


@dataclass(frozen=True)
class ExpertCut:
    """How a task's rows and columns are dealt to 16 virtual warps, and so the order of its sums."""

    k_groups: int  # G
    warp_tiles: int  # T

    @property
    def tile_rows(self) -> int:
        """Rows of W in a task."""
        return ROW_TILE * self.warp_tiles * VIRTUAL_WARPS // self.k_groups

    def rounds(self, k: int) -> int:
        """Rounds of `k` columns."""
        return -(-k // (CHUNK * self.k_groups))

    def tiles(self, n: int) -> list[tuple[int, int]]:
        """The row ranges of an expert's tasks."""
        begins = range(0, n, self.tile_rows)
        return [(begin, min(begin + self.tile_rows, n)) for begin in begins]

    def tile_bytes(self, k: int, dtype: str) -> int:
        """Packed bytes of one task."""
        return self.rounds(k) * self.warp_tiles * VIRTUAL_WARPS * unit_bytes(dtype)

    def expert_bytes(self, n: int, k: int, dtype: str) -> int:
        """Packed bytes of one expert."""
        return len(self.tiles(n)) * self.tile_bytes(k, dtype)

    def name(self, dtype: str) -> str:
        """The packing of weights stored as `dtype`."""
        kind = "nvfp4" if dtype == "nvfp4" else "bf16"
        return f"expert_{kind}k{self.k_groups}w{self.warp_tiles}"


EXPERT_CUTS = tuple(ExpertCut(groups, tiles) for groups in K_GROUPS for tiles in WARP_TILES)


def stage_bytes(dtype: str) -> int:
    """Bytes of weights stored as `dtype` in a whole stage of the ring: whole sixteens of units."""
    sixteen = VIRTUAL_WARPS * unit_bytes(dtype)
    return STAGE_ROOM_BYTES // sixteen * sixteen


def nvfp4_units(blocks: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Rows of stored blocks [rows, K / 16, 9] as units, by chunk, then by row tile.

    rows: a multiple of 16. out: NVFP4_UNIT_BYTES a unit, written.
    """
    rows, count = blocks.shape[:2]
    assert out.nbytes == rows // ROW_TILE * -(-count * LANE_COLUMNS // CHUNK) * NVFP4_UNIT_BYTES
    stored = np.ascontiguousarray(blocks)
    _native.pack_nvfp4_units(
        _byte_places().ctypes.data,
        _scale_codes().ctypes.data,
        stored.ctypes.data,
        rows,
        count,
        out.ctypes.data,
    )


@cache
def _byte_places() -> NDArray[np.uint32]:
    """[4, 256]: what a byte of two codes becomes, by its place in a word."""
    code_pairs = np.arange(256, dtype=np.uint32)
    placed = np.zeros((4, 256), np.uint32)
    for place, pair in enumerate(_PLACES):
        for code, bits in enumerate(pair):
            for bit, to in enumerate(bits):
                placed[place] |= (code_pairs >> (4 * code + bit) & 1) << np.uint32(to)
    return placed


@cache
def _scale_codes() -> NDArray[np.uint8]:
    """By e4m3 code: the re-coded magnitude."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    high = np.array([0, 0, 1, 1, 2, 2, 2, 2])[mantissa]  # floor(log2) of a denormal's mantissa
    denormal = high << 3 | ((mantissa << 3 >> high) & 7)
    magnitude = np.where(exponent == 0, denormal, exponent + 2 << 3 | mantissa)
    magnitude[0], magnitude[127] = 0, _SCALE_NAN
    return np.concatenate([magnitude, magnitude]).astype(np.uint8)


def _packer(dtype: str, cut: ExpertCut) -> Packer:
    def size(shape: Sequence[int]) -> int:
        experts, n, k = shape
        return experts * cut.expert_bytes(n, k, dtype)

    def pack(stored: NDArray[Any], shape: Sequence[int], given: DType) -> NDArray[np.uint8]:
        experts, n, k = shape
        if (given.name == "nvfp4") != (dtype == "nvfp4"):
            msg = f"experts stored as {given} - at packing {cut.name(dtype)}"
            raise PlanError(f"{msg} - nvfp4 has a packing of its own")
        units = _units_of(given)
        out = np.empty((experts, len(cut.tiles(n)), cut.tile_bytes(k, dtype)), np.uint8)
        rows = stored.reshape(-1).view(given.storage).reshape(experts, n, -1)

        def pack_expert(expert: int) -> None:
            kept = np.empty(cut.tile_bytes(k, dtype), np.uint8)
            for tile, (begin, end) in enumerate(cut.tiles(n)):
                row_tiles = (end - begin) // ROW_TILE
                part = kept[: row_tiles * -(-k // CHUNK) * unit_bytes(dtype)]
                units(rows[expert, begin:end], part)
                _deal(part, out[expert, tile], row_tiles, k, cut)

        each_part(experts, pack_expert)
        return out.reshape(-1)

    return Packer(size, pack)


def _deal(
    units: NDArray[np.uint8], tile: NDArray[np.uint8], row_tiles: int, k: int, cut: ExpertCut
) -> None:
    """Units by chunk and row tile to the order of a task, padded with zeros."""
    chunks, rounds, row_groups = -(-k // CHUNK), cut.rounds(k), VIRTUAL_WARPS // cut.k_groups
    places = (rounds, cut.warp_tiles, cut.k_groups, row_groups)
    ordered = tile.reshape(*places, -1).transpose(0, 2, 1, 3, 4)
    padded = (rounds * cut.k_groups, cut.warp_tiles * row_groups)
    dealt = units.reshape(chunks, row_tiles, -1)
    if (chunks, row_tiles) != padded:
        whole = np.zeros((*padded, dealt.shape[-1]), np.uint8)
        whole[:chunks, :row_tiles] = dealt
        dealt = whole
    ordered[...] = dealt.reshape(ordered.shape)


def _units_of(given: DType) -> Callable[[NDArray[Any], NDArray[np.uint8]], None]:
    if given.name == "nvfp4":
        return lambda rows, out: nvfp4_units(rows.reshape(len(rows), -1, _BLOCK_BYTES), out)
    return lambda rows, out: mma16_units(to_bf16_bits(rows, given), LANE_COLUMNS, out)


EXPERT_PACKERS: dict[str, Packer] = {
    cut.name(dtype): _packer(dtype, cut) for dtype in ("bf16", "nvfp4") for cut in EXPERT_CUTS
}
