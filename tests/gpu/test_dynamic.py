"""Dynamic segments on the GPU: only live tasks run, with the results of every policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpurt.executors import cuda
from gpurt.executors.base import Options
from gpurt.planner import plan
from gpurt.wire import FaultKind, FinishReason
from tests.gpu.experts_structs import on_gpu
from tests.gpu.tiny_llama import device_target
from tests.helpers.drive import Driver
from tests.helpers.experts import Experts, live_of

POLICIES: dict[str, Any] = {
    "static": "static",
    "claim": "claim",
    "ready": "ready",
    "static but experts": {"expert_up": "claim", "expert_down": "claim"},
    "ready around": {"route": "ready", "pre": "ready", "combine": "ready", "fold": "ready"}
    | {"expert_up": "claim", "expert_down": "claim"},
}


@contextmanager
def driven(experts: Experts, policy: Any, **changes: Any) -> Iterator[Driver]:
    graph = on_gpu(experts).graph()
    target = replace(device_target(), **changes)
    executor = cuda.load(
        plan(graph, target, policy=policy), graph, Options(wait_timeout_ms=3000, linger_ms=2000)
    )
    try:
        yield Driver(executor)
    finally:
        executor.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", POLICIES)
def test_results_equal_the_model_over_thousands_of_steps(policy: str) -> None:
    experts = Experts(layers=3, slots=40, tiles=4)
    with driven(experts, POLICIES[policy]) as driver:
        assert driver.run(max_tokens=3000) == ([], FinishReason.STEPS)
        assert driver.executor.read("sum")[0] == experts.expected_sum(3000)
        counters = driver.executor.counters().tolist()
        assert counters == [3000 * c.signals_per_step for c in driver.executor.plan.counters]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [1, 2, 7])
def test_any_number_of_workers_gives_the_same(workers: int) -> None:
    experts = Experts()
    with driven(experts, "claim", workers=workers) as driver:
        for steps in (1, 200, 3, 500):
            assert driver.run(max_tokens=steps) == ([], FinishReason.STEPS)
        assert driver.executor.read("sum")[0] == experts.expected_sum(704)


@pytest.mark.timeout(300)
def test_absent_tasks_leave_no_span() -> None:
    experts, steps = Experts(layers=2, slots=8, tiles=3), 16
    with driven(experts, "claim") as driver:
        assert driver.run(max_tokens=steps) == ([], FinishReason.STEPS)
        driver.view.request_exit()
        assert driver.executor.join(30.0)
        tasks = driver.executor.plan.tasks
        raw = driver.executor.raw_trace()
        ran = [tasks[int(t)].body for spans in raw.spans for t in spans["task"]]
    live = sum(live_of(layer, step, 8) for layer in range(2) for step in range(steps))
    assert ran.count("expert_up") == ran.count("expert_down") == 3 * live
    assert ran.count("combine") == 2 * steps


@pytest.mark.timeout(300)
def test_more_live_slots_than_the_plan_has_are_a_fault() -> None:
    experts = on_gpu(Experts())
    route = experts.bodies[1]
    broken = replace(route, cuda=route.cuda.replace("out(1)[0] = live;", "out(1)[0] = 5;"))
    experts.bodies[1] = broken
    graph = experts.graph()
    made = plan(graph, device_target(), policy="claim")
    executor = cuda.load(made, graph, Options(wait_timeout_ms=3000))
    driver = Driver(executor)
    driver.submit(max_tokens=3)
    assert executor.join(30.0)
    fault = driver.view.fault()
    executor.close()
    assert fault is not None
    assert (fault["kind"], fault["seen"], fault["needed"]) == (FaultKind.CAPACITY, 5, 4)
    assert np.isin(int(fault["task"]), [i for i, t in enumerate(made.tasks) if t.body == "route"])
