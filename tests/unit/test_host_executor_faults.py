"""A worker that gives up leaves a Fault that names the edge; the next launch works."""

import time

import numpy as np
import pytest

from gpurt import wire
from gpurt.errors import ClosedError, DeviceError, PlanError
from gpurt.executors import host
from gpurt.executors.base import Options
from gpurt.wire import FaultKind, FinishReason, KernelState
from tests.helpers.drive import driven
from tests.helpers.hand_plan import Node, hand_plan

POLICIES = {
    "static": [("static", 0)],
    "claim": [("claim", 0)],
    "ready": [("ready", 0)],
    "mixed": [("static", 2), ("ready", 2), ("claim", 0)],
}
DIAMOND = [Node(), Node(after=(0,)), Node(after=(0,)), Node(after=(1, 2))]


def wait_for_end(driver):
    assert driver.executor.join(30.0)
    return driver.view.fault()


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_edge_that_is_never_signalled_is_a_fault_with_its_numbers(policy, workers):
    planned = hand_plan(DIAMOND, workers, POLICIES[policy], unsignalled=[(1, 3)])
    with driven(planned, wait_timeout_ms=100.0) as driver:
        driver.submit(max_tokens=5)
        fault = wait_for_end(driver)
        plan = planned[0]
        assert fault is not None
        assert fault["kind"] == FaultKind.EDGE_TIMEOUT
        # Task 3 lacks a signal; advance waits for task 3, and either wait may run out first.
        assert fault["task"] in (3, 4)
        (counter, signals) = plan.tasks[int(fault["task"])].waits[0]
        assert fault["counter"] == counter
        assert fault["needed"] == signals
        assert fault["seen"] == (1 if fault["task"] == 3 else 0)
        assert fault["worker"] < workers
        assert fault["waited_ns"] >= 100e6
        assert driver.view.progress(0)[1] == FinishReason.NONE
        # The host ends that request; the next launch takes the next one.
        assert driver.view.control["submit_head"] == 1


def test_the_launch_after_a_fault_works():
    arm = {"raises": True}

    def sometimes():
        if arm["raises"]:
            raise ValueError("not today")

    planned = hand_plan([Node(sometimes), Node(after=(0,))], 2, [("static", 0)])
    with driven(planned) as driver:
        driver.submit(max_tokens=3)
        assert wait_for_end(driver)["kind"] == FaultKind.HOST_BODY
        arm["raises"] = False
        assert driver.run(max_tokens=3) == ([], FinishReason.STEPS)
        assert driver.view.fault() is None
        assert driver.executor.fault_cause() is None
        assert driver.executor.launches == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_python_body_that_raises_names_its_task_and_keeps_the_exception(policy):
    def fails():
        raise ZeroDivisionError("in the body")

    nodes = [Node(), Node(fails, (0,)), Node(after=(1,))]
    with driven(hand_plan(nodes, 3, POLICIES[policy])) as driver:
        driver.submit(max_tokens=3)
        fault = wait_for_end(driver)
        assert (fault["kind"], fault["task"], fault["step"]) == (FaultKind.HOST_BODY, 1, 0)
        cause = driver.executor.fault_cause()
    assert isinstance(cause, ZeroDivisionError)
    assert str(cause) == "in the body"


def test_abort_ends_a_launch_without_a_fault():
    started = []

    def slow():
        started.append(1)
        time.sleep(0.005)

    with driven(hand_plan([Node(slow)], 2, [("static", 0)])) as driver:
        driver.submit(max_tokens=1_000_000)
        while not started:
            time.sleep(0.001)
        driver.view.request_abort()
        assert driver.executor.join(30.0)
        assert driver.view.fault() is None
        assert driver.view.progress(0)[1] == FinishReason.NONE
        assert len(started) < 1000


def test_abort_ends_workers_that_wait_for_an_edge():
    planned = hand_plan(DIAMOND, 3, [("static", 0)], unsignalled=[(2, 3)])
    with driven(planned, wait_timeout_ms=600_000.0) as driver:
        driver.submit(max_tokens=1)
        time.sleep(0.05)
        driver.view.request_abort()
        assert driver.executor.join(30.0)
        assert driver.view.fault() is None


def test_a_launch_while_workers_run_is_refused():
    with driven(hand_plan([Node()], 2, [("static", 0)])) as driver:
        driver.executor.launch()
        with pytest.raises(DeviceError, match=r"^the workers of launch 1 still run"):
            driver.executor.launch()


def test_a_closed_executor_refuses_to_launch_and_closes_twice():
    with driven(hand_plan([Node()], 2, [("static", 0)])) as driver:
        driver.executor.close()
        driver.executor.close()
        with pytest.raises(ClosedError, match=r"^the executor is closed"):
            driver.executor.launch()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 3}, r"^3 workers for a plan of 2"),
        ({"prefill_rows": 2}, r"^prefill_rows is 2"),
        ({"span_capacity": 100}, r"^span_capacity is 100"),
        ({"queue_capacity": 0}, r"^sample_period 64, queue_capacity 0"),
    ],
)
def test_options_that_contradict_the_plan_are_refused(options, message):
    plan, graph = hand_plan([Node()], 2, [("static", 0)])
    with pytest.raises(PlanError, match=message):
        host.load(plan, graph, Options(**options))


def test_a_body_that_nobody_has_is_refused():
    plan, graph = hand_plan([Node("nonesuch")], 2, [("static", 0)])
    with pytest.raises(PlanError, match=r"^no body is named 'nonesuch'"):
        host.load(plan, graph, Options())


def test_a_fault_record_is_a_copy():
    def fails():
        raise ValueError

    with driven(hand_plan([Node(fails)], 1, [("static", 0)])) as driver:
        driver.submit()
        fault = wait_for_end(driver)
        driver.view.control["fault"] = np.zeros((), wire.FAULT)
        assert fault["kind"] == FaultKind.HOST_BODY
        assert driver.view.kernel_state() == KernelState.ENDING
