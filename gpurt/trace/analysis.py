"""What a Trace says: where step time went, which operators took it, who was late, what was
critical.

A step's window reaches from the end of the step before (or its first run) to the end of its last
task. Every worker's time in a window is split without a rest:

    claimed     edges met              signalled   claimed              the step's end
       |- wait -----|- compute + stall -----|- idle -|- ... -|- tail -----------|
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.errors import TraceError
from gpurt.trace.spans import end_ns
from gpurt.trace.trace import PHASES, Trace

SPLIT_NAMES = ("compute", "stall", "wait", "idle", "tail")
PATH_NAMES = ("compute", "stall", "hop", "worker", "open")


@dataclass(frozen=True)
class OperatorRow:
    """All tasks of one operator over all layers, per step."""

    name: str
    body: str
    tasks: float
    run_us: float  # summed over workers
    stall_us: float
    wait_us: float
    task_us: float  # median run of one task
    gigabytes_per_s: float  # bytes moved over the time its tasks ran, all workers together
    share: float  # of all run time


@dataclass(frozen=True)
class LongWait:
    """A task that waited, and who was late. late_task -1: the step opened late."""

    step: int
    task: int
    operator: str
    worker: int
    wait_us: float
    late_task: int
    late_operator: str
    late_worker: int
    late_us: float  # how long after the wait began the late one signalled
    why: str


def whole_steps(trace: Trace) -> list[int]:
    """Steps with all their spans. Raises: TraceError if there is none."""
    numbers = [int(n) for n in trace.whole_steps]
    if not numbers:
        what = f"no step has all of its {len(trace.task_op)} spans"
        raise TraceError(f"{what} - at trace {trace.name} - trace a longer request")
    return numbers


def step_window(trace: Trace, step: int) -> tuple[int, int]:
    """(begin, end) of a step in nanoseconds."""
    spans = trace.spans_of(step)
    begin = int((spans["begin_ns"] + spans["wait_ns"]).min())
    before = trace.spans_of(step - 1) if step else spans[:0]
    if len(before):
        ended = int(end_ns(before).max())
        row = int(np.searchsorted(trace.steps["step"], step))
        known = row < len(trace.steps) and int(trace.steps["step"][row]) == step
        opened = int(trace.steps["begin_ns"][row]) if known else ended
        # Usually a step opens where the last one ended; after an idle time, later.
        begin = opened if ended <= opened <= begin else min(begin, ended)
    return begin, int(end_ns(spans).max())


def step_times_us(trace: Trace, phase: str | None = None) -> NDArray[np.float64]:
    """Duration of every summarised step; of the whole steps if there are no summaries."""
    steps = trace.steps
    if phase is not None:
        steps = steps[steps["phase"] == PHASES.index(phase)]
    if len(trace.steps):
        times: NDArray[np.float64] = (steps["end_ns"] - steps["begin_ns"]) / 1e3
        return times
    windows = [step_window(trace, s) for s in whole_steps(trace)]
    return np.array([(b - a) / 1e3 for a, b in windows])


def typical_step(trace: Trace) -> int:
    """The whole step of median duration, of the last phase that has one (decode, if any)."""
    steps = whole_steps(trace)
    phase_of = {int(s["step"]): int(s["phase"]) for s in trace.steps}
    last = max(phase_of.get(s, 0) for s in steps)
    candidates = [s for s in steps if phase_of.get(s, 0) == last]
    durations = [(b - a, s) for s in candidates for a, b in [step_window(trace, s)]]
    return sorted(durations)[len(durations) // 2][1]


def split(trace: Trace, steps: list[int] | None = None) -> NDArray[np.float64]:
    """Nanoseconds [worker, SPLIT_NAMES], summed over `steps` (all whole ones); rows sum to the
    length of the steps.
    """
    total = np.zeros((trace.workers, len(SPLIT_NAMES)))
    for step in whole_steps(trace) if steps is None else steps:
        low, high = step_window(trace, step)
        spans = trace.spans_of(step)
        for worker in range(trace.workers):
            total[worker] += _split_one(spans[spans["worker"] == worker], low, high)
    return total


def operators(trace: Trace) -> list[OperatorRow]:
    """A row an operator, layers together, most run time first; means over the whole steps."""
    steps = whole_steps(trace)
    spans = np.concatenate([trace.spans_of(s) for s in steps])
    keys = [operator_key(o.path, trace.name) for o in trace.operators]
    names = sorted(set(keys))
    group = np.array([names.index(k) for k in keys])[spans["op"]]
    total_run = max(int(spans["run_ns"].sum()), 1)
    rows = []
    for index, name in enumerate(names):
        mine = spans[group == index]
        if not len(mine):
            continue
        run, moved = int(mine["run_ns"].sum()), int(trace.task_bytes[mine["task"]].sum())
        rows.append(
            OperatorRow(
                name=name,
                body=trace.operators[int(mine["op"][0])].body,
                tasks=len(mine) / len(steps),
                run_us=run / 1e3 / len(steps),
                stall_us=int(mine["stall_ns"].sum()) / 1e3 / len(steps),
                wait_us=int(mine["wait_ns"].sum()) / 1e3 / len(steps),
                task_us=float(np.median(mine["run_ns"])) / 1e3,
                gigabytes_per_s=moved / _covered_ns(mine),
                share=run / total_run,
            )
        )
    return sorted(rows, key=lambda r: -r.run_us)


def longest_waits(trace: Trace, count: int = 10) -> list[LongWait]:
    """The longest waits of the whole steps, each with who was late, by how much and why."""
    spans = np.concatenate([trace.spans_of(s) for s in whole_steps(trace)])
    order = np.argsort(-spans["wait_ns"], kind="stable")[:count]
    return [blame(trace, spans[i]) for i in order if spans["wait_ns"][i] > 0]


def blame(trace: Trace, span: Any) -> LongWait:
    """Who `span`'s task waited for: of its producers in that step, the one that signalled last."""
    claimed = int(span["begin_ns"])
    late = late_producer(trace, span)
    step = int(span["step"])
    common: dict[str, Any] = {
        "step": step,
        "task": int(span["task"]),
        "operator": operator_name(trace, int(span["op"])),
        "worker": int(span["worker"]),
        "wait_us": int(span["wait_ns"]) / 1e3,
    }
    if late is None:
        return LongWait(
            **common,
            late_task=-1,
            late_operator=f"step {step} opened",
            late_worker=-1,
            late_us=int(span["wait_ns"]) / 1e3,
            why="it has no producer in the step",
        )
    return LongWait(
        **common,
        late_task=int(late["task"]),
        late_operator=operator_name(trace, int(late["op"])),
        late_worker=int(late["worker"]),
        late_us=max(0, _end(late) - claimed) / 1e3,
        why=_why(late, claimed, claimed + int(span["wait_ns"])),
    )


def late_producer(trace: Trace, span: Any) -> Any:
    """The span of the producer that signalled last in the step of `span`, or None."""
    producers = trace.producers_of(int(span["task"]))
    spans = trace.spans_of(int(span["step"]))
    mine = spans[np.isin(spans["task"], producers)]
    return mine[int(np.argmax(end_ns(mine)))] if len(mine) else None


def critical_path(trace: Trace, step: int) -> NDArray[Any]:
    """The chain that set a step's length, first task to last. Before each task comes the one it
    could not start without and that ended last: a producer, or what its worker did before.
    """
    spans = trace.spans_of(step)
    if not len(spans):
        raise TraceError(f"step {step} has no spans - at trace {trace.name} - see gpurt trace")
    ends = end_ns(spans)
    row_of = {int(t): i for i, t in enumerate(spans["task"])}
    order = np.lexsort((spans["begin_ns"], spans["worker"]))
    before: dict[int, int] = {
        int(b): int(a)
        for a, b in itertools.pairwise(order)
        if spans["worker"][a] == spans["worker"][b]
    }
    row = int(np.argmax(ends))
    path, seen = [row], {row}
    while True:
        found = [row_of[int(p)] for p in trace.producers_of(int(spans["task"][row])) if p in row_of]
        if row in before:
            found.append(before[row])
        found = [f for f in found if f not in seen]
        if not found:
            break
        row = max(found, key=lambda f: int(ends[f]))
        path.append(row)
        seen.add(row)
    return spans[path[::-1]]


def path_parts(trace: Trace, step: int) -> dict[str, float]:
    """Where the critical path spent its step, by PATH_NAMES in nanoseconds, without a rest."""
    places = path_places(trace, step, critical_path(trace, step))
    return dict(zip(PATH_NAMES, places.sum(axis=0).tolist(), strict=True))


def path_places(trace: Trace, step: int, path: NDArray[Any]) -> NDArray[np.float64]:
    """Nanoseconds [span of the critical path, PATH_NAMES]; all of them add up to the step.

    open: until the first task ran; hop: from a signal to the start that waited for it; worker: from
    the end of the task before on the same worker.
    """
    reached, _ = step_window(trace, step)
    before = -1
    places = np.zeros((len(path), len(PATH_NAMES)))
    column = {name: i for i, name in enumerate(PATH_NAMES)}
    for row, span in zip(places, path, strict=True):
        met, ended = int(span["begin_ns"]) + int(span["wait_ns"]), _end(span)
        gap = max(0, met - reached)
        if before < 0:
            row[column["open"]] = gap
        else:
            waited = before in trace.producers_of(int(span["task"]))
            row[column["hop" if waited else "worker"]] = gap
        run = max(0, ended - max(met, reached))
        stall = min(int(span["stall_ns"]), run)
        row[column["stall"]], row[column["compute"]] = stall, run - stall
        reached, before = max(reached, ended), int(span["task"])
    return places


def operator_name(trace: Trace, op: int) -> str:
    """An operator's path without the graph's name: `layers[3].attn.q`."""
    info = trace.operators[op]
    prefix = trace.name + "."
    return info.path.removeprefix(prefix) or info.name


def operator_key(path: str, graph_name: str) -> str:
    """The same for all layers: `layers[*].attn.q`."""
    return re.sub(r"\[\d+\]", "[*]", path.removeprefix(graph_name + "."))


# ---- helpers ---------------------------------------------------------------------------------
def _split_one(spans: NDArray[Any], low: int, high: int) -> NDArray[np.float64]:
    """One worker's window, in the order of SPLIT_NAMES.

    A clock that is rounded, or read by two threads, can let a span begin before the one before it
    ended; what they share counts for the first.
    """
    if not len(spans):
        return np.array([0, 0, 0, 0, high - low], np.float64)
    ended = np.clip(end_ns(spans), low, high)
    before = np.maximum.accumulate(np.concatenate([[low], ended[:-1]]))
    claimed = np.maximum(np.clip(spans["begin_ns"], low, high), before)
    met = np.maximum(np.clip(spans["begin_ns"] + spans["wait_ns"], low, high), claimed)
    ended = np.maximum(ended, met)
    run, wait = int((ended - met).sum()), int((met - claimed).sum())
    stall = int(np.minimum(spans["stall_ns"], ended - met).sum())
    tail = high - int(ended.max())
    idle = (high - low) - run - wait - tail
    return np.array([run - stall, stall, wait, idle, tail], np.float64)


def _covered_ns(spans: NDArray[Any]) -> int:
    """Length of the union of all runs, steps one after another."""
    order = np.argsort(spans["begin_ns"] + spans["wait_ns"], kind="stable")
    starts = (spans["begin_ns"] + spans["wait_ns"])[order]
    ends = end_ns(spans)[order]
    reach = np.maximum.accumulate(ends)
    previous = np.concatenate([starts[:1], reach[:-1]])
    return max(int(np.maximum(0, ends - np.maximum(starts, previous)).sum()), 1)


def _end(span: Any) -> int:
    return int(span["begin_ns"]) + int(span["wait_ns"]) + int(span["run_ns"])


def _why(late: Any, since_ns: int, met_ns: int) -> str:
    """What the late task did after the other began to wait for it: the largest part; or that the
    other one noticed late, as a thread does that lost its core.
    """
    begin, met = int(late["begin_ns"]), int(late["begin_ns"]) + int(late["wait_ns"])
    parts = {
        "claimed late": max(0, begin - since_ns),
        "waited itself": max(0, met - max(begin, since_ns)),
        "its own run": max(0, _end(late) - max(met, since_ns)),
        "seen late": max(0, met_ns - max(_end(late), since_ns)),
    }
    stalled = int(late["stall_ns"])
    largest = max(parts, key=lambda k: parts[k])
    if largest == "its own run" and stalled * 2 > int(late["run_ns"]):
        return "its weights came late"
    return largest
