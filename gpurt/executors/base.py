"""What every executor offers: launch, memory that the host shares with it, and its raw trace.

Owns: the Executor protocol, Options, HostView (the host's side of the submission protocol).
Does not know: where workers run (host.py, cuda.py) and who submits (gpurt/runtime.py).

    publish:  fill requests[entry] -> submit_tail (release) -> fence -> read kernel_state
    ending:   kernel_state = ENDING -> fence -> read submit_tail -> RUNNING again, or end

Of the two, at least one sees the other: a request is never left to a kernel that is going away.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpurt import _native, wire
from gpurt.errors import DeviceError
from gpurt.plan import Plan

SPAN_STEPS = 16  # steps whose spans are kept, at the least, if workers share the tasks evenly
SPAN_CAPACITY_MIN = 8192
ENDING_SLICE_S = 0.0005  # between two looks at a kernel that is ending
_LAG_NAP_S = 20e-6  # ranks end a step within one of its hops

Record = np.ndarray[tuple[()], Any]  # a structured array without axes: fields by name, writable


@dataclass(frozen=True)
class Options:
    """How a loaded plan runs. `resident` keeps the kernel: linger_ms and residency_ms then rest.

    workers: 0 for the plan's own number. prefill_rows: rows of one sequence in a step,
    0 for all rows of the step. first_step: number of the first step after a launch (tests). rank,
    rank_count: this one's place among executors that run together; one alone runs the graph of a
    rank in loop-back.
    """

    workers: int = 0
    linger_ms: float = 200.0
    residency_ms: float = 1000.0
    wait_timeout_ms: float = 2000.0
    trace: bool = True
    queue_capacity: int = 64
    resident: bool = False
    prefill_rows: int = 0
    span_capacity: int = 0  # a worker and ring; a power of two; 0: what SPAN_STEPS steps need
    summary_capacity: int = 4096
    sample_period: int = 64
    first_step: int = 0
    rank: int = 0
    rank_count: int = 1


@dataclass(frozen=True)
class RawTrace:
    """Spans as workers wrote them. spans, sampled: one wire.SPAN array a worker, oldest first.

    summaries: wire.STEP_SUMMARY by step. tick_ns: nanoseconds of one span tick. dropped: spans that
    newer ones overwrote.
    """

    spans: list[NDArray[Any]]
    sampled: list[NDArray[Any]]
    summaries: NDArray[Any]
    tick_ns: float
    dropped: int


def whole_spans(
    ring: NDArray[Any], before: int, after: int, unpublished: int
) -> tuple[NDArray[Any], int]:
    """The spans of one worker's ring that no lap was overwriting, oldest first, and how many are
    gone.

    ring: a copy, wire.SPAN [capacity]. before, after: the worker's count, read before and after
    the copy was made. unpublished: spans that it may have stored beyond its count; 0 once it ended.
    """
    capacity = len(ring)
    first = min(max(0, after + unpublished - capacity), before)
    return ring[np.arange(first, before) % capacity], first


class Executor(Protocol):
    """A loaded plan. Thread-safe but for `launch` and `close`, which one thread at a time calls."""

    plan: Plan
    host: HostView
    launches: int  # since load

    @property
    def ranks(self) -> tuple[Executor, ...]:
        """The executors that run together, by rank; of one alone itself."""

    def launch(self) -> None:
        """Reset counters and start all workers. Raises: DeviceError if they run already."""

    def running(self) -> bool:
        """Whether workers of the last launch are still there."""

    def join(self, timeout_s: float) -> bool:
        """Wait until no worker runs; False on time-out. Releases the GIL."""

    def read(self, buffer_name: str) -> NDArray[Any]:
        """A copy of a buffer, in its storage dtype and shape."""

    def write(self, buffer_name: str, array: NDArray[Any]) -> None:
        """Fill a state buffer. Only while no request runs."""

    def counters(self) -> NDArray[np.uint64]:
        """A copy of every counter, for fault reports."""

    def fault_cause(self) -> BaseException | None:
        """What a Python body raised in the last launch, if that is why it ended."""

    def raw_trace(self) -> RawTrace:
        """The rings as they are now."""

    def raw_traces(self) -> list[RawTrace]:
        """Those of all ranks, by rank."""

    def close(self) -> None:
        """Abort, wait for the workers and give all memory back. Idempotent."""


class Peer(Protocol):
    """What the host of one rank needs of the others'."""

    def request_abort(self) -> None:
        """End now."""

    def own_fault(self) -> Record | None:
        """A copy of their Fault, or None."""


class HostView:
    """Host-visible memory of one executor, as numpy arrays, and the words that both sides share.

    requests, outputs: [queue]. prompt_tokens, output_tokens: [queue, context] u32. A request's
    entry is sequence % queue; the caller fills `requests[entry]`, `prompt_tokens[entry]`, clears
    `outputs[entry]`, then calls `publish`. One thread publishes at a time; any thread may wait.
    The arrays live as long as the executor is open.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Arrays: host_control (shape ()), requests, outputs, prompt_tokens, output_tokens."""
        self.control: Record = arrays["host_control"].reshape(())
        self.requests = arrays["requests"]
        self.outputs = arrays["outputs"]
        self.prompt_tokens = arrays["prompt_tokens"]
        self.output_tokens = arrays["output_tokens"]
        self.peers: tuple[Peer, ...] = ()  # other ranks, for who speaks for all of them
        self._address = {
            name: int(self.control.ctypes.data) + wire.field_offset(wire.HOST_CONTROL, name)
            for name in wire.HOST_CONTROL.names or ()
        }

    def publish(self, tail: int) -> bool:
        """Make requests below `tail` visible. Returns: whether a running kernel will take them;
        if not, call `ensure_running`.
        """
        _native.store_release_u64(self._address["submit_tail"], tail)
        _native.fence_seq_cst()
        self.wake()
        return self.kernel_state() == wire.KernelState.RUNNING

    def cancel(self, entry: int) -> None:
        """Ask for the end of a request; it ends at the next step. A finished one does not care."""
        address = int(self.requests.ctypes.data) + entry * wire.REQUEST_RECORD.itemsize
        offset = wire.field_offset(wire.REQUEST_RECORD, "cancel")
        _native.store_release_u32(address + offset, 1)
        _native.add_u32(self._address["cancel_count"], 1)
        self.wake()

    def request_exit(self) -> None:
        """End at the next request boundary; what is queued stays queued."""
        _native.store_release_u32(self._address["exit_request"], 1)
        self.wake()

    def request_abort(self) -> None:
        """End now, on all ranks: workers leave at their next wait."""
        for peer in self.peers:
            peer.request_abort()
        _native.store_release_u32(self._address["abort_request"], 1)
        self.wake()

    def kernel_state(self) -> wire.KernelState:
        """What the controller last said."""
        return wire.KernelState(_native.load_acquire_u32(self._address["kernel_state"]))

    def progress(self, entry: int) -> tuple[int, wire.FinishReason]:
        """(tokens readable, reason or NONE) of a request, now."""
        return self.wait_output(entry, 0xFFFFFFFF, 0.0)

    def wait_output(
        self, entry: int, seen_count: int, timeout_s: float
    ) -> tuple[int, wire.FinishReason]:
        """Wait until a request has more than `seen_count` tokens or ended, at most `timeout_s`.

        Returns: (tokens readable, reason or NONE). Releases the GIL; spins shortly, then naps.
        """
        address = int(self.outputs.ctypes.data) + entry * wire.REQUEST_OUTPUT.itemsize
        count, reason = _native.wait_output(address, seen_count, timeout_s)
        return count, wire.FinishReason(reason)

    def fault(self) -> Record | None:
        """A copy of the last launch's Fault, or None. Of several ranks: of one that gave up by
        itself, else of one that followed another.
        """
        faults = [f for view in (self, *self.peers) if (f := view.own_fault()) is not None]
        followed = wire.FaultKind.PEER
        return min(faults, key=lambda f: bool(f["kind"] == followed), default=None)

    def own_fault(self) -> Record | None:
        """A copy of this rank's Fault, or None."""
        kind = wire.field_offset(wire.FAULT, "kind")
        if _native.load_acquire_u32(self._address["fault"] + kind) == 0:
            return None
        return np.array(self.control["fault"])

    def wake(self) -> None:
        """Called after a word of the host changed. The host executor wakes sleeping workers."""


def catch_up(executor: Executor, heartbeat: int) -> None:
    """Wait until a rank, if it runs, has ended as many steps as rank 0 had."""
    while executor.running() and int(executor.host.control["heartbeat"]) < heartbeat:
        time.sleep(_LAG_NAP_S)


def settled_state(executor: Executor, timeout_s: float) -> wire.KernelState:
    """Whether a kernel is there that takes what was published, once it knows itself.

    Returns: RUNNING, also while it is starting; ABSENT: launch; ENDING: it is still there and has
    been leaving for `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while executor.running():
        # RUNNING: it reads the tail again before it may end. ABSENT: it is starting.
        if executor.host.kernel_state() != wire.KernelState.ENDING:
            return wire.KernelState.RUNNING
        if time.monotonic() > deadline:
            return wire.KernelState.ENDING
        # ENDING lasts for microseconds: either it saw the request, or its workers are leaving.
        executor.join(ENDING_SLICE_S)
    return wire.KernelState.ABSENT


def ensure_running(executor: Executor, timeout_s: float = 30.0) -> bool:
    """Make sure that a kernel is there which takes published requests. Returns: whether this call
    launched. Call it after `publish` returned False, and again whenever a wait for output timed
    out: a kernel also ends after its residency, and leaves what is queued to the next launch.

    Raises: DeviceError if an ending kernel is still there after `timeout_s`.
    """
    state = settled_state(executor, timeout_s)
    if state == wire.KernelState.ENDING:
        msg = f"a kernel is still ending after {timeout_s:.0f} s - at {executor.plan.name}"
        raise DeviceError(f"{msg} - close the runtime and open it again")
    if state == wire.KernelState.ABSENT:
        executor.launch()
    return state == wire.KernelState.ABSENT
