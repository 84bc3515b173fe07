"""attention over several spans on the GPU: split over tasks, merged in the order of spans."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from gpurt.buffer import DTYPES
from gpurt.graph import Graph
from gpurt.graphs.ops.attention import SPAN
from gpurt.graphs.ops.dtypes import dtype_code
from tests.gpu import test_attention_extras as extras
from tests.gpu.one_op import Arrays, reference, run_op, runner
from tests.gpu.one_task import OneTask, Step, first_difference
from tests.gpu.test_attention_extras import Case

CONTEXT = 2 * SPAN + 256
CASES = [
    Case(norm=0, gated=False, out_eps=0),
    Case(window=SPAN + 90),
    Case(heads=6, kv_heads=2, dim=128, norm=1),
]
STEPS = {
    "first token": Step([0], [0]),
    "a span's last": Step([1], [SPAN - 1]),
    "a span begins": Step([1], [SPAN]),
    "rows over a border": Step([2] * 16, list(range(SPAN - 7, SPAN + 9))),
    "slots of all lengths": Step([2, 2, 0, 1], [CONTEXT - 2, CONTEXT - 1, 5, SPAN + 300]),
}


@cache
def split_runner(
    case: Case, dtype: str, team_warps: int = 16, features: tuple[str, ...] = ()
) -> OneTask:
    plain = Case(case.heads, case.kv_heads, case.dim, norm=case.norm, gated=False, out_eps=0)
    code = dtype_code(DTYPES[dtype])
    extra = "" if case == plain else ", true"
    struct = f"attention_split_of<{case.dim}, {case.heads // case.kv_heads}, {code}{extra}>"
    return OneTask("attention_split", struct, team_warps, features)


def both(
    case: Case, step: Step, dtype: str = "bf16", *, splits: int = 0, team: int = 16, seed: int = 0
) -> tuple[Arrays, Arrays]:
    """Arrays after both operators on the GPU, and by their references."""
    graph = Graph(rows=extras.PLAN_ROWS, slots=extras.SLOTS, context=CONTEXT)
    op = extras.operator(case, dtype, graph, splits)
    merge = graph.operators[-1]
    arrays = extras.inputs(op, step, dtype, seed)
    out = np.full(merge.args["out"].shape, np.nan, np.float32)
    got = run_op(op, arrays, step, split_runner(case, dtype, team))
    want = reference(op, arrays, step)

    def merged(partials: Any) -> dict[str, Any]:
        gates = {"q": arrays["q"]} if case.gated else {}
        return {"partials": partials, "out": out, **gates}

    got |= run_op(merge, merged(got["partials"]), step, runner("attention_merge", team))
    want |= reference(merge, merged(want["partials"]), step)
    return got, want


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_spans_equal_the_reference(case: Case, step: str) -> None:
    got, want = both(case, STEPS[step])
    rows = len(STEPS[step].slots)
    tolerance = extras.TOLERANCE["bf16"]
    difference = first_difference(got["out"][:rows], want["out"][:rows], tolerance, step=step)
    assert difference is None, difference
    assert np.isnan(got["out"][rows:]).all(), "rows past the step were written"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_do_not_depend_on_splits_or_team(case: Case) -> None:
    step = STEPS["slots of all lengths"]
    wanted, _ = both(case, step, splits=1)
    for splits, team in ((2, 16), (3, 1)):
        got, _ = both(case, step, splits=splits, team=team)
        for name in ("out", "k_cache", "v_cache"):
            assert got[name].tobytes() == wanted[name].tobytes(), f"{splits} {team} {name}"


def test_the_first_span_has_the_bits_of_a_plan_that_knows_no_other() -> None:
    case, step = CASES[0], Step([0, 0, 1], [70, 71, 20])
    op = extras.operator(case, "f32")
    arrays = extras.inputs(op, step, "f32")
    whole = OneTask("attention", f"attention_of<{case.dim}, 2, {dtype_code(DTYPES['f32'])}>")
    wanted = run_op(op, arrays, step, whole)["out"]
    graph = Graph(rows=extras.PLAN_ROWS, slots=extras.SLOTS, context=CONTEXT)
    split = extras.operator(case, "f32", graph)
    given = extras.inputs(split, step, "f32", seed=3)
    for name in ("q", "kv"):
        given[name] = arrays[name]
    given["rope"][: extras.CONTEXT] = arrays["rope"]
    for slot in range(2):
        for page in range(6):
            to, begin = given["page_table"][slot, page], arrays["page_table"][slot, page]
            for name in ("k_cache", "v_cache"):
                given[name][to] = arrays[name][begin]
    got = run_op(split, given, step, split_runner(case, "f32"))
    merge = graph.operators[-1]
    out = np.full(merge.args["out"].shape, np.nan, np.float32)
    one = runner("attention_merge")
    done = run_op(merge, {"partials": got["partials"], "out": out}, step, one)["out"]
    assert done[:3].tobytes() == wanted[:3].tobytes()
