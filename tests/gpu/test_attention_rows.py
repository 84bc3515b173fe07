"""attention of many rows on the GPU: bit for bit what steps of 16 rows leave, one after another."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from gpurt.body import Target
from gpurt.buffer import DTYPES
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.dtypes import dtype_code
from gpurt.planner.lower import lower
from tests.gpu import test_attention_extras as extras
from tests.gpu import test_attention_split as split
from tests.gpu.one_op import TARGET, Arrays, run_op, runner
from tests.gpu.one_task import OneTask, Step
from tests.gpu.test_attention_extras import Case
from tests.gpu.test_attention_split import CONTEXT, SPAN

PLAIN = Case(norm=0, gated=False, out_eps=0)
# Decode rows of other sequences, then a chunk of a prompt, whose rows see each other.
MIXED = Step([1, 2, *[0] * 38], [300, 63, *range(27, 65)])
CHUNK = Step([0] * 33, list(range(5, 38)))
CASES = [
    (PLAIN, MIXED),
    (Case(heads=6, kv_heads=2, dim=128, norm=1, gated=False, out_eps=0), CHUNK),
    (Case(window=20), MIXED),
    (Case(heads=9, kv_heads=1, dim=128, rope=False, norm=0), CHUNK),
]
OVER_A_SPAN = Step([1, 2, *[0] * 38], [5, CONTEXT - 1, *range(SPAN - 20, SPAN + 18)])


@cache
def rows_runner(case: Case, dtype: str, splits: bool, team_warps: int = 16) -> OneTask:
    plain = Case(case.heads, case.kv_heads, case.dim, norm=case.norm, gated=False, out_eps=0)
    is_full = case != plain or case.norm == 2
    flags = f"{str(is_full).lower()}, {str(splits).lower()}"
    code, group = dtype_code(DTYPES[dtype]), case.heads // case.kv_heads
    struct = f"attention_rows_of<{case.dim}, {group}, {code}, {flags}>"
    return OneTask("attention_rows", struct, team_warps)


def operators(
    case: Case, dtype: str, rows: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Operator, list[Operator]]:
    """The operator for steps of `rows` rows, and all that the planner makes of its graph."""
    monkeypatch.setattr(extras, "PLAN_ROWS", rows)
    graph = Graph(rows=rows, slots=extras.SLOTS, context=context)
    op = extras.operator(case, dtype, graph)
    return op, list(lower(graph, TARGET, ["static"] * len(graph.operators)).graph.operators)


def run_many(made: list[Operator], arrays: Arrays, step: Step, one: OneTask) -> Arrays:
    """Both of its operators, and the one that joins spans if there is one."""
    arrays = dict(arrays)
    for op in made:
        of_op = runner("attention_merge") if op.body.name == "attention_merge" else one
        given = {name: arrays[name] for name in op.args}
        done = run_op(op, given, step, of_op)
        arrays |= {name: done[name] for name in given}
    return arrays


def run_few(case: Case, dtype: str, arrays: Arrays, step: Step, context: int) -> Arrays:
    """In steps of 16 rows."""
    graph = Graph(rows=16, slots=extras.SLOTS, context=context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extras, "ring_pages", lambda *_: arrays["page_table"].shape[1])
        op = extras.operator(case, dtype, graph)
    has_spans = len(graph.operators) > 1
    one = split.split_runner(case, dtype) if has_spans else extras.runner(case, dtype)
    caches = {name: arrays[name] for name in ("k_cache", "v_cache")}
    outs = []
    for first in range(0, len(step.slots), 16):
        here = Step(step.slots[first : first + 16], step.positions[first : first + 16])
        rows = len(here.slots)
        given = {name: array for name, array in arrays.items() if name in op.args} | caches
        for name in ("q", "kv"):
            given[name] = np.full((16, arrays[name].shape[1]), np.nan, np.float32)
            given[name][:rows] = arrays[name][first : first + rows]
        for name in ("out", "partials"):
            if name in given:
                given[name] = given[name][:16]
        done = run_op(op, given, here, one)
        caches = {name: done[name] for name in caches}
        out = done.get("out")
        if has_spans:
            merge = graph.operators[-1]
            gates = {"q": given["q"]} if "q" in merge.args else {}
            fresh = np.full(merge.args["out"].shape, np.nan, np.float32)
            parts = {"partials": done["partials"], "out": fresh, **gates}
            out = run_op(merge, parts, here, runner("attention_merge"))["out"]
        assert out is not None
        outs.append(out[:rows])
    return {"out": np.concatenate(outs), **caches}


def check(case: Case, step: Step, dtype: str, context: int, team: int = 16) -> None:
    rows = len(step.slots)
    with pytest.MonkeyPatch.context() as patch:
        op, made = operators(case, dtype, rows + 3, context, patch)
    arrays = extras.inputs(op, step, dtype, seed=7)
    arrays["out"] = np.full((rows + 3, case.heads * case.dim), np.nan, np.float32)
    one = rows_runner(case, dtype, bool(op.params["spans"]), team)
    got = run_many(made, arrays, step, one)
    want = run_few(case, dtype, arrays, step, context)
    for name in ("k_cache", "v_cache"):
        assert got[name].tobytes() == want[name].tobytes(), name
    assert got["out"][:rows].tobytes() == want["out"].tobytes()
    assert np.isnan(got["out"][rows:]).all(), "rows past the step were written"


@pytest.mark.parametrize(("case", "step"), CASES, ids=["plain", "norm", "window", "wide"])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_many_rows_have_the_bits_of_steps_of_16(case: Case, step: Step, dtype: str) -> None:
    check(case, step, dtype, extras.CONTEXT)


def test_a_team_of_one_warp_gives_the_same_bits() -> None:
    check(PLAIN, MIXED, "bf16", extras.CONTEXT, team=1)


@pytest.mark.parametrize("case", split.CASES, ids=str)
def test_many_rows_over_spans_have_the_bits_of_steps_of_16(case: Case) -> None:
    check(case, OVER_A_SPAN, "bf16", CONTEXT)


def test_tiles_cover_every_row_and_none_twice() -> None:
    with pytest.MonkeyPatch.context() as patch:
        _, made = operators(PLAIN, "bf16", 100, extras.CONTEXT, patch)
    for op in made:
        assert op.body.tile is not None
        for workers in (1, 7, 132, 500):
            tiles = op.body.tile(op, Target("cuda", workers, 16, "sm_90a", 232448, 60 << 20))
            for head in range(PLAIN.kv_heads):
                ranges = [t.coords[3] for t in tiles if t.coords[0] == head]
                rows: list[Any] = [r for at in ranges for r in range(at & 0xFFFF, at >> 16)]
                assert sorted(rows) == list(range(100))  # in any order: late rows take longest
