"""A trace of two layers of experts in three steps, small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpurt.trace import SPAN, STEP, OperatorInfo, StepSpans
from tests.helpers.hand_trace import hand_trace

# By layer and step: {expert: rows}; of 4 experts. Layer 1 never chooses expert 2.
CHOSEN = (
    ({0: 2, 3: 1}, {0: 1, 1: 1, 2: 1}, {3: 3}),
    ({1: 3}, {1: 2, 3: 1}, {0: 1, 1: 1, 3: 1}),
)
SLOTS = 4
STEP_NS = 1000


def expert_trace():
    """Every layer: a router, then up and down of SLOTS slots, one task each; the last slots are of
    no expert. All on worker 0, a task in 20 ns.
    """
    operators, task_op, rows = [], [], []
    for layer in range(len(CHOSEN)):
        at = f"hand.layers[{layer}]"
        operators += [
            OperatorInfo("route", "route", f"{at}.route", layer),
            OperatorInfo("up", "expert_matvec", f"{at}.expert_up", layer, SLOTS),
            OperatorInfo("down", "expert_matvec", f"{at}.expert_down", layer, SLOTS),
        ]
        task_op += [3 * layer] + SLOTS * [3 * layer + 1] + SLOTS * [3 * layer + 2]
    for step in range(3):
        for task, op in enumerate(task_op):
            layer, kind = divmod(op, 3)
            slots = list(CHOSEN[layer][step].items())
            slot = task - task_op.index(op)
            has = kind > 0 and slot < len(slots)
            expert, users = slots[slot] if has else (0, 0)
            begin = step * STEP_NS + 20 * task
            rows.append((begin, 0, 20, 0, step, task, op, 0, layer, expert, users))
    tasks = len(task_op)
    none = np.zeros(tasks + 1, np.int64), np.zeros(0, np.int64)
    return replace(
        hand_trace(),
        workers=1,
        operators=tuple(operators),
        task_op=np.array(task_op),
        task_bytes=np.zeros(tasks, np.int64),
        task_dynamic=np.zeros(tasks, bool),
        task_variant=np.zeros(tasks, np.int64),
        waits=none,
        producers=(np.zeros(1, np.int64), np.zeros(0, np.int64)),
        kept=StepSpans(np.array(rows, SPAN)),
        steps=np.array([(s, s * STEP_NS, s * STEP_NS + 360, 3, 2, 0) for s in range(3)], STEP),
    )
