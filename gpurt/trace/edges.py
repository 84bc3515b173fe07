"""Edges of a Trace: for all tasks of a step at once, who was late, and what each edge cost.

An edge leads from one operator to another, layers together: `layers[*].attn -> layers[*].o`. A wait
belongs to the edge from the producer that signalled last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpurt.trace.spans import end_ns
from gpurt.trace.trace import Rows, Trace

ARROW = " -> "


@dataclass(frozen=True)
class EdgeRow:
    """One edge over all its tasks, means over steps; hop: signal to start, where a task waited."""

    producer: str
    consumer: str
    tasks: float
    wait_us: float  # summed over workers
    hop_us: float  # median


def late_tasks(trace: Trace, step: int) -> NDArray[np.int64]:
    """By task: its producer that signalled last in a step, -1 if it has none there."""
    spans = trace.spans_of(step)
    tasks = len(trace.task_op)
    # Later ends rank higher; of equal ends, the one that began first, as late_producer() has it.
    order = np.lexsort((-np.arange(len(spans)), end_ns(spans)))
    rank = np.full(tasks, -1, np.int64)
    rank[spans["task"][order]] = np.arange(len(spans))
    by_counter = _row_max(trace.producers, rank)
    latest = _row_max(trace.waits, by_counter)
    for producer_op, consumer_op in trace.payload_edges:
        found = rank[trace.task_op == producer_op].max(initial=-1)
        mine = trace.task_op == consumer_op
        latest[mine] = np.maximum(latest[mine], found)
    task_at = np.append(spans["task"][order].astype(np.int64), -1)
    return task_at[latest]


def edge_samples(
    trace: Trace, steps: list[int], keys: list[str]
) -> dict[tuple[str, str], NDArray[np.float64]]:
    """[steps, 3] of (tasks, wait in us, median hop in us) for each edge that anybody waited for.

    keys: what each operator counts as. The hop of a step in which nobody waited is not a number.
    """
    names = sorted(set(keys))
    group = np.array([names.index(k) for k in keys], np.int64)
    samples: dict[tuple[str, str], NDArray[np.float64]] = {}
    for place, step in enumerate(steps):
        spans = trace.spans_of(step)
        late = late_tasks(trace, step)[spans["task"]]
        ended = np.zeros(len(trace.task_op), np.int64)
        ended[spans["task"]] = end_ns(spans)
        has_edge = late >= 0
        spans, late = spans[has_edge], late[has_edge]
        edge = group[trace.task_op[late]] * len(names) + group[spans["op"]]
        hop = spans["begin_ns"] + spans["wait_ns"] - ended[late]
        for code in np.unique(edge):
            mine = edge == code
            waits = spans["wait_ns"][mine]
            pair = names[code // len(names)], names[code % len(names)]
            rows = samples.setdefault(pair, _no_waits(len(steps)))
            waited = hop[mine][waits > 0]
            median = float(np.median(waited)) / 1e3 if len(waited) else np.nan
            rows[place] = (len(waits), int(waits.sum()) / 1e3, median)
    return {pair: rows for pair, rows in samples.items() if rows[:, 1].any()}


def edge_rows(trace: Trace, steps: list[int], keys: list[str]) -> list[EdgeRow]:
    """A row an edge, most waiting first."""
    rows = []
    for (producer, consumer), sample in edge_samples(trace, steps, keys).items():
        tasks, wait_us, _ = np.nanmean(sample, axis=0)
        hop_us = float(np.nanmedian(sample[:, 2]))
        rows.append(EdgeRow(producer, consumer, float(tasks), float(wait_us), hop_us))
    return sorted(rows, key=lambda r: -r.wait_us)


# ---- helpers ---------------------------------------------------------------------------------
def _no_waits(steps: int) -> NDArray[np.float64]:
    rows = np.zeros((steps, 3))
    rows[:, 2] = np.nan
    return rows


def _row_max(rows: Rows, values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The largest of `values` that each row points to; -1 for an empty row."""
    offsets, indices = rows
    most = np.full(len(offsets) - 1, -1, np.int64)
    filled = np.flatnonzero(offsets[1:] > offsets[:-1])
    if len(filled):
        most[filled] = np.maximum.reduceat(values[indices], offsets[filled])
    return most
