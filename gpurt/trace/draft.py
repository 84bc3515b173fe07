"""What drafting costs, from a trace: operators under the scope "draft", in decode steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpurt.trace.spans import end_ns
from gpurt.trace.trace import PHASES

if TYPE_CHECKING:
    from gpurt.trace.trace import Trace

SCOPE = "draft"


def draft_times(trace: Trace) -> tuple[float | None, float | None]:
    """Milliseconds of a decode step that its drafter took, and that all else took: means over the
    steps whose drafter's spans were kept. (None, None) if there are none.

    A drafter takes from the start of its first task to the end of its last.
    """
    drafts = [i for i, op in enumerate(trace.operators) if SCOPE in op.path.split(".")]
    spans = trace.spans[np.isin(trace.spans["op"], drafts)]
    begins = spans["begin_ns"] + spans["wait_ns"]
    ends = end_ns(spans)
    taken, whole = [], []
    for step in trace.steps[trace.steps["phase"] == PHASES.index("decode")]:
        of_step = spans["step"] == step["step"]
        if of_step.any():
            taken.append(int(ends[of_step].max() - begins[of_step].min()))
            whole.append(int(step["end_ns"] - step["begin_ns"]))
    if not taken:
        return None, None
    draft_ms, step_ms = float(np.mean(taken)) / 1e6, float(np.mean(whole)) / 1e6
    return draft_ms, max(0.0, step_ms - draft_ms)
