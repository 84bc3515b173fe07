"""The host's matvec at every SIMD level, against numpy in float64 and the body's own reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.body import StepRows, Target
from gpurt.buffer import DTYPES
from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.dtypes import to_float32, to_storage
from gpurt.graphs.ops.matvec import MATVEC, matvec
from tests.helpers.host_bodies import bodies, guarded, levels, random_weight
from tests.helpers.oracle import step_rows

LEVELS = levels()
FLOATS = ("f32", "f16", "bf16")
BLOCKS = ("q4_1", "q8_0")
EPS = 1e-5
# Of |w| |x|: float sums of up to 1,536 terms round at 2^-24 each; block formats round x to 16 bits.
FLOAT_ERROR, BLOCK_ERROR = 1e-6, 1e-5


@dataclass
class Case:
    """One matvec operator with its stored arrays."""

    n: int
    k: int
    rows: int
    w_dtype: str
    x_dtype: str = "f32"
    y_dtype: str = "f32"
    norm: bool = False
    residual: bool = False
    swiglu: bool = False
    sampled: bool = False
    scale: float = 1.0
    softcap: float = 0.0
    seed: int = 0
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        width = self.n // 2 if self.swiglu else self.n
        x = rng.standard_normal((self.rows, self.k)).astype(np.float32)
        self.arrays = {
            "x": guarded(to_storage(x, DTYPES[self.x_dtype])),
            "w": guarded(random_weight(rng, self.n, self.k, self.w_dtype)),
        }
        if self.norm:
            self.arrays["norm"] = guarded(rng.uniform(0.5, 2, self.k).astype(np.float32))
        if self.residual:
            self.arrays["residual"] = guarded(
                rng.standard_normal((self.rows, width)).astype(np.float32)
            )
        self.arrays["y"] = self.empty()

    def empty(self) -> NDArray[Any]:
        width = self.n // 2 if self.swiglu else self.n
        storage = DTYPES[self.y_dtype].storage
        raw = np.full((self.rows, width * storage.itemsize), 0xFF, np.uint8)
        return raw.view(storage)

    def operator(self) -> Operator:
        graph = Graph(rows=self.rows, vocab=max(2, self.n))
        x = graph.activation("x", (self.rows, self.k), self.x_dtype)
        w = graph.weight("w", (self.n, self.k), self.w_dtype, self.arrays["w"])
        y = graph.activation("y", self.arrays["y"].shape, self.y_dtype)
        norm = residual = None
        if self.norm:
            norm = graph.weight("norm", (self.k,), "f32", self.arrays["norm"])
        if self.residual:
            residual = graph.activation("residual", self.arrays["residual"].shape, "f32")
        return matvec(
            graph,
            x,
            w,
            y,
            norm=norm,
            residual=residual,
            swiglu=self.swiglu,
            sampled=self.sampled,
            eps=EPS,
            scale=self.scale,
            softcap=self.softcap,
        )

    def run(
        self,
        level: str,
        step: StepRows | None = None,
        coords: list[tuple[int, int]] | None = None,
        scratch_bytes: int = 1 << 22,
    ) -> NDArray[Any]:
        """A fresh y, computed by the body, one task a tile."""
        op, arrays = self.operator(), dict(self.arrays, y=self.empty())
        tiles = coords or [t.coords for t in MATVEC.tile(op, Target("host", 2))]
        kind, _ = bodies(level).run(
            MATVEC,
            arrays,
            op.params,
            step or all_rows(self.rows),
            coords=tiles,
            scratch_bytes=scratch_bytes,
        )
        assert kind == 0
        return arrays["y"]

    def reference(self, step: StepRows | None = None) -> NDArray[np.float32]:
        """The same by graphs/ops/matvec.py."""
        dtypes = {"x": self.x_dtype, "w": self.w_dtype}
        arrays = {
            name: to_float32(a, DTYPES[dtypes.get(name, "f32")]) if name != "y" else a
            for name, a in self.arrays.items()
        }
        arrays["y"] = np.full(self.arrays["y"].shape, np.nan, np.float32)
        MATVEC.reference(self.operator(), arrays, step or all_rows(self.rows))
        return arrays["y"]


def all_rows(rows: int) -> StepRows:
    return step_rows(list(range(rows)), list(range(rows)), sample_rows=list(range(rows)))


def relative_error(case: Case, y: NDArray[Any]) -> float:
    """Largest |y - x w| over |x| |w|, with the products in float64."""
    x = to_float32(case.arrays["x"], DTYPES[case.x_dtype]).astype(np.float64)
    w = to_float32(case.arrays["w"], DTYPES[case.w_dtype]).astype(np.float64)
    size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=1)[None, :]
    return float(np.max(np.abs(y.astype(np.float64) - x @ w.T) / size))


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", FLOATS + BLOCKS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (7, 64), (65, 576), (130, 1536)])
def test_matvec_equals_float64_within_rounding(level: str, dtype: str, n: int, k: int) -> None:
    case = Case(n, k, 3, dtype, seed=n + k)
    bound = BLOCK_ERROR if dtype in BLOCKS else FLOAT_ERROR
    assert relative_error(case, case.run(level)) < bound


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k", [1, 5, 17, 33, 100, 575])
def test_float_weights_take_any_number_of_columns(level: str, dtype: str, k: int) -> None:
    case = Case(5, k, 2, dtype, seed=k)
    assert relative_error(case, case.run(level)) < FLOAT_ERROR


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", FLOATS + BLOCKS)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 16, 21])
def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it(
    level: str, dtype: str, rows: int
) -> None:
    case = Case(22, 96, rows, dtype, norm=True, swiglu=True, residual=True)
    together = case.run(level)
    for row in range(rows):
        alone = Case(22, 96, 1, dtype, norm=True, swiglu=True, residual=True)
        alone.arrays = dict(case.arrays)
        for name in ("x", "residual"):
            alone.arrays[name] = guarded(case.arrays[name][row : row + 1])
        assert same_bits(alone.run(level), together[row : row + 1])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", FLOATS + BLOCKS)
def test_bits_do_not_depend_on_tiles_or_scratch(level: str, dtype: str) -> None:
    case = Case(150, 160, 5, dtype, norm=True)
    whole = case.run(level, coords=[(0, 150)])
    cut = [(0, 1), (1, 2), (2, 7), (7, 71), (71, 150)]
    assert same_bits(case.run(level, coords=cut), whole)
    assert same_bits(case.run(level, scratch_bytes=64), whole)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", FLOATS + BLOCKS)
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize(
    "options",
    [
        {"norm": True},
        {"residual": True},
        {"swiglu": True},
        {"norm": True, "swiglu": True},
        {"norm": True, "residual": True, "swiglu": True},
        {"scale": 0.25},
        {"scale": 0.05, "softcap": 5.0, "residual": True},
        {"scale": 0.02, "softcap": 2.0, "swiglu": True},
    ],
    ids=lambda options: "+".join(options),
)
def test_norm_and_epilogues_equal_the_reference(
    level: str, dtype: str, x_dtype: str, options: dict[str, Any]
) -> None:
    case = Case(70, 192, 4, dtype, x_dtype=x_dtype, **options)
    expected = case.reference()
    # BLOCK_ERROR times |x| |w|, of which the largest results are about a tenth.
    atol = 1e-4 * np.abs(expected).max()
    np.testing.assert_allclose(case.run(level), expected, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("y_dtype", ["f16", "bf16"])
def test_results_are_rounded_to_the_dtype_of_y(level: str, y_dtype: str) -> None:
    plain, rounded = (Case(37, 64, 3, "f32", y_dtype=d) for d in ("f32", y_dtype))
    expected = to_storage(plain.run(level), DTYPES[y_dtype])
    assert same_bits(rounded.run(level), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_sampled_rows_alone_are_computed_and_lie_compact(level: str) -> None:
    case = Case(48, 64, 6, "q8_0", norm=True, sampled=True)
    step = step_rows(range(6), range(6), sample_rows=[1, 4])
    y = case.run(level, step)
    expected = case.reference(step)[:2]
    np.testing.assert_allclose(y[:2], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert same_bits(y[2:], case.empty()[2:])
    nothing = step_rows(range(6), range(6), sample_rows=[])
    assert same_bits(case.run(level, nothing), case.empty())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", FLOATS + BLOCKS)
def test_rows_past_the_steps_rows_are_neither_read_nor_written(level: str, dtype: str) -> None:
    case = Case(20, 64, 5, dtype, norm=True)
    case.arrays["x"][3:] = np.nan
    y = case.run(level, all_rows(3))
    assert np.isfinite(y[:3]).all()
    assert same_bits(y[3:], case.empty()[3:])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", FLOATS + BLOCKS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{}, {"norm": True}, {"softcap": 4.0}], ids=str)
def test_a_number_that_is_not_finite_reaches_every_result_of_its_row(
    level: str, dtype: str, bad: float, options: dict[str, Any]
) -> None:
    case = Case(9, 96, 5, dtype, **options)
    case.arrays["x"][2, 70] = bad
    finite = np.isfinite(case.run(level))
    assert not finite[2].any()
    assert finite[[0, 1, 3, 4]].all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", BLOCKS)
def test_blocks_of_zeros_tiny_and_huge_activations_stay_exact_enough(
    level: str, dtype: str
) -> None:
    case = Case(8, 128, 1, dtype)
    x = case.arrays["x"]
    x[0, :32], x[0, 32:64] = 0.0, x[0, 32:64] * np.float32(1e-20)
    x[0, 64:96] *= np.float32(1e20)
    y = case.run(level)
    assert np.isfinite(y).all()
    assert relative_error(case, y) < BLOCK_ERROR


@pytest.mark.parametrize("level", LEVELS)
def test_an_outlier_blurs_only_its_own_block(level: str) -> None:
    case = Case(16, 64, 1, "q8_0")
    case.arrays["x"][0, 5] = 3000.0
    case.arrays["w"].reshape(16, 2, 34)[:, 0, :2] = 0  # the outlier's block weighs nothing
    x, w = case.arrays["x"], to_float32(case.arrays["w"], DTYPES["q8_0"])
    exact = x[:, 32:].astype(np.float64) @ w[:, 32:].astype(np.float64).T
    np.testing.assert_allclose(case.run(level), exact, atol=1e-4 * np.abs(exact).max())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", FLOATS + BLOCKS)
def test_rows_kept_from_the_last_task_are_never_stale(level: str, dtype: str) -> None:
    # A worker keeps prepared rows between tasks. Same addresses, new content: nothing may remain.
    case = Case(8, 64, 6, dtype, norm=True, sampled=True)
    step = step_rows(range(6), range(6), sample_rows=[0, 3])
    for name, at in (("x", (3, 63)), ("norm", (17,)), ("x", (0, 0))):
        before = case.run(level, step)
        case.arrays[name][at] += np.float32(1)
        assert not same_bits(case.run(level, step), before)
        np.testing.assert_allclose(case.run(level, step)[:2], case.reference(step)[:2], rtol=1e-2)
    other = step_rows(range(6), range(6), sample_rows=[0, 4])
    np.testing.assert_allclose(case.run(level, other)[:2], case.reference(other)[:2], rtol=1e-2)
