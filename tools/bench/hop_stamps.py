"""Where a stage of empty tasks goes: `python -m tools.bench.hop_stamps` (one GPU).

The device code with more clocks in its spans: how long a signal took, whether the storer was there
before its team, and how long from the loader's sight of a task to its team's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from gpurt.bench.cases import find
from gpurt.bench.machine import cuda_machine
from tools.bench.ablate import LOADER, STORER, changed, compile_from

STAMPS = [
    (
        STORER,
        "    spans.publish_until(shared().slot_done[turn % kSlotCount], turn, traces);\n",
        "    const u32 ready_at = clock_cycles_low();\n"
        "    spans.publish_until(shared().slot_done[turn % kSlotCount], turn, traces);\n",
    ),
    (
        STORER,
        "    SpanWriter::Run run;\n",
        "    const u32 sent_at = clock_cycles_low();\n    SpanWriter::Run run;\n",
    ),
    (
        STORER,
        "    if (traces) run = spans.run_of(slot, turn, done_at);\n",
        "    if (traces) {\n      run = spans.run_of(slot, turn, done_at);\n"
        "      run.stall = sent_at - done_at;\n"
        "      run.chosen = min(static_cast<u32>(slot.begin) - slot.followed, 65535u) |\n"
        "                   min(done_at - ready_at, 65535u) << 16;\n    }\n",
    ),
    (
        LOADER,
        "    slot.parked = slot.followed = 0;\n",
        "    slot.parked = 0;\n    slot.followed = clock_cycles_low();\n",
    ),
]


def shown(values: Any) -> str:
    """Percentiles."""
    points = np.percentile(np.asarray(values, np.float64), (1, 10, 50, 90, 99, 100))
    return " ".join(f"{p:.0f}" for p in points)


def main() -> None:
    """Three cases."""
    machine: Any = cuda_machine()
    for name in ("dispatch-static", "dispatch-claim", "dispatch-ready"):
        case = find([name])[0]
        with tempfile.TemporaryDirectory() as folder:
            changed(Path(folder), STAMPS)
            compile_from(Path(folder))
            side: Any = case.ours(machine, case.make(False), lambda *_: None)
            print(name, side.measure(), "us")
            trace = side.runtime.trace()
            side.close()
        spans = trace.spans
        spans = spans[(spans["layer"] > 4) & (spans["layer"] < 60)]
        print(f"  {len(spans)} spans; percentiles 1 10 50 90 99 100")
        gaps, periods = [], []
        for worker in range(trace.workers):
            own = np.sort(spans[spans["worker"] == worker], order="begin_ns")
            ends = own["begin_ns"] + own["wait_ns"] + own["run_ns"]
            near = np.diff(own["layer"].astype(np.int64)) == 1
            gaps.append((own["begin_ns"][1:] - ends[:-1])[near])
            periods.append(np.diff(own["begin_ns"])[near])
        print("  ns, begin to begin:", shown(np.concatenate(periods)))
        print("  ns, begin to edges met:", shown(spans["wait_ns"]))
        print("  ns, edges met to the storer's sight of the end:", shown(spans["run_ns"]))
        print("  ns, that to the next begin:", shown(np.concatenate(gaps)))
        print("  ns, storer's sight to its signal sent:", shown(spans["stall_ns"]))
        print("  cycles, loader's sight to the team's begin:", shown(spans["expert"]))
        print("  cycles, storer waited for its team:", shown(spans["expert_rows"]))
        key = spans["step"].astype(np.int64) * 1000 + spans["layer"]
        order = np.argsort(key, kind="stable")
        cuts = np.flatnonzero(np.diff(key[order])) + 1
        groups = np.split(spans[order], cuts)
        whole = [g for g in groups if len(g) == 132]
        print(f"  {len(whole)} whole stages")
        if whole:
            print(
                "  ns, the slowest signal of a stage:", shown([g["stall_ns"].max() for g in whole])
            )
            last = [int(g["worker"][np.argmax(g["stall_ns"])]) for g in whole]
            print("  whose it was:", np.bincount(last, minlength=132).tolist())
            slow = [int(g["worker"][np.argmax(g["run_ns"])]) for g in whole]
            print("  whose run was the longest:", np.bincount(slow, minlength=132).tolist())
            met = np.stack([np.sort(g, order="worker")["wait_ns"] for g in whole])
            print("  ns, medians of waits by worker:", np.median(met, axis=0).astype(int).tolist())
            ended = [g["begin_ns"] + g["wait_ns"] + g["run_ns"] for g in whole]
            print("  ns, first to last end of a stage:", shown([e.max() - e.min() for e in ended]))
            late = [int(g["worker"][np.argmax(e)]) for g, e in zip(whole, ended, strict=True)]
            print("  who ended last:", np.bincount(late, minlength=132).tolist())


if __name__ == "__main__":
    main()
