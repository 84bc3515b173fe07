"""The host's reduce_squares and combine_columns against their references, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.body import Target
from gpurt.errors import GraphError
from gpurt.graph import Graph
from gpurt.graphs.ops.combine_columns import combine_columns
from gpurt.graphs.ops.reduce_squares import SUMS, reduce_squares
from tests.gpu import test_combine_columns, test_reduce_squares
from tests.helpers.host_bodies import bodies
from tests.helpers.oracle import step_rows

CUDA = Target("cuda", 132, 16, "sm_90a", 232448, 60 << 20)
ROWS = 16


def both(op, arrays, rows):
    """What the host's body and the reference make of the same arrays."""
    step = step_rows(range(rows), range(rows))
    seen, wanted = ({n: a.copy() for n, a in arrays.items()} for _ in range(2))
    coords = [tile.coords for tile in op.body.tile(op, Target("host", 2))]
    host = bodies("portable")
    assert host.run(op.body, seen, op.params, step, coords=coords, plan_rows=ROWS)[0] == 0
    op.body.reference(op, wanted, step)
    return seen, wanted


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("shape", [(5, 3, 4), (300, 8, 2), (1156, 1, 8)])
def test_reduce_squares_equals_its_reference(shape, rows):
    op = test_reduce_squares.operator(*shape)
    seen, wanted = both(op, test_reduce_squares.inputs(op, rows), rows)
    assert np.array_equal(seen["x"], wanted["x"], equal_nan=True)
    np.testing.assert_allclose(seen["y"], wanted["y"], rtol=5e-6)


@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("shape", [(5, 3, 4), (300, 8, 2), (64, 12, 8)])
def test_combine_columns_equals_its_reference(shape, rows):
    op = test_combine_columns.operator(*shape)
    seen, wanted = both(op, test_combine_columns.inputs(op, rows), rows)
    np.testing.assert_allclose(seen["y"], wanted["y"], rtol=5e-6, atol=5e-6)


def test_squares_of_parts_are_those_of_the_whole():
    """Four sums a pair and rank: together the pair's sum of squares over all columns."""
    op = test_reduce_squares.operator(300, 3, 2)
    arrays = test_reduce_squares.inputs(op, 4)
    seen, _ = both(op, arrays, 4)
    squares = np.sum(seen["x"][:12].astype(np.float64) ** 2, axis=1)
    np.testing.assert_allclose(seen["y"][:4].reshape(12, SUMS).sum(axis=1), squares, rtol=1e-5)


@pytest.mark.parametrize(("top_k", "count"), [(8, 32), (3, 48), (1, 16)])
def test_a_tile_is_of_one_row_and_no_more_than_a_team(top_k, count):
    op = test_reduce_squares.operator(512, top_k, 8)
    tiles = op.body.tile(op, CUDA)
    assert len(tiles) == count
    assert all(t.coords[0] // top_k == (t.coords[1] - 1) // top_k for t in tiles)


def test_shapes_that_do_not_fit_are_refused():
    graph = Graph("sums", rows=2)
    parts = graph.activation("parts", [4, 6, 8], "f32")
    x, y = graph.activation("x", [6, 8], "f32"), graph.activation("y", [2, 12], "f32")
    gain = graph.weight("gain", [9], "f32", lambda: None)
    with pytest.raises(GraphError, match=r"gain \[9\].*at sums.reduce_squares - x needs \[6, 8\]"):
        reduce_squares(graph, parts, gain, x, y)
    routes = graph.activation("routes", [64], "u32")
    given = {"ranks": 4, "experts": 5, "top_k": 3, "eps": 1e-5}
    with pytest.raises(GraphError, match=r"at sums.combine - they need .*\(2, 48\)"):
        combine_columns(graph, x, y, routes, graph.activation("z", [2, 8], "f32"), **given)


@pytest.mark.parametrize(("width", "top_k", "what"), [(6, 3, "6 columns"), (8, 33, "33 experts")])
def test_what_the_gpu_cannot_is_refused(width, top_k, what):
    module = test_reduce_squares if width % 4 else test_combine_columns
    op = module.operator(width, top_k, 2)
    with pytest.raises(GraphError, match=rf"^{what} .* - use device"):
        op.body.tile(op, CUDA)
