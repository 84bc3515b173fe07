"""Drives an executor as a runtime does, but one call at a time: submit, wait, collect."""

from __future__ import annotations

import time
from contextlib import contextmanager

import numpy as np

from gpurt import wire
from gpurt.executors import host
from gpurt.executors.base import HostView, Options, ensure_running

WAIT_S = 60.0  # far beyond what any test needs; a hang fails instead of blocking


class Driver:
    """One executor and the requests that were given to it, in order."""

    def __init__(self, executor):
        self.executor = executor
        self.view: HostView = executor.host
        self.next = int(self.view.control["submit_tail"])
        self.promised = False  # whether the last publish found a running kernel

    def submit(self, *, start: bool = True, **fields) -> int:
        """Queue one request; returns its sequence number. prompt: token ids; stop: token ids."""
        sequence = self.next
        entry = sequence % len(self.view.requests)
        prompt = fields.pop("prompt", [])
        stop = fields.pop("stop", [])
        self.view.requests[entry] = np.zeros((), wire.REQUEST_RECORD)
        record = self.view.requests[entry]
        self.view.outputs[entry] = np.zeros((), wire.REQUEST_OUTPUT)
        record["sequence"] = sequence
        record["kind"] = wire.RequestKind.GENERATE if prompt else wire.RequestKind.STEPS
        record["prompt_tokens"], record["stop_count"] = len(prompt), len(stop)
        record["stop_ids"][: len(stop)] = stop
        for name, value in {"max_tokens": 1, "top_p": 1.0, **fields}.items():
            record[name] = value
        self.view.prompt_tokens[entry, : len(prompt)] = prompt
        self.next = sequence + 1
        self.promised = self.view.publish(self.next)
        if start and not self.promised:
            ensure_running(self.executor)
        return sequence

    def wait(self, sequence: int) -> tuple[list[int], wire.FinishReason]:
        """The tokens and why it ended. Launches again when the kernel left it queued."""
        entry = sequence % len(self.view.requests)
        deadline = time.monotonic() + WAIT_S
        count, reason = self.view.progress(entry)
        while reason == wire.FinishReason.NONE:
            assert time.monotonic() < deadline, f"request {sequence} has {count} tokens"
            count, reason = self.view.wait_output(entry, count, 0.05)
            if reason == wire.FinishReason.NONE and not self.executor.running():
                assert self.view.fault() is None, self.view.fault()
                ensure_running(self.executor)
        return self.view.output_tokens[entry, :count].tolist(), reason

    def wait_for_promised(self, sequence: int) -> wire.FinishReason:
        """Like `wait`, for a request that `publish` said a running kernel will take."""
        entry = sequence % len(self.view.requests)
        deadline = time.monotonic() + WAIT_S
        reason = wire.FinishReason.NONE
        while reason == wire.FinishReason.NONE and time.monotonic() < deadline:
            # Looked at first: what a kernel took is finished before it is gone.
            gone = not self.executor.running()
            reason = self.view.wait_output(entry, 0, 0.0 if gone else 0.01)[1]
            assert reason or not gone, f"request {sequence} was promised a kernel that left"
        return reason

    def output(self, sequence: int):
        """The request's output record."""
        return self.view.outputs[sequence % len(self.view.requests)]

    def run(self, **fields) -> tuple[list[int], wire.FinishReason]:
        """Submit one request and wait for it."""
        return self.wait(self.submit(**fields))


@contextmanager
def driven(planned, **options):
    """A Driver over `(plan, graph)`; closed at the end."""
    plan, graph = planned
    options = {"wait_timeout_ms": 20_000.0, "linger_ms": 20_000.0, "residency_ms": 0.0} | options
    executor = host.load(plan, graph, Options(**options))
    try:
        yield Driver(executor)
    finally:
        executor.close()
