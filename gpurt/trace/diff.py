"""Two traces of the same graph: what got slower, and whether that is more than noise.

Figures are medians over the steps of one phase, in microseconds a step: of the step itself, of the
run, stall and wait time of each operator (layers and workers together), and of the wait time that
each edge cost. Noise is what the steps of both traces show between themselves:

    max( 3 standard errors of the difference of medians,      spread from step to step
         distance of the medians of a trace's two halves )    drift: clocks, heat, neighbours

It knows nothing of what changes between two runs of a process. A figure is slower or faster only
beyond its noise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpurt.errors import TraceError
from gpurt.trace.analysis import operator_key, step_window, whole_steps
from gpurt.trace.edges import ARROW, edge_samples
from gpurt.trace.trace import PHASES, Trace

Verdict = Literal["slower", "faster", "same", "new", "gone", "unknown"]

STEPS_MIN = 3  # fewer say nothing about spread
DRIFT_STEPS_MIN = 8
ERRORS = 3.0
MEDIAN_ERROR = 1.2533  # standard error of a median, in those of a mean (normal distribution)
SIGMA_OF_MAD = 1.4826
STEPS_READ_MAX = 200  # of each trace, evenly chosen


@dataclass(frozen=True)
class Change:
    """One figure of both traces, in us a step. before, after: None where a trace lacks it."""

    kind: Literal["step", "run", "stall", "wait", "edge"]
    name: str
    before_us: float | None
    after_us: float | None
    noise_us: float | None  # None: too few steps to tell
    verdict: Verdict

    @property
    def change_us(self) -> float:
        """After less before; what is absent counts as 0."""
        return (self.after_us or 0.0) - (self.before_us or 0.0)


@dataclass(frozen=True)
class Diff:
    """All figures of two traces, the largest change of a kind first. before, after: what they are
    of, `name on device, workers`.
    """

    before: str
    after: str
    phase: str
    before_steps: int
    after_steps: int
    changes: tuple[Change, ...]

    def of(self, *kinds: str) -> list[Change]:
        """The changes of some kinds."""
        return [c for c in self.changes if c.kind in kinds]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {
            "changes": [asdict(c) | {"change_us": c.change_us} for c in self.changes]
        }


def compare(before: Trace, after: Trace, phase: str | None = None) -> Diff:
    """What changed from `before` to `after`. phase None: the last one that both traces have.

    Raises: TraceError if a trace has no whole step, or they share no phase.
    """
    chosen = _phase(before, after, phase)
    old_steps, new_steps = _steps(before, chosen), _steps(after, chosen)
    old, new = _figures(before, old_steps), _figures(after, new_steps)
    _add_zeros(old, new, before, len(old_steps))
    _add_zeros(new, old, after, len(new_steps))
    changes = [_change(key, old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys())]
    kinds = ("step", "run", "stall", "wait", "edge")
    changes.sort(key=lambda c: (kinds.index(c.kind), -abs(c.change_us), c.name))
    counts = len(old_steps), len(new_steps)
    return Diff(_about(before), _about(after), chosen, *counts, tuple(changes))


def noise_us(old: NDArray[np.float64], new: NDArray[np.float64]) -> float | None:
    """How far two medians may lie apart by chance; None: too few steps."""
    if min(len(old), len(new)) < STEPS_MIN:
        return None
    errors = [SIGMA_OF_MAD * _mad(v) / np.sqrt(len(v)) for v in (old, new)]
    error = ERRORS * MEDIAN_ERROR * float(np.hypot(*errors))
    return max(error, _drift(old), _drift(new))


# ---- helpers ---------------------------------------------------------------------------------
def _about(trace: Trace) -> str:
    return f"{trace.name} on {trace.device}, {trace.workers} workers"


def _phases(trace: Trace) -> dict[str, list[int]]:
    """Whole steps by phase; all under `plain` if there are no summaries."""
    of = {int(s["step"]): int(s["phase"]) for s in trace.steps}
    found: dict[str, list[int]] = {}
    for step in whole_steps(trace):
        index = of.get(step, 0)
        name = PHASES[index] if index < len(PHASES) else "other"
        found.setdefault(name, []).append(step)
    return found


def _phase(before: Trace, after: Trace, phase: str | None) -> str:
    old, new = _phases(before), _phases(after)
    if phase is not None and phase in old and phase in new:
        return phase
    common = [p for p in (*PHASES, "other") if p in old and p in new]
    if phase is not None or not common:
        wanted = "no phase in common" if phase is None else f"no {phase} steps in both"
        have = f"{'/'.join(old)} before, {'/'.join(new)} after"
        raise TraceError(f"the traces have {wanted} ({have}) - at trace diff - trace the same work")
    return common[-1]


def _steps(trace: Trace, phase: str) -> list[int]:
    steps = _phases(trace)[phase]
    if len(steps) <= STEPS_READ_MAX:
        return steps
    return [steps[i * len(steps) // STEPS_READ_MAX] for i in range(STEPS_READ_MAX)]


def _figures(trace: Trace, steps: list[int]) -> dict[tuple[str, str], NDArray[np.float64]]:
    """(kind, name) -> a value a step, in us."""
    keys = [operator_key(o.path, trace.name) for o in trace.operators]
    names = sorted(set(keys))
    group = np.array([names.index(k) for k in keys], np.int64)
    found: dict[tuple[str, str], NDArray[np.float64]] = {}
    windows = [step_window(trace, s) for s in steps]
    found["step", "step"] = np.array([(high - low) / 1e3 for low, high in windows])
    parts = {"run": "run_ns", "stall": "stall_ns", "wait": "wait_ns"}
    sums = {kind: np.zeros((len(steps), len(names))) for kind in parts}
    for place, step in enumerate(steps):
        spans = trace.spans_of(step)
        for kind, column in parts.items():
            weights = spans[column].astype(np.float64)
            sums[kind][place] = np.bincount(group[spans["op"]], weights, len(names)) / 1e3
    for kind, values in sums.items():
        for index, name in enumerate(names):
            if kind == "run" or values[:, index].any():
                found[kind, name] = values[:, index]
    for (producer, consumer), rows in edge_samples(trace, steps, keys).items():
        found["edge", f"{producer}{ARROW}{consumer}"] = rows[:, 1]
    return found


def _add_zeros(
    figures: dict[tuple[str, str], NDArray[np.float64]],
    other: dict[tuple[str, str], NDArray[np.float64]],
    trace: Trace,
    steps: int,
) -> None:
    """Nobody waited: that is 0, where the other trace has a figure and this one the operators."""
    names = {operator_key(o.path, trace.name) for o in trace.operators}
    for kind, name in other.keys() - figures.keys():
        if names.issuperset(name.split(ARROW)):
            figures[kind, name] = np.zeros(steps)


def _change(
    key: tuple[str, str], old: NDArray[np.float64] | None, new: NDArray[np.float64] | None
) -> Change:
    kind: Any = key[0]
    before = None if old is None else float(np.median(old))
    after = None if new is None else float(np.median(new))
    if old is None or new is None:
        return Change(kind, key[1], before, after, None, "new" if old is None else "gone")
    noise = noise_us(old, new)
    change = (after or 0.0) - (before or 0.0)
    verdict: Verdict = "same"
    if noise is None:
        verdict = "unknown"
    elif abs(change) > noise:
        verdict = "slower" if change > 0 else "faster"
    return Change(kind, key[1], before, after, noise, verdict)


def _mad(values: NDArray[np.float64]) -> float:
    return float(np.median(np.abs(values - np.median(values))))


def _drift(values: NDArray[np.float64]) -> float:
    if len(values) < DRIFT_STEPS_MIN:
        return 0.0
    half = len(values) // 2
    return abs(float(np.median(values[:half]) - np.median(values[half:])))
