"""What goes wrong on the GPU ends in one exception, and the next Runtime works."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gpurt.runtime
from gpurt.body import body
from gpurt.buffer import f32
from gpurt.errors import DeviceError, FaultError, GpurtError, GraphError
from gpurt.executors import cuda
from gpurt.executors.base import Options
from gpurt.graph import Graph
from gpurt.plan import Plan
from gpurt.planner import plan
from gpurt.runtime import Runtime
from tests.gpu.tiny_llama import Weights, device_target, tiny_llama
from tests.gpu.tiny_muse import tiny_muse

PROMPT = list(range(1, 30))


def works() -> None:
    with Runtime("cuda:0") as runtime:
        request = runtime.submit(tiny_llama(), PROMPT, max_tokens=4, ignore_eos=True)
        assert len(list(request)) == 4


@pytest.mark.parametrize("policy", ["static", "claim", "ready"])
def test_an_edge_that_is_never_signalled_is_named_within_the_time_out(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = tiny_llama()
    made = plan(graph, device_target(), policy=policy)
    # Of what fills a ready slot only the first are named: those of kv.
    names = ("kv",) if policy == "ready" else {op.name for op in made.operators}
    mute = next(
        i
        for i, t in enumerate(made.tasks)
        if t.signals and t.body == "matvec" and made.operators[t.op].name in names
    )
    assert f"task {mute} (matvec" in _fault_of_a_mute(graph, made, mute, monkeypatch)


def test_a_body_that_waits_for_its_edges_itself_gives_up_within_the_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = tiny_muse()
    made = plan(graph, device_target())
    waiters: dict[int, set[str]] = {}
    for task in made.tasks:
        for counter, _ in task.waits:
            waiters.setdefault(counter, set()).add(task.body)
    alone = next(counter for counter, bodies in waiters.items() if bodies == {"matvec_f32"})
    mute = next(i for i, t in enumerate(made.tasks) if alone in t.signals)
    # Nobody else waits for it: were it not for the router, all would be well. Who waits for the
    # router may be named first.
    assert "counter" in _fault_of_a_mute(graph, made, mute, monkeypatch, (alone,))


def _fault_of_a_mute(
    graph: Graph,
    made: Plan,
    mute: int,
    monkeypatch: pytest.MonkeyPatch,
    lacking: tuple[int, ...] | None = None,
) -> str:
    """What a plan ends with whose task `mute` does not signal some counters, or none; afterwards
    all is well.
    """
    tasks = list(made.tasks)
    signals = tasks[mute].signals
    kept = () if lacking is None else tuple(c for c in signals if c not in lacking)
    tasks[mute] = replace(tasks[mute], signals=kept)
    # Past the checker on purpose: it would refuse this plan.
    monkeypatch.setattr(gpurt.runtime, "_check_given", lambda *_: None)
    with Runtime("cuda:0", wait_timeout_ms=200) as runtime:
        runtime.prepare(graph, plan=replace(made, tasks=tuple(tasks)))
        request = runtime.submit(graph, PROMPT, max_tokens=4)
        begin = time.monotonic()
        with pytest.raises(FaultError, match=r"task \d+") as caught:
            request.result(timeout_s=20)
        assert time.monotonic() - begin < 10, "the report came late"
    works()
    return str(caught.value)


@pytest.mark.parametrize("edges", ["counter", "payload"])
def test_nan_in_a_weight_is_a_fault_of_sample_and_never_a_hang(
    edges: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Weights.load

    def poisoned(self: Weights) -> Any:
        values = plain(self)
        if self.shape == (256,) and self.seed == 1:
            values[17] = np.nan
        return values

    monkeypatch.setattr(Weights, "load", poisoned)
    with Runtime("cuda:0", edges=edges, wait_timeout_ms=500) as runtime:
        request = runtime.submit(tiny_llama(), PROMPT, max_tokens=4)
        with pytest.raises(FaultError, match="met NaN or infinity"):
            request.result(timeout_s=20)
    monkeypatch.undo()
    works()


@pytest.mark.parametrize("after_tokens", [0, 3])
def test_cancel_in_prefill_and_in_decode(after_tokens: int) -> None:
    graph = tiny_llama(context=8192)  # so long that the cancel comes first
    with Runtime("cuda:0", prefill_rows=1) as runtime:
        runtime.prepare(graph)
        prompt = [5] * (4000 if after_tokens == 0 else 3)
        request = runtime.submit(graph, prompt, max_tokens=4000, ignore_eos=True)
        if after_tokens:
            iterator = iter(request)
            for _ in range(after_tokens):
                next(iterator)
        request.cancel()
        result = request.result(timeout_s=20)
        assert result.finish_reason == "cancelled"
        assert len(result.token_ids) < 4000
        following = runtime.submit(graph, PROMPT, max_tokens=4, ignore_eos=True)
        assert len(following.result(timeout_s=20).token_ids) == 4


def test_close_with_requests_in_flight_ends_them() -> None:
    runtime = Runtime("cuda:0", prefill_rows=1)
    graph = tiny_llama(context=512)
    requests = [runtime.submit(graph, [3] * 100, max_tokens=400, ignore_eos=True) for _ in range(8)]
    runtime.close()
    for request in requests:
        # One that was closed before it began may as well raise an error that says so.
        with contextlib.suppress(GpurtError):
            assert request.result(timeout_s=5).finish_reason == "cancelled"
    works()


DOUBLE = """
struct twice {
  __device__ static void run(const gpurt::TaskRecord& task, const gpurt::BodyContext& context) {
    const float* x = context.address<const float>(task, 0);
    float* y = context.address<float>(task, 1);
    for (gpurt::u32 i = context.thread; i < 64; i += context.team_threads) y[i] = 2.0f * x[i];
  }
};
"""


def chain(source: str, length: int = 5) -> Graph:
    def twice(x: Any, y: Any) -> None:
        y[...] = 2 * x

    own = body("twice", twice, source)
    graph = Graph("chain")
    before = graph.input("x", [64], f32)
    for i in range(length):
        after = (
            graph.output("y", [64], f32)
            if i == length - 1
            else graph.activation(f"t{i}", [64], f32)
        )
        graph.task(own, reads=[before], writes=[after])
        before = after
    return graph


def test_a_users_struct_runs_and_its_outputs_come_back() -> None:
    graph = chain(DOUBLE)
    x = np.arange(64, dtype=np.float32)
    with Runtime("cuda:0") as runtime:
        for scale in (1, 3):
            result = runtime.submit(graph, inputs={"x": scale * x}, steps=7).result()
            assert np.array_equal(result.outputs["y"], 32 * scale * x)


def test_a_compile_error_names_the_users_line() -> None:
    graph = chain(DOUBLE.replace("2.0f * x[i]", "2.0f * z[i]"))
    with (
        Runtime("cuda:0") as runtime,
        pytest.raises(GraphError, match=r'identifier "z" is undefined.*twice, line 5'),
    ):
        runtime.prepare(graph)


def test_more_workers_than_sms_are_refused_with_both_numbers() -> None:
    target = device_target()
    many = replace(target, workers=target.workers + 1)
    graph = tiny_llama()
    with pytest.raises(DeviceError, match=f"^{many.workers} workers, but only {target.workers}"):
        cuda.load(plan(graph, many), graph, Options())


def test_a_second_launch_while_one_runs_is_refused() -> None:
    graph = tiny_llama()
    executor = cuda.load(plan(graph, device_target()), graph, Options(resident=True))
    try:
        executor.launch()
        with pytest.raises(DeviceError, match="runs already"):
            executor.launch()
    finally:
        executor.close()
    executor.close()
    works()
