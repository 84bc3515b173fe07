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
        self._histories = {i: _History(graph.buffers[i].shape) for i in sorted(written)}
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
            for bounds, users in access.reads.items():
                self._merge(op, buffer, history.written(bounds), users, needs)
            covered: dict[int, int] = {}
            for bounds, users in access.writes.items():
                self._merge(op, buffer, history.touched(bounds, covered), users, needs)
            if disjoint:
                history.forget(covered)
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
    """Accesses to one buffer that later ones may conflict with."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._reads = boxes.BoxIndex(shape)
        self._writes = boxes.BoxIndex(shape)
        self._readers: dict[int, tuple[DraftOp, int]] = {}  # box -> (operator, its tiles)
        self._writers: dict[int, tuple[DraftOp, int]] = {}

    def written(self, bounds: Bounds) -> Needs:
        """Who wrote a part of a region."""
        found: Needs = {}
        for number in self._writes.near(bounds):
            op, tiles = self._writers[number]
            found[op] = found.get(op, 0) | tiles
        return found

    def touched(self, bounds: Bounds, covered: dict[int, int]) -> Needs:
        """Who wrote or read a part of a region. covered: counts elements of each access that the
        region covers, by the box's number, negative for reads.
        """
        found: Needs = {}
        for index, users, sign in (
            (self._writes, self._writers, 0),
            (self._reads, self._readers, -1),
        ):
            for number in index.near(bounds):
                op, tiles = users[number]
                found[op] = found.get(op, 0) | tiles
                key = number ^ sign
                covered[key] = covered.get(key, 0) + boxes.shared(index.bounds[number], bounds)
        return found

    def forget(self, covered: dict[int, int]) -> None:
        """Drop the accesses of which disjoint writes cover every element."""
        for key, count in covered.items():
            index, users, number = self._writes, self._writers, key
            if key < 0:
                index, users, number = self._reads, self._readers, ~key
            if count == boxes.volume(index.bounds[number]):
                index.remove(number)
                del users[number]

    def add(self, op: DraftOp, access: Access) -> None:
        """Append an operator's accesses."""
        for bounds, tiles in access.reads.items():
            self._readers[self._reads.add(bounds)] = (op, tiles)
        for bounds, tiles in access.writes.items():
            self._writers[self._writes.add(bounds)] = (op, tiles)


def _check_tiles(op: DraftOp, buffer: Buffer, access: Access, tile_count: int) -> bool:
    """Whether the writes are disjoint. Raises: GraphError if two tiles conflict."""
    if not access.writes:
        return True
    disjoint = boxes.are_disjoint(list(access.writes))
    alone = all(users & (users - 1) == 0 for users in access.writes.values())
    if tile_count == 1 or (disjoint and alone and not access.reads):
        return disjoint
    writes = list(access.writes.items())
    others = [(b, t, "writes") for b, t in writes]
    others += [(b, t, "reads") for b, t in access.reads.items()]
    array = boxes.boxes_of([b for b, _, _ in others])
    step = max(1, _CHUNK_PAIRS // len(others))
    for start in range(0, len(writes), step):
        hits = boxes.overlaps(array[start : min(start + step, len(writes))], array)
        for i, j in zip(*(axis.tolist() for axis in np.nonzero(hits)), strict=True):
            (bounds, users), (other, other_users, verb) = writes[start + i], others[j]
            first = next(bits_of(users))
            second = next(bits_of((users | other_users) & ~(1 << first)), None)
            if second is not None:
                part = boxes.text(buffer.name, bounds)
                msg = f"tile {first} of task {op.index} ({op.body}) writes {part}, but tile "
                msg += f"{second} {verb} {boxes.text(buffer.name, other)} in no order with it"
                raise GraphError(f"{msg} - at {op.path} - write another buffer or use one tile")
    return disjoint
