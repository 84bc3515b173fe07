"""Every policy and any number of workers runs each task once a step, after what it waits for."""

import pytest

from gpurt.wire import FinishReason
from tests.helpers.drive import driven
from tests.helpers.hand_plan import Node, hand_plan, random_nodes

POLICIES = {
    "static": [("static", 0)],
    "claim": [("claim", 0)],
    "ready": [("ready", 0)],
    "mixed": [("static", 9), ("ready", 11), ("claim", 7), ("ready", 3), ("static", 0)],
}
WORKERS = [1, 2, 3, 7]


def checked(counts, index, after):
    """A node that counts its steps and raises if what it waits for has not run in this one."""

    def run():
        mine = counts[index] + 1
        for earlier in after:
            assert counts[earlier] == mine, f"task {index} ran before task {earlier}"
        counts[index] = mine

    return Node(run, after)


def checked_plan(count, workers, policy, seed=7):
    counts = [0] * count
    nodes = random_nodes(count, seed, lambda i, after: checked(counts, i, after))
    return hand_plan(nodes, workers, POLICIES[policy]), counts


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_task_runs_once_a_step_and_after_its_producers(policy, workers):
    planned, counts = checked_plan(40, workers, policy)
    with driven(planned) as driver:
        assert driver.run(max_tokens=200) == ([], FinishReason.STEPS)
        assert driver.executor.fault_cause() is None
        assert driver.output(0)["steps"] == 200
    assert counts == [200] * 40


@pytest.mark.parametrize("policy", ["static", "ready", "mixed"])
def test_132_workers_on_few_cores_make_progress(policy):
    planned, counts = checked_plan(40, 132, policy)
    with driven(planned) as driver:
        assert driver.run(max_tokens=20) == ([], FinishReason.STEPS)
    assert counts == [20] * 40


@pytest.mark.parametrize("policy", POLICIES)
def test_10_000_steps_of_noops_end(policy):
    nodes = random_nodes(40, 3, lambda _, after: Node("noop", after))
    with driven(hand_plan(nodes, 2, POLICIES[policy])) as driver:
        assert driver.run(max_tokens=10_000) == ([], FinishReason.STEPS)
        assert driver.view.control["heartbeat"] == 10_000
        counters = driver.executor.counters()
        assert counters.tolist() == [
            10_000 * c.signals_per_step for c in driver.executor.plan.counters
        ]


@pytest.mark.parametrize("policy", POLICIES)
def test_step_numbers_pass_2_to_the_32(policy):
    planned, counts = checked_plan(30, 3, policy)
    first = (1 << 32) - 20
    with driven(planned, first_step=first) as driver:
        assert driver.run(max_tokens=50) == ([], FinishReason.STEPS)
        assert driver.output(0)["first_step"] == first
        assert driver.output(0)["last_step"] == first + 49
        assert driver.run(max_tokens=3) == ([], FinishReason.STEPS)
    assert counts == [53] * 30


@pytest.mark.parametrize("policy", POLICIES)
def test_more_workers_than_tasks_hold_tickets_of_later_steps(policy):
    planned, counts = checked_plan(2, 7, policy)
    with driven(planned) as driver:
        for _ in range(20):
            assert driver.run(max_tokens=25) == ([], FinishReason.STEPS)
    assert counts == [500, 500]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_launch_starts_from_zeroed_counters(policy):
    planned, counts = checked_plan(20, 2, policy)
    with driven(planned, linger_ms=1.0) as driver:
        for launches in (1, 2, 3):
            assert driver.run(max_tokens=5) == ([], FinishReason.STEPS)
            assert driver.executor.join(30.0)
            assert driver.executor.launches == launches
    assert counts == [15] * 20
