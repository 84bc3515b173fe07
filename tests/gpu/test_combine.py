"""combine on the GPU against its reference, and its bits over rows and teams."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.combine import combine
from gpurt.graphs.ops.route import NO_SLOT, RoutesLayout
from tests.gpu.one_op import TEAMS, Arrays, reference, rows_step, run_op, runner
from tests.gpu.one_task import first_difference
from tests.helpers.routes import choices, routes_of

PLAN_ROWS = 16
TOLERANCE = 2e-6  # float32, in another order
SHAPES = [(144, 3, 13), (32, 1, 5), (4096, 8, 256), (2052, 8, 9), (64, 32, 40)]  # M, T, E


def operator(width: int, top_k: int, experts: int, gain: bool, residual: bool) -> Operator:
    graph = Graph(rows=PLAN_ROWS)
    layout = RoutesLayout(PLAN_ROWS, experts, top_k)
    wide = [PLAN_ROWS, width]
    return combine(
        graph,
        graph.activation("d", [PLAN_ROWS * top_k, width], "f32"),
        graph.activation("routes", [layout.words], "u32"),
        graph.activation("y", wide, "f32"),
        experts=experts,
        top_k=top_k,
        gain=graph.weight("gain", [width], "f32", lambda: None) if gain else None,
        residual=graph.activation("residual", wide, "f32") if residual else None,
        eps=1e-5,
    )


def inputs(op: Operator, rows: int, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    arrays = {n: rng.standard_normal(r.shape).astype(np.float32) for n, r in op.args.items()}
    top_k, experts = int(op.params["top_k"]), int(op.params["experts"])
    weights = rng.uniform(0.1, 2, (rows, top_k)).astype(np.float32)
    layout = RoutesLayout(PLAN_ROWS, experts, top_k)
    arrays["routes"] = routes_of(layout, choices("random", rows, experts, top_k), weights)
    arrays["d"][rows * top_k :] = np.nan
    arrays["y"][...] = np.nan
    return arrays


@pytest.mark.parametrize("gain", [False, True])
def test_pairs_of_other_ranks_are_left_out(gain: bool) -> None:
    op = operator(144, 3, 13, gain, residual=False)
    arrays, layout = inputs(op, 5), RoutesLayout(PLAN_ROWS, 13, 3)
    for pair in (0, 2, 3, 4, 5, 10):  # the first, the last, all of a row, one in the middle
        arrays["routes"][layout.pair(pair)] = NO_SLOT
        arrays["d"][pair] = np.nan
    got = run_op(op, arrays, rows_step(5), runner("combine"))["y"]
    want = reference(op, arrays, rows_step(5))["y"]
    assert (difference := first_difference(got[:5], want[:5], TOLERANCE)) is None, difference
    assert not got[1].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("gain", "residual"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_combine_equals_its_reference(
    shape: tuple[int, int, int], gain: bool, residual: bool, rows: int
) -> None:
    op = operator(*shape, gain, residual)
    arrays, step = inputs(op, rows), rows_step(rows)
    got = run_op(op, arrays, step, runner("combine"))["y"]
    want = reference(op, arrays, step)["y"]
    assert (difference := first_difference(got[:rows], want[:rows], TOLERANCE)) is None, difference
    assert np.isnan(got[rows:]).all(), "rows past the step were written"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_rows_or_team(shape: tuple[int, int, int]) -> None:
    op, top_k = operator(*shape, True, True), shape[1]
    arrays = inputs(op, 16, seed=3)
    together = [run_op(op, arrays, rows_step(16), runner("combine", t))["y"] for t in TEAMS]
    assert together[0].tobytes() == together[1].tobytes()
    layout = RoutesLayout(PLAN_ROWS, shape[2], top_k)
    weights = arrays["routes"][layout.pair(0) + 1 :: 2]
    for row in range(16):
        alone = {name: array.copy() for name, array in arrays.items()}
        pairs = slice(row * top_k, (row + 1) * top_k)
        alone["d"][:top_k], alone["d"][top_k:] = arrays["d"][pairs], np.nan
        alone["residual"][0] = arrays["residual"][row]
        alone["routes"][layout.pair(0) + 1 : layout.pair(top_k) : 2] = weights[pairs]
        got = run_op(op, alone, rows_step(1), runner("combine"))["y"]
        assert got[0].tobytes() == together[0][row].tobytes(), f"row {row}"
