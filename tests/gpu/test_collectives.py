"""publish and collect on the GPU against their references, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from gpurt.body import StepRows, Target
from gpurt.buffer import f32
from gpurt.graph import Graph
from gpurt.graphs.ops.collect import collect
from gpurt.graphs.ops.publish import publish
from tests.gpu.one_task import OneTask, Step

ROWS, RANKS = 16, 4  # OneTask's capacity
TARGET = Target("cuda", 132, 16, "sm_90a")


@pytest.mark.parametrize(("width", "per_row", "sampled"), [(1500, 1, 0), (64, 3, 0), (2049, 1, 1)])
@pytest.mark.parametrize("kind", [None, 0, 1], ids=["publish", "sum", "side-by-side"])
def test_both_halves_equal_their_references(
    kind: int | None, width: int, per_row: int, sampled: int
) -> None:
    rng, rows = np.random.default_rng(0), ROWS * per_row
    graph = Graph("collective", rows=ROWS)
    part = graph.activation("part", [rows, width], f32)
    slots = graph.activation("slots", [RANKS, rows, width], f32)
    whole = graph.activation("y", [rows, width * (RANKS if kind == 1 else 1)], f32)
    shared = {"per_row": per_row, "sampled": bool(sampled)}
    if kind is None:
        op = publish(graph, part, slots, **shared)
        arrays = {"part": rng.standard_normal(part.shape).astype(np.float32)}
        arrays["slots"] = np.full(slots.shape, np.nan, np.float32)
    else:
        op = collect(graph, slots, whole, kind=kind, **shared)
        arrays = {"slots": rng.standard_normal(slots.shape).astype(np.float32)}
        arrays["y"] = np.full(whole.shape, np.nan, np.float32)
    assert op.body.tile is not None
    assert op.body.reference is not None
    coords = [tile.coords for tile in op.body.tile(op, TARGET)]
    step = Step([0] * 5, range(5), sample_rows=[1, 4])
    names = list(arrays)
    got = OneTask(op.body.name).run(
        [arrays[name] for name in names], list(op.params.values()), coords, step
    )
    numbers = np.arange(5, dtype=np.uint32)
    rows_of_step = StepRows(numbers, numbers, numbers, np.array([1, 4], np.uint32))
    want = {name: array.copy() for name, array in arrays.items()}
    op.body.reference(op, want, rows_of_step)
    for name, array in zip(names, got, strict=False):
        assert array is not None
        assert np.array_equal(array, want[name], equal_nan=True), name
