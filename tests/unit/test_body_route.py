"""The host's route at every SIMD level, against its own reference: word for word."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt import wire
from gpurt.body import StepRows
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.route import ROUTE, SIGMOID, SOFTMAX, RoutesLayout, route
from tests.helpers.host_bodies import bodies, guarded, levels
from tests.helpers.oracle import step_rows
from tests.helpers.routes import UNWRITTEN, choices, routes_of

LEVELS = levels()


@dataclass
class Case:
    """One route operator with its arrays; `rows` are the step's, `plan_rows` what fits."""

    rows: int
    experts: int
    top_k: int
    kind: int = SIGMOID
    bias: bool = False
    factor: float = 1.0
    norm_topk: bool = True
    plan_rows: int = 16
    seed: int = 0
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        logits = np.full((self.plan_rows, self.experts), np.nan, np.float32)
        logits[: self.rows] = rng.standard_normal((self.rows, self.experts)) * 2
        self.arrays = {"logits": guarded(logits)}
        if self.bias:
            bias = rng.standard_normal(self.experts).astype(np.float32)
            self.arrays["bias"] = guarded(bias * np.float32(0.2))

    @property
    def layout(self) -> RoutesLayout:
        return RoutesLayout(self.plan_rows, self.experts, self.top_k)

    @property
    def step(self) -> StepRows:
        return step_rows(range(self.rows), range(self.rows))

    def operator(self) -> Operator:
        graph = Graph(rows=self.plan_rows)
        bias = None
        if self.bias:
            bias = graph.weight("bias", (self.experts,), "f32", self.arrays["bias"])
        return route(
            graph,
            graph.activation("logits", (self.plan_rows, self.experts), "f32"),
            graph.activation("routes", (self.layout.words,), "u32"),
            top_k=self.top_k,
            kind=self.kind,
            bias=bias,
            factor=self.factor,
            norm_topk=self.norm_topk,
        )

    def run_any(self, level: str, scratch_bytes: int) -> tuple[NDArray[np.uint32], int, list[int]]:
        routes = guarded(np.full(self.layout.words, UNWRITTEN, np.uint32))
        arrays = dict(self.arrays, routes=routes)
        kind, detail = bodies(level).run(
            ROUTE,
            arrays,
            self.operator().params,
            self.step,
            scratch_bytes=scratch_bytes,
            plan_rows=self.plan_rows,
        )
        return routes, kind, detail

    def run(self, level: str, scratch_bytes: int = 1 << 16) -> NDArray[np.uint32]:
        routes, kind, _ = self.run_any(level, scratch_bytes)
        assert kind == 0
        return routes

    def fault(self, level: str) -> list[int]:
        """Row, column, argument of the fault that the task must end with."""
        _, kind, detail = self.run_any(level, 1 << 16)
        assert kind == wire.FaultKind.NON_FINITE
        return detail[:3]

    def reference(self) -> NDArray[np.uint32]:
        arrays = dict(self.arrays, routes=np.full(self.layout.words, UNWRITTEN, np.uint32))
        assert ROUTE.reference is not None
        ROUTE.reference(self.operator(), arrays, self.step)
        return arrays["routes"]

    def weights(self, routes: NDArray[np.uint32]) -> NDArray[np.float32]:
        """[rows, top_k]"""
        begin, end = self.layout.pair(0), self.layout.pair(self.rows * self.top_k)
        return routes[begin + 1 : end : 2].copy().view(np.float32).reshape(self.rows, self.top_k)

    def chosen(self, routes: NDArray[np.uint32]) -> list[list[int]]:
        """Experts of each row, by its pairs' slots."""
        pairs = range(self.rows * self.top_k)
        ids = [int(routes[self.layout.slot(int(routes[self.layout.pair(p)]))]) for p in pairs]
        return np.array(ids).reshape(self.rows, self.top_k).tolist()


def check(case: Case, level: str) -> None:
    got, expected = case.run(level), case.reference()
    np.testing.assert_allclose(case.weights(got), case.weights(expected), rtol=1e-5, atol=1e-12)
    first = case.layout.pair(0)
    is_weight = np.zeros(len(got), np.bool_)
    is_weight[first + 1 : case.layout.pair(case.rows * case.top_k) : 2] = True
    np.testing.assert_array_equal(got[~is_weight], expected[~is_weight])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 5), (7, 2), (33, 8), (256, 8)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "factor": 2.5},
        {"kind": SOFTMAX},
        {"kind": SOFTMAX, "norm_topk": False, "factor": 0.5},
    ],
    ids=["sigmoid", "biased", "softmax", "softmax_as_is"],
)
def test_routes_equal_the_reference(
    level: str, rows: int, experts: int, top_k: int, options: dict[str, Any]
) -> None:
    check(Case(rows, experts, top_k, seed=rows + experts, **options), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [SIGMOID, SOFTMAX])
def test_equal_scores_go_to_the_lower_expert(level: str, kind: int) -> None:
    case = Case(5, 19, 4, kind=kind)
    logits = case.arrays["logits"]
    logits[0] = 0.5
    logits[1], logits[1, 18] = -1.0, 1.0
    logits[2], logits[2, [3, 7, 11, 15, 18]] = -1.0, 1.0
    logits[3], logits[3, ::2] = 0.0, -0.0
    logits[4] = np.arange(19) // 3
    chosen = case.chosen(case.run(level))
    assert chosen == [[0, 1, 2, 3], [0, 1, 2, 18], [3, 7, 11, 15], [0, 1, 2, 3], [15, 16, 17, 18]]
    check(case, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pattern", ["one", "spread", "random"])
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_every_pattern_of_choices_comes_out_as_it_went_in(
    level: str, pattern: str, rows: int
) -> None:
    case = Case(rows, 40, 3)
    chosen = choices(pattern, rows, 40, 3)
    logits = case.arrays["logits"]
    logits[:rows] = -4
    np.put_along_axis(logits[:rows], chosen, 3.0, axis=1)
    got = case.run(level)
    assert case.chosen(got) == chosen.tolist()
    np.testing.assert_array_equal(got, routes_of(case.layout, chosen, case.weights(got)))
    np.testing.assert_allclose(case.weights(got), 1 / 3, rtol=1e-5)
    assert got[0] == {"one": 3, "spread": min(40, 3 * rows)}.get(pattern, got[0])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("options", [{"bias": True}, {"kind": SOFTMAX}], ids=str)
def test_weights_do_not_depend_on_the_rows_beside_them(level: str, options: dict[str, Any]) -> None:
    case = Case(16, 37, 5, **options)
    together = case.weights(case.run(level))
    for row in range(16):
        alone = Case(1, 37, 5, **options)
        alone.arrays = dict(case.arrays, logits=guarded(case.arrays["logits"][row : row + 1]))
        assert alone.weights(alone.run(level)).tobytes() == together[row].tobytes()
    assert case.run(level, scratch_bytes=64).tobytes() == case.run(level).tobytes()


@pytest.mark.parametrize("level", LEVELS)
def test_the_bias_selects_but_does_not_weigh(level: str) -> None:
    case = Case(2, 9, 2, bias=True)
    case.arrays["bias"][...] = [0, 0, 0, 9, 0, 0, 9, -np.inf, 0]
    case.arrays["logits"][:2] = 1.0
    case.arrays["logits"][0, [3, 7]] = -2.0, 50.0
    got = case.run(level)
    assert case.chosen(got) == [[3, 6], [3, 6]]
    p = 1 / (1 + np.exp(np.array([2.0, -1.0])))
    np.testing.assert_allclose(case.weights(got), [p / p.sum(), [0.5, 0.5]], rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_rows_whose_experts_all_weigh_nothing_stay_finite(level: str) -> None:
    case = Case(2, 6, 3)
    case.arrays["logits"][0], case.arrays["logits"][1] = -3e38, -87.0
    weights = case.weights(case.run(level))
    np.testing.assert_array_equal(weights[0], 0)
    np.testing.assert_allclose(weights[1], np.exp(-87.0) / 1e-15, rtol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [SIGMOID, SOFTMAX])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (2, 18), (4, 7)])
def test_a_logit_that_is_not_finite_is_a_fault_with_its_place(
    level: str, kind: int, bad: float, row: int, column: int
) -> None:
    case = Case(5, 19, 4, kind=kind)
    case.arrays["logits"][row, column] = bad
    case.arrays["logits"][4, 9] = np.nan
    assert case.fault(level) == [row, column, 0]


@pytest.mark.parametrize("level", LEVELS)
def test_a_bias_that_is_not_a_number_is_a_fault_of_the_bias(level: str) -> None:
    case = Case(2, 19, 4, bias=True)
    case.arrays["bias"][11] = np.nan
    assert case.fault(level) == [0, 11, 1]
