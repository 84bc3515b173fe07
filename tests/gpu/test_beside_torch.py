"""Torch in the same process, while a request runs, between requests and after: never a deadlock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from gpurt.runtime import Runtime
from tests.gpu.tiny_llama import tiny_llama

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # torch's own
]
LIMIT_S = 30.0
# Each is used once: the first use loads its kernel.
LAZY = iter(["erfinv", "sinh", "asinh", "cosh", "atanh", "expm1", "log1p", "tan", "acos", "frac"])


def work() -> None:
    """Everything that waits for a resident kernel where the two share a context."""
    x = torch.ones(1 << 18, device="cuda")
    y = (x * 2).sum().item()
    assert y == 2 * (1 << 18)
    name = next(LAZY, None)
    if name is not None:
        float(getattr(torch, name)(x[:8] * 0.25)[0].item())
    square = torch.ones(512, 512, device="cuda")
    assert float((square @ square)[0, 0].item()) == 512.0
    del x, square
    torch.cuda.empty_cache()
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    torch.empty(1 << 20, pin_memory=True)
    torch.cuda.synchronize()


def copy() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        pinned = torch.ones(1 << 18, pin_memory=True)
        there = pinned.to("cuda", non_blocking=True)
        assert float(there.cpu().sum()) == 1 << 18
        stream.synchronize()


def in_time(*functions: Callable[[], Any]) -> None:
    """Run each in a thread of its own. Fails if one is not back in LIMIT_S."""
    errors: list[BaseException] = []

    def run(function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "torch work hangs beside the kernel"
    if errors:
        raise errors[0]


def test_torch_work_during_between_and_after_requests() -> None:
    graph = tiny_llama(context=512)
    prompt = list(range(20))
    in_time(work)
    with Runtime("cuda:0", linger_ms=300, residency_ms=500) as runtime:
        wanted = list(runtime.submit(graph, prompt, max_tokens=64, ignore_eos=True))
        in_time(work)  # lingering
        request = runtime.submit(graph, prompt, max_tokens=64, ignore_eos=True)
        in_time(work, copy, copy)  # most likely during; then after
        assert list(request) == wanted
        tokens = []
        for index, token in enumerate(
            runtime.submit(graph, prompt, max_tokens=64, ignore_eos=True)
        ):
            tokens.append(token)
            if index in (0, 10, 63):
                work()  # by the very thread that reads tokens
        assert tokens == wanted
    in_time(work)


def test_torch_work_beside_a_stream_of_requests_and_a_resident_kernel() -> None:
    graph = tiny_llama(context=512)
    for resident in (False, True):
        with Runtime("cuda:0", resident=resident, residency_ms=200) as runtime:
            runtime.prepare(graph)
            stop = threading.Event()
            outputs = set()

            def feed(runtime: Runtime = runtime, stop: Any = stop, outputs: Any = outputs) -> None:
                while not stop.is_set():
                    request = runtime.submit(graph, [7, 8, 9], max_tokens=200, ignore_eos=True)
                    outputs.add(tuple(request))

            feeder = threading.Thread(target=feed, daemon=True)
            feeder.start()
            for _ in range(3):
                in_time(work, copy, copy)
            stop.set()
            feeder.join(LIMIT_S)
            assert not feeder.is_alive()
            assert len(outputs) == 1


CHILD = """
from gpurt.runtime import Runtime
from tests.gpu.tiny_llama import tiny_llama
with Runtime("cuda:0", resident=True) as runtime:
    graph = tiny_llama(context=512)
    print(list(runtime.submit(graph, [1, 2, 3], max_tokens=8, ignore_eos=True)), flush=True)
    if {waits}:
        request = runtime.submit(graph, [1, 2, 3], max_tokens=500, ignore_eos=True)
        import time
        time.sleep(60)
"""


def test_a_process_killed_with_its_kernel_resident_leaves_the_gpu_usable() -> None:
    environment = {**os.environ, "PYTHONPATH": "."}
    victim = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(waits=True)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert victim.stdout is not None
    line = victim.stdout.readline()
    victim.send_signal(signal.SIGKILL)
    victim.wait(LIMIT_S)
    victim.stdout.close()
    fresh = subprocess.run(
        [sys.executable, "-c", CHILD.format(waits=False)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
        env=environment,
    )
    assert fresh.stdout == line != ""
