"""Spans by step, and what a span is. file.py has those that are read when a step is asked for."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

# One task on one worker. begin: claimed, the wait starts; begin + wait: edges met, the run starts;
# begin + wait + run: signalled. stall: part of the run, waiting for streamed weights. expert: what
# the task ran, for so many rows of the step; both 0 for all other tasks.
SPAN = np.dtype(
    [
        ("begin_ns", "<i8"),
        ("wait_ns", "<i8"),
        ("run_ns", "<i8"),
        ("stall_ns", "<i8"),
        ("step", "<u8"),
        ("task", "<u4"),
        ("op", "<u4"),
        ("worker", "<u4"),
        ("layer", "<u4"),
        ("expert", "<u4"),
        ("expert_rows", "<u4"),
    ]
)


class StepSpans:
    """Spans in memory, by step and begin."""

    # Numbers of the steps that have all their spans; None: not known, whoever asks has to count.
    whole_steps: NDArray[np.uint64] | None = None

    def __init__(self, spans: NDArray[Any]) -> None:
        """Spans: SPAN, by step and begin; not copied."""
        self._spans = spans

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps with spans, ascending."""
        return list(self._ranges)

    def all(self) -> NDArray[Any]:
        """All spans."""
        return self._spans

    def of(self, step: int) -> NDArray[Any]:
        """Those of one step, by begin; empty if none was kept."""
        low, high = self._ranges.get(step, (0, 0))
        return self._spans[low:high]

    @cached_property
    def _ranges(self) -> dict[int, tuple[int, int]]:
        numbers, starts = np.unique(self._spans["step"], return_index=True)
        bounds = itertools.pairwise([*starts.tolist(), len(self._spans)])
        return dict(zip(numbers.tolist(), bounds, strict=True))


def end_ns(spans: NDArray[Any]) -> NDArray[np.int64]:
    """When each span was signalled."""
    total: NDArray[np.int64] = spans["begin_ns"] + spans["wait_ns"] + spans["run_ns"]
    return total
