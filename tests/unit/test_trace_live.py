"""A resident runtime's trace while a request runs: from Python, and by a signal."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

import gpurt
from gpurt.cli_trace import trace_on_signal
from gpurt.errors import ClosedError, TraceError
from gpurt.trace import Trace

STEPS = 5
HELD_AT = 3  # steps that have ended when the run is held


@pytest.fixture
def held():
    """(runtime, request, gate) of a request of STEPS steps that stands in step HELD_AT."""
    reached, gate = threading.Event(), threading.Event()
    calls = []

    def body(x, y):
        calls.append(None)
        if len(calls) == HELD_AT + 1:
            reached.set()
            gate.wait()
        np.add(x, 1, out=y)

    graph = gpurt.Graph("held")
    x, y = graph.input("x", [4], "f32"), graph.output("y", [4], "f32")
    graph.task(gpurt.body("hold", body), reads=[x], writes=[y])
    with gpurt.Runtime("host", workers=1, wait_timeout_ms=60_000, resident=True) as runtime:
        with pytest.raises(TraceError, match=r"^nothing ran so far - at Runtime\.trace"):
            runtime.trace()
        request = runtime.submit(graph, inputs={"x": np.zeros(4)}, steps=STEPS)
        reached.wait()
        try:
            yield runtime, request, gate
        finally:
            gate.set()
    with pytest.raises(ClosedError):
        runtime.trace()


def test_trace_of_a_runtime_has_the_steps_so_far(held):
    runtime, request, gate = held
    assert runtime.trace().whole_steps.tolist() == list(range(HELD_AT))
    gate.set()
    request.result()
    trace = runtime.trace()
    assert trace.whole_steps.tolist() == list(range(STEPS))
    assert [r.last_step for r in trace.requests] == [STEPS - 1]


def test_a_signal_writes_the_trace_of_what_runs(held, tmp_path, capsys):
    runtime, *_ = held
    path = tmp_path / "live.trace"
    before = signal.getsignal(signal.SIGUSR1)
    with trace_on_signal(runtime, path):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert Trace.load(path).whole_steps.tolist() == list(range(HELD_AT))
        assert capsys.readouterr().err == f"wrote {path}\n"
        path.unlink()
        path.mkdir()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert capsys.readouterr().err.startswith("gpurt: cannot write the trace: Is a directory")
    assert signal.getsignal(signal.SIGUSR1) is before
