"""The host executor: threads as workers. Loads a Plan into memory, runs it through gpurt._native.

Owns: arenas, weights, state, the Python bodies' views. Does not know: who submits (gpurt/runtime).
A weight given as an array or DLPack object is used where it lies, without a copy; one given as a
function is copied into the weight arena, which asks for huge pages.
"""

from __future__ import annotations

import atexit
import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt import _native, wire
from gpurt.body import Body
from gpurt.buffer import DTYPES
from gpurt.errors import ClosedError, ConfigError, DeviceError, PlanError
from gpurt.executors import program
from gpurt.executors.base import Executor, HostView, Options, RawTrace, whole_spans
from gpurt.executors.contents import contents_of
from gpurt.executors.symmetric import SymmetricMap
from gpurt.graph import Graph
from gpurt.plan import Plan, PlanBuffer, PlanRegion, rank_counters
from gpurt.progress import Progress

SHARED_ALIGN_BYTES = 16  # a caller's array that lies worse is copied
HUGE_PAGES_FROM_BYTES = 4 << 20
SCRATCH_BYTES = 1 << 20  # a worker; bodies that need more take their own
_ADVANCE = "advance"  # part of the worker loop, not of the body table

# Threads that need the GIL while the interpreter ends would take the process down.
_open: weakref.WeakSet[HostExecutor] = weakref.WeakSet()


def load(
    plan: Plan,
    graph: Graph,
    options: Options,
    progress: Progress | None = None,
    parking: _native.Parking | None = None,
    shared: SymmetricMap | None = None,
) -> HostExecutor:
    """Allocate, fill weights and state, and make the workers' program. Starts nothing.

    progress: called as (what, done, total). Of a group: parking, where all of its workers sleep,
    and shared, where its ranks meet. Raises: PlanError, GraphError, DeviceError; ConfigError
    for a bad GPURT_SIMD.
    """
    try:
        _native.simd_level()  # a worker thread could not raise
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if plan.target.kind != "host":
        msg = f"a plan for {plan.target.kind} cannot run on host threads - at {plan.name}"
        raise DeviceError(f"{msg} - plan for a host target")
    polled = sum(1 for b in plan.buffers if b.memory == "payload")
    if polled:
        msg = f"{polled} payload buffers, which host threads do not poll - at {plan.name}"
        raise PlanError(f'{msg} - plan with edges="counter"')
    layout = program.symmetric_layout(plan, options)
    sections = {
        name: np.zeros(0, s.dtype) if s.size_bytes == 0 else _allocate(s)
        for name, s in program.zeroed(plan, options).items()
        if name != "symmetric"
    }
    if shared is None:
        own = map_zeroed(layout.size_bytes)
        shared = SymmetricMap((_address(own),) * options.rank_count, own)
    sections["symmetric"] = shared.view(options.rank, layout.size_bytes)
    sections["peers"][:] = shared.addresses
    symmetric = sections["symmetric"][layout.buffers :]
    memory = _Memory(plan, graph, symmetric, progress)
    addresses = program.buffer_addresses(plan, memory.bases, _address(sections["step_state"]))
    for index, array in enumerate(memory.arrays):
        if array is not None:
            addresses[index] = _address(array)
    memory.bind_step(plan, sections["step_state"])
    callbacks, table = _bodies(plan, graph, memory)
    index_of = {name: i for i, name in enumerate(table)}
    sections |= program.constants(plan, index_of, addresses)
    header = program.header(plan, options, {n: _address(a) for n, a in sections.items()})
    table_names = list(table.values())
    return HostExecutor(
        plan,
        options,
        memory,
        sections,
        header,
        callbacks,
        table_names,
        parking or _native.Parking(),
        shared,
    )


class HostExecutor:
    """An Executor whose workers are threads of this process. See gpurt.executors.base."""

    def __init__(
        self,
        plan: Plan,
        options: Options,
        memory: _Memory,
        sections: dict[str, NDArray[Any]],
        header: NDArray[Any],
        callbacks: list[Callable[[], object] | None],
        bodies: list[str | None],
        parking: _native.Parking,
        shared: SymmetricMap,
    ) -> None:
        """Made by `load`."""
        self.plan, self.options, self.launches = plan, options, 0
        self._memory, self._sections, self._header = memory, sections, header
        self._native = _native.HostExecutor(
            _address(header),
            bodies,
            callbacks,
            (memory, sections, header, shared),
            SCRATCH_BYTES,
            parking,
        )
        self.host: HostView = _ThreadView(sections, self._native)
        self._closed = False
        _open.add(self)

    @property
    def ranks(self) -> tuple[Executor, ...]:
        """Itself."""
        return (self,)

    def launch(self) -> None:
        """Zero the counters and start all workers. Raises: DeviceError, ClosedError."""
        if self._closed:
            raise ClosedError(f"the executor is closed - at {self.plan.name} - load the plan again")
        if not self.running():
            self.host.control["launch"] = self.launches + 1
            for name in program.TRACE_COUNTS:
                self._sections[name][...] = 0
        if not self._native.launch():
            msg = f"the workers of launch {self.launches} still run - at {self.plan.name}"
            raise DeviceError(f"{msg} - join them first")
        self.launches += 1

    def running(self) -> bool:
        """Whether a worker of the last launch is still there."""
        return self._native.running()

    def join(self, timeout_s: float) -> bool:
        """Wait until no worker runs; False on time-out."""
        return self._native.join(timeout_s)

    def read(self, buffer_name: str) -> NDArray[Any]:
        """A copy of a buffer in its storage dtype; block formats as [rows, row bytes]. Of two sets,
        and of what several variants have of their own, those of the last step.
        """
        raw = self._sections["step_state"][: wire.STEP_STATE.itemsize]
        index, set_bytes = program.last_step(self.plan, buffer_name, raw.view(wire.STEP_STATE)[0])
        return np.array(self._memory.view(index, set_bytes))

    def write(self, buffer_name: str, array: NDArray[Any]) -> None:
        """Fill a state buffer with an array of its storage dtype and shape.

        Raises: PlanError for another dtype or shape, for a weight, and for an unknown name.
        """
        view = self._view(buffer_name)
        if self.plan.buffers[self.plan.buffer_index(buffer_name)].role == "weight":
            msg = f"{buffer_name} is a weight, which nobody writes - at {self.plan.name}"
            raise PlanError(f"{msg} - declare it as state")
        if array.shape != view.shape or array.dtype != view.dtype:
            msg = f"{array.dtype} {list(array.shape)} for {view.dtype} {list(view.shape)}"
            raise PlanError(f"{msg} - at buffer {buffer_name} - convert the array")
        view[...] = array

    def counters(self) -> NDArray[np.uint64]:
        """A copy of every counter; of those that ranks signal what the last of them gave."""
        stride = wire.COUNTER_STRIDE // 8
        counts = np.array(self._sections["counters"].view(np.uint64)[::stride])
        layout = program.symmetric_layout(self.plan, self.options)
        words = self._sections["symmetric"][layout.counters : layout.buffers].view(np.uint64)
        for counter, number in rank_counters(self.plan).items():
            first = number * self.options.rank_count
            counts[counter] = words[::stride][first : first + self.options.rank_count].min()
        return counts

    def fault_cause(self) -> BaseException | None:
        """What a Python body raised in the last launch."""
        return self._native.body_error()

    def raw_trace(self) -> RawTrace:
        """The rings as they are now."""
        spans, dropped = self._rings("spans", "span_counts")
        sampled, _ = self._rings("sampled_spans", "sampled_counts")
        summaries = np.array(self._sections["summaries"])
        done = summaries[summaries["end_ns"] != 0]
        return RawTrace(spans, sampled, np.sort(done, order="step"), 1.0, dropped)

    def raw_traces(self) -> list[RawTrace]:
        """Of this one alone."""
        return [self.raw_trace()]

    def close(self) -> None:
        """Abort and wait for the workers. Buffers stay readable while this object lives."""
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        self._native.abort()
        while not self._native.join(1.0):
            pass  # a Python body runs to its end

    def _view(self, name: str) -> NDArray[Any]:
        return self._memory.view(self.plan.buffer_index(name))

    def _rings(self, ring: str, counts: str) -> tuple[list[NDArray[Any]], int]:
        arrays: list[NDArray[Any]] = []
        dropped = 0
        # Asked first: a worker that ends meanwhile may have been storing during the copy.
        unpublished = int(self.running())
        spans, count_bytes = self._sections[ring], self._sections[counts]
        for worker in range(self.plan.target.workers):
            if spans.size == 0:
                arrays.append(np.zeros(0, wire.SPAN))
                continue
            address = _address(count_bytes) + worker * wire.SPAN_COUNT_STRIDE
            before = _native.load_acquire_u64(address)
            copy = np.array(spans[worker])
            after = _native.load_acquire_u64(address)
            whole, gone = whole_spans(copy, before, after, unpublished)
            arrays.append(whole)
            dropped += gone
        return arrays, dropped


class _ThreadView(HostView):
    """Workers sleep while no step is open, so a changed word comes with a call."""

    def __init__(self, sections: dict[str, NDArray[Any]], native: _native.HostExecutor) -> None:
        super().__init__(sections)
        self._workers = native

    def wake(self) -> None:
        self._workers.wake()

    def request_abort(self) -> None:
        super().request_abort()
        self._workers.abort()


class _Memory:
    """The arenas, and every buffer as an array."""

    def __init__(
        self, plan: Plan, graph: Graph, symmetric: NDArray[np.uint8], progress: Progress | None
    ) -> None:
        self.plan = plan
        self.arrays: list[NDArray[np.uint8] | None] = [None] * len(plan.buffers)
        self._arenas = {
            memory: map_zeroed(plan.arena_bytes(memory))
            for memory in ("weight", "state", "activation", "payload")
        }
        self._arenas["symmetric"] = symmetric
        self.bases = {memory: _address(arena) for memory, arena in self._arenas.items()}
        sources = {b.name: b for b in graph.buffers}
        total, contents = len(plan.buffers), contents_of(plan, graph)
        for index, planned in enumerate(plan.buffers):
            buffer = sources.get(planned.source or planned.name)
            if buffer is not None and planned.memory != "step":
                data = contents.take(planned)
                made_for_us = callable(buffer.source) and planned.name not in contents.mapped
                self._fill(index, planned, data, made_for_us)
            elif planned.memory == "weight":
                msg = f"the graph has no weight {planned.name} - at {plan.name}"
                raise PlanError(f"{msg} - use the graph that the plan was made of")
            if progress is not None:
                progress("loading", index + 1, total)
        contents.close()

    def bind_step(self, plan: Plan, step_state: NDArray[Any]) -> None:
        """Where the sampled tokens lie."""
        begin = wire.sampled_offset_bytes(plan.rows)
        for index, planned in enumerate(plan.buffers):
            if planned.memory == "step":
                at = begin + planned.offset_bytes
                self.arrays[index] = step_state[at : at + planned.size_bytes]

    def view(self, index: int, set_bytes: int = 0) -> NDArray[Any]:
        """A buffer in its storage dtype and shape, in place. set_bytes: from its first set."""
        planned = self.plan.buffers[index]
        dtype = DTYPES[planned.dtype]
        data = self._bytes(index, set_bytes)
        if planned.packing:
            return data
        row_bytes = dtype.row_bytes(planned.shape[-1])
        last = row_bytes // dtype.storage.itemsize
        return data.view(dtype.storage).reshape(*planned.shape[:-1], last)

    def region(self, region: PlanRegion, writes: bool) -> NDArray[Any]:
        """A region of a buffer as a Python body sees it."""
        index, bounds = region
        view = self.view(index)
        planned = self.plan.buffers[index]
        dtype = DTYPES[planned.dtype]
        if dtype.block > 1:
            unit = dtype.block_bytes
            low, high = bounds[-1]
            bounds = (*bounds[:-1], (low // dtype.block * unit, high // dtype.block * unit))
        part = view[tuple(slice(low, high) for low, high in bounds)]
        if not writes:
            part.flags.writeable = False
        return part

    def _bytes(self, index: int, set_bytes: int = 0) -> NDArray[np.uint8]:
        own = self.arrays[index]
        if own is not None:
            return own
        planned = self.plan.buffers[index]
        arena = self._arenas[planned.memory]
        begin = planned.offset_bytes + set_bytes
        return arena[begin : begin + planned.size_bytes]

    def _fill(
        self, index: int, planned: PlanBuffer, data: NDArray[np.uint8] | None, made_for_us: bool
    ) -> None:
        if data is None:
            return
        shareable = _address(data) % SHARED_ALIGN_BYTES == 0 and data.nbytes == planned.size_bytes
        if planned.memory == "weight" and not made_for_us and not planned.packing and shareable:
            self.arrays[index] = data
        else:
            self._bytes(index)[: data.nbytes] = data


def _bodies(
    plan: Plan, graph: Graph, memory: _Memory
) -> tuple[list[Callable[[], object] | None], dict[str, str | None]]:
    """What a task runs: a callback a task for Python bodies, and the table of names, where None
    stands for "its callback".
    """
    user = {op.body.name: op.body for op in graph.operators if op.body.is_user}
    table: dict[str, str | None] = {_ADVANCE: None}
    for op in graph.operators:
        if op.body.is_user and user[op.body.name].host is not op.body.host:
            msg = f"two bodies are named {op.body.name!r} - at {op.path} - rename one"
            raise PlanError(msg)
    callbacks: list[Callable[[], object] | None] = [None] * len(plan.tasks)
    for index, task in enumerate(plan.tasks):
        body = user.get(task.body)
        if body is not None:
            callbacks[index] = _callback(plan, graph, memory, index, body)
        if task.body not in table:
            table[task.body] = None if body is not None else task.body
    known = {*_native.body_names(), *user, _ADVANCE}
    unknown = sorted(set(table) - known)
    if unknown:
        msg = f"no body is named {unknown[0]!r} - at {plan.name} - the host has {sorted(known)}"
        raise PlanError(msg)
    return callbacks, table


def _callback(
    plan: Plan, graph: Graph, memory: _Memory, index: int, body: Body
) -> Callable[[], object]:
    task = plan.tasks[index]
    assert body.host is not None
    views = [memory.region(r, False) for r in task.reads]
    views += [memory.region(r, True) for r in task.writes]
    params = graph.operators[task.op].params if task.op < len(graph.operators) else {}
    return partial(body.host, *views, **params)


def _allocate(section: program.Section) -> NDArray[Any]:
    data = map_zeroed(section.size_bytes)
    return data[: section.size_bytes].view(section.dtype).reshape(section.shape)


def map_zeroed(size_bytes: int) -> NDArray[np.uint8]:
    """Zeroed pages that exist once they are touched; large ones as huge pages where allowed."""
    if size_bytes == 0:
        return np.zeros(0, np.uint8)
    pages = mmap.mmap(-1, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE") and size_bytes >= HUGE_PAGES_FROM_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def _address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


@atexit.register
def _close_all() -> None:
    for executor in list(_open):
        executor.close()
