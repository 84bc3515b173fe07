"""Boxes: which regions of one buffer overlap, which cover another, and what is left uncovered.

A box is one half-open range an axis. Many boxes are an int64 array [count, axes, 2].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from gpurt.plan import Bounds

Boxes = NDArray[np.int64]
Matrix = NDArray[np.bool_]

_FEW = 8  # boxes below which plain loops beat numpy
_CELLS = 256  # along an axis


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
    if len(bounds) <= _FEW:
        return not any(overlap(one, two) for one, two in combinations(bounds, 2))
    array = boxes_of(bounds)
    return bool(_paint(array, _edges(array)).max() <= 1)


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
    array = boxes_of(covers)
    near = array[np.flatnonzero(overlaps(boxes_of([box]), array)[0])]
    if not len(near):
        return box
    whole = boxes_of([box])
    near = np.clip(near, whole[..., :1], whole[..., 1:])
    cuts = _edges(np.concatenate([near, whole]))
    filled = _paint(near, cuts) > 0
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


def _edges(boxes: Boxes) -> list[NDArray[np.int64]]:
    """Along each axis the places where some box begins or ends. Of the grid that they cut each cell
    is wholly in a box or wholly out.
    """
    return [np.unique(boxes[:, axis]) for axis in range(boxes.shape[1])]


def _paint(boxes: Boxes, cuts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """By cell of the grid, in how many boxes it lies: what changes at a box's corners, summed."""
    counts = np.zeros([len(cut) for cut in cuts], dtype=np.int64)
    places = [np.searchsorted(cut, boxes[:, axis]) for axis, cut in enumerate(cuts)]
    for corner in product((0, 1), repeat=len(cuts)):
        at = tuple(place[:, side] for place, side in zip(places, corner, strict=True))
        np.add.at(counts, at, (-1) ** sum(corner))
    for axis in range(len(cuts)):
        np.cumsum(counts, axis=axis, out=counts)
    return counts[(slice(-1),) * len(cuts)]


def volume(bounds: Bounds) -> int:
    """Elements of a box."""
    return prod(high - low for low, high in bounds)


def text(name: str, bounds: Bounds) -> str:
    """As in `x[0:16, 64:128]`."""
    return f"{name}[{', '.join(f'{low}:{high}' for low, high in bounds)}]"


class BoxIndex:
    """Boxes of one buffer by number, found by what they touch.

    A box lies in the cells of the axis along which it spans fewest. Whoever asks looks along every
    axis; if boxes that are near are many, numpy looks at all.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self._widths = [max(1, -(-size // _CELLS)) for size in shape]
        self._cells: list[dict[int, list[int]]] = [{} for _ in shape]
        self._whole = tuple((0, size) for size in shape)
        self.bounds: dict[int, Bounds] = {}
        self._next = 0

    def add(self, bounds: Bounds) -> int:
        """Add a box. Returns: its number, from 0, never used again."""
        number, self._next = self._next, self._next + 1
        self.bounds[number] = bounds
        axis, span = self._place(bounds)
        cells = self._cells[axis]
        for cell in span:
            cells.setdefault(cell, []).append(number)
        return number

    def remove(self, number: int) -> None:
        """Forget a box."""
        axis, span = self._place(self.bounds.pop(number))
        cells = self._cells[axis]
        for cell in span:
            cells[cell].remove(number)
            if not cells[cell]:
                del cells[cell]

    def near(self, bounds: Bounds) -> list[int]:
        """Numbers of the boxes that share an element with this one, ascending."""
        if not self.bounds or bounds == self._whole:
            return list(self.bounds)
        if len(self.bounds) <= _FEW:
            return [i for i, other in self.bounds.items() if overlap(bounds, other)]
        found: set[int] = set()
        for cells, width, (low, high) in zip(self._cells, self._widths, bounds, strict=True):
            span = range(low // width, (high - 1) // width + 1)
            if len(cells) < len(span):
                found.update(*(numbers for cell, numbers in cells.items() if cell in span))
            else:
                found.update(*(cells[cell] for cell in span if cell in cells))
        if len(found) > _CELLS:
            numbers = sorted(found)
            hits = overlaps(boxes_of([bounds]), boxes_of([self.bounds[i] for i in numbers]))[0]
            return [numbers[i] for i in np.flatnonzero(hits).tolist()]
        return [i for i in sorted(found) if overlap(bounds, self.bounds[i])]

    def _place(self, bounds: Bounds) -> tuple[int, range]:
        """The axis along which a box spans fewest cells, and those."""
        spans = [
            range(low // width, (high - 1) // width + 1)
            for width, (low, high) in zip(self._widths, bounds, strict=True)
        ]
        axis = min(range(len(spans)), key=lambda axis: len(spans[axis]))
        return axis, spans[axis]


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
