"""Runtime, session and requests, against a double of the executor: orders that are hard to force
on a real one. tests/unit/test_runtime_host.py runs the same promises on threads.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import gpurt.runtime as runtime_module
from gpurt import wire
from gpurt.errors import (
    BoundError,
    ClosedError,
    DeviceError,
    FaultError,
    RequestError,
    RingFullError,
)
from gpurt.graph import Graph
from gpurt.runtime import Runtime
from gpurt.watchdog import Watchdog
from tests.helpers.fake_executor import FakeExecutor, toy_plan

VOCAB = 97


@pytest.fixture
def fakes(monkeypatch):
    """Executors that were made, oldest first; planning and loading are the double's."""
    made = []

    def load(plan, graph, config, progress):
        del progress
        options = runtime_module.options_of(config)
        made.append(FakeExecutor(plan, graph, options))
        return made[-1]

    monkeypatch.setattr(runtime_module, "_make_plan", lambda graph, *_: toy_plan(graph))
    monkeypatch.setattr(runtime_module, "_load", load)
    return made


def model(name="toy", context=64):
    return Graph(name, rows=4, context=context, vocab=VOCAB)


def expected(prompt, count):
    return [(sum(prompt) + i) % VOCAB for i in range(count)]


def held(runtime, graph, fakes):
    """Loads the graph; its kernel will stop before the next token."""
    runtime.prepare(graph)
    fakes[-1].hold()
    return fakes[-1]


def open_runtime(**options):
    return Runtime("host", workers=2, **options)


def test_tokens_come_in_order_and_the_result_repeats_them(fakes):
    with open_runtime() as runtime:
        request = runtime.submit(model(), [3, 4], max_tokens=10)
        assert list(request) == expected([3, 4], 10)
        assert list(request) == expected([3, 4], 10)
        result = request.result()
    assert (result.token_ids, result.finish_reason) == (expected([3, 4], 10), "length")
    stats = request.stats
    assert (stats.prompt_tokens, stats.completion_tokens, stats.launches) == (2, 10, 1)
    assert fakes[0].closed


def test_request_that_arrives_while_the_kernel_lingers_needs_no_launch(fakes):
    graph = model()
    with open_runtime(linger_ms=5000) as runtime:
        launches = []
        for _ in range(5):
            request = runtime.submit(graph, [1], max_tokens=3)
            request.result()
            launches.append(request.stats.launches)
    assert launches == [1, 0, 0, 0, 0]
    assert fakes[0].launches == 1


def test_kernel_that_ended_after_its_linger_is_launched_again(fakes):
    graph = model()
    with open_runtime(linger_ms=1) as runtime:
        first = runtime.submit(graph, [1], max_tokens=3)
        first.result()
        assert fakes[0].join(10)
        second = runtime.submit(graph, [2], max_tokens=3)
        assert second.result().token_ids == expected([2], 3)
    assert (first.stats.launches, second.stats.launches) == (1, 1)


def test_submit_to_a_kernel_that_is_ending_waits_for_its_end_and_launches(fakes):
    graph = model()
    with open_runtime(linger_ms=1) as runtime:
        runtime.prepare(graph)
        fakes[0].ending_s = 0.1
        runtime.submit(graph, [1], max_tokens=3).result()
        while fakes[0].host.kernel_state() != wire.KernelState.ENDING:
            time.sleep(0.001)
        request = runtime.submit(graph, [2], max_tokens=3)
        assert request.launches == 1  # by submit itself, not by whoever looks next
        assert request.result(10).token_ids == expected([2], 3)


def test_request_queued_when_residency_ends_is_launched_once_more_and_not_lost(fakes):
    graph = model()
    with open_runtime() as runtime:
        held(runtime, graph, fakes)
        first = runtime.submit(graph, [1], max_tokens=3)
        second = runtime.submit(graph, [2], max_tokens=3)
        third = runtime.submit(graph, [3], max_tokens=3)
        fakes[0].residency_over = True
        fakes[0].release()
        assert third.result(10).token_ids == expected([3], 3)
        assert second.result(10).token_ids == expected([2], 3)
    assert [r.stats.launches for r in (first, second, third)][1:] == [1, 0]


@pytest.mark.usefixtures("fakes")
def test_threads_submit_and_read_at_once():
    graph, results = model(), {}

    def work(number):
        for turn in range(8):
            prompt = [number, turn]
            results[number, turn] = runtime.submit(graph, prompt, max_tokens=12).result(30)

    with open_runtime() as runtime:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(results) == 48
    for (number, turn), result in results.items():
        assert result.token_ids == expected([number, turn], 12)


def test_cancel_ends_a_running_and_a_queued_request(fakes):
    graph = model()
    with open_runtime() as runtime:
        held(runtime, graph, fakes)
        first = runtime.submit(graph, [1], max_tokens=60)
        second = runtime.submit(graph, [2], max_tokens=60)
        first.cancel()
        second.cancel()
        assert first.result(10).finish_reason == "cancelled"
        assert second.result(10).finish_reason == "cancelled"
        fakes[0].release()
        assert runtime.submit(graph, [5], max_tokens=2).result(10).token_ids == expected([5], 2)


def test_close_ends_requests_in_flight_as_cancelled(fakes):
    graph = model()
    runtime = open_runtime()
    held(runtime, graph, fakes)
    running = runtime.submit(graph, [1], max_tokens=60)
    queued = runtime.submit(graph, [2], max_tokens=60)
    seen = []
    reader = threading.Thread(target=lambda: seen.append(queued.result(30)))
    reader.start()
    runtime.close()
    reader.join(30)
    assert seen[0].finish_reason == "cancelled"
    assert running.result(1).finish_reason == "cancelled"
    assert fakes[0].closed
    with pytest.raises(ClosedError, match=r"^the Runtime was closed"):
        runtime.submit(graph, [1], max_tokens=1)
    runtime.close()


def test_close_ends_a_submit_that_waits_for_another_graph(fakes):
    one, two = model("one"), model("two")
    runtime = open_runtime()
    runtime.prepare(two)
    held(runtime, one, fakes)
    endless = runtime.submit(one, [1], max_tokens=60)
    errors = []

    def submit_another():
        try:
            runtime.submit(two, [2], max_tokens=1)
        except ClosedError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=submit_another)
    waiting.start()
    while runtime._lock.acquire(blocking=False):
        runtime._lock.release()  # until the other thread has it, and waits
        time.sleep(0.001)
    runtime.close()
    waiting.join(30)
    assert errors[0].startswith("the Runtime was closed")
    assert endless.result(1).finish_reason == "cancelled"
    assert all(f.closed for f in fakes)


def test_watchdog_that_is_stopped_while_it_looks_around_ends():
    looking, go_on = threading.Event(), threading.Event()

    class Busy:
        in_flight = ()

        def tend(self):
            looking.set()
            assert go_on.wait(30)

    dog = Watchdog([Busy()])
    dog.wake()
    assert looking.wait(30)
    stopper = threading.Thread(target=dog.stop)
    stopper.start()
    while not dog._stopped:
        time.sleep(0.001)
    go_on.set()
    stopper.join(30)
    assert not stopper.is_alive()


def test_full_ring_is_refused_and_room_comes_back(fakes):
    graph = model()
    with open_runtime(queue_capacity=2) as runtime:
        held(runtime, graph, fakes)
        first = runtime.submit(graph, [1], max_tokens=5)
        runtime.submit(graph, [2], max_tokens=5)
        with pytest.raises(RingFullError, match=r"^2 requests are queued and the oldest is unfin"):
            runtime.submit(graph, [3], max_tokens=5)
        fakes[0].release()
        first.result(10)
        # Nobody read the second one: its tokens are kept when its entry is reused.
        later = [runtime.submit(graph, [n], max_tokens=5) for n in (4,)]
        assert later[0].result(10).token_ids == expected([4], 5)


def test_unread_request_keeps_its_tokens_when_its_entry_is_reused(fakes):
    graph = model()
    with open_runtime(queue_capacity=1) as runtime:
        requests = []
        for number in range(4):
            requests.append(runtime.submit(graph, [number], max_tokens=4))
            while not fakes[0].host.outputs["finish_reason"][0]:
                fakes[0].host.wait_output(0, 0xFFFF, 0.01)
        for number, request in enumerate(requests):
            assert request.result(10).token_ids == expected([number], 4)


def test_another_graph_waits_for_the_first_one_and_takes_the_device(fakes):
    one, two = model("one"), model("two")
    with open_runtime(linger_ms=60_000) as runtime:
        first = runtime.submit(one, [1], max_tokens=20)
        second = runtime.submit(two, [2], max_tokens=3)
        assert first.done
        assert not fakes[0].running()
        assert second.result(10).token_ids == expected([2], 3)
        again = runtime.submit(one, [1], max_tokens=2)
        assert again.result(10).token_ids == expected([1], 2)
    assert [f.launches for f in fakes] == [2, 1]
    assert (second.stats.launches, again.stats.launches) == (1, 1)


@pytest.mark.usefixtures("fakes")
def test_stop_id_ends_and_ignore_eos_does_not():
    graph = model()
    with open_runtime() as runtime:
        stop = runtime.submit(graph, [5], max_tokens=9, stop_ids=[7]).result(10)
        goes_on = runtime.submit(graph, [5], max_tokens=9, stop_ids=[7], ignore_eos=True)
        assert (stop.token_ids, stop.finish_reason) == ([5, 6, 7], "stop")
        assert goes_on.result(10).finish_reason == "length"


def test_fault_names_task_edge_numbers_and_who_is_stuck(fakes):
    graph = model()
    with open_runtime() as runtime:
        executor = held(runtime, graph, fakes)
        request = runtime.submit(graph, [1], max_tokens=50)
        queued = runtime.submit(graph, [2], max_tokens=5)
        record = np.zeros((), wire.FAULT)
        for field, value in {
            "kind": 1, "worker": 0, "task": 2, "counter": 1, "step": 40, "seen": 40,
            "needed": 41, "waited_ns": 2_000_000_000,
        }.items():  # fmt: skip
            record[field] = value
        executor.fault_record = record
        executor.release()
        with pytest.raises(FaultError) as caught:
            request.result(10)
        with pytest.raises(FaultError):
            queued.result(10)
        text = str(caught.value)
        assert text.startswith(
            "task 2 (advance), worker 0, waited 2000 ms in step 40 for counter 1"
        )
        assert "seen 40, needed 41" in text
        assert "task 1 (noop second)" in text
        assert "\n" not in text
        executor.fault_record = None
        assert runtime.submit(graph, [9], max_tokens=2).result(10).token_ids == expected([9], 2)
        # What was queued behind the fault was dropped, not run late.
        assert executor.host.outputs["token_count"][queued.sequence] == 0


def test_kernel_that_vanishes_ends_its_request_with_an_error(fakes):
    graph = model()
    with open_runtime() as runtime:
        held(runtime, graph, fakes).vanish = True
        request = runtime.submit(graph, [1], max_tokens=50)
        fakes[0].release()
        with pytest.raises(FaultError, match=r"^the kernel is gone, and request 0 was running"):
            request.result(20)
        fakes[0].vanish = False
        assert runtime.submit(graph, [1], max_tokens=2).result(10).finish_reason == "length"


def test_failed_launch_is_raised_by_submit_and_leaves_the_runtime_usable(fakes):
    graph = model()
    with open_runtime() as runtime:
        runtime.prepare(graph)
        fakes[0].launch_error = DeviceError("out of threads - at launch - use fewer")
        with pytest.raises(DeviceError, match=r"^out of threads"):
            runtime.submit(graph, [1], max_tokens=2)
        fakes[0].launch_error = None
        assert runtime.submit(graph, [1], max_tokens=2).result(10).token_ids == expected([1], 2)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"prompt": []}, RequestError, "^the prompt is empty"),
        ({"prompt": None}, RequestError, "^no prompt"),
        ({"prompt": [VOCAB]}, RequestError, f"^token {VOCAB} is outside the vocabulary of {VOCAB}"),
        ({"prompt": [-1]}, RequestError, "^token -1 is outside"),
        ({"prompt": [0.5]}, RequestError, "^the prompt is float64"),
        ({"prompt": [1] * 65}, BoundError, "^the prompt has 65 tokens, the context 64"),
        ({"max_tokens": 65}, BoundError, "^1 prompt tokens and max_tokens 65 exceed the cont"),
        ({"max_tokens": 0}, RequestError, "^max_tokens is 0"),
        ({"temperature": -1.0}, RequestError, "^temperature is -1.0"),
        ({"temperature": float("nan")}, RequestError, "^temperature is nan"),
        ({"top_p": 0.0}, RequestError, "^top_p is 0"),
        ({"top_p": 1.5}, RequestError, "^top_p is 1.5"),
        ({"top_k": -1}, RequestError, "^top_k is -1"),
        ({"seed": -1}, RequestError, "^seed is -1"),
        ({"stop_ids": list(range(17))}, RequestError, "^17 stop ids, at most 16"),
        ({"stop_ids": [VOCAB]}, RequestError, "^a stop id is"),
    ],
)
def test_bad_request_is_refused_before_anything_is_planned(fakes, options, error, text):
    prompt = options.pop("prompt", [1])
    with open_runtime() as runtime, pytest.raises(error, match=text):
        runtime.submit(model(), prompt, **options)
    assert fakes == []


@pytest.mark.usefixtures("fakes")
def test_prompt_that_fills_the_context_yields_one_token():
    with open_runtime() as runtime:
        assert len(runtime.submit(model(), [1] * 64).result(10).token_ids) == 1
        assert len(runtime.submit(model(), [1]).result(10).token_ids) == 64


def test_plain_graph_takes_inputs_and_gives_outputs(fakes):
    graph = Graph("plain")
    graph.input("x", [4], "f32")
    graph.output("y", [4], "f32")
    with open_runtime() as runtime:
        runtime.prepare(graph)
        fakes[0].step = lambda buffers: buffers["y"].__iadd__(buffers["x"])
        one = runtime.submit(graph, inputs={"x": np.ones(4)}, steps=3)
        two = runtime.submit(graph)
        assert two.result(10).outputs["y"].tolist() == [4.0] * 4
        assert one.result(10).outputs["y"].tolist() == [3.0] * 4
        assert one.result().finish_reason == "steps"
        assert one.stats.steps == 3


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"z": np.ones(4)}, "^no input is named 'z'"),
        ({"x": np.ones(3)}, r"^an array of shape \[3\] for x \[4\] f32"),
        ({"x": np.ones(4, complex)}, "^complex128 elements do not fit"),
        ({"x": ["a"] * 4}, "^list of dtype"),
        ({}, "^input x was never given"),
    ],
)
@pytest.mark.usefixtures("fakes")
def test_bad_input_is_refused(inputs, text):
    graph = Graph("plain")
    graph.input("x", [4], "f32")
    with open_runtime() as runtime, pytest.raises(RequestError, match=text):
        runtime.submit(graph, inputs=inputs)


def test_result_times_out_and_the_request_goes_on(fakes):
    with open_runtime() as runtime:
        graph = model()
        runtime.prepare(graph)
        fakes[0].hold()
        request = runtime.submit(graph, [1], max_tokens=2)
        with pytest.raises(TimeoutError, match=r"^no end after"):
            request.result(0.05)
        fakes[0].release()
        assert request.result(10).finish_reason == "length"


def test_runtime_nobody_holds_is_freed(fakes):
    runtime = open_runtime()
    runtime.submit(model(), [1], max_tokens=2).result(10)
    del runtime
    assert fakes[0].closed
