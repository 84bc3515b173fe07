"""Trace as JSON for the Perfetto viewer and chrome://tracing.

A process a rank (pid 1 + rank), a lane a worker (tid from 10 on: viewers fold small or equal ids
together, so no lane has the id of a process).
A span is a slice "run" and, before it, a slice "wait"; flow arrows lead from the task that was
waited for. Counter tracks give rows and microseconds of every step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpurt.errors import TraceError
from gpurt.trace.analysis import late_producer, operator_key, operator_name
from gpurt.trace.trace import PHASES, Trace

FIRST_PID = 1
FIRST_TID = 10  # or beyond the last pid
MAX_FLOWS = 50_000  # viewers grow slow beyond; the longest waits come first


def write_perfetto(trace: Trace, path: str | Path) -> None:
    """Write the JSON. Raises: TraceError if the path cannot be written."""
    text = json.dumps(to_perfetto(trace), separators=(",", ":"))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"cannot write the Perfetto file: {error.strerror}"
        raise TraceError(f"{what} - at {path} - choose another path") from error


def to_perfetto(trace: Trace) -> dict[str, Any]:
    """The JSON as a dict: times in microseconds."""
    records = [*_names(trace), *_slices(trace), *_flows(trace), *_counters(trace)]
    return {"displayTimeUnit": "ns", "traceEvents": records}


# ---- helpers ---------------------------------------------------------------------------------
def _names(trace: Trace) -> Iterator[dict[str, Any]]:
    for rank in range(trace.ranks):
        name = f"{trace.name} on {trace.device}" + (f", rank {rank}" if trace.ranks > 1 else "")
        process = {"ph": "M", "pid": FIRST_PID + rank}
        yield {**process, "name": "process_name", "args": {"name": name}}
        yield {**process, "name": "process_sort_index", "args": {"sort_index": rank}}
    for worker in range(trace.workers):
        lane = {"ph": "M", **_lane(trace, worker)}
        yield {**lane, "name": "thread_name", "args": {"name": trace.lane_name(worker)}}
        yield {**lane, "name": "thread_sort_index", "args": {"sort_index": worker}}


def _slices(trace: Trace) -> Iterator[dict[str, Any]]:
    names = [operator_name(trace, op) for op in range(len(trace.operators))]
    kinds = [operator_key(o.path, trace.name) for o in trace.operators]
    for span in trace.spans:
        begin, wait, run = int(span["begin_ns"]), int(span["wait_ns"]), int(span["run_ns"])
        task, op = int(span["task"]), int(span["op"])
        lane = {"ph": "X", **_lane(trace, int(span["worker"]))}
        about = {"task": task, "step": int(span["step"]), "layer": int(span["layer"])}
        if wait:
            slice_ = {**lane, "name": "wait", "cat": "wait", "ts": begin / 1e3, "dur": wait / 1e3}
            yield {**slice_, "args": {**about, "for": names[op]}}
        about["stall_us"] = int(span["stall_ns"]) / 1e3  # type: ignore[assignment]
        about["bytes"] = int(trace.task_bytes[task])
        if span["expert_rows"]:
            about |= {"expert": int(span["expert"]), "expert_rows": int(span["expert_rows"])}
        start = {"ts": (begin + wait) / 1e3, "dur": run / 1e3}
        yield {**lane, **start, "name": names[op], "cat": kinds[op], "args": about}


def _flows(trace: Trace) -> Iterator[dict[str, Any]]:
    waited = trace.spans[trace.spans["wait_ns"] > 0]
    order = (-waited["wait_ns"]).argsort(kind="stable")[:MAX_FLOWS]
    for number, span in enumerate(waited[order]):
        late = late_producer(trace, span)
        if late is None:
            continue
        common = {"name": "edge", "cat": "edge", "id": number}
        # An arrow starts and ends inside a slice, so a nanosecond off its ends.
        start = int(late["begin_ns"]) + int(late["wait_ns"]) + max(int(late["run_ns"]) - 1, 0)
        end = int(span["begin_ns"]) + int(span["wait_ns"])
        source, sink = _lane(trace, int(late["worker"])), _lane(trace, int(span["worker"]))
        yield {**common, **source, "ph": "s", "ts": start / 1e3}
        yield {**common, **sink, "ph": "f", "bp": "e", "ts": max(end, start) / 1e3}


def _counters(trace: Trace) -> Iterator[dict[str, Any]]:
    for step in trace.steps:
        at = {"ph": "C", "pid": FIRST_PID, "ts": int(step["begin_ns"]) / 1e3}
        microseconds = (int(step["end_ns"]) - int(step["begin_ns"])) / 1e3
        phase = PHASES[int(step["phase"])] if int(step["phase"]) < len(PHASES) else "other"
        if len(trace.variant_rows) > 1:
            phase += f" of {trace.variant_rows[int(step['variant'])]}"
        yield {**at, "name": "rows", "args": {phase: int(step["rows"])}}
        yield {**at, "name": "step us", "args": {"us": microseconds}}


def _lane(trace: Trace, worker: int) -> dict[str, Any]:
    first = max(FIRST_TID, FIRST_PID + trace.ranks)
    return {"pid": FIRST_PID + trace.lane(worker)[0], "tid": first + worker}
