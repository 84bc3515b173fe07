"""Dynamic segments on host threads: only live tasks run, and results are those of every policy."""

import numpy as np
import pytest

from gpurt import wire
from gpurt.body import Target
from gpurt.faults import describe_fault
from gpurt.planner import plan
from gpurt.wire import FaultKind, FinishReason
from tests.helpers.drive import driven
from tests.helpers.experts import Experts, live_of

POLICIES = {
    "static": "static",
    "claim": "claim",
    "ready": "ready",
    "static but experts": {"expert_up": "claim", "expert_down": "claim"},
    "up only": {"expert_up": "claim", "expert_down": "ready", "combine": "ready"},
    "down only": {"expert_down": "claim", "route": "claim", "pre": "ready", "fold": "ready"},
    "ready around": {"start": "ready", "route": "ready", "pre": "ready", "combine": "ready"}
    | {"fold": "ready", "expert_up": "claim", "expert_down": "claim"},
}
WORKERS = [1, 2, 3, 7]


def planned(experts: Experts, workers: int, policy):
    graph = experts.graph()
    return plan(graph, Target("host", workers), policy=policy), graph


def assert_ran(experts: Experts, policy, steps: int) -> None:
    """Every live tile once a step; a dynamic operator's other tiles not at all."""
    expected = experts.expected_counts(steps)
    for (name, layer), counts in experts.counts.items():
        np.testing.assert_array_equal(counts, expected[name, layer])
        chosen = policy if isinstance(policy, str) else policy.get(name, "static")
        entries = counts.sum() if chosen == "claim" else steps * counts.size
        assert experts.entries[name, layer] == entries, (name, layer)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_only_live_tasks_run_and_results_are_equal(policy, workers):
    experts = Experts()
    with driven(planned(experts, workers, POLICIES[policy])) as driver:
        assert driver.run(max_tokens=60) == ([], FinishReason.STEPS)
        assert driver.executor.read("sum")[0] == experts.expected_sum(60)
        counters = driver.executor.counters().tolist()
        assert counters == [60 * c.signals_per_step for c in driver.executor.plan.counters]
    assert_ran(experts, POLICIES[policy], 60)


@pytest.mark.parametrize("workers", [2, 5])
def test_thousands_of_steps_over_several_requests(workers):
    experts = Experts(layers=3, slots=5, tiles=3)
    with driven(planned(experts, workers, "claim")) as driver:
        for steps in (1, 700, 2, 400, 1, 900):
            assert driver.run(max_tokens=steps) == ([], FinishReason.STEPS)
        total = experts.steps[0]
        assert total == 2004
        assert driver.executor.read("sum")[0] == experts.expected_sum(total)
    assert_ran(experts, "claim", total)


@pytest.mark.parametrize("policy", ["claim", "up only"])
def test_step_numbers_pass_2_to_the_32(policy):
    experts, first = Experts(), (1 << 32) - 20
    with driven(planned(experts, 3, POLICIES[policy]), first_step=first) as driver:
        assert driver.run(max_tokens=50) == ([], FinishReason.STEPS)
        assert driver.output(0)["last_step"] == first + 49
    assert_ran(experts, POLICIES[policy], 50)


def test_more_workers_than_live_tasks():
    experts = Experts(layers=1, slots=2, tiles=1)
    with driven(planned(experts, 16, "claim")) as driver:
        for _ in range(10):
            assert driver.run(max_tokens=20) == ([], FinishReason.STEPS)
    assert_ran(experts, "claim", 200)


def test_a_second_launch_starts_from_the_beginning():
    experts = Experts()
    with driven(planned(experts, 2, "claim"), linger_ms=1.0) as driver:
        for launches in (1, 2, 3):
            assert driver.run(max_tokens=7) == ([], FinishReason.STEPS)
            assert driver.executor.join(30.0)
            assert driver.executor.launches == launches
    assert_ran(experts, "claim", 21)


def test_a_cancelled_request_leaves_the_queue_whole():
    experts = Experts()
    with driven(planned(experts, 3, "claim")) as driver:
        for _ in range(5):
            sequence = driver.submit(max_tokens=1_000_000)
            driver.view.cancel(sequence % len(driver.view.requests))
            assert driver.wait(sequence)[1] == FinishReason.CANCELLED
            assert driver.run(max_tokens=5) == ([], FinishReason.STEPS)
        total = experts.steps[0]
        assert driver.executor.read("sum")[0] == experts.expected_sum(total)
    assert_ran(experts, "claim", total)


@pytest.mark.parametrize("workers", WORKERS)
def test_an_expert_that_raises_is_a_fault_that_names_it(workers):
    step = next(s for s in range(23, 40) if live_of(1, s, 4) > 1)
    experts = Experts(fails_in=step)
    with driven(planned(experts, workers, "claim")) as driver:
        driver.submit(max_tokens=100)
        assert driver.executor.join(30.0)
        fault = driver.view.fault()
        assert fault is not None
        assert fault["kind"] == FaultKind.HOST_BODY
        made = driver.executor.plan
        assert made.tasks[int(fault["task"])].body == "expert_up"
        assert made.tasks[int(fault["task"])].coords[0] == 0
        assert isinstance(driver.executor.fault_cause(), ZeroDivisionError)


def test_more_live_slots_than_the_plan_has_are_a_fault():
    experts = Experts(too_many=True)
    with driven(planned(experts, 3, "claim")) as driver:
        driver.submit(max_tokens=3)
        assert driver.executor.join(30.0)
        fault = driver.view.fault()
        assert fault is not None
        assert fault["kind"] == FaultKind.CAPACITY
        text = describe_fault(driver.executor.plan, fault, driver.executor.raw_trace(), None)
        assert text.startswith("task 1 (route), worker ")
        assert f"named {int(fault['seen'])} live slots, the plan has 4, in step 0" in text


def test_an_expert_that_never_ends_its_wait_is_blamed_on_the_right_task():
    """Absent tasks have no spans either, but nobody waits for them."""
    experts = Experts(layers=1)
    made, graph = planned(experts, 2, "claim")
    stuck = next(i for i, t in enumerate(made.tasks) if t.body == "expert_down")
    with driven((made, graph), wait_timeout_ms=300.0) as driver:
        records = driver.executor._sections["records"]
        records["signal_count"][stuck] = 0
        driver.submit(max_tokens=50)
        assert driver.executor.join(30.0)
        fault = driver.view.fault()
        assert fault is not None
        assert fault["kind"] == FaultKind.EDGE_TIMEOUT
        raw, counters = driver.executor.raw_trace(), driver.executor.counters()
        for spans in raw.spans:  # as if it had not run
            spans["step"][spans["task"] == stuck] = 1 << 30
        text = describe_fault(made, fault, raw, counters)
        assert f"task {stuck} (expert_down), " in text  # directly, or as what `combine` waits for
        assert " more - at" not in text


def test_the_wire_arrays_state_decisions_and_absent_signals():
    experts = Experts(layers=1)
    made, graph = planned(experts, 2, "claim")
    with driven((made, graph)) as driver:
        sections = driver.executor._sections
        policies = sections["segments"]["policy"].tolist()
        assert policies == [1, 3, 3, 1]
        decider, compensator = sections["decisions"]
        assert decider["published"]["cursor"].tolist() == [1, 2, 0, 0]
        assert decider["published"]["tiles_per_slot"].tolist() == [2, 2, 0, 0]
        assert (decider["published_count"], decider["absent_count"]) == (2, 0)
        assert (compensator["published_count"], compensator["absent_count"]) == (0, 5)
        records = sections["records"]
        deciding = np.flatnonzero(records["flags"] & wire.TaskFlags.DECIDES)
        assert deciding.tolist() == [1, 4]
        assert records["param"][deciding, wire.PARAM_DECISION].tolist() == [0, 1]
