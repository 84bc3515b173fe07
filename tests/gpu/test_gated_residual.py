"""gated_residual on the GPU against its reference, and its bits over rows and teams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpurt.graph import Graph, Operator
from gpurt.graphs.ops.dtypes import to_float32
from gpurt.graphs.ops.gated_residual import gated_residual
from tests.gpu.one_op import TEAMS, Arrays, reference, rows_step, run_op, runner
from tests.gpu.one_task import first_difference

PLAN_ROWS = 16
# The whole of one tile, a tile's end, several tiles, and fewer granules than a team has threads
WIDTHS = [48, 192, 2048, 2052, 8192]
TOLERANCE = 2e-6  # float32, in another order
NAN = {4: np.nan, 2: 0x7FC0}  # by bytes of an element as stored
NORMED = ["f32", "bf16"]
TOLERANCE_NORMED = {"f32": 4e-6, "bf16": 2**-7}  # of two norms; of a close call of a rounding


def operator(hidden: int, gain: bool, normed: str = "") -> Operator:
    graph = Graph(rows=PLAN_ROWS)
    names = ("alpha", "beta", "gain", "norm")
    vector = {n: graph.weight(n, [hidden], "f32", lambda: None) for n in names}
    rows = {n: graph.activation(n, [PLAN_ROWS, hidden], "f32") for n in ("branch", "stream", "y")}
    options: dict[str, Any] = {}
    if normed:
        to = graph.activation("normed", [PLAN_ROWS, hidden], normed)
        options = {"norm": vector["norm"], "normed": to, "norm_eps": 1e-3}
    return gated_residual(
        graph,
        rows["branch"],
        rows["stream"],
        vector["alpha"],
        vector["beta"],
        rows["y"],
        gain=vector["gain"] if gain else None,
        eps=1e-5,
        **options,
    )


def inputs(op: Operator, rows: int, seed: int = 0) -> Arrays:
    """Random arguments; rows past the step's are NaN, and so are y and normed."""
    rng = np.random.default_rng(seed)
    arrays = {n: rng.standard_normal(r.shape).astype(np.float32) for n, r in op.args.items()}
    for name in ("branch", "stream"):
        arrays[name][rows:] = np.nan
    arrays["y"][...] = np.nan
    if "normed" in arrays:
        storage = op.args["normed"].buffer.dtype.storage
        arrays["normed"] = np.full(arrays["y"].shape, NAN[storage.itemsize], storage)
    return arrays


def floats(op: Operator, normed: Any) -> Any:
    return to_float32(normed, op.args["normed"].buffer.dtype)


@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("gain", [False, True], ids=["plain", "gain"])
@pytest.mark.parametrize("rows", [1, 3, 5, 16])
def test_gated_residual_equals_its_reference(hidden: int, gain: bool, rows: int) -> None:
    op = operator(hidden, gain)
    arrays, step = inputs(op, rows), rows_step(rows)
    got = run_op(op, arrays, step, runner("gated_residual"))["y"]
    want = reference(op, arrays, step)["y"]
    assert (difference := first_difference(got[:rows], want[:rows], TOLERANCE)) is None, difference
    assert np.isnan(got[rows:]).all(), "rows past the step were written"


@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("normed", NORMED)
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_what_is_normed_equals_its_reference(hidden: int, normed: str, rows: int) -> None:
    op = operator(hidden, True, normed)
    arrays, step = inputs(op, rows), rows_step(rows)
    arrays["stream"][:rows] *= 3  # a norm that does nothing would be seen
    got = run_op(op, arrays, step, runner("gated_residual"))
    want = reference(op, arrays, step)
    plain = operator(hidden, True)
    alone = run_op(plain, {n: arrays[n] for n in plain.args}, step, runner("gated_residual"))
    assert got["y"].tobytes() == alone["y"].tobytes()
    pair = floats(op, got["normed"]), want["normed"]
    difference = first_difference(pair[0][:rows], pair[1][:rows], TOLERANCE_NORMED[normed])
    assert difference is None, difference
    assert np.isnan(pair[0][rows:]).all(), "rows past the step were written"


@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("normed", NORMED)
def test_bits_of_what_is_normed_do_not_depend_on_rows_or_team(hidden: int, normed: str) -> None:
    op = operator(hidden, True, normed)
    arrays = inputs(op, 16, seed=3)
    wanted, other = (
        run_op(op, arrays, rows_step(16), runner("gated_residual", t))["normed"] for t in TEAMS
    )
    assert wanted.tobytes() == other.tobytes()
    for row in (0, 7, 15):
        alone = dict(arrays)
        for name in ("branch", "stream"):
            alone[name] = np.full_like(arrays[name], np.nan)
            alone[name][0] = arrays[name][row]
        got = run_op(op, alone, rows_step(1), runner("gated_residual"))["normed"]
        assert got[0].tobytes() == wanted[row].tobytes(), f"row {row}"


@pytest.mark.parametrize("hidden", WIDTHS)
def test_bits_do_not_depend_on_rows_or_team(hidden: int) -> None:
    op = operator(hidden, True)
    arrays = inputs(op, 16, seed=3)
    together = [run_op(op, arrays, rows_step(16), runner("gated_residual", t))["y"] for t in TEAMS]
    assert together[0].tobytes() == together[1].tobytes()
    for row in range(16):
        alone = dict(arrays, branch=arrays["branch"].copy(), stream=arrays["stream"].copy())
        for name in ("branch", "stream"):
            alone[name][0], alone[name][1:] = arrays[name][row], np.nan
        got = run_op(op, alone, rows_step(1), runner("gated_residual"))["y"]
        assert got[0].tobytes() == together[0][row].tobytes(), f"row {row}"
