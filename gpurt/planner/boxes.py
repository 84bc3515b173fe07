"""Boxes: which regions of one buffer overlap, which cover another, and what is left uncovered.

A box is one half-open range an axis. Many boxes are an int64 array [count, axes, 2].
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from gpurt.plan import Bounds

Boxes = NDArray[np.int64]
Matrix = NDArray[np.bool_]


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
    return all(
        low < other_high and other_low < high
        for (low, high), (other_low, other_high) in zip(a, b, strict=True)
    )


def covered_by_disjoint(a: Boxes, b: Boxes) -> Matrix:
    """[len(a)]: whether the boxes b, which are disjoint, cover each of a."""
    volume = np.ones((len(a), len(b)), dtype=np.int64)
    for axis in range(a.shape[1]):
        low = np.maximum(a[:, axis, 0, None], b[None, :, axis, 0])
        high = np.minimum(a[:, axis, 1, None], b[None, :, axis, 1])
        volume *= np.maximum(high - low, 0)
    whole = np.prod(a[:, :, 1] - a[:, :, 0], axis=1)
    return np.asarray(volume.sum(axis=1) == whole, dtype=np.bool_)


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
    for cover in covers[:4]:  # the common case, without numpy
        if all(c <= a and b <= d for (a, b), (c, d) in zip(box, cover, strict=True)):
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


class BoxSet:
    """Boxes of one buffer, each once, that answers what touches a box."""

    def __init__(self, axes: int) -> None:
        self.bounds: list[Bounds] = []
        self._known: set[Bounds] = set()
        self._boxes = np.zeros((8, axes, 2), dtype=np.int64)

    def add(self, bounds: Bounds) -> None:
        """Add a box; one that is there stays once."""
        if bounds in self._known:
            return
        count = len(self.bounds)
        if count == len(self._boxes):
            self._boxes = np.concatenate([self._boxes, np.zeros_like(self._boxes)])
        self._boxes[count] = bounds
        self._known.add(bounds)
        self.bounds.append(bounds)

    def near(self, bounds: Bounds) -> list[int]:
        """Indices into `bounds` of the boxes that share an element with this one."""
        if len(self.bounds) <= 8:
            return [i for i, other in enumerate(self.bounds) if overlap(bounds, other)]
        hits = overlaps(boxes_of([bounds]), self._boxes[: len(self.bounds)])[0]
        return [int(i) for i in np.flatnonzero(hits)]

    def covers(self, bounds: Bounds) -> bool:
        """Whether all of a box lies in the union."""
        if bounds in self._known:
            return True
        return first_uncovered(bounds, [self.bounds[i] for i in self.near(bounds)]) is None
