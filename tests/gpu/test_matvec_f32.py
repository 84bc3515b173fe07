"""The exact matvec on the GPU against its reference, and its bits over rows and teams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.matvec import matvec
from tests.gpu.one_op import TEAMS, Arrays, reference, rows_step, run_op, runner
from tests.gpu.one_task import first_difference

PLAN_ROWS = 16
TOLERANCE = 1e-6  # of the largest output: float32 from end to end
SHAPES = [(13, 192), (256, 8192), (4, 36), (130, 2052), (1, 4)]  # N, K


def operator(n: int, k: int, norm: bool = True, **more: Any) -> Operator:
    graph = Graph(rows=PLAN_ROWS)
    return matvec(
        graph,
        graph.activation("x", [PLAN_ROWS, k], "f32"),
        graph.weight("w", [n, k], "f32", lambda: None),
        graph.activation("y", [PLAN_ROWS, n], "f32"),
        norm=graph.weight("norm", [k], "f32", lambda: None) if norm else None,
        eps=1e-5,
        exact=True,
        **more,
    )


def inputs(op: Operator, rows: int, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    arrays = {n: rng.standard_normal(r.shape).astype(np.float32) for n, r in op.args.items()}
    arrays["w"] /= np.sqrt(np.float32(arrays["w"].shape[1]))
    arrays["x"][rows:] = np.nan
    arrays["y"][...] = np.nan
    return arrays


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "more", [{}, {"scale": 0.4}, {"scale": 2.0, "softcap": 3.0}], ids=["plain", "scale", "softcap"]
)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_products_are_exact_to_float32(shape: tuple[int, int], norm: bool, more: Any) -> None:
    op = operator(*shape, norm, **more)
    for rows in (1, 5, 16):
        arrays, step = inputs(op, rows), rows_step(rows)
        got = run_op(op, arrays, step, runner("matvec_f32"))["y"]
        wide = {name: array.astype(np.float64) for name, array in arrays.items()}
        want = reference(op, arrays, step)["y"]
        if not more and not norm:
            want[:rows] = wide["x"][:rows] @ wide["w"].T
        difference = first_difference(got[:rows], want[:rows], 2 * TOLERANCE, rows=rows)
        assert difference is None, difference
        assert np.isnan(got[rows:]).all(), "rows past the step were written"


@pytest.mark.parametrize("shape", SHAPES[:1] + SHAPES[3:], ids=str)
def test_bits_do_not_depend_on_rows_or_team(shape: tuple[int, int]) -> None:
    op = operator(*shape, scale=0.7)
    arrays = inputs(op, 16, seed=3)
    both = [run_op(op, arrays, rows_step(16), runner("matvec_f32", team))["y"] for team in TEAMS]
    assert both[0].tobytes() == both[1].tobytes()
    for row in range(16):
        alone = dict(arrays, x=np.full_like(arrays["x"], np.nan))
        alone["x"][0] = arrays["x"][row]
        got = run_op(op, alone, rows_step(1), runner("matvec_f32"))["y"]
        assert got[0].tobytes() == both[0][row].tobytes(), f"row {row}"
