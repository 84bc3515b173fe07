"""combine_columns on the GPU against its reference, and its bits over rows and teams."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.combine_columns import combine_columns
from gpurt.graphs.ops.reduce_squares import SUMS
from gpurt.graphs.ops.route import RoutesLayout
from tests.gpu.one_op import TEAMS, Arrays, reference, rows_step, run_op, runner
from tests.gpu.one_task import first_difference
from tests.helpers.routes import choices, routes_of

ROWS = 16
EXPERTS = 40
# Columns a rank, T, ranks: pairs and ranks that a lane asks for at once, and more of both.
SHAPES = [(36, 3, 4), (512, 8, 8), (1156, 1, 2), (64, 12, 8)]


def operator(width: int, top_k: int, ranks: int) -> Operator:
    graph, pairs = Graph(rows=ROWS), ROWS * top_k
    return combine_columns(
        graph,
        graph.activation("x", [pairs, width], "f32"),
        graph.activation("squares", [ROWS, ranks * top_k * SUMS], "f32"),
        graph.activation("routes", [RoutesLayout(ROWS, EXPERTS, top_k).words], "u32"),
        graph.activation("y", [ROWS, width], "f32"),
        ranks=ranks,
        experts=EXPERTS,
        top_k=top_k,
        eps=1e-5,
    )


def inputs(op: Operator, rows: int) -> Arrays:
    rng, top_k = np.random.default_rng(rows), int(op.params["top_k"])
    arrays = {n: rng.standard_normal(r.shape).astype(np.float32) for n, r in op.args.items()}
    arrays["squares"] = np.abs(arrays["squares"])
    weights = rng.uniform(0.1, 2, (rows, top_k)).astype(np.float32)
    layout = RoutesLayout(ROWS, EXPERTS, top_k)
    arrays["routes"] = routes_of(layout, choices("random", rows, EXPERTS, top_k), weights)
    arrays["x"][rows * top_k :] = arrays["squares"][rows:] = arrays["y"][...] = np.nan
    return arrays


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_combine_columns_equals_its_reference(shape: tuple[int, int, int], rows: int) -> None:
    op, step = operator(*shape), rows_step(rows)
    arrays = inputs(op, rows)
    got = run_op(op, arrays, step, runner(op.body.name))["y"]
    want = reference(op, arrays, step)["y"]
    assert (difference := first_difference(got[:rows], want[:rows], 4e-6)) is None, difference
    assert np.isnan(got[rows:]).all(), "rows past the step were written"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_rows_or_team(shape: tuple[int, int, int]) -> None:
    op, top_k = operator(*shape), shape[1]
    arrays, body = inputs(op, 16), op.body.name
    together = [run_op(op, arrays, rows_step(16), runner(body, t))["y"] for t in TEAMS]
    assert together[0].tobytes() == together[1].tobytes()
    layout = RoutesLayout(ROWS, EXPERTS, top_k)
    weights = arrays["routes"][layout.pair(0) + 1 :: 2]
    for row in (0, 7, 15):
        alone = {name: array.copy() for name, array in arrays.items()}
        pairs = slice(row * top_k, (row + 1) * top_k)
        alone["x"][:top_k], alone["squares"][0] = arrays["x"][pairs], arrays["squares"][row]
        alone["routes"][layout.pair(0) + 1 : layout.pair(top_k) : 2] = weights[pairs]
        got = run_op(op, alone, rows_step(1), runner(body))["y"]
        assert got[0].tobytes() == together[0][row].tobytes(), f"row {row}"
