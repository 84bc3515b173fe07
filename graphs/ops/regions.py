"""Regions that tilers and references cut: parts of an operator's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from gpurt.buffer import Region

if TYPE_CHECKING:
    from gpurt.graph import Operand, Operator


def region_of(operand: Operand) -> Region:
    """The operand itself, or the whole of a buffer."""
    return operand if isinstance(operand, Region) else operand.whole


def part(region: Region, axis: int, begin: int, end: int) -> Region:
    """`region` cut to [begin, end) along an axis, counted from the region's own start."""
    low, _ = region.bounds[axis]
    bounds = list(region.bounds)
    bounds[axis] = (low + begin, low + end)
    return Region(region.buffer, tuple(bounds))


def columns(region: Region, begin: int, end: int) -> Region:
    """`region` cut to columns [begin, end) of its last axis."""
    return part(region, len(region.bounds) - 1, begin, end)


def array_of(op: Operator, arrays: Mapping[str, NDArray[Any]], arg: str) -> NDArray[Any] | None:
    """The view of an argument's region in its buffer's array; None for an absent optional."""
    if arg not in op.args:
        return None
    return arrays[arg][tuple(slice(a, b) for a, b in op.args[arg].bounds)]


def required(op: Operator, arrays: Mapping[str, NDArray[Any]], arg: str) -> NDArray[Any]:
    """The view of an argument's region that is never absent."""
    return arrays[arg][tuple(slice(a, b) for a, b in op.args[arg].bounds)]
