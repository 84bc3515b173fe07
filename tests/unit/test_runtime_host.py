"""Runtime on real threads: what test_runtime.py promises with a double, and what needs bodies."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import gpurt.runtime as runtime_module
from gpurt.body import body
from gpurt.errors import BoundError, ClosedError, FaultError, PlanError, RingFullError, TraceError
from gpurt.graph import Graph
from gpurt.graphs import llama
from gpurt.loaders import load_model
from gpurt.plan import Plan
from gpurt.runtime import Runtime
from tests.helpers.gate import Gate
from tests.helpers.hand_plan import Node, hand_plan
from tests.helpers.tiny import tiny_folder

add = body("add", lambda a, b, out: np.add(a, b, out=out))
scale = body("scale", lambda x, out, by: np.multiply(x, by, out=out))


def diamond(name="diamond", dtype="f32"):
    g = Graph(name)
    x, y = g.input("x", [4], dtype), g.output("y", [4], "f32")
    a, b, c = (g.activation(n, [4], "f32") for n in "abc")
    g.task(scale, [x], [a], by=1.0)
    g.task(scale, [a], [b], by=2.0)
    g.task(scale, [a], [c], by=3.0)
    g.task(add, [b, c], [y])
    return g


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random model of 20 tokens, context 64."""
    return load_model(tiny_folder(tmp_path_factory.mktemp("tiny")))


def graph_of(model, **bounds):
    return llama.build(model.config, model.weights, **bounds)


def open_runtime(**options):
    return Runtime("host", workers=2, **options)


@pytest.mark.parametrize("policy", ["static", "claim", "ready", {"scale": "claim"}])
def test_diamond_of_user_bodies_runs_under_every_policy(policy):
    with open_runtime(policy=policy) as runtime:
        graph = diamond()
        for start in range(3):
            x = np.arange(4) + start
            result = runtime.submit(graph, inputs={"x": x}).result(30)
            assert result.outputs["y"].tolist() == (x * 5).tolist()
        assert result.finish_reason == "steps"


def test_first_request_launches_and_later_ones_find_the_kernel(tiny):
    graph = graph_of(tiny)
    with open_runtime(linger_ms=20_000, residency_ms=0) as runtime:
        requests = [runtime.submit(graph, [1, 2, 3], max_tokens=5) for _ in range(3)]
        tokens = [r.result(60).token_ids for r in requests]
        assert [r.stats.launches for r in requests] == [1, 0, 0]
        assert runtime.launches == 1
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(tokens[0]) == 5


def test_kernel_that_lingered_out_is_launched_again(tiny):
    graph = graph_of(tiny)
    with open_runtime(linger_ms=1) as runtime:
        first = runtime.submit(graph, [1], max_tokens=2)
        first.result(60)
        executor = runtime._sessions[0].executor
        assert executor.join(30)
        second = runtime.submit(graph, [1], max_tokens=2)
        assert second.result(60) == first.result()
        assert (first.stats.launches, second.stats.launches) == (1, 1)
        assert second.trace().whole_steps.tolist() == [0, 1]
        with pytest.raises(TraceError, match=r"^the spans of request 0 are gone"):
            first.trace()


def test_thousand_requests_of_different_lengths_on_one_kernel(tiny):
    graph = graph_of(tiny)
    with open_runtime(residency_ms=0, linger_ms=60_000, queue_capacity=77) as runtime:
        first = [
            runtime.submit(graph, [n % 20] * (1 + n % 7), max_tokens=1 + n % 11) for n in range(77)
        ]
        expected = [request.result(60).token_ids for request in first]
        pending = []
        for number in range(1000):
            n = number % 77
            pending.append(runtime.submit(graph, [n % 20] * (1 + n % 7), max_tokens=1 + n % 11))
            if len(pending) == 50:
                for at, request in enumerate(pending):
                    assert request.result(60).token_ids == expected[(number - 49 + at) % 77]
                pending = []
        assert runtime.launches == 1


def test_requests_queued_beyond_the_residency_are_launched_again(tiny):
    graph = graph_of(tiny)
    with open_runtime(residency_ms=1) as runtime:
        requests = [runtime.submit(graph, [n], max_tokens=60, ignore_eos=True) for n in range(19)]
        assert all(len(r.result(60).token_ids) == 60 for r in requests)
        assert runtime.launches > 1


def test_threads_submit_and_read_at_once(tiny):
    graph, seen = graph_of(tiny), []

    def work(number, alone):
        for _ in range(4):
            tokens = list(runtime.submit(graph, [number, 3], max_tokens=20))
            seen.append(tokens == alone)

    with open_runtime() as runtime:
        alone = [
            runtime.submit(graph, [n, 3], max_tokens=20).result(60).token_ids for n in range(4)
        ]
        threads = [threading.Thread(target=work, args=(n, alone[n])) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
            assert not thread.is_alive()
    assert seen == [True] * 16


def test_cancel_in_decode_keeps_the_tokens_that_came(tiny):
    with open_runtime() as runtime:
        whole = runtime.submit(graph_of(tiny), [5], max_tokens=60).result(60).token_ids
    graph = graph_of(tiny)
    gate = Gate(graph)
    with open_runtime(wait_timeout_ms=60_000) as runtime:
        request = runtime.submit(graph, [5], max_tokens=60)
        gate.open(steps=3)
        tokens = iter(request)
        seen = [next(tokens), next(tokens), next(tokens)]
        request.cancel()
        gate.open()
        seen += list(tokens)
        result = request.result(60)
    assert result.finish_reason == "cancelled"
    assert result.token_ids == seen == whole[: len(seen)]


def test_cancel_in_prefill_ends_without_a_token(tiny):
    graph = graph_of(tiny, rows=1)
    gate = Gate(graph)
    with open_runtime(wait_timeout_ms=60_000) as runtime:
        ahead = runtime.submit(graph, [1] * 40, max_tokens=20)
        request = runtime.submit(graph, [1] * 60, max_tokens=2)
        request.cancel()
        gate.open()
        assert request.result(60).token_ids == []
        assert request.result().finish_reason == "cancelled"
        assert len(ahead.result(60).token_ids) == 20


def test_close_with_requests_in_flight_ends_them(tiny):
    graph = graph_of(tiny)
    runtime = open_runtime()
    requests = [runtime.submit(graph, [n], max_tokens=60) for n in range(10)]
    runtime.close()
    assert {r.result(1).finish_reason for r in requests} <= {"cancelled", "length"}
    with pytest.raises(ClosedError, match=r"^the Runtime was closed"):
        runtime.submit(graph, [1], max_tokens=1)


def test_full_queue_is_refused():
    blocked = threading.Event()
    gate = body("gate", lambda out: blocked.wait(30) and out.fill(1))
    graph = Graph("gated")
    graph.task(gate, [], [graph.activation("x", [1], "f32")])
    with open_runtime(queue_capacity=2, wait_timeout_ms=60_000) as runtime:
        first = [runtime.submit(graph) for _ in range(2)]
        with pytest.raises(RingFullError, match=r"^2 requests are queued and the oldest"):
            runtime.submit(graph)
        blocked.set()
        assert [r.result(30).finish_reason for r in first] == ["steps", "steps"]
        assert runtime.submit(graph).result(30).finish_reason == "steps"


def test_prompt_beyond_the_context_is_refused_with_both_numbers(tiny):
    with open_runtime() as runtime:
        with pytest.raises(BoundError, match=r"^the prompt has 65 tokens, the context 64"):
            runtime.submit(graph_of(tiny), [1] * 65)
        assert runtime.launches == 0


def test_prompt_that_fills_the_context_yields_its_token(tiny):
    with open_runtime() as runtime:
        result = runtime.submit(graph_of(tiny), [1] * 64, ignore_eos=True).result(60)
        assert len(result.token_ids) == 1
        whole = runtime.submit(graph_of(tiny), [1], ignore_eos=True).result(60)
        assert len(whole.token_ids) == 64


def test_edge_that_is_never_signalled_is_named_and_the_runtime_lives(monkeypatch):
    plan, graph = hand_plan(
        [Node(), Node(after=(0,)), Node(after=(1,))],
        2,
        [("static", 100)],
        unsignalled=[(0, 1)],
    )
    real = runtime_module._make_plan
    with monkeypatch.context() as patch:
        # Such a plan never passes the checker, so it comes past it.
        patch.setattr(
            runtime_module, "_make_plan", lambda g, *rest: plan if g is graph else real(g, *rest)
        )
        with open_runtime(wait_timeout_ms=100) as runtime:
            with pytest.raises(FaultError) as caught:
                runtime.submit(graph).result(60)
            # Task 1 or one that waits for it: all their waits run out together.
            text = str(caught.value)
            assert re.match(r"task [123] \(\w+\), worker [01], waited \d+ ms in step 0 for", text)
            assert "for counter 0: seen 0, needed 1" in text
            assert "all its producers ran: task 0 (noop)" in text or "no task signals" in text
            with pytest.raises(FaultError):
                runtime.submit(graph).result(60)
            x = np.ones(4)
            assert runtime.submit(diamond(), inputs={"x": x}).result(30).outputs["y"][0] == 5
    with open_runtime() as runtime:
        x = np.ones(4)
        assert runtime.submit(diamond(), inputs={"x": x}).result(30).outputs["y"][0] == 5


def test_python_body_that_raises_is_the_cause_of_the_fault():
    def fail(*_):
        raise ZeroDivisionError("in the body")

    graph = Graph("failing")
    graph.task(body("fail", fail), [graph.input("x", [1], "f32")], [graph.output("y", [1], "f32")])
    with open_runtime() as runtime:
        request = runtime.submit(graph, inputs={"x": np.ones(1)})
        with pytest.raises(FaultError, match=r"^task 0 \(fail\), worker \d, raised") as caught:
            request.result(60)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_nan_in_the_weights_is_a_fault_that_names_the_place(tmp_path):
    folder = tiny_folder(tmp_path / "nan")
    model = load_model(folder)
    name = "model.norm.weight"
    source = model.weights[name]
    broken = dict(model.weights)
    bad = np.array(source.load())
    bad[0] = np.nan
    broken[name] = type(source)(name, source.dtype, source.shape, lambda: bad)
    graph = llama.build(model.config, broken)
    with open_runtime() as runtime, pytest.raises(FaultError, match=r"met NaN or infinity at row"):
        runtime.submit(graph, [1], max_tokens=2).result(60)


def test_loaded_plan_runs_and_a_plan_of_another_graph_is_refused(tiny, tmp_path):
    graph = graph_of(tiny)
    with open_runtime() as runtime:
        runtime.prepare(graph).save(tmp_path / "a.plan")
        wanted = runtime.submit(graph, [4, 5], max_tokens=9).result(60).token_ids
    plan = Plan.load(tmp_path / "a.plan")
    with open_runtime() as runtime:
        again = graph_of(tiny)
        assert runtime.prepare(again, plan=plan) is plan
        assert runtime.submit(again, [4, 5], max_tokens=9).result(60).token_ids == wanted
        with pytest.raises(PlanError, match=r"^the plan's rows, slots, context and vocabulary"):
            runtime.prepare(graph_of(tiny, rows=3), plan=plan)
        with pytest.raises(PlanError, match=r"^the plan's rows"):
            runtime.prepare(diamond(), plan=plan)


def test_trace_of_a_request_has_its_steps_only(tiny):
    graph = graph_of(tiny)
    with open_runtime(linger_ms=20_000) as runtime:
        runtime.submit(graph, [1], max_tokens=6).result(60)
        request = runtime.submit(graph, [1], max_tokens=4)
        request.result(60)
        trace = request.trace()
    assert len(trace.whole_steps) == 4
    assert trace.steps["step"].tolist() == trace.whole_steps.tolist() == [6, 7, 8, 9]
    assert trace.critical_path()["task"][-1] == len(trace.task_op) - 1
    known = trace.requests[0]
    assert (known.first_step, known.last_step, known.tokens) == (6, 9, 4)
    assert len(trace.requests) == 1


def test_trace_off_says_how_to_turn_it_on(tiny):
    with open_runtime(trace=False) as runtime:
        request = runtime.submit(graph_of(tiny), [1], max_tokens=2)
        request.result(60)
        with pytest.raises(TraceError, match=r"^no spans were kept .* open the Runtime with trace"):
            request.trace()


def test_slots_of_one_step_give_the_tokens_of_each_alone(tiny):
    prompts = [[1, 2, 3], [9], [4] * 20]
    with open_runtime() as runtime:
        one = graph_of(tiny, slots=1)
        alone = [runtime.submit(one, p, max_tokens=12).result(60).token_ids for p in prompts]
        three = graph_of(tiny, slots=3)
        together = [runtime.submit(three, p, max_tokens=12) for p in prompts]
        assert [r.result(60).token_ids for r in together] == alone


@pytest.mark.reference
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_tensors_go_in_without_numpy_knowing_their_dtype(dtype):
    torch = pytest.importorskip("torch")
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=getattr(torch, dtype), requires_grad=True)
    if dtype == "float32":
        with open_runtime() as runtime:
            y = runtime.submit(diamond(), inputs={"x": x}).result(30).outputs["y"]
        assert torch.from_dlpack(y).tolist() == [5.0, 10.0, 15.0, 20.0]
        return
    graph = Graph("copy")
    copy = body("copy", lambda x, out: np.copyto(out, x))
    graph.task(copy, [graph.input("x", [4], "bf16")], [graph.output("y", [4], "bf16")])
    with open_runtime() as runtime:
        y = runtime.submit(graph, inputs={"x": x}).result(30).outputs["y"]
    assert y.tolist() == [1.0, 2.0, 3.0, 4.0]


INTERRUPTED = """
import numpy as np, os, signal, sys, threading
from gpurt.body import body
from gpurt.graph import Graph
from gpurt.runtime import Runtime
started = threading.Event()
def slow(out):
    started.set()
    import time
    time.sleep(0.3)
graph = Graph("slow")
graph.task(body("slow", slow), [], [graph.activation("x", [1], "f32")])
with Runtime("host", workers=1) as runtime:
    request = runtime.submit(graph, steps=100000)
    started.wait()
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        request.result()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
print("closed", request.result().finish_reason, flush=True)
"""


def test_ctrl_c_in_a_wait_leaves_cleanly():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["interrupted", "closed cancelled"]
    assert signal.SIGINT.name not in done.stderr


def test_a_parked_runtime_has_no_kernel_and_the_next_submit_launches_again():
    with open_runtime(resident=True) as runtime:
        graph = diamond()
        for launches in (1, 2):
            request = runtime.submit(graph, inputs={"x": np.arange(4)})
            runtime.park()
            assert request.done
            assert runtime.launches == launches
            assert not runtime._find(graph).executor.running()
    with pytest.raises(ClosedError):
        runtime.park()
