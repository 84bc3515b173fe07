"""Empty stages: every task needs all tasks of the stage before. The price of dispatch alone.

`static`, `claim` and `ready` over counter edges, one worker an SM. The figures to compare with are
of a bare loop (us a stage of 132 tasks): static 0.95, claim 1.38, ready 2.02.

    python -m tools.bench.dispatch
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import torch

from gpurt import wire
from gpurt.body import Target
from gpurt.plan import (
    TASK_ADVANCE,
    Plan,
    PlanBuffer,
    PlanCounter,
    PlanOperator,
    PlanSegment,
    PlanTask,
    Policy,
)
from tools.bench.rig import Options, Rig

STEPS = 8


def stage_plan(
    stages: int, width: int, policy: Policy, *, workers: int = 132, missing: int = -1
) -> Plan:
    """`stages` x `width` noop tasks. missing: this task's signal goes to a counter nobody needs."""
    tasks, producers = [], [[] for _ in range(stages + 1)]
    lists: list[list[int]] = [[] for _ in range(workers)]
    for stage in range(stages):
        for _ in range(width):
            index = len(tasks)
            signal = stages if index == missing else stage
            waits = ((stage - 1, width),) if stage else ()
            producers[signal].append(index)
            lists[index % workers].append(index)
            tasks.append(_task(stage, "noop", 0, waits, (signal,)))
    count = len(tasks)
    tasks.append(_task(stages, "advance", TASK_ADVANCE, ((stages - 1, width),), ()))
    counters = []
    for stage in range(stages + 1):
        after = range((stage + 1) * width, (stage + 2) * width) if stage < stages - 1 else ()
        signals = width if stage < stages else max(1, len(producers[stage]))
        successors = tuple(after) if policy == "ready" else ()
        counters.append(PlanCounter(signals, tuple(producers[stage]), successors))
    taken = [tuple(t) if policy == "static" else () for t in lists]
    last = [(count,) if w == count % workers else () for w in range(workers)]
    return Plan(
        1,
        f"{stages} stages of {width}, {policy}",
        Target("cuda", workers, 16, "sm_90a", 232448, 60 << 20),
        1,
        1,
        1,
        0,
        (PlanBuffer("x", (64,), "f32", "state", "", 256, "state", 0),),
        (
            *(PlanOperator(f"stage{i}", "noop", "stages", i, policy) for i in range(stages)),
            PlanOperator("advance", "advance", "stages", stages, "static"),
        ),
        tuple(tasks),
        tuple(counters),
        (PlanSegment(policy, 0, count), PlanSegment("static", count, count + 1)),
        tuple(zip(taken, last, strict=True)),
        (),
    )


def _task(
    op: int, body: str, flags: int, waits: tuple[tuple[int, int], ...], signals: tuple[int, ...]
) -> PlanTask:
    return PlanTask(op, body, (0, 0, 0, 0), flags, waits, signals, (), 0, (), None, op, (), (), 0)


def measure(policy: Policy, stages: int, width: int, reps: int) -> dict[str, Any]:
    """Microseconds a stage, the kernel's own clock."""
    options = Options(linger_ms=0, wait_timeout_ms=1000, queue_capacity=1)
    plan = stage_plan(stages, width, policy)
    rig = Rig(plan, _memory(), options)
    times = []
    for _ in range(reps):
        rig.run(STEPS)
        if rig.fault["kind"] or rig.output["finish_reason"] != wire.FinishReason.STEPS:
            print("FAULT", rig.fault, rig.output, flush=True)
            return {"policy": policy, "width": width, "us": -1}
        times.append(rig.step_us() / stages)
    row = {"policy": policy, "width": width, "us": float(np.median(times)), "min": min(times)}
    print(
        f"  {policy:8s} {width:5d} tasks a stage: {row['us']:.3f} us (min {row['min']:.3f})",
        flush=True,
    )
    return row


def hang(policy: Policy) -> None:
    """A signal that never comes: the kernel must end with a Fault."""
    options = Options(linger_ms=0, wait_timeout_ms=5, queue_capacity=1)
    rig = Rig(stage_plan(8, 132, policy, missing=132 * 3 + 7), _memory(), options)
    ms = rig.run(2)
    print(f"  hang, {policy}: ended after {ms:.1f} ms, fault {rig.fault}", flush=True)


def _memory() -> dict[str, torch.Tensor]:
    empty = torch.zeros(256, dtype=torch.uint8, device="cuda")
    return {"weight": empty, "state": empty, "payload": empty, "activation": empty}


def main() -> None:
    """Print a table, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=9)
    args = parser.parse_args()
    torch.cuda.init()
    policies: tuple[Policy, ...] = ("static", "claim", "ready")
    rows = [measure(p, 64, width, args.reps) for width in (132, 528) for p in policies]
    for policy in policies:
        hang(policy)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
