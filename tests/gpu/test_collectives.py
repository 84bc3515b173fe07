"""The bodies of collectives on the GPU against their references, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.collect import collect
from gpurt.graphs.ops.gated_residual import gated_residual
from gpurt.graphs.ops.publish import publish
from gpurt.graphs.ops.reduce import reduce
from tests.gpu.one_op import reference, run_op, runner
from tests.gpu.one_task import Step, first_difference

ROWS, RANKS = 16, 4  # OneTask's capacity
STEP = Step([0] * 5, range(5), sample_rows=[1, 4])
KINDS = ["publish", "beside", "scatter", "reduce", "reduce-behind", "sum", "sum-behind"]


def operator(kind: str, width: int, per_row: int, sampled: bool) -> Operator:
    """Slots are the first columns of their buffer's rows."""
    graph, rows = Graph("collective", rows=ROWS), ROWS * per_row
    slots = graph.activation("slots", [RANKS, rows, 3 * width], "f32")[:, :, :width]
    in_place = graph.activation("rows", [rows, (RANKS + 1) * width], "f32")[:, : RANKS * width]
    part, behind = (graph.activation(name, [rows, width], "f32") for name in ("part", "behind"))
    wide, wide_behind = (
        graph.activation(f"{name}.wide", [rows, RANKS * width], "f32")
        for name in ("part", "behind")
    )
    options = {"per_row": per_row, "sampled": sampled}
    if kind == "publish":
        return publish(graph, part, slots, **options)
    if kind == "beside":
        return publish(graph, part, in_place, **options)
    if kind == "scatter":
        return publish(graph, wide, slots, scatter=True, **options)
    if kind.startswith("reduce"):
        residual = wide_behind if "-" in kind else None
        return reduce(graph, slots, in_place, per_row=per_row, residual=residual)
    return collect(graph, slots, part, residual=behind if "-" in kind else None, **options)


@pytest.mark.parametrize(("width", "per_row", "sampled"), [(1500, 1, 0), (64, 3, 0), (2049, 1, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_each_part_equals_its_reference(kind: str, width: int, per_row: int, sampled: int) -> None:
    op, rng = operator(kind, width, per_row, bool(sampled)), np.random.default_rng(0)
    written = op.writes[0].buffer
    arrays = {}
    for name, region in op.args.items():
        shape = region.buffer.shape
        arrays[name] = rng.standard_normal(shape).astype(np.float32)
        if region.buffer is written:
            arrays[name][...] = np.nan
    got, want = run_op(op, arrays, STEP, runner(op.body.name)), reference(op, arrays, STEP)
    for name in arrays:
        assert np.array_equal(got[name], want[name], equal_nan=True), name


@pytest.mark.parametrize("width", [192, 4096])
def test_a_gated_residual_adds_up_its_branch(width: int) -> None:
    graph, rng = Graph(rows=ROWS), np.random.default_rng(1)
    vectors = {n: graph.weight(n, [width], "f32", lambda: None) for n in ("alpha", "beta")}
    stream, y = (graph.activation(n, [ROWS, width], "f32") for n in ("stream", "y"))
    slots = graph.activation("slots", [RANKS, ROWS, 2 * width], "f32")[:, :, :width]
    op = gated_residual(graph, slots, stream, y=y, eps=1e-5, **vectors)
    arrays = {
        name: rng.standard_normal(region.buffer.shape).astype(np.float32)
        for name, region in op.args.items()
    }
    got = run_op(op, arrays, STEP, runner("gated_residual"))["y"][:5]
    want = reference(op, arrays, STEP)["y"][:5]
    assert (difference := first_difference(got, want, 2e-6)) is None, difference
