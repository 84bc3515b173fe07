"""matvec on the GPU against graphs/ops/matvec.py; and its bits, whatever rows, team and edges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt import wire
from gpurt.executors import cuda
from gpurt.executors.base import Options
from gpurt.graph import Graph
from gpurt.graphs.ops import matvec_cuda
from gpurt.graphs.ops.dtypes import to_bf16
from gpurt.graphs.ops.matvec import matvec
from gpurt.planner import plan
from tests.gpu.tiny_llama import device_target
from tests.helpers.drive import Driver

EPS = 1e-5
# bf16 rounds x (after its norm) by up to 2^-9 of each term; sums of hundreds of terms of both signs
# stay within a few of that of the row's own size.
RELATIVE = 2e-2
ROWS = 160  # of x; steps take the first ones


@dataclass(frozen=True)
class Case:
    """One matvec. dtype: of x and y."""

    n: int
    k: int
    dtype: str = "f32"
    norm: bool = False
    residual: bool = False
    swiglu: bool = False
    scale: float = 1.0
    softcap: float = 0.0

    def __str__(self) -> str:
        extras = [e for e in ("norm", "residual", "swiglu") if getattr(self, e)]
        return "-".join([f"{self.n}x{self.k}", self.dtype, *extras])


CASES = [
    Case(576, 576, residual=True),  # 9 chunks: a short last stage
    Case(960, 576, norm=True),
    Case(3072, 576, norm=True, swiglu=True),  # two row tiles a task
    Case(576, 1536, residual=True),  # two stages
    Case(8192, 576, norm=True),  # four row tiles a task
    Case(64, 80, norm=True),  # columns end inside a chunk
    Case(4800, 64),  # the last tiles are smaller powers of two
    Case(4800, 1040),  # four row tiles a task, which share floats of 16 rows
    Case(1000, 576),  # the last row tile is half a one
    Case(1024, 2048, dtype="bf16"),
    Case(960, 576, norm=True, scale=0.6, softcap=1.5),
]


def as_float(array: NDArray[Any]) -> NDArray[np.float32]:
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def data_of(case: Case) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(case.n * case.k)
    width = case.n // 2 if case.swiglu else case.n
    x = rng.standard_normal((ROWS, case.k)).astype(np.float32)
    return {
        "x": to_bf16(x) if case.dtype == "bf16" else x,
        "w": to_bf16((rng.standard_normal((case.n, case.k)) / case.k**0.5).astype(np.float32)),
        "norm": rng.uniform(0.5, 1.5, case.k).astype(np.float32),
        "residual": rng.standard_normal((ROWS, width)).astype(np.float32),
    }


def graph_of(case: Case, data: dict[str, NDArray[Any]], rows: int) -> Graph:
    """x passes through a matvec with the identity first, so that payload edges have a producer."""
    graph = Graph("matvec", rows=rows)
    width = case.n // 2 if case.swiglu else case.n
    x = graph.input("x", [rows, case.k], case.dtype)
    hidden = graph.activation("hidden", [rows, case.k], case.dtype)
    y = graph.output("y", [rows, width], case.dtype)
    identity = to_bf16(np.eye(case.k, dtype=np.float32))
    matvec(graph, x, graph.weight("one", [case.k, case.k], "bf16", identity), hidden, name="copy")
    norm = graph.weight("norm", [case.k], "f32", data["norm"]) if case.norm else None
    residual = graph.input("residual", [rows, width], "f32") if case.residual else None
    w = graph.weight("w", [case.n, case.k], "bf16", data["w"])
    matvec(
        graph,
        hidden,
        w,
        y,
        norm=norm,
        residual=residual,
        swiglu=case.swiglu,
        eps=EPS * case.norm,
        scale=case.scale,
        softcap=case.softcap,
    )
    return graph


def run(case: Case, rows: int, edges: str = "counter", **target: Any) -> NDArray[Any]:
    data = data_of(case)
    graph = graph_of(case, data, rows)
    made = plan(graph, replace(device_target(), **target), edges=edges)
    made.check()
    executor = cuda.load(made, graph, Options(wait_timeout_ms=5000))
    try:
        executor.write("x", data["x"][:rows])
        if case.residual:
            executor.write("residual", data["residual"][:rows])
        # Two steps: the second one uses the other payload set.
        _, reason = Driver(executor).run(max_tokens=2)
        assert reason == wire.FinishReason.STEPS
        return executor.read("y")
    finally:
        executor.close()


def reference(case: Case, rows: int) -> NDArray[np.float32]:
    data = data_of(case)
    # The copy rounds x to bf16 on its way through the tensor cores.
    x = as_float(to_bf16(as_float(data["x"][:rows])))
    if case.norm:
        x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * data["norm"]
    z = x @ as_float(data["w"]).T * case.scale
    if case.softcap:
        z = case.softcap * np.tanh(z / case.softcap)
    if case.swiglu:
        gate, up = z[:, 0::2], z[:, 1::2]
        z = gate / (1 + np.exp(-gate)) * up
    return z + data["residual"][:rows] if case.residual else z


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_products_equal_the_reference_within_bf16(case: Case, rows: int) -> None:
    close(case, run(case, rows))


def close(case: Case, seen: NDArray[Any]) -> None:
    """Within what bf16 rounds."""
    got, want = as_float(seen), reference(case, len(seen))
    error = (
        np.abs(got - want) / np.linalg.norm(want, axis=-1, keepdims=True) * want.shape[-1] ** 0.5
    )
    worst = np.unravel_index(np.argmax(error), error.shape)
    # A product of two sums has the errors of both, and of 16 times as many some are larger.
    bound = RELATIVE * (2 if case.swiglu else 1) * (1.25 if len(got) > 16 else 1)
    assert error[worst] < bound, f"{case} at {worst}: {got[worst]} for {want[worst]}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_do_not_depend_on_rows_team_workers_or_edges(case: Case) -> None:
    want = run(case, 16)
    for rows, edges, target in (
        (1, "counter", {}),
        (5, "counter", {}),
        (1, "payload", {}),
        (16, "payload", {}),
        (16, "counter", {"team_warps": 1}),
        (1, "payload", {"team_warps": 1}),
        (5, "payload", {"workers": 7}),
    ):
        got = run(case, rows, edges, **target)
        np.testing.assert_array_equal(
            got.view(np.uint8), want[:rows].view(np.uint8), err_msg=f"{rows} {edges} {target}"
        )


def check_many_rows(case: Case, many: tuple[int, ...], **target: Any) -> None:
    """Steps of more than 16 rows: within bf16 of the reference, each row as in every other step."""
    few, most = run(case, 16), run(case, many[-1])
    assert most[:16].tobytes() == few.tobytes(), f"{many[-1]} rows"
    close(case, most)
    for rows in many[:-1]:
        got = run(case, rows, **target)
        assert got.tobytes() == most[:rows].tobytes(), f"{rows} rows"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_of_many_rows_have_the_bits_of_small_ones(case: Case) -> None:
    check_many_rows(case, (17, 33, 100, 128, ROWS))
    check_many_rows(case, (40,), team_warps=1, workers=7)
    check_many_rows(case, (100,), workers=2)  # many tasks one after another


@pytest.mark.parametrize("most", [2, 4, 8, 16])
def test_many_rows_by_packed_tiles_of_every_size(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their K groups are fewer, and W ends in smaller tiles."""
    monkeypatch.setattr(matvec_cuda, "_TASKS", 1)
    monkeypatch.setattr(matvec_cuda, "_ROW_TILES_MAX", most)
    check_many_rows(Case(24 * most - 8, 192, norm=True), (17, 33))
