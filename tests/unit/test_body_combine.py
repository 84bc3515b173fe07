"""The host's combine at every SIMD level, against its own reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.body import StepRows, Target
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.combine import COMBINE, combine
from gpurt.graphs.ops.route import RoutesLayout
from tests.helpers.host_bodies import bodies, guarded, levels
from tests.helpers.oracle import step_rows
from tests.helpers.routes import choices, routes_of

LEVELS = levels()
PLAN_ROWS = 16
PATTERNS = ("one", "spread", "random")


@dataclass
class Case:
    """One operator with its arrays; pairs and rows past the step's are NaN."""

    rows: int
    width: int
    top_k: int = 3
    experts: int = 40
    gain: bool = True
    residual: bool = False
    pattern: str = "random"
    seed: int = 0
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        pairs = self.rows * self.top_k
        d = np.full((PLAN_ROWS * self.top_k, self.width), np.nan, np.float32)
        d[:pairs] = rng.standard_normal((pairs, self.width)) * 0.1
        chosen = choices(self.pattern, self.rows, self.experts, self.top_k)
        weights = rng.uniform(0.05, 1, chosen.shape).astype(np.float32)
        layout = RoutesLayout(PLAN_ROWS, self.experts, self.top_k)
        self.arrays = {"d": guarded(d), "routes": guarded(routes_of(layout, chosen, weights))}
        if self.gain:
            self.arrays["gain"] = guarded(rng.uniform(0.5, 2, self.width).astype(np.float32))
        if self.residual:
            residual = np.full((PLAN_ROWS, self.width), np.nan, np.float32)
            residual[: self.rows] = rng.standard_normal((self.rows, self.width))
            self.arrays["residual"] = guarded(residual)

    @property
    def step(self) -> StepRows:
        return step_rows(range(self.rows), range(self.rows))

    def operator(self) -> Operator:
        graph, a = Graph(rows=PLAN_ROWS), self.arrays
        gain = graph.weight("gain", (self.width,), "f32", a["gain"]) if self.gain else None
        rows = (PLAN_ROWS, self.width)
        residual = graph.activation("residual", rows, "f32") if self.residual else None
        return combine(
            graph,
            graph.activation("d", a["d"].shape, "f32"),
            graph.activation("routes", a["routes"].shape, "u32"),
            graph.activation("y", rows, "f32"),
            experts=self.experts,
            top_k=self.top_k,
            gain=gain,
            residual=residual,
            eps=1e-8,
        )

    def run(
        self,
        level: str,
        coords: list[tuple[int, int]] | None = None,
        scratch_bytes: int = 1 << 12,
    ) -> NDArray[np.float32]:
        op = self.operator()
        y = guarded(np.full((PLAN_ROWS, self.width), np.nan, np.float32))
        kind, _ = bodies(level).run(
            COMBINE,
            dict(self.arrays, y=y),
            op.params,
            self.step,
            coords=coords or [t.coords for t in COMBINE.tile(op, Target("host", 2))],
            scratch_bytes=scratch_bytes,
            plan_rows=PLAN_ROWS,
        )
        assert kind == 0
        return y

    def reference(self) -> NDArray[np.float32]:
        arrays = dict(self.arrays, y=np.full((PLAN_ROWS, self.width), np.nan, np.float32))
        assert COMBINE.reference is not None
        COMBINE.reference(self.operator(), arrays, self.step)
        return arrays["y"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("width", [1, 33, 1090])
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_combine_equals_the_reference(
    level: str, rows: int, width: int, top_k: int, gain: bool, residual: bool
) -> None:
    case = Case(rows, width, top_k, gain=gain, residual=residual, seed=rows + width)
    # Rows past the step's are NaN in both: neither written nor read.
    np.testing.assert_allclose(case.run(level), case.reference(), rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("rows", "experts"), [(16, 40), (16, 5), (2, 256)])
def test_pairs_are_found_whatever_the_experts(
    level: str, pattern: str, rows: int, experts: int
) -> None:
    case = Case(rows, 48, 4, experts, pattern=pattern)
    np.testing.assert_allclose(case.run(level), case.reference(), rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("gain", [True, False])
def test_bits_depend_on_neither_rows_tiles_nor_scratch(level: str, gain: bool) -> None:
    case = Case(16, 77, 4, gain=gain, residual=True)
    together = case.run(level)
    assert case.run(level, [(0, 1), (1, 18), (18, 77)]).tobytes() == together.tobytes()
    assert case.run(level, scratch_bytes=0).tobytes() == together.tobytes()
    layout = RoutesLayout(PLAN_ROWS, 40, 4)
    for row in range(16):
        alone = Case(1, 77, 4, gain=gain, residual=True)
        alone.arrays = dict(case.arrays)
        for name, count in (("d", 4), ("residual", 1)):
            part = alone.arrays[name][row * count : (row + 1) * count]
            alone.arrays[name] = guarded(np.concatenate([part, case.arrays[name][count:]]))
        at = layout.pair(4 * row)
        weights = case.arrays["routes"][at + 1 : at + 8 : 2].copy().view(np.float32)
        alone.arrays["routes"] = routes_of(layout, np.arange(4)[None], weights[None])
        assert alone.run(level)[0].tobytes() == together[row].tobytes()


@pytest.mark.parametrize("level", LEVELS)
def test_pairs_are_summed_in_ascending_order(level: str) -> None:
    # 1e8 - 1e8 + 1 is 1 from the left; any other order loses the 1.
    case = Case(1, 20, 3, gain=False)
    case.arrays["d"][:3] = np.array([[1e8], [-1e8], [1.0]], np.float32)
    case.arrays["routes"] = routes_of(
        RoutesLayout(PLAN_ROWS, 40, 3), np.array([[2, 5, 9]]), np.ones((1, 3), np.float32)
    )
    np.testing.assert_array_equal(case.run(level)[0], 1.0)


@pytest.mark.parametrize("level", LEVELS)
def test_the_norm_comes_before_the_sum(level: str) -> None:
    # A hundredfold expert output weighs as before: each pair is normed by itself.
    case = Case(2, 64, 3)
    before = case.run(level)[:2]
    case.arrays["d"][1] *= 100
    np.testing.assert_allclose(case.run(level)[:2], before, rtol=1e-4, atol=1e-5)
