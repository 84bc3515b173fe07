"""CUDA executor: one persistent block per SM runs a loaded plan.

Owns: device memory and what lies in it, the launch, copies beside a resident kernel.
Does not know: what the kernel does (scheduler/persistent.cu) and who submits (gpurt/runtime.py).
Importing this module never starts CUDA.

    load     allocate -> upload weights, compiling (cuda_compile) beside it -> load code -> prove
             residency -> upload the plan
    launch   zero counters -> payload sets to sentinels -> control words -> cooperative launch
    resident nothing is allocated, freed, loaded or compiled; reads and writes are asynchronous
             copies on a stream of their own, through pinned memory
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt import wire
from gpurt.buffer import DTYPES
from gpurt.errors import ClosedError, DeviceError, PlanError
from gpurt.executors import program
from gpurt.executors.base import Executor, HostView, Options, RawTrace, whole_spans
from gpurt.executors.contents import contents_of
from gpurt.executors.cuda_compile import ENTRY, PROGRAM_SYMBOL, KernelCode, compile_kernel
from gpurt.executors.cuda_driver import STAGING_BYTES, Device, Kernel
from gpurt.executors.fragments import has_fragments, side_by_side
from gpurt.executors.symmetric import SymmetricMap
from gpurt.graph import Graph
from gpurt.plan import MEMORIES, PAYLOAD, Plan, PlanBuffer, align_up
from gpurt.progress import Progress

SENTINEL_BYTE = 0xFF
_RESET = (
    "counters",
    "arrived",
    "ready_slots",
    "cursors",
    "held_tickets",
    "slots",
    *program.TRACE_COUNTS,
)
_END_TIMEOUT_S = 10.0
DISPLAY_RESIDENCY_MS = 1000  # a display's GPU: drivers end kernels that run for some 2 s
SPAN_TICK_NS = 1.0  # scheduler/storer.cuh scales an SM's cycles to the global clock itself


@dataclass
class _Memory:
    """Device memory of one loaded plan; `addresses` of every section and arena."""

    blocks: list[int] = field(default_factory=list)
    sections: dict[str, int] = field(default_factory=dict)
    arenas: dict[str, int] = field(default_factory=dict)
    reset_begin: int = 0
    reset_bytes: int = 0


def load(
    plan: Plan,
    graph: Graph,
    options: Options,
    progress: Progress | None = None,
    device_index: int = 0,
    shared: SymmetricMap | None = None,
) -> CudaExecutor:
    """Compile, allocate and upload a plan; nothing is launched yet.

    progress: called as (what, done, total). shared: where the ranks of a group meet.
    Raises: DeviceError if the device is missing, too small, or cannot hold every block at once;
    GraphError if a user's CUDA struct does not compile.
    """
    device = Device.open(device_index)
    with device.current():
        return CudaExecutor(plan, graph, options, device, progress or _silent, shared)


class CudaExecutor:
    """A loaded plan on one GPU. Thread-safe but for `launch` and `close`."""

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        options: Options,
        device: Device,
        progress: Progress,
        shared: SymmetricMap | None,
    ) -> None:
        """Use `load`."""
        self.plan, self.launches, self._shared = plan, 0, shared
        self._options, self._device, self._closed = options, device, False
        self._copy_lock = threading.Lock()
        self._memory = _Memory()
        _check_target(plan, device)
        _check_display(options, device)
        self._stream, self._copies = device.stream(), device.stream()
        self._staging = device.host_mapped(STAGING_BYTES)
        self._launch_words = device.host_mapped(4096)
        try:
            self._code = self._compile_beside_upload(graph, progress)
            self._kernel = Kernel(device, self._code.cubin, ENTRY)
        except BaseException:
            self._free()
            raise
        try:
            self._block_threads = self._constant("gpurt_block_threads")
            self._smem_bytes = self._constant("gpurt_shared_bytes")
            self._prove_residency()
            self._upload_plan(progress)
        except BaseException:
            self._kernel.unload()
            self._free()
            raise

    @property
    def ranks(self) -> tuple[Executor, ...]:
        """Itself."""
        return (self,)

    # ---- protocol ----------------------------------------------------------------------------
    def launch(self) -> None:
        """Reset all that a launch starts from, then launch. Raises: DeviceError."""
        self._check_open()
        if self.running():
            msg = f"a kernel of {self.plan.name} runs already - at launch {self.launches + 1}"
            raise DeviceError(f"{msg} - wait for its end with join()")
        control = self.host.control
        words = self._launch_words[: wire.DEVICE_CONTROL.itemsize].view(wire.DEVICE_CONTROL)[0]
        words["steps_open"] = self._options.first_step
        words["submit_head"] = control["submit_head"]
        words["launch"] = control["launch"] = self.launches + 1
        words["idle"] = 1
        last = len(self.plan.step_variants()) - 1
        wire.first_turn(words, self._options.first_step, last)
        for name in ("exit_request", "abort_request", "workers_in", "ranks_in", "heartbeat"):
            control[name] = 0
        control["fault"] = np.zeros((), wire.FAULT)
        control["kernel_state"] = wire.KernelState.ABSENT
        memory, device = self._memory, self._device
        with device.current():
            device.fill(memory.reset_begin, 0, memory.reset_bytes, self._stream)
            for kind in PAYLOAD:
                size_bytes = self.plan.two_sets_bytes(kind)
                device.fill(memory.arenas[kind], SENTINEL_BYTE, size_bytes, self._stream)
            ranks = program.symmetric_layout(self.plan, self._options)
            counters = memory.sections["symmetric"] + ranks.counters
            device.fill(counters, 0, ranks.buffers - ranks.counters, self._stream)
            device.copy_to_device(
                memory.sections["device_control"],
                self._launch_words,
                wire.DEVICE_CONTROL.itemsize,
                self._stream,
            )
            workers = self.plan.target.workers
            self._kernel.launch(workers, self._block_threads, self._smem_bytes, self._stream)
        self.launches += 1

    def running(self) -> bool:
        """Whether workers of the last launch are still there. Raises: DeviceError if it crashed."""
        if self._closed:
            return False
        with self._device.current():
            return not self._device.is_idle(self._stream)

    def join(self, timeout_s: float) -> bool:
        """Wait until no worker runs; False on time-out. Releases the GIL."""
        deadline = time.monotonic() + timeout_s
        nap_s = 20e-6
        while self.running():
            if time.monotonic() >= deadline:
                return False
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, 1e-3)
        return True

    def read(self, buffer_name: str) -> NDArray[Any]:
        """A copy of a buffer, in its storage dtype and shape. Of two sets, and of what several
        variants have of their own, those of the last step.

        Raises: PlanError for an unknown name and for a packed weight, ClosedError.
        """
        raw = self._download(self._memory.sections["step_state"], wire.STEP_STATE.itemsize)
        index, set_bytes = program.last_step(self.plan, buffer_name, raw.view(wire.STEP_STATE)[0])
        buffer, address = self.plan.buffers[index], self._addresses[index] + set_bytes
        if buffer.packing:
            msg = f"{buffer.name} is packed as {buffer.packing} - at CudaExecutor.read"
            raise PlanError(f"{msg} - weights are read from their source")
        raw = self._download(address, buffer.size_bytes)
        dtype = DTYPES[buffer.dtype]
        last_axis = -1 if dtype.block > 1 else buffer.shape[-1]
        array = raw.view(dtype.storage).reshape(*buffer.shape[:-1], last_axis)
        return side_by_side(array) if has_fragments(self.plan, index) else array

    def write(self, buffer_name: str, array: NDArray[Any]) -> None:
        """Fill a state buffer. Only while no request runs.

        Raises: PlanError if it does not fit or is no state, ClosedError.
        """
        buffer, address = self._find(buffer_name)
        storage = DTYPES[buffer.dtype].storage
        data = np.ascontiguousarray(array)
        if buffer.role != "state" or data.dtype != storage or data.nbytes != buffer.size_bytes:
            what = f"{buffer.role} {buffer.name} takes {list(buffer.shape)} {storage}"
            got = f"got {list(data.shape)} {data.dtype}"
            raise PlanError(f"{what}, {got} - at CudaExecutor.write - pass a state's array")
        self._check_open()
        with self._copy_lock, self._device.current():
            self._device.upload(address, data, self._staging, self._copies)

    def counters(self) -> NDArray[np.uint64]:
        """A copy of every counter, for fault reports."""
        size = len(self.plan.counters) * wire.COUNTER_STRIDE
        raw = self._download(self._memory.sections["counters"], size)
        return raw.view(np.uint64)[:: wire.COUNTER_STRIDE // 8].copy()

    def fault_cause(self) -> BaseException | None:
        """None: no Python runs on the device."""
        return None

    def raw_trace(self) -> RawTrace:
        """The rings as they are now. Spans that the kernel overwrites meanwhile are left out."""
        layout = program.zeroed(self.plan, self._options)
        capacity = layout["spans"].shape[1]
        workers = self.plan.target.workers
        if capacity == 0:
            empty = [np.zeros(0, wire.SPAN)] * workers
            summaries = np.zeros(0, wire.STEP_SUMMARY)
            return RawTrace(empty, list(empty), summaries, 1.0, 0)
        summaries = self._section("summaries").view(wire.STEP_SUMMARY)
        spans, dropped = self._spans("spans", "span_counts", workers, capacity)
        sampled, _ = self._spans("sampled_spans", "sampled_counts", workers, capacity)
        ended = summaries[summaries["end_ns"] != 0]
        ordered = ended[np.argsort(ended["step"], kind="stable")]
        return RawTrace(spans, sampled, ordered, SPAN_TICK_NS, dropped)

    def raw_traces(self) -> list[RawTrace]:
        """Of this one alone."""
        return [self.raw_trace()]

    def close(self) -> None:
        """Abort, wait for the kernel's end and give all memory back. Idempotent.

        Raises: DeviceError if the kernel is still there after its wait time-out and 10 s more.
        """
        if self._closed:
            return
        self.host.request_abort()
        ended = self.join(_END_TIMEOUT_S + self._options.wait_timeout_ms / 1e3)
        if not ended:
            msg = f"the kernel of {self.plan.name} did not end - at launch {self.launches}"
            raise DeviceError(f"{msg} - end the process: its memory cannot be freed")
        self._closed = True
        with self._device.current():
            self._kernel.unload()
        self._free()

    # ---- load --------------------------------------------------------------------------------
    def _compile_beside_upload(self, graph: Graph, progress: Progress) -> KernelCode:
        """Compile the kernel while weights are packed and uploaded: both take seconds to minutes,
        and the compiler needs no more than one core.
        """
        bodies = {op.body.name: op.body for op in graph.operators}
        with ThreadPoolExecutor(1) as compiler:
            code = compiler.submit(compile_kernel, self.plan, bodies, self._device.limits.arch)
            self._allocate()
            self._upload_weights(graph, progress)
            progress("compiling", 0, 1)
            compiled = code.result()
        progress("compiling", 1, 1)
        return compiled

    def _constant(self, name: str) -> int:
        """A number that the kernel states about itself."""
        pointer, size = self._kernel.symbol(name)
        raw = self._device.download(pointer, size, self._staging, self._copies)
        return int(raw.view(np.uint32)[0])

    def _prove_residency(self) -> None:
        workers, limits = self.plan.target.workers, self._device.limits
        per_sm = self._kernel.resident_blocks(self._block_threads, self._smem_bytes)
        room = per_sm * limits.sm_count
        where = f"at device cuda:{self._device.index} ({limits.name})"
        if workers > room:
            what = f"{workers} workers, but only {room} blocks can be resident"
            why = (
                f"{per_sm} an SM, {limits.sm_count} SMs; a block takes {self._block_threads} "
                f"threads of {self._kernel.register_count} registers and {self._smem_bytes:,} bytes"
            )
            raise DeviceError(f"{what} ({why}) - {where} - plan for {room} workers or fewer")
        if not limits.cooperative:
            msg = f"no cooperative launch - {where}"
            raise DeviceError(f"{msg} - residency cannot be proved: use another device")

    def _allocate(self) -> None:
        device, memory, plan = self._device, self._memory, self.plan
        host: dict[str, NDArray[Any]] = {}
        sections = program.zeroed(plan, self._options)
        if self._shared is not None:
            memory.sections["symmetric"] = self._shared.addresses[self._options.rank]
            del sections["symmetric"]
        # What a launch zeroes lies in one piece.
        order = [*_RESET, *(n for n in sections if n not in _RESET)]
        offsets, size = {}, 0
        for name in order:
            section = sections[name]
            if section.place == "host":
                raw = device.host_mapped(section.size_bytes)[: section.size_bytes]
                host[name] = raw.view(section.dtype).reshape(section.shape)
                memory.sections[name] = int(raw.ctypes.data)
                continue
            offsets[name] = size
            size = align_up(size + section.size_bytes)
            if name in _RESET:
                memory.reset_bytes = size
        base = self._take(size, f"{plan.name}: counters, step state and trace rings")
        memory.reset_begin = base
        # In the stream of the uploads that follow: another stream's fill may come after them, which
        # a GPU that others use too really does.
        device.fill(base, 0, size, self._copies)
        memory.sections.update({name: base + offset for name, offset in offsets.items()})
        for kind in MEMORIES:
            if kind not in ("step", "symmetric", "symmetric_payload", "none"):
                two_sets = kind == "payload"
                arena = plan.two_sets_bytes(kind) if two_sets else plan.arena_bytes(kind)
                memory.arenas[kind] = self._take(arena, f"{plan.name}: {kind} buffers")
        ranks = program.symmetric_layout(plan, self._options)
        memory.arenas["symmetric"] = memory.sections["symmetric"] + ranks.buffers
        memory.arenas["symmetric_payload"] = memory.sections["symmetric"] + ranks.payload
        for kind in ("state", "activation"):
            device.fill(memory.arenas[kind], 0, plan.arena_bytes(kind), self._copies)
        step_state = memory.sections["step_state"]
        self._addresses = program.buffer_addresses(plan, memory.arenas, step_state)
        self.host = HostView(host)
        self._pinned = host  # lives as long as somebody views it

    def _take(self, size_bytes: int, what: str) -> int:
        pointer = self._device.allocate(size_bytes, what)
        self._memory.blocks.append(pointer)
        return pointer

    def _upload_weights(self, graph: Graph, progress: Progress) -> None:
        device, plan = self._device, self.plan
        with_source = {b.name for b in graph.buffers if b.source is not None}
        filled = [b for b in plan.buffers if (b.source or b.name) in with_source]
        total = sum(b.size_bytes for b in filled)
        done = 0
        packed = contents_of(plan, graph)

        def content(planned: PlanBuffer) -> tuple[PlanBuffer | None, NDArray[np.uint8] | None]:
            first = packed.first(planned)
            return first, None if first is not None else packed.take(planned)

        with ThreadPoolExecutor(1) as packer:
            ahead = [packer.submit(content, planned) for planned in filled[:1]]
            for planned, following in zip_longest(filled, filled[1:]):
                progress("packing and uploading weights", done, total)
                first, data = ahead.pop().result()
                # One buffer is packed while another is uploaded, and no more: they may be large.
                if following is not None:
                    ahead.append(packer.submit(content, following))
                address = self._addresses[plan.buffer_index(planned.name)]
                if first is not None:
                    source = self._addresses[plan.buffer_index(first.name)]
                    device.copy_within(address, source, planned.size_bytes, self._copies)
                elif data is not None:
                    device.upload(address, data, self._staging, self._copies)
                done += planned.size_bytes
        packed.close()
        device.wait(self._copies)
        progress("packing and uploading weights", total, total)

    def _upload_plan(self, progress: Progress) -> None:
        device, plan = self._device, self.plan
        progress("uploading the plan", 0, 1)
        constants = program.constants(plan, self._code.bodies, self._addresses)
        for name, array in constants.items():
            address = self._take(array.nbytes, f"{plan.name}: {name}")
            device.upload(address, array, self._staging, self._copies)
            self._memory.sections[name] = address
        header = program.header(plan, self._options, self._memory.sections, tick_ns=SPAN_TICK_NS)
        alone = (self._memory.sections["symmetric"],)
        peers = np.array(alone if self._shared is None else self._shared.addresses, np.uint64)
        device.upload(self._memory.sections["peers"], peers, self._staging, self._copies)
        pointer, size = self._kernel.symbol(PROGRAM_SYMBOL)
        if size != wire.PROGRAM.itemsize:
            msg = f"the kernel's Program has {size} bytes, wire.py says {wire.PROGRAM.itemsize}"
            raise DeviceError(f"{msg} - at {plan.name} - reinstall gpurt")
        device.upload(pointer, np.asarray(header).reshape(1), self._staging, self._copies)

    def _free(self) -> None:
        with self._device.current():
            for pointer in self._memory.blocks:
                self._device.free(pointer)
            self._memory.blocks.clear()
            self._device.destroy(self._stream)
            self._device.destroy(self._copies)

    # ---- helpers -----------------------------------------------------------------------------
    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the executor is closed - at {self.plan.name} - load the plan again")

    def _find(self, name: str) -> tuple[PlanBuffer, int]:
        index = self.plan.buffer_index(name)
        return self.plan.buffers[index], self._addresses[index]

    def _download(self, address: int, size_bytes: int) -> NDArray[np.uint8]:
        self._check_open()
        with self._copy_lock, self._device.current():
            return self._device.download(address, size_bytes, self._staging, self._copies)

    def _section(self, name: str) -> NDArray[np.uint8]:
        size = program.zeroed(self.plan, self._options)[name].size_bytes
        return self._download(self._memory.sections[name], size)

    def _spans(
        self, ring: str, counts: str, workers: int, capacity: int
    ) -> tuple[list[NDArray[Any]], int]:
        stride = wire.SPAN_COUNT_STRIDE // 8
        unpublished = wire.SPANS_UNPUBLISHED if self.running() else 0
        before = self._section(counts).view(np.uint64)[::stride].copy()
        spans = self._section(ring).view(wire.SPAN).reshape(workers, capacity)
        after = self._section(counts).view(np.uint64)[::stride]
        result, dropped = [], 0
        for worker in range(workers):
            whole, gone = whole_spans(
                spans[worker], int(before[worker]), int(after[worker]), unpublished
            )
            result.append(whole)
            dropped += gone
        return result, dropped


def _check_target(plan: Plan, device: Device) -> None:
    target, limits = plan.target, device.limits
    where = f"at device cuda:{device.index} ({limits.name})"
    if target.kind != "cuda":
        msg = f"the plan {plan.name} is for {target.kind} - {where}"
        raise DeviceError(f"{msg} - plan it for this device")
    if target.arch and target.arch != limits.arch:
        msg = f"the plan {plan.name} is for {target.arch}, the device is {limits.arch}"
        raise DeviceError(f"{msg} - {where} - plan again for this device")
    if target.smem_bytes > limits.smem_bytes:
        msg = f"the plan counts on {target.smem_bytes:,} bytes of shared memory a block"
        msg = f"{msg}, the device has {limits.smem_bytes:,}"
        raise DeviceError(f"{msg} - {where} - plan again for this device")


def _check_display(options: Options, device: Device) -> None:
    """Where the driver ends long kernels, no kernel may mean to stay longer than it allows."""
    stays = options.resident or not 0 < options.residency_ms <= DISPLAY_RESIDENCY_MS
    if device.limits.kernel_timeout and stays:
        asked = "no end" if options.resident else f"{options.residency_ms:g} ms"
        msg = f"a display is attached, kernels are ended after about 2 s; residency is {asked}"
        where = f"at device cuda:{device.index} ({device.limits.name})"
        raise DeviceError(f"{msg} - {where} - use residency_ms={DISPLAY_RESIDENCY_MS} or less")


def _silent(what: str, done: int, total: int) -> None:
    """No progress wanted."""
