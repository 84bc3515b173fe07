"""Cost: what a task is expected to take. It balances lists; no result depends on it.

Source of the figures: a core of a server CPU moves about 10 GB/s of weights through a quantised
product; an H200 streams 4.5 TB/s over 132 SMs, 34 GB/s each, and a hop between SMs takes 0.5 us.
"""

from __future__ import annotations

from gpurt.body import Target, Tile
from gpurt.buffer import Region

_TASK_NS = {"host": 300, "cuda": 700}
_NS_PER_KIB = {"host": 100, "cuda": 30}
_HOP_NS = {"host": 200, "cuda": 500}


def region_bytes(region: Region) -> int:
    """Bytes of a region, stored row-major."""
    *outer, width = region.shape
    rows = 1
    for extent in outer:
        rows *= extent
    dtype = region.buffer.dtype
    return rows * (-(-width // dtype.block) * dtype.block_bytes)


def tile_bytes(tile: Tile) -> int:
    """Bytes a tile moves: what its tiler says, else all that it declares."""
    return tile.cost_bytes or sum(region_bytes(r) for r in (*tile.reads, *tile.writes))


def task_ns(size_bytes: int, target: Target) -> int:
    """Nanoseconds of a task that moves `size_bytes`."""
    return _TASK_NS[target.kind] + size_bytes * _NS_PER_KIB[target.kind] // 1024


def hop_ns(target: Target) -> int:
    """Nanoseconds from a signal to another worker that waits for it."""
    return _HOP_NS[target.kind]
