"""Where a prompt's steps go: `python tools/bench/prompt_steps.py 512:256:6 8192:512:2` (one GPU).

Of Llama-3.1-8B's shape: tokens of the prompt, rows of a step, layers (0: all). Prints the time to
the first token, a decode step's, and of the prompt's last step its critical path by operator,
beside what tasks of it take: at 5, 50, 95 and 100 %, of those that had work.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import numpy as np

from gpurt.bench import cases, shapes
from gpurt.bench.machine import cuda_machine
from gpurt.bench.ours import prompt_ids
from gpurt.trace.analysis import critical_path, operator_key, path_parts, step_window
from gpurt.trace.spans import end_ns
from gpurt.trace.trace import Trace

_TOKENS = 24  # of the requests whose decode steps are measured
_IDLE_NS = 2000  # a task that takes less had no rows


def show(trace: Trace, step: int) -> None:
    """One step, by operator."""
    begin, end = step_window(trace, step)
    spans = trace.spans_of(step)
    parts = {name: round(ns / 1e3) for name, ns in path_parts(trace, step).items()}
    print(f"step {step}: {(end - begin) / 1e3:.1f} us, {parts}")
    keys = [operator_key(o.path, trace.name) for o in trace.operators]
    path = critical_path(trace, step)
    on_path: dict[str, float] = defaultdict(float)
    added = np.diff(end_ns(path).astype(np.int64), prepend=begin)
    for span, ns in zip(path, added, strict=True):
        on_path[keys[int(span["op"])]] += float(ns) / 1e3
    for key in sorted(set(keys), key=lambda k: -on_path[k]):
        mine = spans[[keys[op] == key for op in spans["op"]]]
        runs = mine["run_ns"][mine["run_ns"] > _IDLE_NS]
        if len(runs):
            shown = ", ".join(f"{v / 1e3:.1f}" for v in np.percentile(runs, (5, 50, 95, 100)))
            print(f"  {key:28s} {on_path[key]:8.1f} us; {len(runs)} of {len(mine)} tasks: {shown}")


def measure(machine: Any, count: int, rows: int, layers: int) -> None:
    """Three requests; the last one, of one token, has its steps' spans."""
    whole = shapes.LLAMA_8B
    cases._PROMPT_ROWS = rows
    shapes.LLAMA_8B = shapes.llama_layers(whole, layers or whole.layers)
    case = cases.find([f"ttft-{count}"])[0]
    side: Any = case.ours(machine, case.make(False), lambda *_: None)
    shapes.LLAMA_8B = whole
    try:
        ids, tokens, steps = prompt_ids(count, 0, side.graph.vocab), [], np.zeros(1)
        for wanted in (_TOKENS, _TOKENS, 1):
            request = side.runtime.submit(side.graph, ids, max_tokens=wanted, ignore_eos=True)
            tokens.append([int(t) for t in request])
            if wanted > 1:
                of = request.trace().steps
                steps = (of["end_ns"] - of["begin_ns"])[-wanted // 2 :] / 1e3
        first_us = (request.timing.first_token_ns - request.timing.begin_ns) / 1e3
        print(f"== {count} tokens, {rows} rows, {layers} layers: first token {first_us:.0f} us,")
        print(f"   decode {np.median(steps):.1f} us, the same tokens {tokens[0] == tokens[1]}")
        trace = request.trace()
        show(trace, int(trace.whole_steps[-1]))
    finally:
        side.close()


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        measure(cuda_machine(), *(int(part) for part in argument.split(":")))
