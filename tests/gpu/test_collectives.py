"""The bodies of collectives on the GPU against their references, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.collect import SIDE_BY_SIDE, SUM, collect
from gpurt.graphs.ops.gated_residual import gated_residual
from gpurt.graphs.ops.publish import publish
from gpurt.graphs.ops.reduce import reduce
from tests.gpu.one_op import reference, run_op, runner
from tests.gpu.one_task import Step, first_difference

ROWS, RANKS = 16, 4  # OneTask's capacity
STEP = Step([0] * 5, range(5), sample_rows=[1, 4])
KINDS = ["publish", "scatter", "reduce", "reduce-behind", "sum", "sum-behind", "side-by-side"]


def operator(kind: str, width: int, per_row: int, sampled: bool) -> Operator:
    """Slots are the first columns of their buffer's rows."""
    graph, rows = Graph("collective", rows=ROWS), ROWS * per_row
    wide = [RANKS, rows, 3 * width]
    slots = graph.activation("slots", wide, "f32")[:, :, :width]
    side_by_side = [rows, RANKS * width]
    if kind in ("publish", "scatter"):
        scatter = kind == "scatter"
        part = graph.activation("part", side_by_side if scatter else [rows, width], "f32")
        return publish(graph, part, slots, per_row=per_row, sampled=sampled, scatter=scatter)
    if kind.startswith("reduce"):
        sums = graph.activation("sums", wide, "f32")[:, :, :width]
        behind = graph.activation("behind", side_by_side, "f32") if "-" in kind else None
        return reduce(graph, slots, sums, per_row=per_row, residual=behind)
    shape = side_by_side if kind == "side-by-side" else [rows, width]
    y, behind = (graph.activation(name, shape, "f32") for name in ("y", "behind"))
    return collect(
        graph,
        slots,
        y,
        kind=SIDE_BY_SIDE if kind == "side-by-side" else SUM,
        per_row=per_row,
        sampled=sampled,
        residual=behind if kind == "sum-behind" else None,
    )


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


@pytest.mark.parametrize("kind", [SUM, SIDE_BY_SIDE], ids=["sum", "side-by-side"])
@pytest.mark.parametrize("width", [192, 4096])
def test_a_gated_residual_puts_its_branch_together(kind: int, width: int) -> None:
    graph, rng = Graph(rows=ROWS), np.random.default_rng(1)
    hidden = RANKS * width if kind == SIDE_BY_SIDE else width
    vectors = {n: graph.weight(n, [hidden], "f32", lambda: None) for n in ("alpha", "beta")}
    stream, y = (graph.activation(n, [ROWS, hidden], "f32") for n in ("stream", "y"))
    slots = graph.activation("slots", [RANKS, ROWS, 2 * width], "f32")[:, :, :width]
    op = gated_residual(graph, slots, stream, y=y, kind=kind, eps=1e-5, **vectors)
    arrays = {
        name: rng.standard_normal(region.buffer.shape).astype(np.float32)
        for name, region in op.args.items()
    }
    got = run_op(op, arrays, STEP, runner("gated_residual"))["y"][:5]
    want = reference(op, arrays, STEP)["y"][:5]
    assert (difference := first_difference(got, want, 2e-6)) is None, difference
