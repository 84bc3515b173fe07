"""Figures of a Trace beside its times: bandwidth, experts that steps chose, proposals taken."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gpurt.trace.analysis import operator_key, step_window, typical_step
from gpurt.trace.trace import Trace


@dataclass(frozen=True)
class Bandwidth:
    """Of the typical step: the bytes that its tasks move, over its length.

    ceiling: GB/s that this machine was measured to reach, None if it never was.
    """

    megabytes: float
    gigabytes_per_s: float
    ceiling: float | None

    @property
    def share(self) -> float | None:
        """Of the ceiling."""
        return self.gigabytes_per_s / self.ceiling if self.ceiling else None

    def as_dict(self) -> dict[str, float]:
        """What is known, for JSON."""
        figures = {**asdict(self), "share": self.share}
        return {name: value for name, value in figures.items() if value is not None}


@dataclass(frozen=True)
class ExpertRow:
    """Tasks that a step has only for experts that its rows chose, of one operator in all layers.

    share: of them, the part that ran; a mean over the whole steps, and its range.
    """

    name: str
    tasks: int
    share: float
    least: float
    most: float


@dataclass(frozen=True)
class Acceptance:
    """Of all requests of a trace: steps that verified proposals, and tokens a step."""

    verify_steps: int
    tokens_per_step: float
    by_position: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; positions from 1."""
        return {
            "verify_steps": self.verify_steps,
            "tokens_per_step": self.tokens_per_step,
            "by_position": {str(i): share for i, share in enumerate(self.by_position, 1)},
        }


def bandwidth(trace: Trace) -> Bandwidth:
    """See Bandwidth. Raises: TraceError if no step is whole."""
    step = typical_step(trace)
    low, high = step_window(trace, step)
    moved = int(trace.task_bytes[trace.spans_of(step)["task"]].sum())
    rate = moved / max(high - low, 1)
    return Bandwidth(moved / 1e6, rate, trace.ceiling_gbps or None)


def experts(trace: Trace) -> list[ExpertRow]:
    """A row an operator of dynamic tasks, most tasks first; none without any."""
    dynamic = np.flatnonzero(trace.task_dynamic)
    if not len(dynamic) or not len(trace.whole_steps):
        return []
    keys = [operator_key(o.path, trace.name) for o in trace.operators]
    names = sorted({keys[int(op)] for op in np.unique(trace.task_op[dynamic])})
    group = np.array([names.index(k) if k in names else -1 for k in keys])
    of_task = np.where(trace.task_dynamic, group[trace.task_op], -1)
    total = np.bincount(of_task[dynamic], minlength=len(names))
    shares = []
    for step in trace.whole_steps:
        ran = of_task[trace.spans_of(int(step))["task"]]
        shares.append(np.bincount(ran[ran >= 0], minlength=len(names)) / total)
    table = np.array(shares)
    rows = [
        ExpertRow(name, int(total[i]), *(float(f(table[:, i])) for f in (np.mean, np.min, np.max)))
        for i, name in enumerate(names)
    ]
    return sorted(rows, key=lambda r: -r.tasks)


def acceptance(trace: Trace) -> Acceptance | None:
    """See Acceptance; None if no request of the trace drafted."""
    steps = sum(r.verify_steps for r in trace.requests)
    if not steps:
        return None
    width = max(len(r.accepted) for r in trace.requests)
    taken = np.zeros(width)
    for request in trace.requests:
        taken[: len(request.accepted)] += request.accepted
    shares = taken / steps
    return Acceptance(steps, 1 + float(shares.sum()), tuple(shares.tolist()))
