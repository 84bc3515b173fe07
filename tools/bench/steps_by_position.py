"""Where slow decode steps come from: `python -m tools.bench.steps_by_position` (one GPU).

Runs the case decode-p99 once and holds every step's time against its position: what a straight line
explains, what is left of it, what repeats with a period, and which operators grow.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.bench.cases import find
from gpurt.bench.machine import cuda_machine
from gpurt.trace.analysis import critical_path, operator_key, path_parts, step_window
from gpurt.trace.spans import end_ns
from gpurt.trace.trace import PHASES, Trace

PERIODS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_Floats = NDArray[np.float64]


def percentiles(times: _Floats) -> str:
    """The usual ones, the last as medians."""
    points = (1, 10, 50, 90, 99, 99.9, 100)
    found = np.percentile(times, points)
    shown = ", ".join(f"p{p:g} {v:.1f}" for p, v in zip(points, found, strict=True))
    return f"{shown}; p99 / median {found[4] / found[2]:.4f}"


def by_position(trace: Trace) -> None:
    """All steps: the line through them, and what is left."""
    steps = trace.steps[trace.steps["phase"] == PHASES.index("decode")]
    times = (steps["end_ns"] - steps["begin_ns"]) / 1e3
    between = (steps["begin_ns"][1:] - steps["end_ns"][:-1]) / 1e3
    place = np.arange(len(times), dtype=np.float64)
    print(f"{len(times)} steps:", percentiles(times))
    print("between steps:", percentiles(between + 1e-9))
    for first in range(0, len(times), 100):
        part = times[first : first + 100]
        print(f"  {first:5d}: median {np.median(part):.1f}, most {part.max():.1f}")
    # Through medians of 20, so that a few slow steps do not bend it.
    centres = place[: len(times) // 20 * 20].reshape(-1, 20).mean(axis=1)
    middles = np.median(times[: len(centres) * 20].reshape(-1, 20), axis=1)
    slope, base = np.polyfit(centres, middles, 1)
    left = times - (base + slope * place)
    print(f"line: {base:.1f} us + {slope * 1e3:.1f} ns a position")
    print("what the line leaves:", percentiles(left + np.median(times)))
    for period in PERIODS:
        means = [np.median(left[i::period]) for i in range(period)]
        worst = int(np.argmax(means))
        print(f"  period {period}: medians {min(means):.2f} to {max(means):.2f} (at {worst})")
    print("slowest beyond the line (place, time, beyond, since the last such):")
    slow = np.sort(np.argsort(left)[-40:])
    for i, at in enumerate(slow):
        since = at - slow[i - 1] if i else 0
        print(f"  {at:5d} {times[at]:.1f} {left[at]:+.1f} {since}")


def by_operator(trace: Trace) -> None:
    """Steps whose spans are here: what of the critical path grows."""
    first = int(trace.steps["step"][0])
    kept = [int(s) for s in trace.whole_steps]
    print(f"{len(kept)} whole steps, {kept[0]} to {kept[-1]}, the first step {first}")
    chosen = kept[:: max(1, len(kept) // 24)]
    rows: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for step in chosen:
        path = critical_path(trace, step)
        ends = end_ns(path).astype(np.int64)
        added = np.diff(ends, prepend=step_window(trace, step)[0])
        sums: dict[str, float] = defaultdict(float)
        for span, ns in zip(path, added, strict=True):
            path_name = trace.operators[int(span["op"])].path
            sums[operator_key(path_name, trace.name)] += float(ns) / 1e3
        for name, us in sums.items():
            rows[name].append((step, us))
        for name, ns in path_parts(trace, step).items():
            rows[f"part {name}"].append((step, ns / 1e3))
    for name, points in sorted(rows.items(), key=lambda r: -np.median([u for _, u in r[1]])):
        at, us = np.array(points).T
        slope = np.polyfit(at, us, 1)[0] * 1e3 if len(us) > 2 else 0.0
        shown = f"median {np.median(us):.1f}, {us.min():.1f} to {us.max():.1f}"
        print(f"  {name}: {shown} us of the path; {slope:.1f} ns a step")


def main() -> None:
    """Measure, then print."""
    machine: Any = cuda_machine()
    case = find(["decode-p99"])[0]
    workload = case.make("--small" in sys.argv)
    side: Any = case.ours(machine, workload, lambda *_: None)
    try:
        print(machine.name, machine.clocks, side.measure(), side.note())
        trace = side.last.trace()
        by_position(trace)
        by_operator(trace)
    finally:
        side.close()


if __name__ == "__main__":
    main()
