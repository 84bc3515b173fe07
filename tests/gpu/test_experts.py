"""Layers of experts, task after task: the same bits under every policy, team and number of workers.

A task's activations are fetched while the one before it still runs; test_expert_matvec.py has one
task at a time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.bench import graphs
from gpurt.executors import cuda
from gpurt.executors.base import Options
from gpurt.planner import plan
from gpurt.wire import FinishReason
from tests.gpu.tiny_llama import device_target
from tests.helpers.drive import Driver
from tests.helpers.oracle import GraphOracle, step_rows

pytestmark = pytest.mark.timeout(300)

# Muse Spark's, a rank of 8: 64 and 512 rows a task.
SIZE = {"layers": 3, "experts": 64, "top_k": 8, "width": 4096, "inner": 512, "rows": 16}
STEPS = 8
VARIANTS: dict[str, dict[str, Any]] = {
    "static": {},
    "claim": {"policy": {"expert_matvec": "claim"}, "edges": "auto"},
    "all claim": {"policy": "claim"},
    "ready": {"policy": "ready"},
    "ready experts": {"policy": {"expert_matvec": "ready"}, "edges": "auto"},
    "few workers": {"policy": {"expert_matvec": "claim"}, "workers": 2},
    "team of 1": {"policy": {"expert_matvec": "claim"}, "team_warps": 1},
}


def given() -> NDArray[np.float32]:
    shape = SIZE["rows"], SIZE["width"]
    return np.random.default_rng(7).standard_normal(shape, np.float32)


def run(*, routed: bool, policy: Any = "static", edges: Any = "counter", **target: Any) -> Any:
    """y and the last layer's d, after some steps."""
    graph = graphs.experts_alone(**SIZE, routed=routed)
    made = plan(graph, replace(device_target(), **target), policy=policy, edges=edges)
    executor = cuda.load(made, graph, Options(wait_timeout_ms=30_000, linger_ms=2000))
    try:
        executor.write("x", given())
        driver = Driver(executor)
        assert driver.run(max_tokens=STEPS) == ([], FinishReason.STEPS)
        driver.view.request_exit()
        assert executor.join(30.0)
        return [executor.read(name) for name in ("y", f"layers[{SIZE['layers'] - 1}].d")]
    finally:
        executor.close()


@cache
def wanted(routed: bool) -> Any:
    return run(routed=routed)


@pytest.mark.parametrize("routed", [False, True], ids=["known", "routed"])
@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "static"])
def test_bits_do_not_depend_on_the_plan(name: str, routed: bool) -> None:
    want = wanted(routed)
    for array, other in zip(want, run(routed=routed, **VARIANTS[name]), strict=True):
        assert other.tobytes() == array.tobytes()


def test_y_is_the_oracles() -> None:
    """bf16 activations, layer after layer: the choice is given, so no rounding changes it."""
    y = wanted(False)[0]
    oracle = GraphOracle(graphs.experts_alone(**SIZE, routed=False))
    oracle.arrays["x"][:] = given()
    oracle.run(oracle.graph.operators, step_rows([0] * SIZE["rows"], list(range(SIZE["rows"]))))
    want = oracle.arrays["y"]
    error = float(np.linalg.norm(y - want) / np.linalg.norm(want))
    assert error < 2e-2, error
