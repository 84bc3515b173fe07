"""attention beyond plain causal, on the GPU: a window's ring of pages, gate, norms, no rotation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from gpurt.buffer import DTYPES
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.attention import attention, ring_pages, tile_attention
from gpurt.graphs.ops.dtypes import dtype_code, to_storage
from tests.gpu.one_op import TARGET, TEAMS, Arrays, reference, run_op
from tests.gpu.one_task import OneTask, Step, first_difference

PAGE, CONTEXT, SLOTS, PLAN_ROWS = 16, 512, 3, 16
# 16-bit caches round keys and values; the rest is float32 with another order of sums.
TOLERANCE = {"f32": 5e-6, "bf16": 1.5e-2, "e4m3": 0.2}


@dataclass(frozen=True)
class Case:
    """One operator."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    window: int = 0
    rope: bool = True
    norm: int = 2  # as qk_norm_kind
    gated: bool = True
    out_eps: float = 1e-5
    block: bool = False

    def __str__(self) -> str:
        flags = f"n{self.norm}{'r' if self.rope else ''}{'g' if self.gated else ''}"
        flags += "b" if self.block else ""
        return f"{self.heads}x{self.dim}-w{self.window}-{flags}{'o' if self.out_eps else ''}"


CASES = [
    Case(window=20),  # less than two pages: the ring has wrapped many times
    Case(rope=False),
    Case(window=1),
    Case(window=200, dim=128, heads=6, kv_heads=2),
    Case(window=300, norm=1, gated=False),  # more chunks than virtual warps
    Case(window=20, norm=0, gated=False, out_eps=0),
    Case(heads=9, kv_heads=1, dim=128, rope=False, norm=0),  # several passes over the heads
    Case(gated=False),
    Case(block=True, norm=1, gated=False, out_eps=0),
    Case(window=20, block=True, norm=1, gated=False, out_eps=0),
    Case(window=3, block=True, norm=0, gated=False, out_eps=0),  # less than a block
]
STEPS = {
    "first token": Step([0], [0]),
    "inside the first window": Step([1], [12]),
    "a window's edge": Step([2, 0], [19, 20]),
    "past it": Step([1], [100]),
    "long": Step([2, 1], [511, 255]),
    "prefill": Step([0] * 16, list(range(16))),
    "prefill past a window": Step([2] * 16, list(range(56, 72))),
    "mixed slots": Step([0, 1, 2, 2, 2], [300, 17, 5, 6, 7]),
}


@cache
def runner(case: Case, dtype: str, team_warps: int = 16, features: tuple[str, ...] = ()) -> OneTask:
    code = dtype_code(DTYPES[dtype])
    struct = f"attention_of<{case.dim}, {case.heads // case.kv_heads}, {code}, true>"
    return OneTask("attention", struct, team_warps, features)


def operator(case: Case, dtype: str, graph: Graph | None = None, splits: int = 0) -> Operator:
    """Attention. graph: whose context is not the usual one."""
    graph = graph or Graph(rows=PLAN_ROWS, slots=SLOTS, context=CONTEXT)
    pages = ring_pages(case.window, PLAN_ROWS, graph.context, PAGE)
    width, cache_shape = case.heads * case.dim, [SLOTS * pages, case.kv_heads, PAGE, case.dim]
    rope = (
        graph.weight("rope", [graph.context, case.dim], "f32", lambda: None) if case.rope else None
    )
    norm = graph.weight("norm", [2, case.dim], "f32", lambda: None) if case.norm == 1 else None
    return attention(
        graph,
        graph.activation("q", [PLAN_ROWS, width * (1 + case.gated)], "f32"),
        graph.activation("kv", [PLAN_ROWS, 2 * case.kv_heads * case.dim], "f32"),
        graph.state("k", cache_shape, dtype),
        graph.state("v", cache_shape, dtype),
        graph.state("table", [SLOTS, pages], "u32"),
        rope,
        graph.activation("out", [PLAN_ROWS, width], "f32"),
        heads=case.heads,
        qk_norm=norm,
        scale=1.3 * case.dim**-0.5,
        eps=1e-6,
        window=case.window,
        weightless_qk_norm=case.norm == 2,
        gated=case.gated,
        out_eps=case.out_eps,
        block=case.block,
        splits=splits,
    )


def inputs(op: Operator, step: Step, dtype: str, seed: int = 0) -> Arrays:
    """Random arguments. Caches hold NaN but where positions lie that a row of the step may see."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {
        name: rng.standard_normal(region.shape).astype(np.float32)
        for name, region in op.args.items()
    }
    shape = op.args["page_table"].shape
    table = rng.permutation(shape[0] * shape[1]).astype(np.uint32).reshape(shape)
    arrays["page_table"] = table
    if "rope" in op.args:
        positions, dim = op.args["rope"].shape
        angles = rng.uniform(0, 6, (positions, dim // 2))
        arrays["rope"] = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    window = int(op.params["window"])
    for name in ("k_cache", "v_cache"):
        cache_RKPD = np.full(op.args[name].shape, np.nan, np.float32)
        for slot, position in sorted(zip(step.slots, step.positions, strict=True)):
            first = max(0, position + 1 - window) if window else 0
            seen = np.arange(first, position)
            pages = table[slot, seen // PAGE % shape[1]]
            values = rng.standard_normal((len(seen), *cache_RKPD.shape[1::2]))
            cache_RKPD[pages, :, seen % PAGE] = values
        arrays[name] = to_storage(cache_RKPD, DTYPES[dtype])
    rows = len(step.slots)
    for name in ("q", "kv"):
        arrays[name][rows:] = np.nan
    for name in ("out", "partials"):
        if name in arrays:
            arrays[name][...] = np.nan
    return arrays


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "e4m3"])
def test_attention_equals_its_reference(case: Case, dtype: str) -> None:
    op = operator(case, dtype)
    for name, step in STEPS.items():
        arrays = inputs(op, step, dtype)
        got = run_op(op, arrays, step, runner(case, dtype))["out"]
        want = reference(op, arrays, step)["out"]
        rows = len(step.slots)
        difference = first_difference(got[:rows], want[:rows], TOLERANCE[dtype], step=name)
        assert difference is None, difference
        assert np.isnan(got[rows:]).all(), f"{name}: rows past the step were written"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_do_not_depend_on_team_or_on_the_rows_beside(case: Case) -> None:
    op = operator(case, "bf16")
    step = Step([0] * 16, list(range(60, 76)))
    arrays = inputs(op, step, "bf16", seed=5)
    both = [run_op(op, arrays, step, runner(case, "bf16", team)) for team in TEAMS]
    for which in ("out", "k_cache", "v_cache"):
        assert both[0][which].tobytes() == both[1][which].tobytes(), which
    if case.block:  # its rows see each other, so none can run alone
        return
    caches = {name: arrays[name] for name in ("k_cache", "v_cache")}
    for row in range(16):
        alone = dict(arrays, **caches)
        for name in ("q", "kv"):
            alone[name] = np.full_like(arrays[name], np.nan)
            alone[name][0] = arrays[name][row]
        got = run_op(op, alone, Step([0], [60 + row]), runner(case, "bf16"))
        caches = {name: got[name] for name in caches}
        assert got["out"][0].tobytes() == both[0]["out"][row].tobytes(), f"row {row}"


@pytest.mark.parametrize("workers", [2, 8, 24, 132])
@pytest.mark.parametrize("case", [CASES[0], CASES[6], CASES[9]], ids=str)
def test_bits_do_not_depend_on_how_many_tasks_share_the_rows(case: Case, workers: int) -> None:
    op = operator(case, "bf16")
    tasks = {tile.coords for tile in tile_attention(op, replace(TARGET, workers=workers))}
    assert len(tasks) <= workers
    for step in (Step([0] * 16, list(range(60, 76))), Step([2, 0, 0], [19, 20, 21])):
        arrays = inputs(op, step, "bf16", seed=6)
        seen = run_op(op, arrays, step, runner(case, "bf16"), workers=workers)
        want = run_op(op, arrays, step, runner(case, "bf16"), workers=1)
        for which in ("out", "k_cache", "v_cache"):
            assert seen[which].tobytes() == want[which].tobytes(), which


@pytest.mark.parametrize("team", TEAMS)
def test_without_queries_the_caches_get_what_attention_writes(team: int) -> None:
    case, dtype, step = Case(norm=1, gated=False, out_eps=0), "f32", STEPS["mixed slots"]
    whole = operator(case, dtype)
    arrays = inputs(whole, step, dtype)
    bare = replace(whole, args={n: r for n, r in whole.args.items() if n not in ("q", "out")})
    few = {name: arrays[name] for name in bare.args}
    one = runner(case, dtype, team)
    seen, want = run_op(bare, few, step, one), run_op(whole, arrays, step, one)
    for name in ("k_cache", "v_cache"):
        assert seen[name].tobytes() == want[name].tobytes()
