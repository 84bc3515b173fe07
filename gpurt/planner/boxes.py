"""Boxes: which regions of one buffer overlap, which cover another, and what is left uncovered.

A box is one half-open range an axis. Many boxes are an int64 array [count, axes, 2].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod

import numpy as np
from numpy.typing import NDArray

from gpurt.plan import Bounds

Boxes = NDArray[np.int64]
Matrix = NDArray[np.bool_]

_FEW = 8  # boxes below which plain loops beat numpy
_CELLS = 256
_CELLS_PER_BOX = 8


def boxes_of(bounds: Sequence[Bounds]) -> Boxes:
    """The array of some bounds, which have one number of axes."""
    return np.array(bounds, dtype=np.int64).reshape(len(bounds), -1, 2)


def overlaps(a: Boxes, b: Boxes) -> Matrix:
    """[len(a), len(b)]: whether the two share an element."""
    result = np.ones((len(a), len(b)), dtype=np.bool_)
    for axis in range(a.shape[1]):
        result &= a[:, axis, 0, None] < b[None, :, axis, 1]
        result &= b[None, :, axis, 0] < a[:, axis, 1, None]
    return result


def overlap(a: Bounds, b: Bounds) -> bool:
    """Whether two boxes share an element."""
    for (low, high), (other_low, other_high) in zip(a, b, strict=True):
        if low >= other_high or other_low >= high:
            return False
    return True


def shared(a: Bounds, b: Bounds) -> int:
    """Elements that two boxes share."""
    count = 1
    for (low, high), (other_low, other_high) in zip(a, b, strict=True):
        count *= max(0, min(high, other_high) - max(low, other_low))
    return count


def are_disjoint(bounds: Sequence[Bounds]) -> bool:
    """Whether no two of the boxes share an element."""
    if len(bounds) < 2:
        return True
    array = boxes_of(bounds)
    step = max(1, (1 << 22) // len(bounds))
    hits = sum(
        int(np.count_nonzero(overlaps(array[i : i + step], array)))
        for i in range(0, len(bounds), step)
    )
    return hits == len(bounds)


def first_uncovered(box: Bounds, covers: Sequence[Bounds]) -> Bounds | None:
    """A part of `box` that none of `covers` touches, as large as is simple; None if covered."""
    if not covers:
        return box
    if len(covers) <= _FEW:  # the common case, without numpy
        parts = [shared(box, cover) for cover in covers]
        if max(parts) == volume(box):
            return None
        pairs = combinations(covers, 2)
        if sum(parts) == volume(box) and not any(overlap(one, two) for one, two in pairs):
            return None
    near = boxes_of(covers)[np.flatnonzero(overlaps(boxes_of([box]), boxes_of(covers))[0])]
    if not len(near):
        return box
    # A grid on all the boxes' own edges: each of its cells is wholly in or wholly out.
    cuts = []
    for axis, (low, high) in enumerate(box):
        edges = np.unique(np.clip(np.append(near[:, axis].ravel(), [low, high]), low, high))
        cuts.append(edges)
    filled = np.zeros([len(c) - 1 for c in cuts], dtype=np.bool_)
    for cover in near:
        index = tuple(
            slice(
                int(np.searchsorted(cut, cover[axis, 0])), int(np.searchsorted(cut, cover[axis, 1]))
            )
            for axis, cut in enumerate(cuts)
        )
        filled[index] = True
    if filled.all():
        return None
    cell = [int(i) for i in np.argwhere(~filled)[0]]
    extent = [(c, c + 1) for c in cell]
    for axis in reversed(range(len(box))):  # grow: the message should name all that is missing
        while extent[axis][1] < len(cuts[axis]) - 1:
            grown = [slice(*e) for e in extent]
            grown[axis] = slice(extent[axis][1], extent[axis][1] + 1)
            if filled[tuple(grown)].any():
                break
            extent[axis] = (extent[axis][0], extent[axis][1] + 1)
    return tuple((int(cut[a]), int(cut[b])) for cut, (a, b) in zip(cuts, extent, strict=True))


def volume(bounds: Bounds) -> int:
    """Elements of a box."""
    return prod(high - low for low, high in bounds)


def text(name: str, bounds: Bounds) -> str:
    """As in `x[0:16, 64:128]`."""
    return f"{name}[{', '.join(f'{low}:{high}' for low, high in bounds)}]"


class BoxIndex:
    """Boxes of one buffer by number, found by what they touch.

    Narrow boxes lie in the cells of a grid along the longest axis; questions about wide ones scan
    all boxes with numpy.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self._axis = max(range(len(shape)), key=lambda axis: shape[axis])
        self._cell = max(1, -(-shape[self._axis] // _CELLS))
        self._cells: dict[int, list[int]] = {}
        self._wide: list[int] = []
        self._boxes = np.zeros((8, len(shape), 2), dtype=np.int64)
        self._numbers: list[int] = []  # of each row of _boxes in use
        self._rows: dict[int, int] = {}
        self._next = 0
        self.bounds: dict[int, Bounds] = {}

    def add(self, bounds: Bounds) -> int:
        """Add a box. Returns: its number, from 0, never used again."""
        number, self._next = self._next, self._next + 1
        self.bounds[number] = bounds
        if len(self._numbers) == len(self._boxes):
            self._make_room()
        self._rows[number] = len(self._numbers)
        self._boxes[len(self._numbers)] = bounds
        self._numbers.append(number)
        cells = self._span(bounds)
        if len(cells) > _CELLS_PER_BOX:
            self._wide.append(number)
        else:
            for cell in cells:
                self._cells.setdefault(cell, []).append(number)
        return number

    def remove(self, number: int) -> None:
        """Forget a box."""
        bounds = self.bounds.pop(number)
        self._boxes[self._rows.pop(number)] = 0  # an empty box touches nothing
        cells = self._span(bounds)
        if len(cells) > _CELLS_PER_BOX:
            self._wide.remove(number)
        else:
            for cell in cells:
                self._cells[cell].remove(number)

    def near(self, bounds: Bounds) -> list[int]:
        """Numbers of the boxes that share an element with this one, ascending."""
        cells = self._span(bounds)
        if len(self.bounds) <= _FEW:
            found = list(self.bounds)
        elif len(cells) > _CELLS_PER_BOX or len(self._wide) > _CELLS:
            hits = overlaps(boxes_of([bounds]), self._boxes[: len(self._numbers)])[0]
            return [self._numbers[i] for i in np.flatnonzero(hits).tolist()]
        else:
            several = [self._cells.get(cell, []) for cell in cells]
            found = sorted({i for cell in (*several, self._wide) for i in cell})
        return [i for i in found if overlap(bounds, self.bounds[i])]

    def _span(self, bounds: Bounds) -> range:
        low, high = bounds[self._axis]
        return range(low // self._cell, (high - 1) // self._cell + 1)

    def _make_room(self) -> None:
        alive = [row for row, number in enumerate(self._numbers) if number in self.bounds]
        boxes = np.zeros((max(8, 2 * len(alive)), *self._boxes.shape[1:]), dtype=np.int64)
        boxes[: len(alive)] = self._boxes[alive]
        self._boxes = boxes
        self._numbers = [self._numbers[row] for row in alive]
        self._rows = {number: row for row, number in enumerate(self._numbers)}


class BoxSet:
    """Boxes of one buffer, each once."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.index = BoxIndex(shape)
        self.numbers: dict[Bounds, int] = {}

    def add(self, bounds: Bounds) -> None:
        """Add a box; one that is there stays once."""
        if bounds not in self.numbers:
            self.numbers[bounds] = self.index.add(bounds)

    def covers(self, bounds: Bounds) -> bool:
        """Whether all of a box lies in the union."""
        if bounds in self.numbers:
            return True
        near = [self.index.bounds[i] for i in self.index.near(bounds)]
        return first_uncovered(bounds, near) is None
