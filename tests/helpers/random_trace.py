"""Random traces: tasks, edges and times of a few workers whose spans do not overlap."""

from __future__ import annotations

import numpy as np

from gpurt.trace import SPAN, STEP, OperatorInfo, StepSpans, Trace


def random_trace(seed, steps=3):
    """A trace of few workers, the same for the same seed. Odd seeds: times with many ties."""
    rng = np.random.default_rng(seed)
    grain = 40 if seed % 2 else 1

    def ns(low, high):
        return int(rng.integers(low, -(-high // grain))) * grain

    tasks, workers = int(rng.integers(3, 25)), int(rng.integers(1, 5))
    op_count = int(rng.integers(1, 5))
    task_op = np.sort(rng.integers(0, op_count, tasks))
    worker = rng.integers(0, workers, tasks)
    producers = [rng.integers(0, t, rng.integers(0, min(t, 4) + 1)).tolist() for t in range(tasks)]
    rows, table, opened = [], np.zeros(steps, STEP), 0
    free = np.zeros(workers, np.int64)
    for step in range(steps):
        end = {}
        for task in range(tasks):
            begin = int(free[worker[task]] + ns(0, 30))
            ready = max([opened, begin, *(end[p] for p in producers[task])])
            met = ready + ns(0, 5)
            run = ns(1, 200)
            stall = int(rng.integers(0, run + 1)) * int(rng.random() < 0.3)
            end[task] = met + run
            free[worker[task]] = end[task]
            rows.append(
                (begin, met - begin, run, stall, step, task, task_op[task], worker[task], 0, 0, 0)
            )
        table[step] = (step, opened, max(end.values()), 1, 2, 0)
        opened = max(end.values()) + ns(0, 40)
    spans = np.array(rows, SPAN)
    lists = [np.array(p, np.int64) for p in producers]
    offsets = np.concatenate([[0], np.cumsum([len(p) for p in lists])])
    return Trace(
        name="random",
        device="host",
        workers=workers,
        operators=tuple(OperatorInfo(f"o{i}", "b", f"random.o{i}", 0) for i in range(op_count)),
        task_op=task_op,
        task_bytes=rng.integers(0, 1000, tasks),
        # One counter a task: its producers signal it.
        waits=(np.arange(tasks + 1), np.arange(tasks)),
        producers=(offsets, np.concatenate([*lists, np.zeros(0, np.int64)])),
        payload_edges=(),
        kept=StepSpans(spans[np.lexsort((spans["begin_ns"], spans["step"]))]),
        steps=table,
    )
