"""Runtime: opens a device, plans and loads graphs, submits requests to what is resident.

Owns: which graph has the device, and the order of submits. What happens to one loaded plan is in
gpurt/session.py; what a request looks like to its caller, in gpurt/request.py.

One graph has the device at a time. A submit of another graph waits until the first one's requests
have ended, ends its kernel, and launches its own.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.arrays import from_storage, to_storage
from gpurt.ceiling import recall
from gpurt.config import DEBUG_LEVELS, Environment, RuntimeConfig, read_environment, resolve
from gpurt.errors import ClosedError, GraphError, PlanError, RequestError, TraceError
from gpurt.executors.base import Options
from gpurt.plan import TWO_SETS
from gpurt.progress import Progress
from gpurt.request import Request, Sampling, check_prompt
from gpurt.session import Session
from gpurt.watchdog import Watchdog

if TYPE_CHECKING:
    from gpurt.executors.base import Executor
    from gpurt.executors.process_rank import ProcessRank
    from gpurt.graph import Graph
    from gpurt.plan import Plan
    from gpurt.process_group import ProcessGroup
    from gpurt.trace import Trace

FOLLOW_NAP_S = 0.001  # between two looks at what rank 0 wants; steps need none

log = logging.getLogger("gpurt")


class Runtime:
    """One device and the graphs loaded on it. Thread-safe; use with `with`, or call `close()`.

    device: "auto" takes a usable GPU, else "host"; or "cuda:0"; or a list, one for each rank of a
    group of graphs (gpurt/ranks.py). workers: SMs or threads, all by
    default. policy: static, claim, ready, {operator or body: policy}, or auto: what `gpurt tune`
    measured for this device and graph, else static. edges: counter, payload, auto. team_warps:
    warps of a worker on a GPU, 16 or 1.
    linger_ms: how long the kernel stays after its last request. residency_ms: after this long it
    ends between two requests, so that other work on the GPU gets its turn; 0 sets no limit.
    resident: it stays until `close()`. A resident kernel takes every second time slice from other
    work on that GPU; nothing waits for its end. wait_timeout_ms: a wait inside the kernel gives up
    after this long.
    trace: keep spans. queue_capacity: unfinished requests at a time. step_rows: rows of
    each step size that a graph is planned for, ascending, at most the graph's rows; a step is of
    the smallest size that holds what waits. None: the graph's rows, and on a GPU one row where
    tokens are decoded without a drafter. prefill_rows: prompt tokens of one request in one step,
    default all rows of the step. group: this process is one of its ranks (gpurt/process_group.py);
    `device` then counts from the rank's own GPU.
    Raises: ConfigError, DeviceError.
    """

    def __init__(
        self,
        device: str | Sequence[str] = "auto",
        *,
        workers: int | None = None,
        policy: str | Mapping[str, str] = "static",
        edges: str = "auto",
        team_warps: int = 16,
        linger_ms: float = 200,
        residency_ms: float = 1000,
        wait_timeout_ms: float = 2000,
        resident: bool = False,
        trace: bool = True,
        queue_capacity: int = 64,
        prefill_rows: int | None = None,
        step_rows: Sequence[int] | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self._environment, self._group = read_environment(), group
        if group is not None and group.rank:  # one file; rank 0 writes it
            self._environment = replace(self._environment, trace_path=None)
        self.config = resolve(
            device,
            workers=workers,
            policy=policy,
            edges=edges,
            team_warps=team_warps,
            linger_ms=linger_ms,
            residency_ms=residency_ms,
            wait_timeout_ms=wait_timeout_ms,
            resident=resident,
            trace=trace,
            queue_capacity=queue_capacity,
            prefill_rows=prefill_rows,
            step_rows=step_rows,
            group=group,
        )
        _set_debug(self._environment.debug)
        log.log(DEBUG_LEVELS[1], "runtime\n%s", self.config)
        self._lock = threading.RLock()
        self._closing = False
        self._sessions: list[Session] = []
        self._active: Session | None = None
        self._watchdog = Watchdog(self._sessions)
        self._finalizer = weakref.finalize(
            self, _shut_down, self._sessions, self._watchdog, self._environment
        )

    # ---- use -----------------------------------------------------------------------------
    def prepare(
        self, graph: Graph, *, plan: Plan | None = None, progress: Progress | None = None
    ) -> Plan:
        """Plan, check, compile, load; nothing is launched. Does nothing for a prepared graph.

        plan: use this one instead, for example a loaded one; it is checked again. progress: called
        as (what, done, total). In a process group: on all ranks, in one order, before any of them
        follows. Raises: GraphError, PlanError, DeviceError, ModelError, RankError.
        """
        with self._lock:
            self._check_open()
            _check_ranks(graph, self.config, self._group)
            session = self._find(graph)
            if session is not None and (plan is None or plan is session.plan):
                return session.plan
            if plan is None:
                plan = _make_plan(graph, self.config, progress)
            elif len(self.config.devices) > 1:
                msg = f"a plan of one rank for {len(self.config.devices)} devices"
                raise PlanError(f"{msg} - at Runtime.prepare - leave the plans to it")
            else:
                _check_given(graph, plan, self.config)
            self._check_others_prepare(graph)
            # Loading allocates, and an allocation may wait for a resident kernel.
            self._drain_active()
            self._check_open()
            if session is not None:
                self._drop(session)
            log.log(DEBUG_LEVELS[3], "%s", plan)
            executor = self._load(plan, graph, progress)
            ceiling = recall(self.config.device_name, self.config.workers)
            session = Session(graph, plan, executor, self.config.wait_timeout_ms, ceiling)
            self._sessions.append(session)
            return plan

    def submit(
        self,
        graph: Graph,
        prompt: Sequence[int] | NDArray[Any] | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        inputs: Mapping[str, Any] | None = None,
        steps: int = 1,
        after: Request | None = None,
    ) -> Request:
        """Queue a request and return at once; prepares and launches what is not there yet.

        prompt: token ids, for a graph that makes tokens; max_tokens None: as many as the context
        holds. inputs: arrays, or anything with `__dlpack__`, for the graph's inputs; one left out
        keeps its last content. steps: how often a graph without tokens runs. after: a request of
        this graph that has ended, whose text the prompt goes on from, as in a chat: tokens that
        both begin with are not computed again if the device still has their K/V
        (`stats.cached_tokens`); the text is the same either way. Submits of another graph, and of a
        graph with inputs or outputs, wait for the requests before them.
        Raises: RequestError, BoundError, RingFullError, ClosedError, and what `prepare` raises.
        """
        if self._group is not None and self._group.rank:
            msg = f"rank {self._group.rank} takes no requests - at Runtime.submit"
            raise RequestError(f"{msg} - submit on rank 0, and call follow() on the others")
        ids: NDArray[np.uint32] = np.empty(0, np.uint32)
        if graph.vocab:
            if prompt is None:
                raise RequestError(f"no prompt - at submit({graph.name}) - give token ids")
            ids, max_tokens = check_prompt(prompt, graph.vocab, graph.context, max_tokens)
        elif prompt is not None or max_tokens is not None:
            msg = f"{graph.name} makes no tokens, but a prompt or max_tokens came"
            raise RequestError(f"{msg} - at submit - use inputs= and steps=")
        else:
            max_tokens = steps
        stops = tuple(int(t) for t in stop_ids)
        sampling = Sampling(max_tokens, temperature, top_k, top_p, seed, stops, ignore_eos)
        sampling.check(graph.vocab)
        arrays = _check_inputs(graph, dict(inputs or {}))
        with self._lock:
            self.prepare(graph)
            session = self._activate(graph)
            _check_written(session, arrays)
            request = Request(session, self, ids, sampling)
            session.submit(request, arrays, after)
        self._watchdog.wake()
        return request

    def follow(self) -> None:
        """On ranks other than 0 of a process group: take part in all that rank 0 runs, on the
        graphs prepared here. Returns once rank 0, or another thread here, closes its Runtime.

        Raises: FaultError with this rank's report of a launch that failed; rank 0 may go on if all
        call it again. RankError if a process is gone; RequestError on rank 0 and without a group.
        """
        if self._group is None or self._group.rank == 0:
            what = "no process group" if self._group is None else "rank 0"
            msg = f"{what} follows nobody - at Runtime.follow"
            raise RequestError(f"{msg} - call it on the other ranks, submit on rank 0")
        executors = self._process_ranks()
        if not executors:
            raise GraphError("no graph is prepared - at Runtime.follow - prepare rank 0's first")
        while not self._closing and all(one.attend() for one in executors):
            time.sleep(FOLLOW_NAP_S)

    def read(self, graph: Graph, name: str) -> NDArray[Any]:
        """A copy of one buffer of a prepared graph, between requests: for tests and debugging."""
        session = self._find(graph)
        if session is None:
            raise GraphError(f"{graph.name} is not prepared - at Runtime.read - prepare it first")
        session.wait_idle()
        dtype = next((b.dtype for b in graph.buffers if b.name == name), None)
        array = session.executor.read(name)
        return array if dtype is None else from_storage(array, dtype)

    def trace(self) -> Trace:
        """The timeline of the graph that has the device, as far as it got: of all requests of the
        last launch, also of one that runs.

        Raises: TraceError if nothing ran or tracing is off, ClosedError.
        """
        self._check_open()
        session = self._active
        if session is None:
            raise TraceError("nothing ran so far - at Runtime.trace - submit a request first")
        return session.trace()

    @property
    def launches(self) -> int:
        """Kernel launches since the Runtime was opened."""
        return sum(s.launches for s in self._sessions)

    def park(self) -> None:
        """Wait for the requests in flight, then end the kernel: other work has the device to
        itself until the next submit, which launches again. Raises: ClosedError.
        """
        with self._lock:
            self._check_open()
            self._drain_active()

    def close(self) -> None:
        """End requests in flight as cancelled, end the kernel, free the device. Idempotent."""
        # Before the lock: a submit that waits for a long request holds it.
        self._closing = True
        for session in list(self._sessions):
            session.refuse()
        with self._lock:
            self._active = None
            # Runs the shutdown once, now; later calls and the garbage collector find it done.
            self._finalizer()

    def __enter__(self) -> Runtime:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- helpers -------------------------------------------------------------------------
    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError("the Runtime was closed - at Runtime - make another one")

    def _load(self, plan: Plan, graph: Graph, progress: Progress | None) -> Executor:
        if self._group is None:
            return _load(plan, graph, self.config, progress)
        from gpurt.executors import process_rank

        place = self.config.device, self._group
        return process_rank.load(plan, graph, options_of(self.config), *place, progress)

    def _process_ranks(self) -> list[ProcessRank]:
        from gpurt.executors.process_rank import ProcessRank

        executors = (session.executor for session in self._sessions)
        return [executor for executor in executors if isinstance(executor, ProcessRank)]

    def _check_others_prepare(self, graph: Graph) -> None:
        if self._group is None or self._group.rank:
            return
        if any(one.is_followed() for one in self._process_ranks()):
            msg = f"{graph.name} comes late: another rank follows already - at Runtime.prepare"
            raise GraphError(f"{msg} - prepare all graphs on every rank, then call follow()")

    def _find(self, graph: Graph) -> Session | None:
        return next((s for s in self._sessions if s.graph is graph and not s.broken), None)

    def _activate(self, graph: Graph) -> Session:
        session = self._find(graph)
        if session is None:  # broken between prepare and here
            msg = f"{graph.name} ended in a fault - at Runtime.submit - submit again"
            raise ClosedError(msg)
        if session is not self._active:
            self._drain_active()
            self._check_open()
            self._active = session
        return session

    def _drain_active(self) -> None:
        if self._active is not None:
            self._active.drain()
            self._active = None

    def _drop(self, session: Session) -> None:
        session.close()
        self._sessions.remove(session)


def _shut_down(sessions: list[Session], watchdog: Watchdog, environment: Environment) -> None:
    watchdog.stop()
    # One whose kernel is there ends first: memory that another gives back would wait for it.
    for session in sorted(sessions, key=lambda s: s.broken or not s.executor.running()):
        if environment.trace_path is not None and session is sessions[-1]:
            _write_trace(session, environment.trace_path)
        session.close()


def _write_trace(session: Session, path: Path) -> None:
    from gpurt.trace.perfetto import write_perfetto

    try:
        with session.lock:
            trace = session.trace()
        write_perfetto(trace, path)
    except TraceError as error:
        log.warning("GPURT_TRACE wrote nothing: %s", error)


def _make_plan(graph: Graph, config: RuntimeConfig, progress: Progress | None) -> Plan:
    from gpurt.profiles import plan_with

    return plan_with(
        graph,
        config.target,
        config.device_name,
        config.policy,
        config.edges,
        progress,
        rows=config.step_rows,
    )


def options_of(config: RuntimeConfig) -> Options:
    """How an executor runs under this configuration."""
    return Options(
        workers=config.target.workers,
        linger_ms=config.linger_ms,
        residency_ms=config.residency_ms,
        wait_timeout_ms=config.wait_timeout_ms,
        trace=config.trace_enabled,
        queue_capacity=config.queue_capacity,
        resident=config.resident,
        prefill_rows=config.prefill_rows or 0,
    )


def _load(plan: Plan, graph: Graph, config: RuntimeConfig, progress: Progress | None) -> Executor:
    options = options_of(config)
    if len(config.devices) > 1:
        from gpurt.executors import group

        plans = [plan, *(_make_plan(g, config, progress) for g in graph.group[1:])]
        return group.load(plans, graph.group, options, config.devices, progress)
    if config.target.kind == "cuda":
        from gpurt.executors import cuda

        index = int(config.device.removeprefix("cuda:"))
        return cuda.load(plan, graph, options, progress=progress, device_index=index)
    from gpurt.executors import host

    return host.load(plan, graph, options, progress=progress)


def _check_ranks(graph: Graph, config: RuntimeConfig, processes: ProcessGroup | None) -> None:
    if processes is not None:
        if (graph.rank, graph.rank_count, len(graph.group)) != (processes.rank, processes.size, 1):
            what = f"{graph.name} is rank {graph.rank} of {graph.rank_count}"
            what += f", this process rank {processes.rank} of {processes.size}"
            raise GraphError(f"{what} - at Runtime.prepare - build this rank's graph, and no other")
        return
    ranks, devices = len(graph.group), len(config.devices)
    if ranks != devices:
        what = f"{graph.name} is a group of {ranks} ranks, the Runtime has {devices} devices"
        hint = "build a graph for each, and gpurt.ranks.group() them"
        raise GraphError(f"{what} - at Runtime.prepare - {hint}")


def _check_given(graph: Graph, plan: Plan, config: RuntimeConfig) -> None:
    """A plan from elsewhere must be proved, and be of this graph and this kind of device."""
    target = config.target
    if (plan.target.kind, plan.target.arch) != (target.kind, target.arch):
        what = f"a plan for {plan.target.kind} {plan.target.arch}".rstrip()
        where = f"{target.kind} {target.arch}".rstrip()
        raise PlanError(f"{what}, but this is {where} - at Runtime.prepare - plan again")
    if plan.target.workers > target.workers and target.kind == "cuda":
        what = f"a plan for {plan.target.workers} workers, but this GPU has {target.workers}"
        raise PlanError(f"{what} - at Runtime.prepare - plan again")
    bounds = (plan.rows, plan.slots, plan.context, plan.vocab)
    if bounds != (graph.rows, graph.slots, graph.context, graph.vocab):
        what = f"the plan's rows, slots, context and vocabulary are {bounds}"
        raise PlanError(f"{what}, the graph's differ - at Runtime.prepare - plan again")
    shapes = {b.name: (b.shape, b.dtype.name) for b in graph.buffers}
    for buffer in plan.buffers:
        name = buffer.source or buffer.name
        lasts = buffer.memory not in ("activation", *TWO_SETS)  # those are as its variants need
        if lasts and name in shapes and shapes[name] != (buffer.shape, buffer.dtype):
            what = f"buffer {name} is {buffer.dtype} {list(buffer.shape)} in the plan"
            raise PlanError(f"{what}, not so in the graph - at Runtime.prepare - plan again")
        if name not in shapes and buffer.role == "weight":
            what = f"weight {name} of the plan is not in the graph"
            raise PlanError(f"{what} - at Runtime.prepare - plan again")
    plan.check()


def _check_inputs(graph: Graph, inputs: dict[str, Any]) -> dict[str, NDArray[Any]]:
    for name in inputs:
        if name not in graph.inputs:
            known = ", ".join(graph.inputs) or "none"
            raise RequestError(f"no input is named {name!r} - at submit - inputs are: {known}")
    return {name: to_storage(graph.inputs[name], value) for name, value in inputs.items()}


def _check_written(session: Session, arrays: Mapping[str, Any]) -> None:
    missing = set(session.graph.inputs) - set(arrays) - session.written_inputs
    if missing:
        names = ", ".join(sorted(missing))
        raise RequestError(f"input {names} was never given - at submit - pass inputs=")


def _set_debug(level: int) -> None:
    """GPURT_DEBUG: what the logger of gpurt says on stderr. 0 leaves it to the program."""
    if level and not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("gpurt: %(message)s"))
        log.addHandler(handler)
    if level:
        log.setLevel(DEBUG_LEVELS[level])
