"""expert_matvec on the GPU against its reference, and its bits whoever shares the expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.buffer import bf16
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.dtypes import to_bf16, to_float32
from gpurt.graphs.ops.expert_matvec import expert_matvec
from gpurt.graphs.ops.route import RoutesLayout
from tests.gpu.one_op import TEAMS, Arrays, reference, rows_step, run_op, runner
from tests.gpu.one_task import first_difference
from tests.helpers.routes import choices, routes_of

PLAN_ROWS = 16
# x and norm are such that bf16 rounds nothing: what is left is the order of float32 sums.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One operator."""

    n: int
    k: int
    dtype: str
    experts: int = 13
    top_k: int = 3
    norm: bool = False
    w_scale: bool = False
    swiglu: bool = False
    x_per_pair: bool = False

    def __str__(self) -> str:
        extras = [e for e in ("norm", "w_scale", "swiglu", "x_per_pair") if getattr(self, e)]
        return "-".join([f"{self.n}x{self.k}", self.dtype, *extras])


CASES = [
    Case(96, 144, "bf16", norm=True, swiglu=True),  # K ends inside a round, N inside a tile
    Case(96, 144, "nvfp4", norm=True, swiglu=True, w_scale=True),
    Case(144, 48, "bf16", x_per_pair=True),  # less than a chunk
    Case(144, 48, "nvfp4", x_per_pair=True, w_scale=True),
    Case(16, 16, "nvfp4"),
    Case(128, 4096, "nvfp4", experts=4, norm=True, swiglu=True, w_scale=True),  # true K: 6 stages
    Case(512, 512, "nvfp4", experts=4, x_per_pair=True, w_scale=True),
    Case(64, 2048, "bf16", experts=4, norm=True),
    Case(32, 1104, "f32", experts=5, top_k=1),  # rounded to bf16 when packed
    # Four whole stages each, more than the ring holds; K inside the last round.
    Case(64, 2896, "nvfp4", experts=2, top_k=1, norm=True, swiglu=True, w_scale=True),
    Case(64, 1024, "bf16", experts=2, top_k=1, norm=True),
]
PATTERNS = ["one", "spread", "random"]


def operator(case: Case) -> Operator:
    graph = Graph(rows=PLAN_ROWS)
    pairs = PLAN_ROWS * case.top_k

    def weight(name: str, *shape: int) -> Any:
        return graph.weight(name, shape, "f32", lambda: None) if getattr(case, name) else None

    return expert_matvec(
        graph,
        graph.activation("x", [pairs if case.x_per_pair else PLAN_ROWS, case.k], "f32"),
        graph.weight("w", [case.experts, case.n, case.k], case.dtype, lambda: None),
        graph.activation("routes", [_layout(case).words], "u32"),
        graph.activation("y", [pairs, case.n // 2 if case.swiglu else case.n], "f32"),
        top_k=case.top_k,
        norm=weight("norm", case.k),
        w_scale=weight("w_scale", case.experts, 2),
        swiglu=case.swiglu,
        x_per_pair=case.x_per_pair,
        eps=1e-5,
    )


def inputs(case: Case, rows: int, pattern: str, seed: int = 0) -> Arrays:
    """Rows and pairs past the step's are NaN."""
    rng = np.random.default_rng(seed)
    used = rows * case.top_k if case.x_per_pair else rows
    x = np.full((PLAN_ROWS * case.top_k if case.x_per_pair else PLAN_ROWS, case.k), np.nan)
    x[:used] = to_float32(to_bf16(rng.standard_normal((used, case.k)).astype(np.float32)), bf16)
    chosen = choices(pattern, rows, case.experts, case.top_k)
    width = case.n // 2 if case.swiglu else case.n
    arrays = {
        "x": x.astype(np.float32),
        "w": _weights(rng, case),
        "routes": routes_of(_layout(case), chosen),
        "y": np.full((PLAN_ROWS * case.top_k, width), np.nan, np.float32),
    }
    if case.norm:
        arrays["norm"] = rng.choice([0.5, 1.0, 2.0], case.k).astype(np.float32)
    if case.w_scale:
        arrays["w_scale"] = rng.uniform(0.25, 2, (case.experts, 2)).astype(np.float32)
    return arrays


def _weights(rng: Any, case: Case) -> NDArray[Any]:
    shape = (case.experts, case.n, case.k)
    if case.dtype == "nvfp4":
        blocks = rng.integers(0, 256, (*shape[:2], case.k // 16, 9)).astype(np.uint8)
        # denormal scales, zero and negative ones among them
        blocks[..., 8] = rng.choice([0, 1, 5, 0x90, *range(8, 0x1C)], blocks.shape[:-1])
        return blocks.reshape(*shape[:2], -1)
    w = to_bf16((rng.standard_normal(shape) / case.k**0.5).astype(np.float32))
    return w if case.dtype == "bf16" else to_float32(w, bf16)


def _layout(case: Case) -> RoutesLayout:
    return RoutesLayout(PLAN_ROWS, case.experts, case.top_k)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_expert_matvec_equals_its_reference(case: Case, pattern: str, rows: int) -> None:
    op, arrays, step = operator(case), inputs(case, rows, pattern), rows_step(rows)
    got = run_op(op, arrays, step, runner("expert_matvec"))["y"]
    want = reference(op, arrays, step)["y"]
    pairs = rows * case.top_k
    difference = first_difference(
        got[:pairs], want[:pairs], TOLERANCE, case=str(case), pattern=pattern, rows=rows
    )
    assert difference is None, difference
    assert np.isnan(got[pairs:]).all(), "pairs past the step's were written"


def test_x_that_bf16_rounds_stays_within_a_hundredth() -> None:
    case = CASES[5]
    arrays = inputs(case, 16, "random", seed=5)
    rng = np.random.default_rng(6)
    arrays["x"] = rng.standard_normal(arrays["x"].shape).astype(np.float32)
    arrays["norm"] = rng.uniform(0.5, 1.5, case.k).astype(np.float32)
    op, step = operator(case), rows_step(16)
    got = run_op(op, arrays, step, runner("expert_matvec"))["y"]
    want = reference(op, arrays, step)["y"]
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert error.max() < 1e-2, error


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_do_not_depend_on_team_or_on_who_shares_the_expert(case: Case) -> None:
    op = operator(case)
    arrays = inputs(case, 16, "one", seed=3)  # 16 rows at the same experts: two mma each
    step = rows_step(16)
    together = [run_op(op, arrays, step, runner("expert_matvec", team))["y"] for team in TEAMS]
    assert together[0].tobytes() == together[1].tobytes()
    top_k, per_row = case.top_k, case.top_k if case.x_per_pair else 1
    for row in (0, 7, 8, 15):
        alone = dict(arrays, x=np.full_like(arrays["x"], np.nan))
        alone["x"][:per_row] = arrays["x"][row * per_row : (row + 1) * per_row]
        chosen = choices("one", 16, case.experts, top_k)[row : row + 1]
        alone["routes"] = routes_of(_layout(case), chosen)
        got = run_op(op, alone, rows_step(1), runner("expert_matvec"))["y"]
        want = together[0][row * top_k : (row + 1) * top_k]
        assert got[:top_k].tobytes() == want.tobytes(), f"row {row}"


def test_slots_that_no_expert_took_do_nothing() -> None:
    case = CASES[0]
    arrays = inputs(case, 1, "one")
    arrays["routes"][0] = 0
    got = run_op(operator(case), arrays, rows_step(1), runner("expert_matvec"))["y"]
    assert np.isnan(got).all()
