"""Session: one loaded plan, its executor, its submission ring and the requests in it.

Owns: ring entries (entry = sequence % capacity), the launch and end protocol as the host sees it,
how a fault ends requests. Does not know: graphs other than its own, devices, models.

  submit: record, prompt -> publish(tail) -> kernel RUNNING? it sees the tail, whatever it does next
                                          -> ENDING? wait until it runs again or has ended
                                          -> ended? launch
  read:   wait_output (no lock, no GIL) -> lock -> copy tokens; the last copy frees the entry

The device never waits for the host: an output entry has room for all of a request's tokens. So
every wait here ends by itself: by tokens, by the kernel's end, or by a Fault within its time-out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.arrays import from_storage
from gpurt.config import DEBUG_LEVELS
from gpurt.errors import (
    ClosedError,
    FaultError,
    GpurtError,
    RequestError,
    RingFullError,
    TraceError,
)
from gpurt.executors.base import settled_state
from gpurt.faults import describe_faults
from gpurt.request import WAIT_SLICE_S, Request
from gpurt.wire import FaultKind, FinishReason, KernelState, RequestFlags, RequestKind

if TYPE_CHECKING:
    from gpurt.executors.base import Executor, HostView
    from gpurt.graph import Graph, Operator
    from gpurt.plan import Plan
    from gpurt.trace import Trace

CLOSE_GRACE_S = 2.0  # for a cancelled request to be noticed; then the run is aborted
JOIN_GRACE_S = 5.0  # for workers to drain after an abort, beyond the wait time-out
ABORT_GRACE_S = 1.0  # for ranks to hear from the one that gave up
POLL_S = 0.0005
# A body may run long while nobody waits for it; so only after many wait time-outs is a silent
# kernel given up.
SILENCE_WAITS = 5
SILENCE_MIN_S = 10.0
ENDED_KEPT = 256  # requests that a trace can name

log = logging.getLogger("gpurt")


class Session:
    """A loaded plan. Thread-safe; `lock` guards everything but the native waits."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        executor: Executor,
        wait_timeout_ms: float,
        ceiling_gbps: float = 0.0,
    ) -> None:
        """ceiling_gbps: measured bandwidth of the device, for traces; 0 if it is not known."""
        self.graph = graph
        self.plan = plan
        self.executor = executor
        self.lock = threading.RLock()
        self.broken = False  # workers did not drain: the executor can be neither reused nor freed
        self.written_inputs: set[str] = set()
        # (launch, RequestInfo's fields) of requests that ended, for traces; no Request, whose
        # Runtime it would keep alive.
        self._ended: deque[tuple[int, tuple[Any, ...]]] = deque(maxlen=ENDED_KEPT)
        self._ceiling_gbps = ceiling_gbps
        self._view: HostView = executor.host
        self._occupants: list[Request | None] = [None] * len(self._view.requests)
        self._next_sequence = int(self._view.control["submit_tail"])
        self._rolls = any(_rolls(op, graph.context) for op in graph.operators)
        self._readers = 0
        self._refusing = False
        self._closed = False
        self._launches = 0
        self._wait_timeout_ms = wait_timeout_ms
        self._heartbeat = (0, time.monotonic())

    @property
    def launches(self) -> int:
        """Launches since load."""
        return self._launches

    @property
    def in_flight(self) -> list[Request]:
        """Unfinished requests, oldest first."""
        return sorted((r for r in self._occupants if r), key=lambda r: r.sequence)

    @property
    def is_serial(self) -> bool:
        """Whether requests share buffers that the host fills or reads, so go one at a time."""
        return bool(self.graph.inputs or self.graph.outputs)

    # ---- submit --------------------------------------------------------------------------
    def submit(
        self, request: Request, inputs: dict[str, NDArray[Any]], after: Request | None = None
    ) -> None:
        """Queue it, and launch if nothing runs. after: what it goes on from, see Runtime.submit.

        Raises: RequestError, RingFullError, ClosedError, DeviceError.
        """
        kept = self._kept_tokens(request, after)
        if self.is_serial:
            self.wait_idle()
        with self.lock:
            self._check_open()
            for name, array in inputs.items():
                self.executor.write(name, array)
                self.written_inputs.add(name)
            sequence = self._next_sequence
            entry = sequence % len(self._occupants)
            self._collect(self._occupants[entry])
            if self._occupants[entry] is not None:
                count = len(self._occupants)
                msg = f"{count} requests are queued and the oldest is unfinished"
                hint = "read or cancel some, or raise queue_capacity"
                raise RingFullError(f"{msg} - at Runtime.submit - {hint}")
            self._fill(request, sequence, entry)
            if after is not None and kept:
                record = self._view.requests[entry : entry + 1]
                record["kept_tokens"], record["follows"] = kept, after.sequence + 1
            self._occupants[entry] = request
            self._next_sequence = sequence + 1
            self._heartbeat = (int(self._view.control["heartbeat"]), time.monotonic())
            self._view.publish(self._next_sequence)
            try:
                self._ensure_running(request)
                request.launch_index = self._launches
            except BaseException:
                self._abandon(request)
                raise

    def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        while True:
            with self.lock:
                pending = self.in_flight
            if not pending:
                return
            self.wait_once(pending[0], len(pending[0].tokens), WAIT_SLICE_S)

    # ---- read ----------------------------------------------------------------------------
    def wait_beyond(self, request: Request, seen: int) -> None:
        """Return once `request` has more than `seen` tokens or has ended."""
        while len(request.tokens) <= seen and not request.done:
            self.wait_once(request, seen, WAIT_SLICE_S)

    def wait_once(self, request: Request, seen: int, timeout_s: float) -> None:
        """Wait for news of `request`, at most `timeout_s`; see to the kernel if there is none."""
        with self.lock:
            if request.done or len(request.tokens) > seen:
                return
            entry = request.entry
            self._readers += 1
            if not request.tokens and not int(self._view.outputs[entry]["token_count"]):
                # Somebody watches for the first token: the time it is seen is the time it came.
                request.timing.watched = True
        try:
            self._view.wait_output(entry, seen, timeout_s)
        finally:
            with self.lock:
                self._readers -= 1
                self._collect(request)
                request.timing.watched = False
                quiet = not request.done and len(request.tokens) <= seen
        if quiet:
            self.tend()

    def cancel(self, request: Request) -> None:
        """Set the flag that `advance` reads."""
        with self.lock:
            if not request.done and not self._closed:
                self._view.cancel(request.entry)

    def trace_of(self, request: Request) -> Trace:
        """See Request.trace."""
        with self.lock:
            if self._closed:
                self._check_open()
            if request.launch_index != self._launches:
                # Workers of a later launch write into the same rings.
                msg = f"the spans of request {request.sequence} are gone"
                raise TraceError(f"{msg} - at Request.trace - ask before the next launch")
            last_step = request.last_step if request.done else None
            return self.trace(request.first_step, last_step)

    def trace(self, first_step: int = 0, last_step: int | None = None) -> Trace:
        """What is kept of the last launch's steps, also while they run; last_step None: all.

        Raises: TraceError if that is nothing, ClosedError.
        """
        from gpurt.trace import RequestInfo, Trace

        with self.lock:
            if self._closed:
                self._check_open()
            raws = self.executor.raw_traces()
            known = [RequestInfo(*row) for launch, row in self._ended if launch == self._launches]
        beside = tuple(
            r
            for r in known
            if r.last_step >= first_step and (last_step is None or r.first_step <= last_step)
        )
        return Trace.from_raw(
            self.plan,
            *raws,
            first_step=first_step,
            last_step=last_step,
            requests=beside,
            ceiling_gbps=self._ceiling_gbps,
        )

    # ---- watch ---------------------------------------------------------------------------
    def tend(self) -> None:
        """See to the kernel: read what ended, launch for what is queued, turn faults to errors."""
        with self.lock:
            if self._closed or not self.in_flight:
                return
            for request in self.in_flight:
                self._collect(request)
            fault = self._view.fault()
            log.log(DEBUG_LEVELS[4], "%d in flight, fault %s", len(self.in_flight), fault)
            if fault is not None:
                self._fail()
            elif self.in_flight and not self.executor.running():
                self._relaunch()
            elif self.in_flight:
                self._check_heartbeat()

    def drain(self) -> None:
        """Let its requests end, then its kernel, so that another plan can have the device."""
        self.wait_idle()
        with self.lock:
            if self._closed or self.broken:
                return
            while self.executor.running():
                self._view.request_exit()
                if not self.executor.join(self._drain_s):
                    self._abort(
                        f"the kernel did not end {self._drain_s:g} s after its last request"
                    )
                    return

    def refuse(self) -> None:
        """Take no more requests, and ask for the end of those in flight."""
        with self.lock:
            self._refusing = True
            for request in self.in_flight if not self._closed else ():
                self._view.cancel(request.entry)

    def close(self) -> None:
        """End what is in flight as cancelled, end the kernel, free everything. Idempotent."""
        self.refuse()
        with self.lock:
            if self._closed:
                return
            if not self.broken:
                self._view.request_exit()
                deadline = time.monotonic() + CLOSE_GRACE_S
                while self.executor.running() and time.monotonic() < deadline:
                    self.executor.join(WAIT_SLICE_S)
                if self.executor.running():
                    self._view.request_abort()
                    self.broken = not self.executor.join(self._drain_s)
            for request in self.in_flight:
                self._collect(request)
                if not request.done:
                    self._finish(request, "cancelled", None)
            self._closed = True
        while self._readers and not self.broken:  # they come back within one slice
            time.sleep(POLL_S)
        if not self.broken:
            self.executor.close()

    # ---- helpers: ring -------------------------------------------------------------------
    @property
    def _drain_s(self) -> float:
        return self._wait_timeout_ms / 1e3 + JOIN_GRACE_S

    def _check_open(self) -> None:
        if self._closed or self._refusing:
            raise ClosedError("the Runtime was closed - at Runtime - make another one")

    def _kept_tokens(self, request: Request, after: Request | None) -> int:
        """Of the prompt, how many tokens have K/V in the slot of `after`, if it is still its slot.

        They are what both begin with. The last token of `after` was never fed; the last one of the
        prompt must be. A window's ring keeps what the last position needs, and no other.
        """
        if after is None:
            return 0
        is_ours = after.session is self
        if not is_ours or not after.done:
            what = "is unfinished" if is_ours else "ran another graph"
            msg = f"`after` is request {after.sequence}, which {what}"
            raise RequestError(f"{msg} - at submit - pass a request of this graph that has ended")
        if after.error is not None or not after.tokens:
            return 0
        fed = np.concatenate([after.prompt, np.array(after.tokens[:-1], np.uint32)])
        size = min(len(fed), len(request.prompt) - 1)
        differs = np.flatnonzero(fed[:size] != request.prompt[:size])
        kept = int(differs[0]) if len(differs) else size
        return kept if not self._rolls or kept == len(fed) else 0

    def _fill(self, request: Request, sequence: int, entry: int) -> None:
        """Write the record. The kernel does not look at it before the tail is published."""
        request.sequence, request.entry = sequence, entry
        sampling, prompt = request.sampling, request.prompt
        record = self._view.requests[entry : entry + 1]
        self._view.outputs[entry : entry + 1] = np.zeros(1, self._view.outputs.dtype)
        record[:] = np.zeros(1, record.dtype)
        record["sequence"] = sequence
        record["kind"] = RequestKind.GENERATE if self.plan.vocab else RequestKind.STEPS
        record["flags"] = RequestFlags.IGNORE_STOP if sampling.ignore_eos else 0
        record["prompt_tokens"] = len(prompt)
        record["max_tokens"] = sampling.max_tokens
        record["temperature"] = sampling.temperature
        record["top_k"] = sampling.top_k
        record["top_p"] = sampling.top_p
        record["seed"] = sampling.seed
        record["stop_count"] = len(sampling.stop_ids)
        record["stop_ids"][0, : len(sampling.stop_ids)] = sampling.stop_ids
        if len(prompt):
            self._view.prompt_tokens[entry, : len(prompt)] = prompt

    def _collect(self, request: Request | None) -> None:
        """Copy what the device published; at the end of a request, free its entry."""
        if request is None or request.done or self._occupants[request.entry] is not request:
            return
        # A time-out of 0 is a read with acquire order: the end first, then the count.
        count, finish = self._view.wait_output(request.entry, 0, 0.0)
        seen = len(request.tokens)
        if count > seen:
            now = time.monotonic_ns()
            request.tokens += self._view.output_tokens[request.entry, seen:count].tolist()
            if request.timing.watched and not seen:
                request.timing.first_seen_ns = now
            request.timing.last_seen_ns = now
        if finish and finish != FinishReason.FAULT:
            self._finish(request, FinishReason(finish).name.lower(), None)

    def _finish(self, request: Request, reason: str, error: GpurtError | None) -> None:
        output = self._view.outputs[request.entry]
        timing = request.timing
        timing.begin_ns = int(output["begin_ns"])
        timing.first_token_ns = int(output["first_token_ns"])
        timing.end_ns = int(output["end_ns"])
        request.steps = int(output["steps"])
        request.first_step = int(output["first_step"])
        request.last_step = int(output["last_step"])
        request.cached_tokens = int(output["kept_tokens"])
        request.verify_steps = int(output["verify_steps"])
        request.accepted = output["accepted"][: self.graph.proposal_limit].tolist()
        if error is None and reason == "steps":
            request.outputs = {
                name: from_storage(self.executor.read(name), buffer.dtype)
                for name, buffer in self.graph.outputs.items()
            }
        request.error = error
        self._occupants[request.entry] = None
        # Last: readers look at it without the lock.
        request.finish_reason = reason
        count = len(request.tokens)
        steps = request.first_step, request.last_step
        drafts = request.verify_steps, tuple(request.accepted)
        ended = (request.sequence, *steps, request.prompt_tokens, count, *drafts)
        self._ended.append((request.launch_index, ended))
        log.log(DEBUG_LEVELS[2], "request %d: %s, %d tokens", request.sequence, reason, count)

    # ---- helpers: launch -----------------------------------------------------------------
    def _ensure_running(self, request: Request) -> None:
        state = settled_state(self.executor, self._drain_s)
        if state == KernelState.ENDING:
            self._abort(f"the kernel has been ending for {self._drain_s:g} s")
        elif state == KernelState.ABSENT:
            self._launch(request)

    def _launch(self, request: Request) -> None:
        self.executor.launch()
        self._launches += 1
        request.launches += 1
        for waiting in self.in_flight:
            waiting.launch_index = self._launches
        self._heartbeat = (int(self._view.control["heartbeat"]), time.monotonic())
        log.log(DEBUG_LEVELS[1], "launch %d for request %d", self._launches, request.sequence)

    def _relaunch(self) -> None:
        """The kernel ended with requests queued: its residency was over, or it had to yield."""
        # It may have finished one between the last look and its end.
        for request in self.in_flight:
            self._collect(request)
        queued = self.in_flight
        if not queued:
            return
        if queued[0].sequence < int(self._view.control["submit_head"]):
            self._abort(f"the kernel is gone, and request {queued[0].sequence} was running")
            return
        try:
            self._launch(queued[0])
        except Exception as error:
            # Whatever a driver throws must reach the readers, not only the watchdog's thread.
            self._fail_all(FaultError(f"launch failed: {error} - at launch - see gpurt doctor"))

    # ---- helpers: faults -----------------------------------------------------------------
    def _check_heartbeat(self) -> None:
        beat, now = int(self._view.control["heartbeat"]), time.monotonic()
        starting = self._view.kernel_state() == KernelState.ABSENT
        if beat != self._heartbeat[0] or (starting and self.plan.rank_count > 1):
            # Before all ranks are in, nothing is late.
            self._heartbeat = (beat, now)
            return
        limit = max(SILENCE_MIN_S, SILENCE_WAITS * self._wait_timeout_ms / 1e3)
        if now - self._heartbeat[1] > limit:
            self._abort(f"no step ended for {limit:g} s, after {beat} steps")

    def _abort(self, what: str) -> None:
        self._view.request_abort()
        self.broken = not self.executor.join(self._drain_s)
        fault = None if self.broken else self._view.fault()
        if fault is not None:
            self._fail()
            return
        hint = "look for a body that does not return" if self.broken else "submit again"
        self._fail_all(FaultError(f"{what} - at plan {self.plan.name} - {hint}"))

    def _fail(self) -> None:
        """A worker gave up: all drain; name what is stuck; every resident request ends."""
        fault = self._view.fault()
        if self.plan.rank_count > 1 and fault is not None and fault["kind"] != FaultKind.RANK_LOST:
            # Ranks tell each other; told by the host first, one would end without a report.
            self.executor.join(ABORT_GRACE_S)
        self._view.request_abort()
        self.broken = not self.executor.join(self._drain_s)
        error = FaultError(describe_faults(self.executor, drained=not self.broken))
        error.__cause__ = self.executor.fault_cause()
        self._fail_all(error)

    def _fail_all(self, error: FaultError) -> None:
        log.log(DEBUG_LEVELS[1], "fault: %s", error)
        for request in self.in_flight:
            self._collect(request)
            if not request.done:
                self._finish(request, "fault", error)
        if not self.broken:
            # What was queued is gone; the next launch must not admit it.
            self._view.control["submit_head"] = self._next_sequence

    def _abandon(self, request: Request) -> None:
        """The launch failed: as if `request` had never been submitted."""
        if not self.executor.running():
            self._occupants[request.entry] = None
            self._view.control["submit_head"] = self._next_sequence


def _rolls(op: Operator, context: int) -> bool:
    """Whether an operator keeps its K/V in a ring, so that old positions are overwritten."""
    params = op.params
    return bool(params.get("window")) and params["pages_per_slot"] * params["page"] < context
