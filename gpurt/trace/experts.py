"""Which experts the steps of a trace chose: by place of the graph, how many and which, how often.

A place is a layer's experts, `layers[3]`: its operators, up and down, run the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpurt.trace.analysis import operator_name
from gpurt.trace.trace import Trace


@dataclass(frozen=True)
class ExpertChoice:
    """What the whole steps chose at one place.

    experts: how many there are. distinct: of a step, mean and range. again: share of a step's
    experts that the step before it had chosen too, a mean; None if no two steps follow each other.
    steps, rows: by expert, in how many steps it was chosen, and by how many rows in all.
    """

    name: str
    experts: int
    distinct: float
    least: int
    most: int
    again: float | None
    steps: tuple[int, ...]
    rows: tuple[int, ...]
    steps_counted: int

    @property
    def hits(self) -> list[tuple[int, float]]:
        """(expert, share of all choices that fell on it), most chosen first."""
        order = sorted(range(self.experts), key=lambda e: (-self.rows[e], e))
        return [(e, self.rows[e] / sum(self.rows)) for e in order]

    @property
    def never(self) -> int:
        """Experts that no step chose."""
        return self.steps.count(0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: by expert, as text."""
        by_expert = {"steps": self.steps, "rows": self.rows}
        return {
            "name": self.name,
            "experts": self.experts,
            "distinct": self.distinct,
            "least": self.least,
            "most": self.most,
            **({} if self.again is None else {"again": self.again}),
            "never": self.never,
            "steps_counted": self.steps_counted,
            **{key: {str(e): n for e, n in enumerate(v)} for key, v in by_expert.items()},
        }


def expert_places(trace: Trace) -> dict[int, str]:
    """The first operator of each place -> its name."""
    found: dict[str, int] = {}
    for op, info in enumerate(trace.operators):
        if info.experts:
            found.setdefault(operator_name(trace, op).rpartition(".")[0], op)
    return {op: name for name, op in found.items()}


def expert_choices(trace: Trace) -> list[ExpertChoice]:
    """A row a place, in the order of the graph; none for a model without experts."""
    places = expert_places(trace)
    chosen: dict[int, dict[int, dict[int, int]]] = {op: {} for op in places}
    for step in trace.whole_steps.tolist():
        spans = trace.spans_of(step)
        spans = spans[(spans["expert_rows"] > 0) & np.isin(spans["op"], list(places))]
        # All tiles of an expert say the same, so one of each is enough.
        key = spans["op"].astype(np.uint64) << np.uint64(32) | spans["expert"]
        one = spans[np.unique(key, return_index=True)[1]]
        for op, expert, rows in one[["op", "expert", "expert_rows"]].tolist():
            chosen[op].setdefault(step, {})[expert] = rows
    return [_choice(trace, op, name, chosen[op]) for op, name in places.items() if chosen[op]]


# ---- helpers ---------------------------------------------------------------------------------
def _choice(trace: Trace, op: int, name: str, chosen: dict[int, dict[int, int]]) -> ExpertChoice:
    """chosen: step -> expert -> rows."""
    most = max(max(experts) for experts in chosen.values())
    count = max(trace.operators[op].experts, most + 1)
    steps, rows = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for experts in chosen.values():
        for expert, users in experts.items():
            steps[expert] += 1
            rows[expert] += users
    sizes = [len(experts) for experts in chosen.values()]
    again = [
        len(experts.keys() & chosen[step - 1].keys()) / len(experts)
        for step, experts in chosen.items()
        if step - 1 in chosen
    ]
    return ExpertChoice(
        name=name,
        experts=count,
        distinct=float(np.mean(sizes)),
        least=min(sizes),
        most=max(sizes),
        again=float(np.mean(again)) if again else None,
        steps=tuple(steps.tolist()),
        rows=tuple(rows.tolist()),
        steps_counted=len(chosen),
    )
