"""The host's expert_matvec at every SIMD level, against its own reference and against matvec."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.body import StepRows, Target
from gpurt.buffer import DTYPES
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.dtypes import to_float32
from gpurt.graphs.ops.expert_matvec import EXPERT_MATVEC, expert_matvec, layout_of
from gpurt.graphs.ops.route import RoutesLayout
from tests.helpers.host_bodies import bodies, guarded, levels, random_weight
from tests.helpers.oracle import step_rows
from tests.helpers.routes import choices, routes_of
from tests.unit.test_body_matvec import Case as MatvecCase
from tests.unit.test_body_matvec import same_bits

LEVELS = levels()
FLOATS = ("f32", "f16", "bf16", "nvfp4")
DTYPES_ALL = (*FLOATS, "q4_1", "q8_0")
PATTERNS = ("one", "spread", "random")
PLAN_ROWS = 16


@dataclass
class Case:
    """One operator with its arrays; rows and pairs past the step's are NaN."""

    n: int
    k: int
    rows: int
    w_dtype: str
    experts: int = 12
    top_k: int = 3
    pattern: str = "random"
    norm: bool = False
    w_scale: bool = False
    swiglu: bool = False
    x_per_pair: bool = False
    seed: int = 0
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        per_row = self.top_k if self.x_per_pair else 1
        x = np.full((PLAN_ROWS * per_row, self.k), np.nan, np.float32)
        x[: self.rows * per_row] = rng.standard_normal((self.rows * per_row, self.k))
        w = random_weight(rng, self.experts * self.n, self.k, self.w_dtype)
        self.arrays = {
            "x": guarded(x),
            "w": guarded(w.reshape(self.experts, self.n, -1)),
            "routes": self.routes(choices(self.pattern, self.rows, self.experts, self.top_k)),
        }
        if self.norm:
            self.arrays["norm"] = guarded(rng.uniform(0.5, 2, self.k).astype(np.float32))
        if self.w_scale:
            scales = rng.uniform(0.25, 4, (self.experts, 2)).astype(np.float32)
            self.arrays["w_scale"] = guarded(scales)

    def routes(self, chosen: NDArray[np.integer]) -> NDArray[np.uint32]:
        return guarded(routes_of(RoutesLayout(PLAN_ROWS, self.experts, self.top_k), chosen))

    @property
    def step(self) -> StepRows:
        return step_rows(range(self.rows), range(self.rows))

    @property
    def width(self) -> int:
        return self.n // 2 if self.swiglu else self.n

    def operator(self) -> Operator:
        graph, a = Graph(rows=PLAN_ROWS), self.arrays
        weights = {
            n: graph.weight(n, a[n].shape, "f32", a[n]) for n in ("norm", "w_scale") if n in a
        }
        return expert_matvec(
            graph,
            graph.activation("x", a["x"].shape, "f32"),
            graph.weight("w", (self.experts, self.n, self.k), self.w_dtype, a["w"]),
            graph.activation("routes", a["routes"].shape, "u32"),
            graph.activation("y", (PLAN_ROWS * self.top_k, self.width), "f32"),
            top_k=self.top_k,
            swiglu=self.swiglu,
            x_per_pair=self.x_per_pair,
            eps=1e-5,
            **weights,
        )

    def empty(self) -> NDArray[np.float32]:
        return guarded(np.full((PLAN_ROWS * self.top_k, self.width), np.nan, np.float32))

    def run(
        self,
        level: str,
        coords: list[tuple[int, ...]] | None = None,
        scratch_bytes: int = 1 << 16,
    ) -> NDArray[np.float32]:
        op, y = self.operator(), self.empty()
        kind, _ = bodies(level).run(
            EXPERT_MATVEC,
            dict(self.arrays, y=y),
            op.params,
            self.step,
            coords=coords or [t.coords for t in EXPERT_MATVEC.tile(op, Target("host", 2))],
            scratch_bytes=scratch_bytes,
            plan_rows=PLAN_ROWS,
        )
        assert kind == 0
        return y

    def reference(self) -> NDArray[np.float32]:
        w = to_float32(self.arrays["w"], DTYPES[self.w_dtype])
        arrays = dict(self.arrays, w=w, y=self.empty())
        assert EXPERT_MATVEC.reference is not None
        with np.errstate(over="ignore"):  # silu of a gate below -88 is 0
            EXPERT_MATVEC.reference(self.operator(), arrays, self.step)
        return arrays["y"]


def check(case: Case, level: str) -> None:
    got, expected = case.run(level), case.reference()
    # Block formats round x to 16 bits; the largest results are some tenths of |x| |w|. Pairs past
    # the step's are NaN in both: never written.
    atol = 1e-4 * np.nanmax(np.abs(expected))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=atol)
    pairs = case.rows * case.top_k
    assert np.isfinite(got[:pairs]).all()
    assert np.isnan(got[pairs:]).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES_ALL)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16])
@pytest.mark.parametrize(
    "options",
    [
        {"swiglu": True, "w_scale": True, "norm": True},
        {"x_per_pair": True, "w_scale": True},
        {"x_per_pair": True, "norm": True},
        {},
    ],
    ids=["up", "down", "down_normed", "plain"],
)
def test_both_halves_of_an_expert_equal_the_reference(
    level: str, dtype: str, rows: int, options: dict[str, Any]
) -> None:
    check(Case(70, 96, rows, dtype, seed=rows, **options), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["bf16", "nvfp4"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 5), (7, 1), (48, 3), (40, 8)], ids=str)
def test_every_pattern_of_routes_is_right(
    level: str, dtype: str, pattern: str, experts: int, top_k: int
) -> None:
    check(Case(6, 32, 16, dtype, experts, top_k, pattern, swiglu=True), level)
    check(Case(5, 48, 5, dtype, experts, top_k, pattern, x_per_pair=True), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("k", [1, 5, 17, 33, 575])
def test_float_weights_take_any_number_of_columns(level: str, dtype: str, k: int) -> None:
    check(Case(3, k, 3, dtype, seed=k, x_per_pair=True), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES_ALL)
def test_an_experts_pairs_have_the_bits_of_matvec_on_its_matrix(level: str, dtype: str) -> None:
    case = Case(22, 96, 7, dtype, experts=4, top_k=2, norm=True, swiglu=True)
    got, routes = case.run(level), case.arrays["routes"]
    layout = layout_of(case.operator())
    for slot in range(int(routes[0])):
        at = layout.slot(slot)
        count = int(routes[at + 1])
        users = routes[at + 2 : at + 2 + 2 * count].reshape(count, 2)
        plain = MatvecCase(22, 96, count, dtype, norm=True, swiglu=True)
        plain.arrays = {
            "x": guarded(case.arrays["x"][users[:, 0]]),
            "w": guarded(case.arrays["w"][routes[at]]),
            "norm": case.arrays["norm"],
            "y": plain.arrays["y"],
        }
        assert same_bits(plain.run(level), got[users[:, 1]])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES_ALL)
@pytest.mark.parametrize("pattern", ["one", "random"])
@pytest.mark.parametrize("per_pair", [False, True])
def test_bits_of_a_pair_do_not_depend_on_who_shares_its_expert(
    level: str, dtype: str, pattern: str, per_pair: bool
) -> None:
    options: dict[str, Any] = {"norm": True, "w_scale": True, "x_per_pair": per_pair}
    case = Case(10, 64, 16, dtype, 9, 3, pattern, swiglu=not per_pair, **options)
    together, chosen = case.run(level), choices(pattern, 16, 9, 3)
    per_row = 3 if per_pair else 1
    for row in range(16):
        alone = Case(10, 64, 1, dtype, 9, 3, swiglu=not per_pair, **options)
        x = np.roll(case.arrays["x"], -row * per_row, axis=0)
        alone.arrays = dict(case.arrays, x=guarded(x), routes=alone.routes(chosen[row : row + 1]))
        assert same_bits(alone.run(level)[:3], together[3 * row : 3 * row + 3])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES_ALL)
def test_bits_do_not_depend_on_tiles_their_order_or_scratch(level: str, dtype: str) -> None:
    case = Case(150, 64, 5, dtype, experts=6, swiglu=True, w_scale=True)
    slots = range(6)
    whole = case.run(level, [(slot, 0, 150) for slot in slots])
    cut = [(0, 2), (2, 68), (68, 70), (70, 150)]
    tiles = [(slot, *part) for part in reversed(cut) for slot in slots]
    assert same_bits(case.run(level, tiles), whole)
    assert same_bits(case.run(level, scratch_bytes=64), whole)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["f32", "nvfp4"])
def test_tiles_of_slots_that_no_expert_took_touch_nothing(level: str, dtype: str) -> None:
    case = Case(8, 32, 2, dtype, experts=12, top_k=2, pattern="one")
    active = int(case.arrays["routes"][0])
    assert active == 2
    beyond = [(slot, 0, 8) for slot in range(active, 12)]
    assert np.isnan(case.run(level, beyond)).all()
    case.arrays["routes"][0] = 0
    assert np.isnan(case.run(level)).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES_ALL)
def test_experts_that_no_row_chose_are_never_read(level: str, dtype: str) -> None:
    case = Case(8, 32, 3, dtype, experts=9, top_k=2, pattern="one", w_scale=True)
    before = case.run(level)
    for expert in set(range(9)) - {3, 4}:
        case.arrays["w"][expert].view(np.uint8)[...] = 0xFF
        case.arrays["w_scale"][expert] = np.nan
    assert same_bits(case.run(level), before)
    assert np.isfinite(before[:6]).all()


@pytest.mark.parametrize("level", LEVELS)
def test_scales_go_with_the_parity_of_a_row_only_under_swiglu(level: str) -> None:
    for swiglu in (False, True):
        case = Case(6, 16, 2, "nvfp4", swiglu=swiglu, w_scale=True)
        case.arrays["w_scale"][:, 1] = 1.0
        even = case.run(level)
        case.arrays["w_scale"][:, 1] = 2.0
        # swiglu: up, the odd rows, is doubled exactly; else the second scale is not for use.
        factor = np.float32(2 if swiglu else 1)
        np.testing.assert_array_equal(case.run(level)[:6], even[:6] * factor)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES_ALL)
@pytest.mark.parametrize("per_pair", [False, True])
def test_a_number_that_is_not_finite_stays_in_its_pairs(
    level: str, dtype: str, per_pair: bool
) -> None:
    case = Case(9, 64, 4, dtype, experts=5, top_k=2, x_per_pair=per_pair)
    case.arrays["x"][2, 50] = np.nan
    bad = [2] if per_pair else [4, 5]
    finite = np.isfinite(case.run(level))
    assert not finite[bad].any()
    assert finite[[p for p in range(8) if p not in bad]].all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["bf16", "q8_0"])
def test_rows_kept_from_the_last_task_are_never_stale(level: str, dtype: str) -> None:
    # One worker, same addresses: only what x holds, or which rows a slot has, has changed.
    case = Case(8, 64, 4, dtype, experts=5, top_k=1, pattern="one")
    before = case.run(level)
    case.arrays["x"][3, 63] += 1
    changed = case.run(level)
    assert same_bits(changed[:3], before[:3])
    assert not same_bits(changed[3], before[3])
    check(case, level)
    case.arrays["routes"][...] = case.routes(np.array([[1], [3], [1], [3]]))
    check(case, level)
