"""Hazards: which earlier tiles a tile must follow, from the regions that both declare.

Read after write, write after read, write after write, in program order. Per buffer a history of
accesses that later ones may still conflict with: an access whose region an operator's writes cover
is forgotten, because whoever conflicts with it also conflicts with that operator, which follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gpurt.body import Tile
from gpurt.buffer import Buffer
from gpurt.errors import GraphError
from gpurt.graph import Graph
from gpurt.plan import Bounds
from gpurt.planner import boxes
from gpurt.planner.draft import DraftOp, bits_of

Needs = dict[DraftOp, int]  # producer -> bitset of its tiles, counted from its first
Regions = dict[Bounds, int]  # region -> bitset of the tiles that access it

_SMALL = 24  # pairs of boxes below which plain loops beat numpy
_CHUNK_PAIRS = 1 << 21


@dataclass
class Access:
    """One operator's accesses to one buffer."""

    reads: Regions = field(default_factory=dict)
    writes: Regions = field(default_factory=dict)


class Hazards:
    """The histories of all buffers that some task writes."""

    def __init__(self, graph: Graph, exempt: set[int]) -> None:
        """exempt: indices of buffers whose edges are payload edges."""
        written = {r.buffer.index for op in graph.operators for r in op.writes}
        self._buffers = graph.buffers
        self._histories = {i: _History(len(graph.buffers[i].shape)) for i in sorted(written)}
        self._exempt = exempt
        self.causes: dict[tuple[int, int], dict[str, None]] = {}  # (producer, consumer) -> buffers

    def needs(self, op: DraftOp, tiles: Sequence[Tile]) -> list[Needs]:
        """What each tile must follow; the tiles then belong to the history.

        Raises: GraphError if two tiles of `op` conflict with each other.
        """
        needs: list[Needs] = [{} for _ in tiles]
        for index, access in self._accesses(tiles).items():
            history, buffer = self._histories[index], self._buffers[index]
            disjoint = _check_tiles(op, buffer, access, len(tiles))
            for regions, kinds in ((access.reads, False), (access.writes, True)):
                for found, users in zip(
                    history.find(list(regions), kinds), regions.values(), strict=True
                ):
                    self._merge(op, buffer, found, users, needs)
            if disjoint:
                history.forget(list(access.writes))
            history.add(op, access)
        return needs

    def _accesses(self, tiles: Sequence[Tile]) -> dict[int, Access]:
        accesses: dict[int, Access] = {}
        for number, tile in enumerate(tiles):
            bit = 1 << number
            for regions, written in ((tile.reads, False), (tile.writes, True)):
                for region in regions:
                    index = region.buffer.index
                    if index in self._exempt or index not in self._histories:
                        continue
                    access = accesses.get(index)
                    if access is None:
                        access = accesses[index] = Access()
                    users = access.writes if written else access.reads
                    users[region.bounds] = users.get(region.bounds, 0) | bit
        return accesses

    def _merge(
        self, op: DraftOp, buffer: Buffer, found: Needs, users: int, needs: list[Needs]
    ) -> None:
        if not found:
            return
        for producer in found:
            self.causes.setdefault((producer.index, op.index), {})[buffer.name] = None
        for tile in bits_of(users):
            need = needs[tile]
            for producer, tiles in found.items():
                need[producer] = need.get(producer, 0) | tiles


class _History:
    """Accesses to one buffer, oldest first."""

    def __init__(self, axes: int) -> None:
        self.count = 0
        self.bounds: list[Bounds] = []
        self.ops: list[DraftOp] = []
        self.tiles: list[int] = []
        self.written: list[bool] = []
        self._boxes = np.zeros((16, axes, 2), dtype=np.int64)
        self._is_write = np.zeros(16, dtype=np.bool_)

    def find(self, regions: list[Bounds], with_reads: bool) -> list[Needs]:
        """For each region what it conflicts with; a read does not conflict with reads."""
        if not self.count or not regions:
            return [{} for _ in regions]
        if len(regions) * self.count <= _SMALL:
            return [self._find_one(region, with_reads) for region in regions]
        result: list[Needs] = []
        known: dict[bytes, Needs] = {}
        array = boxes.boxes_of(regions)
        step = max(1, _CHUNK_PAIRS // self.count)
        for start in range(0, len(regions), step):
            hits = boxes.overlaps(array[start : start + step], self._boxes[: self.count])
            if not with_reads:
                hits &= self._is_write[None, : self.count]
            for row in hits:
                key = row.tobytes()
                if key not in known:
                    known[key] = self._collect([int(i) for i in np.flatnonzero(row)])
                result.append(known[key])
        return result

    def forget(self, writes: list[Bounds]) -> None:
        """Drop what these disjoint regions cover."""
        if not self.count or not writes:
            return
        if len(writes) * self.count <= _SMALL:
            kept = [i for i, b in enumerate(self.bounds) if not _covered(b, writes)]
        else:
            array, kept = boxes.boxes_of(writes), []
            step = max(1, _CHUNK_PAIRS // len(writes))
            for start in range(0, self.count, step):
                part = self._boxes[start : min(start + step, self.count)]
                gone = boxes.covered_by_disjoint(part, array)
                kept += [start + int(i) for i in np.flatnonzero(~gone)]
        if len(kept) == self.count:
            return
        self._boxes[: len(kept)] = self._boxes[kept]
        self._is_write[: len(kept)] = self._is_write[kept]
        self.bounds = [self.bounds[i] for i in kept]
        self.ops = [self.ops[i] for i in kept]
        self.tiles = [self.tiles[i] for i in kept]
        self.written = [self.written[i] for i in kept]
        self.count = len(kept)

    def add(self, op: DraftOp, access: Access) -> None:
        """Append an operator's accesses."""
        for regions, written in ((access.reads, False), (access.writes, True)):
            for bounds, tiles in regions.items():
                if self.count == len(self._boxes):
                    self._boxes = np.concatenate([self._boxes, np.zeros_like(self._boxes)])
                    self._is_write = np.concatenate([self._is_write, self._is_write])
                self._boxes[self.count] = bounds
                self._is_write[self.count] = written
                self.count += 1
                self.bounds.append(bounds)
                self.ops.append(op)
                self.tiles.append(tiles)
                self.written.append(written)

    def _find_one(self, region: Bounds, with_reads: bool) -> Needs:
        return self._collect(
            [
                i
                for i, bounds in enumerate(self.bounds)
                if (with_reads or self.written[i]) and boxes.overlap(region, bounds)
            ]
        )

    def _collect(self, entries: list[int]) -> Needs:
        found: Needs = {}
        for i in entries:
            found[self.ops[i]] = found.get(self.ops[i], 0) | self.tiles[i]
        return found


def _covered(bounds: Bounds, writes: list[Bounds]) -> bool:
    inside = 0
    for write in writes:
        parts = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, write, strict=True)]
        if all(low < high for low, high in parts):
            inside += boxes.volume(tuple(parts))
    return inside == boxes.volume(bounds)


def _check_tiles(op: DraftOp, buffer: Buffer, access: Access, tile_count: int) -> bool:
    """Whether the writes are disjoint. Raises: GraphError if two tiles conflict."""
    if not access.writes:
        return True
    if tile_count == 1:
        return boxes.are_disjoint(list(access.writes))
    writes = list(access.writes.items())
    others = [(b, t, "writes") for b, t in writes]
    others += [(b, t, "reads") for b, t in access.reads.items()]
    array, disjoint = boxes.boxes_of([b for b, _, _ in others]), True
    step = max(1, _CHUNK_PAIRS // len(others))
    for start in range(0, len(writes), step):
        hits = boxes.overlaps(array[start : min(start + step, len(writes))], array)
        for i, j in zip(*(axis.tolist() for axis in np.nonzero(hits)), strict=True):
            (bounds, users), (other, other_users, verb) = writes[start + i], others[j]
            disjoint = disjoint and (j >= len(writes) or start + i == j)
            first = next(bits_of(users))
            second = next(bits_of((users | other_users) & ~(1 << first)), None)
            if second is not None:
                part = boxes.text(buffer.name, bounds)
                msg = f"tile {first} of task {op.index} ({op.body}) writes {part}, but tile "
                msg += f"{second} {verb} {boxes.text(buffer.name, other)} in no order with it"
                raise GraphError(f"{msg} - at {op.path} - write another buffer or use one tile")
    return disjoint
