"""Runs all CUDA tiles of one operator on the GPU, and its reference beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.body import StepRows, Target
from gpurt.buffer import DTYPES
from gpurt.graph import Operator
from gpurt.graphs.ops.dtypes import to_float32
from gpurt.graphs.ops.packing import pack
from tests.gpu.one_task import OneTask, Step

Arrays = dict[str, NDArray[Any]]
# What tiles ask of a target: neither workers nor shared memory change them.
TARGET = Target("cuda", 132, 16, "sm_90a", 232448, 60 << 20)
TEAMS = (16, 1)


@cache
def runner(body: str, team_warps: int = 16, features: tuple[str, ...] = ()) -> OneTask:
    """The body's kernel, compiled once."""
    return OneTask(body, "", team_warps, features)


def run_op(
    op: Operator,
    arrays: Mapping[str, NDArray[Any]],
    step: Step,
    one: OneTask,
    workers: int = TARGET.workers,
) -> Arrays:
    """Every argument after all tiles have run. arrays: by argument, as stored; absent: optional."""
    assert op.body.tile is not None
    tiles = op.body.tile(op, replace(TARGET, team_warps=one.team_warps, workers=workers))
    coords = [tile.coords for tile in tiles]
    names = [arg.name for arg in op.body.args]
    given = [_packed(op, name, arrays[name]) if name in arrays else None for name in names]
    streams = None
    if "routes" in names and "w" in names:
        streams = [tile.stream for tile in tiles], names.index("w"), names.index("routes")
    got = one.run(given, list(op.params.values()), coords, step, streams=streams)
    return {
        name: array
        for name, array in zip([*names, "sampled"], got, strict=True)
        if array is not None
    }


def reference(op: Operator, arrays: Mapping[str, NDArray[Any]], step: Step) -> Arrays:
    """What graphs/ops says the arrays hold then; floats as float32."""
    assert op.body.reference is not None
    want = {name: _floats(op, name, array) for name, array in arrays.items()}
    op.body.reference(op, want, step_rows(step))
    return want


def step_rows(step: Step) -> StepRows:
    """The same step as references see it."""
    tokens = step.tokens or [0] * len(step.slots)
    return StepRows(
        np.array(tokens, np.uint32),
        np.array(step.slots, np.uint32),
        np.array(step.positions, np.uint32),
        np.array(step.sample_rows, np.uint32),
    )


def rows_step(rows: int) -> Step:
    """A step of so many rows of one sequence."""
    return Step([0] * rows, list(range(rows)))


def _packed(op: Operator, name: str, array: NDArray[Any]) -> NDArray[Any]:
    packing = op.body.packing(op, name, TARGET) if op.body.packing is not None else ""
    buffer = op.args[name].buffer
    if not packing:
        return array
    return pack(packing, array, buffer.shape, DTYPES[buffer.dtype.name])


def _floats(op: Operator, name: str, array: NDArray[Any]) -> NDArray[Any]:
    dtype = op.args[name].buffer.dtype
    return array.copy() if dtype.name == "u32" else to_float32(array, dtype).copy()
