"""Experts that a trace says were run, beside those that the rows of a made-up model choose."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gpurt.bench.graphs import drawn_choice
from gpurt.trace import Trace

Chosen = dict[int, set[tuple[int, int]]]  # layer -> (expert, rows that chose it)


def chosen_in(trace: Trace, step: int, op_name: str) -> Chosen:
    """Of the tasks of one operator of each layer."""
    found: Chosen = {}
    for span in trace.spans_of(step):
        info = trace.operators[int(span["op"])]
        if info.name.endswith(op_name) and span["expert_rows"]:
            pair = int(span["expert"]), int(span["expert_rows"])
            found.setdefault(info.layer, set()).add(pair)
    return found


def drawn(layers: int, experts: int, top_k: int, rows: int, **_: Any) -> Chosen:
    """Of `gpurt.bench.graphs.experts_alone` with known routes."""
    choices = (drawn_choice(experts, top_k, rows, layer) for layer in range(layers))
    return {i: set(Counter(c.reshape(-1).tolist()).items()) for i, c in enumerate(choices)}


def assert_spans_name_experts(trace: Trace, size: dict[str, int]) -> None:
    """In every whole step, up and down ran what the rows chose; nothing else ran any."""
    assert len(trace.whole_steps)
    for step in trace.whole_steps.tolist():
        for name in ("expert_up", "expert_down"):
            assert chosen_in(trace, step, name) == drawn(**size)
        others = [s for s in trace.spans_of(step) if not trace.operators[int(s["op"])].experts]
        assert others
        assert not any(s["expert"] or s["expert_rows"] for s in others)
