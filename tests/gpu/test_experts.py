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
from gpurt.trace import Trace
from gpurt.trace.edges import late_tasks
from gpurt.trace.spans import end_ns
from gpurt.wire import FinishReason
from tests.gpu.tiny_llama import device_target
from tests.helpers.chosen import assert_spans_name_experts
from tests.helpers.drive import Driver
from tests.helpers.oracle import GraphOracle, step_rows

pytestmark = pytest.mark.timeout(300)

# Muse Spark's, a rank of 8: 64 and 512 rows a task.
SIZE = {"layers": 3, "experts": 64, "top_k": 8, "width": 4096, "inner": 512, "rows": 16}
STEPS = 8
CLOCKS_APART_NS = 5000  # two SMs' at the most
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
    """y and the last layer's d, after some steps; the trace."""
    graph = graphs.experts_alone(**SIZE, routed=routed)
    made = plan(graph, replace(device_target(), **target), policy=policy, edges=edges)
    executor = cuda.load(made, graph, Options(wait_timeout_ms=30_000, linger_ms=2000))
    try:
        executor.write("x", given())
        driver = Driver(executor)
        assert driver.run(max_tokens=STEPS) == ([], FinishReason.STEPS)
        driver.view.request_exit()
        assert executor.join(30.0)
        names = "y", f"layers[{SIZE['layers'] - 1}].d"
        trace = Trace.from_raw(made, executor.raw_trace())
        return [executor.read(name) for name in names], trace
    finally:
        executor.close()


@cache
def wanted(routed: bool) -> Any:
    return run(routed=routed)


@pytest.mark.parametrize("routed", [False, True], ids=["known", "routed"])
@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "static"])
def test_bits_do_not_depend_on_the_plan(name: str, routed: bool) -> None:
    want, _ = wanted(routed)
    for array, other in zip(want, run(routed=routed, **VARIANTS[name])[0], strict=True):
        assert other.tobytes() == array.tobytes()


def test_y_is_the_oracles() -> None:
    """bf16 activations, layer after layer: the choice is given, so no rounding changes it."""
    y = wanted(False)[0][0]
    oracle = GraphOracle(graphs.experts_alone(**SIZE, routed=False))
    oracle.arrays["x"][:] = given()
    oracle.run(oracle.graph.operators, step_rows([0] * SIZE["rows"], list(range(SIZE["rows"]))))
    want = oracle.arrays["y"]
    error = float(np.linalg.norm(y - want) / np.linalg.norm(want))
    assert error < 2e-2, error


@pytest.mark.parametrize("name", ["static", "claim"])
def test_spans_name_the_experts_that_rows_chose(name: str) -> None:
    _, trace = run(routed=False, **VARIANTS[name])
    assert_spans_name_experts(trace, SIZE)


@pytest.mark.parametrize("name", ["static", "claim"])
def test_no_wait_ends_before_the_task_that_it_was_for(name: str) -> None:
    """A clock read too early counts the wait as run."""
    _, trace = run(routed=False, **VARIANTS[name])
    for step in trace.whole_steps.tolist():
        spans = trace.spans_of(step)
        late = late_tasks(trace, step)[spans["task"]]
        ended = np.zeros(len(trace.task_op), np.int64)
        ended[spans["task"]] = end_ns(spans)
        waited = late >= 0
        early = np.where(waited, ended[late] - spans["begin_ns"] - spans["wait_ns"], 0)
        worst = int(early.argmax())
        pair = [trace.operators[trace.task_op[t]].path for t in (late[worst], spans["task"][worst])]
        assert early[worst] <= CLOCKS_APART_NS, f"step {step}: {pair}, {early[worst]} ns"
