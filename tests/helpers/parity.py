"""Margin-aware comparison of greedy tokens with a reference's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Parity:
    """Tokens of one prompt beside the reference's.

    equal: tokens before the first difference. margin: the reference's top-2 margin there.
    """

    total: int
    equal: int
    margin: float | None

    def holds(self, least_margin: float) -> bool:
        """Whether all tokens are equal, or the first other one was a near tie in the reference.
        After it the texts differ, so nothing more can be compared.
        """
        return self.margin is None or self.margin <= least_margin

    def __str__(self) -> str:
        """As in `64/64` or `17/64, then a margin of 0.0031`."""
        tail = "" if self.margin is None else f", then a margin of {self.margin:.4f}"
        return f"{self.equal}/{self.total}{tail}"


def compare(seen: Sequence[int], wanted: Sequence[int], margins: Sequence[float]) -> Parity:
    """Compare one prompt's tokens. Lengths must agree."""
    assert len(seen) == len(wanted) == len(margins)
    for index, (ours, theirs) in enumerate(zip(seen, wanted, strict=True)):
        if ours != theirs:
            return Parity(len(wanted), index, margins[index])
    return Parity(len(wanted), len(wanted), None)
