"""A trace made by hand, small enough to know every answer.

Two workers, one step of four tasks as a diamond (0 -> 1, 2 -> 3 = advance), in nanoseconds:

  worker 0:  task 0 [0..100)                task 1 [100..400)   task 3 claimed 400, runs [900..1000)
  worker 1:  task 2 claimed 0, waits for 0 until 110, runs [110..880), 300 of that a stall
"""

from __future__ import annotations

import numpy as np

from gpurt.trace import SPAN, STEP, OperatorInfo, StepSpans, Trace

#        begin wait run stall step task op worker layer
STEP_0 = (
    (0, 0, 100, 0, 0, 0, 0, 0, 0),
    (100, 0, 300, 0, 0, 1, 1, 0, 0),
    (0, 110, 770, 300, 0, 2, 1, 1, 1),
    (400, 500, 100, 0, 0, 3, 2, 0, 0),
)


def hand_trace(steps=1, **changes):
    """`steps` equal steps, each begins 1000 ns after the one before."""
    rows = [
        (b + s * 1000, w, r, st, s, t, o, k, ly, 0, 0)
        for s in range(steps)
        for b, w, r, st, _, t, o, k, ly in STEP_0
    ]
    spans = np.array(rows, SPAN)
    spans = changes.pop("spans", spans[np.lexsort((spans["begin_ns"], spans["step"]))])
    fields = {
        "name": "hand",
        "device": "host",
        "workers": 2,
        "operators": (
            OperatorInfo("norm", "norm", "hand.layers[0].norm", 0),
            OperatorInfo("up", "matvec", "hand.layers[0].up", 0),
            OperatorInfo("advance", "advance", "hand.advance", 0),
        ),
        "task_op": np.array([0, 1, 1, 2]),
        "task_bytes": np.array([0, 3000, 7700, 0]),
        "waits": (np.array([0, 0, 1, 2, 3]), np.array([0, 0, 1])),
        "producers": (np.array([0, 1, 3]), np.array([0, 1, 2])),
        "payload_edges": (),
        "kept": StepSpans(spans),
        "steps": np.array([(s, s * 1000, s * 1000 + 1000, 1, 2, 0) for s in range(steps)], STEP),
        "dropped": 0,
    }
    return Trace(**{**fields, **changes})
