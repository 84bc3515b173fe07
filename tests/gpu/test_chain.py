"""A chain of dependent layers on the GPU: the same bits for any rows, team and kind of edge."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.bench import graphs, made_up
from gpurt.buffer import bf16
from gpurt.graphs.ops.dtypes import to_bf16, to_float32
from gpurt.runtime import Runtime

LAYERS, WIDTH = 4, 1024
X = np.random.default_rng(5).standard_normal((16, WIDTH), np.float32)
WAYS = [
    (rows, team, edges)
    for rows in (1, 3, 16)
    for team in (16, 1)
    for edges in ("payload", "counter")
]


def run(rows: int, team: int, edges: str, steps: int = 8) -> list[NDArray[np.float32]]:
    """All layers' outputs after some steps, [rows, WIDTH] each."""
    graph = graphs.chain(LAYERS, WIDTH, rows)
    with Runtime("cuda:0", team_warps=team, edges=edges) as runtime:
        request = runtime.submit(graph, inputs={"x": X[:rows]}, steps=steps)
        last = request.result(60).outputs["y"]
        hidden = [runtime.read(graph, f"h[{layer}]") for layer in range(LAYERS - 1)]
    return [*hidden, last]


@pytest.mark.parametrize(("rows", "team", "edges"), WAYS)
def test_row_0_has_the_same_bits_every_way(rows: int, team: int, edges: str) -> None:
    want, got = run(1, 16, "payload"), run(rows, team, edges)
    for layer, (a, b) in enumerate(zip(want, got, strict=True)):
        assert np.array_equal(a[0], b[0]), f"layer {layer}"


def test_every_layer_is_its_matrix_times_the_one_before() -> None:
    w = to_float32(made_up.matrix((WIDTH, WIDTH), bf16), bf16)
    x = to_float32(to_bf16(X), bf16)
    for layer, y in enumerate(run(16, 16, "payload")):
        want = x @ w.T
        error = np.linalg.norm(y - want) / np.linalg.norm(want)
        assert error < 4e-3, f"layer {layer}: bf16 rounds y once"
        x = y
