"""When workers end: linger, residency, exit, close; and that no request is lost at an end."""

import gc
import threading
import time
import weakref

import pytest

from gpurt.executors.base import ensure_running
from gpurt.wire import FinishReason, KernelState
from tests.helpers.drive import driven
from tests.helpers.hand_plan import Node, hand_plan

STEPS = ([], FinishReason.STEPS)


def noops(workers=2):
    return hand_plan([Node(), Node(after=(0,)), Node(after=(1,))], workers, [("static", 0)])


def test_workers_end_after_the_linger_time_and_come_back_for_the_next_request():
    with driven(noops(), linger_ms=5.0) as driver:
        for launches in (1, 2, 3):
            assert driver.run(max_tokens=3) == STEPS
            assert driver.executor.join(30.0)
            assert driver.view.kernel_state() == KernelState.ENDING
            assert driver.executor.launches == launches


def test_requests_that_come_while_workers_linger_need_no_launch():
    with driven(noops()) as driver:
        for _ in range(20):
            assert driver.run(max_tokens=3) == STEPS
        assert driver.executor.launches == 1


def test_no_request_is_lost_to_workers_that_are_about_to_end():
    # A linger of nothing: the kernel is ending all the time.
    with driven(noops(), linger_ms=0.0) as driver:
        for i in range(500):
            if i % 3 == 0:
                time.sleep(0.0005)
            sequence = driver.submit(max_tokens=1, start=False)
            if driver.promised:
                assert driver.wait_for_promised(sequence) == FinishReason.STEPS
            else:
                ensure_running(driver.executor)
                assert driver.wait(sequence) == STEPS
        assert 1 <= driver.executor.launches <= 500


def test_residency_ends_the_kernel_between_requests_and_what_is_queued_runs_next():
    with driven(noops(), residency_ms=3.0, queue_capacity=16) as driver:
        done = 0
        for _ in range(5):
            sequences = [driver.submit(max_tokens=300) for _ in range(10)]
            for sequence in sequences:
                assert driver.wait(sequence) == STEPS
                done += 1
        assert done == 50
        assert driver.executor.launches > 1


def test_a_resident_kernel_ends_neither_by_linger_nor_by_residency():
    with driven(noops(), resident=True, linger_ms=1.0, residency_ms=1.0) as driver:
        for _ in range(3):
            assert driver.run(max_tokens=3) == STEPS
            assert not driver.executor.join(0.05)
        assert driver.executor.launches == 1


def test_exit_lets_the_running_request_end_and_leaves_the_queue():
    gate = threading.Event()
    with driven(hand_plan([Node(gate.wait)], 2, [("static", 0)])) as driver:
        first = driver.submit(max_tokens=4)
        second = driver.submit(max_tokens=4)
        while driver.view.control["submit_head"] < 1:
            time.sleep(0.001)
        driver.view.request_exit()
        gate.set()
        assert driver.executor.join(30.0)
        assert driver.view.progress(first)[1] == FinishReason.STEPS
        assert driver.view.progress(second)[1] == FinishReason.NONE
        assert driver.wait(second) == STEPS
        assert driver.executor.launches == 2


def test_close_with_requests_in_flight_ends_the_workers():
    with driven(noops(3)) as driver:
        for _ in range(4):
            driver.submit(max_tokens=1_000_000_000)
        driver.executor.close()
        assert not driver.executor.running()
        assert driver.view.progress(3)[1] == FinishReason.NONE


def test_an_executor_that_nobody_holds_ends_its_workers():
    with driven(noops()) as driver:
        driver.submit(max_tokens=1_000_000_000)
        executor = driver.executor
        reference = weakref.ref(executor)
        native = weakref.ref(executor)
        executor.close()
    del driver, executor
    gc.collect()
    assert reference() is None
    assert native() is None


def test_ensure_running_launches_only_when_nothing_runs():
    with driven(noops()) as driver:
        assert ensure_running(driver.executor)
        assert not ensure_running(driver.executor)
        assert driver.executor.launches == 1


def test_a_wait_for_output_lets_other_python_threads_run():
    ticks = []
    stop = threading.Event()

    def count():
        while not stop.is_set():
            ticks.append(1)
            time.sleep(0.001)

    with driven(noops()) as driver:
        driver.executor.launch()
        thread = threading.Thread(target=count)
        thread.start()
        before = len(ticks)
        driver.view.wait_output(0, 0, 0.2)
        during = len(ticks) - before
        stop.set()
        thread.join()
    assert during > 5


def test_an_idle_kernel_sleeps():
    with driven(noops(7), resident=True) as driver:
        driver.run(max_tokens=1)
        time.sleep(0.1)  # past spinning and yielding
        before = time.process_time()
        time.sleep(0.5)
        used = time.process_time() - before
    # A spinning worker would use all of it; the controller wakes every 2 ms.
    assert used < 0.1


@pytest.mark.parametrize("waiters", [4])
def test_many_threads_may_wait_for_one_request(waiters):
    results = []
    with driven(noops()) as driver:
        sequence = driver.submit(max_tokens=5000)
        threads = [
            threading.Thread(target=lambda: results.append(driver.view.wait_output(0, 0, 30.0)))
            for _ in range(waiters)
        ]
        for thread in threads:
            thread.start()
        assert driver.wait(sequence) == STEPS
        for thread in threads:
            thread.join()
    assert results == [(0, FinishReason.STEPS)] * waiters
