"""Buffers in fragment order (planner/fragments.py), read back as rows side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.plan import Plan

_TILE_ROWS, _CHUNK, _GRANULE = 8, 64, 8  # device/bodies/fragments.cuh, in elements of bf16
_PARAMETERS = {0: 15, 4: 16}  # of a matvec: which one is about which argument, x and y


def has_fragments(plan: Plan, buffer: int) -> bool:
    """Whether a matvec of the plan reads or writes the buffer in fragment order."""
    for task in plan.tasks:
        for argument, parameter in _PARAMETERS.items() if task.body == "matvec" else ():
            place = task.addr[argument]
            if place is None or place[0] != buffer:
                continue
            if any(value != 0 for value in task.params[parameter : parameter + 1]):
                return True
    return False


def side_by_side(array: NDArray[Any]) -> NDArray[Any]:
    """The rows of such a buffer, 16 bits an element, each in one piece."""
    rows, width = array.shape
    shape = (width // _CHUNK, rows // _TILE_ROWS, 2, _TILE_ROWS, 4, _GRANULE)
    pieces = array.reshape(shape).transpose(1, 3, 0, 2, 4, 5)
    return np.ascontiguousarray(pieces.reshape(rows, width))
