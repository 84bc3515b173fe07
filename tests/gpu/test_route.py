"""route on the GPU against its reference, word for word but for the weights' last digits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpurt import wire
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.route import SIGMOID, SOFTMAX, RoutesLayout, forced_table, route
from tests.gpu.one_op import TEAMS, Arrays, reference, rows_step, run_op, runner
from tests.gpu.one_task import Step
from tests.helpers.routes import UNWRITTEN

PLAN_ROWS = 16
# E, T: fewer than a warp, no multiple of it, all experts, the model's own, what fits
SHAPES = [(7, 3), (13, 1), (33, 8), (5, 5), (256, 8), (1024, 32)]


def operator(
    experts: int, top_k: int, kind: int = SIGMOID, bias: bool = True, **more: Any
) -> Operator:
    graph = Graph(rows=PLAN_ROWS, slots=4)
    if more.get("forced") is not None:
        more["forced"] = graph.weight("forced", more["forced"].shape, "u32", more["forced"])
    _, own = more.get("own", (0, experts))
    return route(
        graph,
        graph.activation("logits", [PLAN_ROWS, experts], "f32"),
        graph.activation("routes", [RoutesLayout(PLAN_ROWS, own, top_k).words], "u32"),
        top_k=top_k,
        kind=kind,
        bias=graph.weight("bias", [experts], "f32", lambda: None) if bias else None,
        **more,
    )


def inputs(op: Operator, rows: int, seed: int = 0) -> Arrays:
    """Logits whose scores differ by more than float32 rounds."""
    rng = np.random.default_rng(seed)
    experts = int(op.params["experts"])
    logits = np.stack([rng.permutation(experts) for _ in range(PLAN_ROWS)])
    logits = (logits / experts * 6 - 3).astype(np.float32)
    logits[rows:] = np.nan
    routes = np.full(op.args["routes"].shape, UNWRITTEN, np.uint32)
    arrays: Arrays = {"logits": logits, "routes": routes}
    if "bias" in op.args:
        arrays["bias"] = rng.integers(-3, 4, experts).astype(np.float32) / 16
    return arrays


def check(op: Operator, arrays: Arrays, step: Step, team: int = 16) -> np.ndarray:
    one = runner("route", team)
    got, want = run_op(op, arrays, step, one)["routes"], reference(op, arrays, step)["routes"]
    assert one.fault["kind"] == 0
    layout = RoutesLayout(PLAN_ROWS, int(op.params["own"]), int(op.params["top_k"]))
    pairs = len(step.slots) * layout.top_k
    is_weight = np.zeros(len(got), np.bool_)
    is_weight[layout.pair(0) + 1 : layout.pair(pairs) : 2] = True
    np.testing.assert_array_equal(got[~is_weight], want[~is_weight])
    seen, wanted = got[is_weight].view(np.float32), want[is_weight].view(np.float32)
    np.testing.assert_allclose(seen, wanted, rtol=1e-5, atol=1e-12)
    return got


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("team", TEAMS)
def test_sigmoid_with_bias_equals_its_reference(
    shape: tuple[int, int], rows: int, team: int
) -> None:
    op = operator(*shape, factor=1.5)
    check(op, inputs(op, rows, seed=rows), rows_step(rows), team)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm_topk", [False, True])
def test_softmax_equals_its_reference(shape: tuple[int, int], norm_topk: bool) -> None:
    op = operator(*shape, SOFTMAX, bias=False, norm_topk=norm_topk)
    check(op, inputs(op, 16), rows_step(16))


@pytest.mark.parametrize("own", [(0, 13), (13, 57), (69, 1)])
@pytest.mark.parametrize("rows", [1, 16])
def test_only_own_experts_get_slots(own: tuple[int, int], rows: int) -> None:
    op = operator(70, 8, own=own)
    check(op, inputs(op, rows), rows_step(rows))


@pytest.mark.parametrize("team", TEAMS)
def test_equal_scores_go_to_the_lower_ids(team: int) -> None:
    op = operator(70, 8)
    arrays = inputs(op, 4)
    arrays["bias"][...] = 0
    arrays["logits"][:4] = 0
    arrays["logits"][0, 0] = -0.0  # equal to 0
    arrays["logits"][1, 40:] = 1
    arrays["logits"][2, ::33] = 2
    got = check(op, arrays, rows_step(4), team)
    layout = RoutesLayout(PLAN_ROWS, 70, 8)
    chosen = [int(got[layout.slot(int(got[layout.pair(p)]))]) for p in range(16)]
    assert chosen == [*range(8), *range(40, 48)]


def test_all_rows_may_choose_one_expert_and_every_row_others() -> None:
    op = operator(64, 4)
    for shift in (0, 4):
        arrays = inputs(op, 16)
        arrays["bias"][...] = 0
        arrays["logits"][:] = -4
        for row in range(16):
            arrays["logits"][row, (np.arange(4) + shift * row) % 64] = 4
        check(op, arrays, rows_step(16))


def test_a_bias_of_minus_infinity_closes_an_expert() -> None:
    op = operator(7, 3)
    arrays = inputs(op, 16)
    arrays["bias"][[0, 3]] = -np.inf
    got = check(op, arrays, rows_step(16))
    layout = RoutesLayout(PLAN_ROWS, 7, 3)
    assert not {int(got[layout.slot(j)]) for j in range(int(got[0]))} & {0, 3}


@pytest.mark.parametrize("team", TEAMS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["logits", "bias"])
def test_what_is_no_number_is_a_fault_that_names_it(name: str, value: float, team: int) -> None:
    if name == "bias" and not np.isnan(value):
        pytest.skip("a bias may be infinite")
    op = operator(33, 8)
    arrays = inputs(op, 16)
    where = (9, 32) if name == "logits" else (0, 32)
    if name == "logits":
        arrays["logits"][9, 32] = value
        arrays["logits"][12, 1] = value
    else:
        arrays["bias"][32] = value
    one = runner("route", team)
    got = run_op(op, arrays, rows_step(16), one)["routes"]
    assert one.fault["kind"] == wire.FaultKind.NON_FINITE
    assert list(one.fault["detail"][:3]) == [*where, 0 if name == "logits" else 1]
    assert (got == UNWRITTEN).all(), "nothing is written"


def test_a_forced_table_chooses_by_position_and_slot() -> None:
    op = operator(40, 4, forced=forced_table("random", 40, 4, seed=2))
    arrays = inputs(op, 5)
    arrays["forced"] = forced_table("random", 40, 4, seed=2)
    check(op, arrays, Step([0, 1, 2, 3, 3], [5, 9, 5, 5000, 5001]))
