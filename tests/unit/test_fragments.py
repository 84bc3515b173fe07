"""Which activations lie in the order in which matvecs read them: planner/fragments.py."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.bench.graphs import chain
from gpurt.body import Body, Target
from gpurt.executors.fragments import side_by_side
from gpurt.graph import Graph
from gpurt.graphs.ops.gated_residual import gated_residual
from gpurt.graphs.ops.matvec import matvec
from gpurt.planner import plan

CUDA = Target("cuda", 4, 16, "sm_90a", 232448, 50 << 20)
HOST = Target("host", 2)
HIDDEN = 128


def made(rows: int = 16, hidden: int = HIDDEN, dtype: str = "bf16") -> Graph:
    """A gate whose normed rows two matvecs read."""
    graph = Graph("gated", rows=rows)
    ones = np.ones(hidden, np.float32)
    vector = [graph.weight(name, [hidden], "f32", ones) for name in ("alpha", "beta", "norm")]
    branch, stream = (graph.input(name, [rows, hidden], "f32") for name in ("branch", "stream"))
    s = graph.activation("s", [rows, hidden], "f32")
    normed = graph.activation("normed", [rows, hidden], dtype)
    gated_residual(graph, branch, stream, *vector[:2], s, norm=vector[2], normed=normed, eps=1e-5)
    for name in ("a", "b"):
        w = graph.weight(f"{name}.w", [32, hidden], "bf16", np.zeros((32, hidden), np.uint16))
        matvec(graph, normed, w, graph.output(name, [rows, 32], "f32"), name=name)
    return graph


def fragments(graph: Graph, target: Target) -> dict[str, int]:
    """The parameter of those operators that have it."""
    result = plan(graph, target)
    return {
        result.operators[task.op].name: int(task.params[15 if task.body == "matvec" else -1])
        for task in result.tasks
        if task.body in ("gated_residual", "matvec")
    }


@pytest.mark.parametrize(("rows", "tiles"), [(16, 2), (8, 1)])
def test_writer_and_readers_agree_on_whole_row_tiles(rows: int, tiles: int) -> None:
    assert fragments(made(rows), CUDA) == {"gated_residual": tiles, "a": tiles, "b": tiles}


def test_each_step_size_has_its_own_order() -> None:
    graph = Graph("sizes", rows=16)
    ones = np.ones(HIDDEN, np.float32)
    alpha, beta, norm = (graph.weight(n, [HIDDEN], "f32", ones) for n in ("alpha", "beta", "norm"))
    branch = graph.input("branch", [16, HIDDEN], "f32")
    s = graph.row_activation("s", HIDDEN, "f32")
    normed = graph.row_activation("normed", HIDDEN, "bf16")
    gated_residual(graph, branch, branch, alpha, beta, s, norm=norm, normed=normed, eps=1e-5)
    w = graph.weight("w", [32, HIDDEN], "bf16", np.zeros((32, HIDDEN), np.uint16))
    matvec(graph, normed, w, graph.output("y", [16, 32], "f32"), name="y")
    for size, tiles in ((1, 0), (8, 1), (12, 0), (16, 2)):
        assert fragments(graph.narrowed(size), CUDA) == {"gated_residual": tiles, "y": tiles}


@pytest.mark.parametrize(
    ("graph", "target"),
    [
        (made(5), CUDA),  # no whole row tile
        (made(hidden=144), CUDA),  # a chunk that is none
        (made(dtype="f32"), CUDA),
        (made(), HOST),
    ],
    ids=["5 rows", "144 columns", "floats", "host"],
)
def test_others_keep_rows_side_by_side(graph: Graph, target: Target) -> None:
    assert set(fragments(graph, target).values()) == {0}


def test_a_reader_who_knows_no_order_keeps_all_from_it() -> None:
    graph = made()
    normed = next(b for b in graph.buffers if b.name == "normed")
    graph.task(Body("copy", (), cuda="struct copy;"), [normed], [graph.output("c", [16], "f32")])
    assert set(fragments(graph, CUDA).values()) == {0}


def test_what_a_matvec_makes_for_matvecs_lies_in_fragments() -> None:
    result = plan(chain(3, HIDDEN, 16), CUDA)
    tiles = {
        result.buffers[task.addr[4][0]].name: int(task.params[16])
        for task in result.tasks
        if task.body == "matvec" and task.addr[4] is not None
    }
    assert tiles == {"h[0]": 2, "h[1]": 2, "y": 0}


def test_rows_are_found_again() -> None:
    rows, width = 16, 128
    want = np.arange(rows * width, dtype=np.uint16).reshape(rows, width)
    lies = np.zeros(rows * width, np.uint16)
    for row in range(rows):
        for column in range(width):
            granule, chunk = column % 64 // 8, column // 64
            at = (chunk * 2 + row // 8) * 512 + granule // 4 * 256
            lies[at + (row % 8 * 4 + granule % 4) * 8 + column % 8] = want[row, column]
    assert np.array_equal(side_by_side(lies.reshape(rows, width)), want)
