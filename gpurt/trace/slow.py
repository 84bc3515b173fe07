"""Slow steps of a Trace: which they are, and for those whose spans were kept, what was slow.

What was slow is the part of a step's critical path that took the most beyond its median over the
kept steps; and within that part the one task that was furthest beyond what is usual for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.trace.analysis import (
    PATH_NAMES,
    critical_path,
    operator_key,
    operator_name,
    path_places,
    step_window,
)
from gpurt.trace.trace import PHASES, Trace

PLAIN_WORDS = {
    "compute": "running tasks",
    "stall": "waiting for weights",
    "hop": "from signals to the starts that waited for them",
    "worker": "from a worker's task to its next one",
    "open": "until the first task ran",
}
STEPS_READ_MAX = 64  # of a phase, to know what is usual


@dataclass(frozen=True)
class SlowStep:
    """A step. times: its length in medians of its phase. rows: 0 if they are not known. kept: its
    spans are here.

    part: one of PATH_NAMES, empty without spans or if nothing stands out; part_us: what it took
    beyond its median. task, operator, worker, task_us: the place that was furthest beyond.
    """

    step: int
    phase: str
    step_us: float
    times: float
    rows: int
    kept: bool
    part: str = ""
    part_us: float = 0.0
    task: int = -1
    operator: str = ""
    worker: int = -1
    task_us: float = 0.0

    @property
    def why(self) -> str:
        """In words."""
        if not self.part:
            return "nothing stands out" if self.kept else "no spans kept"
        most = f"{_time(self.task_us)} at {self.task} {self.operator} on worker {self.worker}"
        return f"+{_time(self.part_us)} {PLAIN_WORDS[self.part]}; {most}"


def slow_steps(trace: Trace, count: int = 5) -> list[SlowStep]:
    """The slowest steps of the last phase that the trace has; then, to make as many whose spans are
    here, the slowest of those.
    """
    return _Phase(trace).slowest(count)


# ---- helpers ---------------------------------------------------------------------------------
def _time(microseconds: float) -> str:
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1e3:.2f} ms"


class _Phase:
    """The steps of the last phase, and what is usual in them."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        steps = trace.steps
        self._phase = int(steps["phase"].max()) if len(steps) else 0
        steps = steps[steps["phase"] == self._phase]
        self._rows = {int(s["step"]): int(s["rows"]) for s in steps}
        self._lengths = {int(s["step"]): int(s["end_ns"] - s["begin_ns"]) for s in steps}
        self._kept = [int(s) for s in trace.whole_steps]
        if not self._lengths:
            windows = {s: step_window(trace, s) for s in self._kept}
            self._lengths = {s: high - low for s, (low, high) in windows.items()}
        self._kept = [s for s in self._kept if s in self._lengths]

    def slowest(self, count: int) -> list[SlowStep]:
        """See slow_steps."""
        order = sorted(self._lengths, key=lambda s: (-self._lengths[s], s))
        kept = set(self._kept)
        missing = count - sum(s in kept for s in order[:count])
        more = [s for s in order[count:] if s in kept][:missing]
        order = order[:count] + more
        median = max(float(np.median(list(self._lengths.values()))), 1.0) if order else 1.0
        name = PHASES[self._phase] if self._phase < len(PHASES) else "other"
        rows = []
        for step in order:
            length = self._lengths[step]
            found = self._slowest_place(step) if step in kept else {}
            figures = step, name, length / 1e3, length / median, self._rows.get(step, 0)
            rows.append(SlowStep(*figures, step in kept, **found))
        return rows

    @cached_property
    def _usual(self) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
        """Median nanoseconds by PATH_NAMES: of a step, and of a place by operator of all layers."""
        sums = []
        places: dict[str, list[NDArray[np.float64]]] = {}
        for step in self._kept[:: max(1, len(self._kept) // STEPS_READ_MAX)]:
            path = critical_path(self._trace, step)
            parts = path_places(self._trace, step, path)
            sums.append(parts.sum(axis=0))
            for span, row in zip(path, parts, strict=True):
                places.setdefault(self._key(span), []).append(row)
        by_operator = {key: np.median(rows, axis=0) for key, rows in places.items()}
        return np.median(sums, axis=0), by_operator

    def _slowest_place(self, step: int) -> dict[str, Any]:
        path = critical_path(self._trace, step)
        parts = path_places(self._trace, step, path)
        usual, usual_places = self._usual
        beyond = parts.sum(axis=0) - usual
        part = int(np.argmax(beyond))
        if beyond[part] <= 0:
            return {}
        unknown = np.zeros(len(PATH_NAMES))
        excess = [
            row[part] - usual_places.get(self._key(span), unknown)[part]
            for span, row in zip(path, parts, strict=True)
        ]
        span = path[int(np.argmax(excess))]
        return {
            "part": PATH_NAMES[part],
            "part_us": float(beyond[part]) / 1e3,
            "task": int(span["task"]),
            "operator": operator_name(self._trace, int(span["op"])),
            "worker": int(span["worker"]),
            "task_us": float(max(excess)) / 1e3,
        }

    def _key(self, span: Any) -> str:
        path = self._trace.operators[int(span["op"])].path
        return operator_key(path, self._trace.name)
