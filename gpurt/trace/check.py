"""Whether a Trace's parts fit each other, so that what reads it meets no bad index."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.trace.trace import Rows, Trace


def check_trace(trace: Trace) -> None:
    """Raises: ValueError naming the first part that does not fit."""
    tasks, operators, regions = len(trace.task_op), len(trace.operators), len(trace.regions)
    counters = len(trace.producers[0]) - 1
    if trace.workers < 1 or trace.ranks < 1 or trace.workers % trace.ranks:
        raise ValueError(f"{trace.workers} workers of {trace.ranks} ranks")
    _below("an operator of a task", trace.task_op, operators)
    for name, sized in (("task_bytes", trace.task_bytes), ("task_dynamic", trace.task_dynamic)):
        if len(sized) != tasks:
            raise ValueError(f"{len(sized)} of {name} for {tasks} tasks")
    _rows("waits", trace.waits, tasks, counters)
    _rows("producers", trace.producers, counters, tasks)
    for name, rows in (("task_reads", trace.task_reads), ("task_writes", trace.task_writes)):
        if regions:  # files of older versions have neither
            _rows(name, rows, tasks, regions)
    _below("an operator of a payload edge", np.array(trace.payload_edges, np.int64), operators)
    _below("a step's variant", trace.steps["variant"], len(trace.variant_rows))
    numbers = trace.steps["step"]  # unsigned: a difference would wrap
    if (numbers[1:] <= numbers[:-1]).any():
        raise ValueError("steps that are not in order")


def check_spans(trace: Trace, spans: NDArray[Any], step: int, *, is_whole: bool) -> None:
    """Spans that are said to be one step's. Raises: ValueError as above."""
    tasks, operators = len(trace.task_op), len(trace.operators)
    for name, limit in (("task", tasks), ("op", operators), ("worker", trace.workers)):
        _below(f"a span's {name}", spans[name], limit)
    for name in ("wait_ns", "run_ns", "stall_ns"):
        if len(spans) and int(spans[name].min()) < 0:
            raise ValueError(f"a negative {name}")
    if (spans["step"] != step).any() or not len(spans):
        raise ValueError(f"spans that are not of step {step}")
    if (np.diff(spans["begin_ns"]) < 0).any():
        raise ValueError(f"spans of step {step} that are not in order")
    if is_whole != bool(len(trace.whole_among(spans))):
        raise ValueError(f"step {step} that lacks spans, or does not")


# ---- helpers ---------------------------------------------------------------------------------
def _below(what: str, values: NDArray[Any], limit: int) -> None:
    if values.size and not 0 <= int(values.min()) <= int(values.max()) < limit:
        raise ValueError(f"{what} outside of {limit}")


def _rows(name: str, rows: Rows, count: int, limit: int) -> None:
    offsets, values = rows
    if len(offsets) != count + 1 or int(offsets[0]) != 0 or int(offsets[-1]) != len(values):
        raise ValueError(f"{name} of {len(offsets) - 1} rows for {count}")
    if (np.diff(offsets) < 0).any():
        raise ValueError(f"{name} whose offsets fall")
    _below(f"a value of {name}", values, limit)
