"""The host's gated_residual at every SIMD level, against its own reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.body import Target
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.dtypes import to_float32, to_storage
from gpurt.graphs.ops.gated_residual import GATED_RESIDUAL, gated_residual
from tests.helpers.host_bodies import bodies, guarded, levels
from tests.helpers.oracle import step_rows

LEVELS = levels()
PLAN_ROWS = 16


@dataclass
class Case:
    """One operator with its arrays; rows past the step's are NaN."""

    rows: int
    hidden: int
    gain: bool = True
    eps: float = 1e-5
    seed: int = 0
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        shape = (PLAN_ROWS, self.hidden)
        self.arrays = {n: rng.standard_normal(shape).astype(np.float32) for n in self.rows_of}
        self.arrays["branch"] *= 0.01
        for name in self.rows_of:
            self.arrays[name][self.rows :] = np.nan
        for name in ("alpha", "beta", *(("gain",) if self.gain else ())):
            self.arrays[name] = rng.uniform(0.2, 2, self.hidden).astype(np.float32)
        self.arrays = {name: guarded(array) for name, array in self.arrays.items()}

    rows_of = ("branch", "stream")

    def operator(self) -> Operator:
        graph = Graph(rows=PLAN_ROWS)
        weights = {
            name: graph.weight(name, (self.hidden,), "f32", array)
            for name, array in self.arrays.items()
            if name not in self.rows_of
        }
        made = {
            n: graph.activation(n, (PLAN_ROWS, self.hidden), "f32") for n in (*self.rows_of, "y")
        }
        return gated_residual(graph, eps=self.eps, **made, **weights)

    def run(
        self, level: str, coords: list[tuple[int, int]] | None = None, *, in_place: bool = False
    ) -> NDArray[np.float32]:
        op, arrays = self.operator(), dict(self.arrays)
        y = arrays["stream"].copy() if in_place else np.full_like(arrays["stream"], np.nan)
        arrays["y"] = guarded(y)
        if in_place:
            arrays["stream"] = arrays["y"]
        kind, _ = bodies(level).run(
            GATED_RESIDUAL,
            arrays,
            op.params,
            step_rows(range(self.rows), range(self.rows)),
            coords=coords or [t.coords for t in GATED_RESIDUAL.tile(op, Target("host", 2))],
            plan_rows=PLAN_ROWS,
        )
        assert kind == 0
        return arrays["y"]

    def reference(self) -> NDArray[np.float32]:
        arrays = dict(self.arrays, y=np.full_like(self.arrays["stream"], np.nan))
        assert GATED_RESIDUAL.reference is not None
        GATED_RESIDUAL.reference(
            self.operator(), arrays, step_rows(range(self.rows), range(self.rows))
        )
        return arrays["y"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("hidden", [1, 5, 16, 33, 575, 4160])
@pytest.mark.parametrize("gain", [True, False])
def test_gated_residual_equals_the_reference(
    level: str, rows: int, hidden: int, gain: bool
) -> None:
    case = Case(rows, hidden, gain, seed=rows + hidden)
    # Rows past the step's are NaN in both: neither written nor read.
    np.testing.assert_allclose(case.run(level), case.reference(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("hidden", [37, 300])
def test_bits_depend_neither_on_rows_nor_on_tiles(level: str, hidden: int) -> None:
    case = Case(16, hidden)
    together = case.run(level)
    cut = [(0, 1), (1, 9), (9, 25), (25, hidden)]
    assert case.run(level, cut).tobytes() == together.tobytes()
    for row in range(16):
        alone = Case(1, hidden)
        for name in alone.rows_of:
            alone.arrays[name][0] = case.arrays[name][row]
        alone.arrays |= {n: a for n, a in case.arrays.items() if n not in alone.rows_of}
        assert alone.run(level)[0].tobytes() == together[row].tobytes()


@pytest.mark.parametrize("level", LEVELS)
def test_the_stream_may_be_updated_in_place(level: str) -> None:
    case = Case(3, 70)
    assert case.run(level, in_place=True).tobytes() == case.run(level).tobytes()


@pytest.mark.parametrize("level", LEVELS)
def test_a_branch_of_zeros_leaves_the_scaled_stream(level: str) -> None:
    case = Case(2, 48, eps=1e-8)
    case.arrays["branch"][:2] = 0
    expected = case.arrays["alpha"] * case.arrays["stream"][:2]
    np.testing.assert_array_equal(case.run(level)[:2], expected)


@pytest.mark.parametrize("level", LEVELS)
def test_a_number_that_is_not_finite_stays_in_its_row(level: str) -> None:
    case = Case(3, 40)
    case.arrays["branch"][1, 39] = np.nan
    finite = np.isfinite(case.run(level, [(0, 16), (16, 40)]))
    assert not finite[1].any()
    assert finite[[0, 2]].all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("hidden", [1, 33, 2080])
def test_what_is_normed_equals_the_reference(level: str, dtype: str, hidden: int) -> None:
    case = Case(3, hidden)
    rng, graph = np.random.default_rng(1), Graph(rows=PLAN_ROWS)
    made = {
        name: graph.activation(name, region.buffer.shape, "f32")
        for name, region in case.operator().args.items()
    }
    norm = guarded(rng.uniform(0.2, 2, hidden).astype(np.float32))
    normed = graph.activation("normed", (PLAN_ROWS, hidden), dtype)
    op = gated_residual(
        graph,
        eps=case.eps,
        norm=graph.weight("norm", (hidden,), "f32", norm),
        normed=normed,
        norm_eps=1e-3,
        **made,
    )
    tiles = GATED_RESIDUAL.tile(op, Target("host", 2))
    assert [tile.coords[:2] for tile in tiles] == [(0, hidden)]
    shape = (PLAN_ROWS, hidden)
    arrays = dict(case.arrays, norm=norm, y=guarded(np.full(shape, np.nan, np.float32)))
    arrays["normed"] = guarded(to_storage(np.full(shape, np.nan, np.float32), normed.dtype))
    step = step_rows(range(3), range(3))
    coords = [tile.coords for tile in tiles]
    kind, _ = bodies(level).run(
        GATED_RESIDUAL, arrays, op.params, step, coords=coords, plan_rows=PLAN_ROWS
    )
    assert kind == 0
    want = dict(arrays, y=np.full(shape, np.nan, np.float32))
    want["normed"] = want["y"].copy()
    assert GATED_RESIDUAL.reference is not None
    GATED_RESIDUAL.reference(op, want, step)
    assert arrays["y"].tobytes() == case.run(level).tobytes()
    got = to_float32(arrays["normed"], normed.dtype)
    tolerance = 5e-6 if dtype == "f32" else 2**-7
    np.testing.assert_allclose(got, want["normed"], rtol=tolerance, atol=5e-6)
