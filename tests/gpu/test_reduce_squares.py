"""reduce_squares on the GPU against its reference, and its bits over rows and teams."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.reduce_squares import SUMS, reduce_squares
from tests.gpu.one_op import TEAMS, Arrays, reference, rows_step, run_op, runner
from tests.gpu.one_task import first_difference

ROWS = 16
SHAPES = [(36, 3, 4), (512, 8, 8), (1156, 2, 2)]  # columns a rank, T, ranks


def operator(width: int, top_k: int, ranks: int) -> Operator:
    graph, pairs = Graph(rows=ROWS), ROWS * top_k
    return reduce_squares(
        graph,
        graph.activation("parts", [ranks, pairs, 2 * width], "f32")[:, :, :width],
        graph.weight("gain", [width], "f32", lambda: None),
        graph.activation("x", [pairs, width], "f32"),
        graph.activation("y", [ROWS, top_k * SUMS], "f32"),
    )


def inputs(op: Operator, rows: int) -> Arrays:
    rng = np.random.default_rng(rows)
    shapes = {name: region.buffer.shape for name, region in op.args.items()}
    arrays = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    arrays["parts"][:, rows * int(op.params["per_row"]) :] = np.nan
    arrays["x"][...] = arrays["y"][...] = np.nan
    return arrays


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_reduce_squares_equals_its_reference(shape: tuple[int, int, int], rows: int) -> None:
    op, step = operator(*shape), rows_step(rows)
    arrays = inputs(op, rows)
    got, want = run_op(op, arrays, step, runner(op.body.name)), reference(op, arrays, step)
    assert np.array_equal(got["x"], want["x"], equal_nan=True)  # the same additions
    difference = first_difference(got["y"][:rows], want["y"][:rows], 2e-6)
    assert difference is None, difference
    assert np.isnan(got["y"][rows:]).all(), "rows past the step were written"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_rows_or_team(shape: tuple[int, int, int]) -> None:
    op, top_k = operator(*shape), shape[1]
    arrays, body = inputs(op, 16), op.body.name
    together = [run_op(op, arrays, rows_step(16), runner(body, t))["y"] for t in TEAMS]
    assert together[0].tobytes() == together[1].tobytes()
    for row in (0, 7, 15):
        alone = {name: array.copy() for name, array in arrays.items()}
        alone["parts"][:, :top_k] = arrays["parts"][:, row * top_k : (row + 1) * top_k]
        got = run_op(op, alone, rows_step(1), runner(body))["y"]
        assert got[0].tobytes() == together[0][row].tobytes(), f"row {row}"
