"""A GPU made of one host thread: Device, Kernel and compile_source for machines without one.

g++ compiles the real device/ and scheduler/ folders, with ptx.cuh and atomics.hpp replaced, and
machine.cpp runs the kernel: a fibre a thread, blocks that are resident together, copies that land
late. It shows wrong values, misaligned accesses, unfinished barriers, lost signals and hangs of the
protocol; it does not show data races, the memory model, or what approximate instructions round to.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.doctor import CudaProbe
from gpurt.errors import DeviceError, GraphError
from gpurt.executors.cuda_compile import Compiled
from gpurt.executors.cuda_driver import Limits
from gpurt.source import source_dir

HERE = Path(__file__).resolve().parent
GUARD_BYTES = 256  # round every allocation
TICKET = struct.Struct("=qq48x")  # process, file: as long as CUDA's
GUARD_BYTE = 0xFF  # a NaN for whoever reads past an end
LIMIT_S = 100.0  # of one launch
KERNEL_THREAD = "an emulated kernel"
LIMITS = Limits(
    name="an emulated GPU",
    arch="sm_90a",
    sm_count=3,
    smem_bytes=232_448,
    l2_bytes=50 << 20,
    memory_bytes=1 << 30,
    clock_khz=1_800_000,
    kernel_timeout=False,
    cooperative=True,
)
# The emulator's shared memory is a pointer that follows the running block.
SHARED = ("extern __shared__ __align__(128) u8 gpurt_shared[];", "#define gpurt_shared emu::shared")


class Stream:
    """Work in order: at most one kernel, and copies that wait for it. What nobody waits for has not
    happened yet: a GPU that others use too may take its time.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.failure = ""
        self._pending: list[Callable[[], object]] = []

    def later(self, call: Callable[..., object], *args: object) -> None:
        """Do it when somebody waits for the stream, or launches there."""
        self._pending.append(partial(call, *args))

    def wait(self) -> None:
        """Until all of it is done. Raises: DeviceError if its kernel failed."""
        if self.thread is not None:
            self.thread.join()
        for call in self._pending:
            call()
        self._pending.clear()
        self.check()

    def check(self) -> None:
        """Raises: DeviceError if its kernel failed."""
        if self.failure:
            raise DeviceError(f"{self.failure} - at the emulated GPU - see tests/emu")


class EmulatedDevice:
    """cuda_driver.Device on the process's own memory."""

    index = 0

    @property
    def limits(self) -> Limits:
        return LIMITS

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[NDArray[np.uint8], int, int]] = {}
        self._mapped: dict[int, NDArray[np.uint8]] = {}

    @staticmethod
    def open(index: int = 0) -> EmulatedDevice:
        """There is one."""
        assert index == 0
        return EmulatedDevice()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Nothing to switch."""
        yield

    def allocate(self, size_bytes: int, what: str) -> int:
        """Memory of garbage at a multiple of 256, as a GPU's allocator gives it."""
        del what
        file = os.memfd_create("emulated GPU")
        os.ftruncate(file, size_bytes + 2 * GUARD_BYTES)
        raw = np.frombuffer(mmap.mmap(file, 0), np.uint8)
        raw[:] = GUARD_BYTE
        address = int(raw.ctypes.data) + GUARD_BYTES
        self._arrays[address] = raw, size_bytes, file
        return address

    def free(self, pointer: int) -> None:
        """Give memory back. Raises: AssertionError if a kernel wrote past its ends."""
        raw, size_bytes, file = self._arrays.pop(pointer)
        os.close(file)
        guards = np.concatenate([raw[:GUARD_BYTES], raw[GUARD_BYTES + size_bytes :]])
        assert (guards == GUARD_BYTE).all(), f"a kernel wrote past the ends of {size_bytes} bytes"

    def export(self, pointer: int) -> bytes:
        """A ticket for what `allocate` gave."""
        return TICKET.pack(os.getpid(), self._arrays[pointer][2])

    def map_exported(self, ticket: bytes) -> int:
        """Map another device's memory once more, at another address."""
        process, file = TICKET.unpack(ticket)
        opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        raw = np.frombuffer(mmap.mmap(opened, 0), np.uint8)
        os.close(opened)
        address = int(raw.ctypes.data) + GUARD_BYTES
        self._mapped[address] = raw
        return address

    def forget(self, pointer: int) -> None:
        """Undo `map_exported`."""
        del self._mapped[pointer]

    def register(self, array: NDArray[np.uint8]) -> None:
        """It sees all of the host's memory."""
        assert int(array.ctypes.data) % mmap.PAGESIZE == 0

    def unregister(self, array: NDArray[np.uint8]) -> None:
        """Undo `register`."""

    def host_mapped(self, size_bytes: int) -> NDArray[np.uint8]:
        """Zeroed memory that lives as long as its views."""
        raw = np.zeros(max(size_bytes, 4096) + GUARD_BYTES, np.uint8)
        begin = -int(raw.ctypes.data) % GUARD_BYTES
        return raw[begin : begin + max(size_bytes, 4096)]

    def stream(self) -> Stream:
        """A stream."""
        return Stream()

    def is_idle(self, stream: Stream) -> bool:
        """Whether no kernel of the stream runs. Raises: DeviceError if it failed."""
        if stream.thread is not None and stream.thread.is_alive():
            return False
        stream.wait()
        return True

    def wait(self, stream: Stream) -> None:
        """Until the stream's kernel has ended."""
        stream.wait()

    def upload(self, pointer: int, array: NDArray[Any], staging: Any, stream: Stream) -> None:
        """Copy an array to `pointer`."""
        del staging
        stream.wait()
        source = np.ascontiguousarray(array)
        ctypes.memmove(pointer, source.ctypes.data, source.nbytes)

    def download(
        self, pointer: int, size_bytes: int, staging: Any, stream: Stream
    ) -> NDArray[np.uint8]:
        """A copy of what lies at `pointer`."""
        del staging
        stream.wait()
        out = np.empty(size_bytes, np.uint8)
        ctypes.memmove(out.ctypes.data, pointer, size_bytes)
        return out

    def copy_to_device(
        self, pointer: int, pinned: NDArray[np.uint8], size_bytes: int, stream: Stream
    ) -> None:
        """Copy the start of pinned memory, as late as the stream allows."""
        stream.later(ctypes.memmove, pointer, int(pinned.ctypes.data), size_bytes)

    def copy_within(self, pointer: int, source: int, size_bytes: int, stream: Stream) -> None:
        """Copy memory to memory, as late as the stream allows."""
        stream.later(ctypes.memmove, pointer, source, size_bytes)

    def fill(self, pointer: int, byte: int, size_bytes: int, stream: Stream) -> None:
        """Fill memory, as late as the stream allows."""
        stream.later(ctypes.memset, pointer, byte, size_bytes)

    def destroy(self, stream: Stream) -> None:
        """Nothing to give back."""


class EmulatedKernel:
    """cuda_driver.Kernel: a library of its own for each, so that no globals are shared."""

    register_count = local_bytes = 0
    launches = 0  # of all kernels: each is another schedule

    def __init__(self, device: EmulatedDevice, cubin: bytes, name: str) -> None:
        self.device = device
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(cubin)
            file.flush()
            self._library = ctypes.CDLL(file.name)
            self._sizes = _symbol_bytes(file.name)
        self._entry = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)
        self._launch = self._library.emu_launch
        self._launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 4, ctypes.c_double]

    def symbol(self, name: str) -> tuple[int, int]:
        """Address and bytes of a global."""
        return ctypes.addressof(ctypes.c_char.in_dll(self._library, name)), self._sizes[name]

    def resident_blocks(self, threads: int, smem_bytes: int) -> int:
        """One block an SM."""
        assert threads <= 1024
        assert smem_bytes <= LIMITS.smem_bytes
        return 1

    def launch(self, blocks: int, threads: int, smem_bytes: int, stream: Stream) -> None:
        """Start a thread that runs the kernel; the seed of its schedule counts launches."""
        del smem_bytes
        stream.wait()
        EmulatedKernel.launches += 1
        seed = EmulatedKernel.launches

        def run() -> None:
            if self._launch(self._entry, blocks, threads, LIMITS.sm_count, seed, LIMIT_S) != 0:
                stream.failure = f"launch {seed} ran for more than {LIMIT_S} s"

        stream.thread = threading.Thread(target=run, daemon=True, name=KERNEL_THREAD)
        stream.thread.start()

    def unload(self) -> None:
        """Libraries stay: the process may still hold their addresses."""


def compile_source(
    source: str,
    arch: str,
    *,
    headers: Mapping[str, str],
    user_files: Sequence[str] = (),
    options: Sequence[str] = (),
    name: str = "gpurt.cu",
) -> Compiled:
    """cuda_compile.compile_source by g++: the "cubin" is a shared library."""
    del arch, user_files, options, name
    return Compiled(_build(source, tuple(sorted(headers.items()))), (), False)


def probe(index: int = 0) -> CudaProbe:
    """doctor.probe_cuda of the emulated GPU."""
    del index
    return CudaProbe(
        True,
        "",
        name=LIMITS.name,
        arch=LIMITS.arch,
        sm_count=LIMITS.sm_count,
        smem_bytes=LIMITS.smem_bytes,
        l2_bytes=LIMITS.l2_bytes,
    )


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the emulated GPU where the executor and the tests look for a real one."""
    from gpurt.executors import cuda, cuda_compile, shared, symmetric
    from tests.gpu import one_task

    for module in (cuda, one_task, shared, symmetric):
        monkeypatch.setattr(module, "Device", EmulatedDevice)
    for module in (cuda, one_task):
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
    for module in (cuda_compile, one_task):
        monkeypatch.setattr(module, "compile_source", compile_source)
    monkeypatch.setattr("gpurt.doctor.probe_cuda", probe)


@cache
def _build(source: str, headers: tuple[tuple[str, str], ...]) -> bytes:
    digest = hashlib.sha256((source + repr(headers)).encode()).hexdigest()[:16]
    with tempfile.TemporaryDirectory(prefix=f"gpurt-emu-{digest}-") as name:
        folder = Path(name)
        for part in ("device", "scheduler"):
            shutil.copytree(source_dir() / part, folder / part)
        for replaced in ("ptx.cuh", "atomics.hpp"):
            shutil.copy(HERE / replaced, folder / "device" / replaced)
        path = folder / "device" / "shared_memory.cuh"
        text = path.read_text(encoding="utf-8")
        assert SHARED[0] in text, f"{path.name} no longer says {SHARED[0]!r}: adapt the emulator"
        path.write_text(text.replace(*SHARED), encoding="utf-8")
        for header, content in headers:
            (folder / header).write_text(content, encoding="utf-8")
        kernel = folder / "kernel.cpp"
        kernel.write_text(f'#include "cuda.hpp"\n{source}', encoding="utf-8")
        library = folder / "kernel.so"
        command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
        # Inline variables of kernels that run at once must not be one.
        command += ["-fno-gnu-unique"]
        # Jumps between stacks are not what fortified longjmp expects.
        command += ["-fpermissive", "-U_FORTIFY_SOURCE", "-D__CUDACC__=1"]
        command += [f"-I{p}" for p in (folder, HERE, folder / "device", folder / "scheduler")]
        done = subprocess.run(
            [*command, str(kernel), str(HERE / "machine.cpp"), "-o", str(library)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise GraphError(done.stderr[:4000])
        return library.read_bytes()


def _symbol_bytes(library: str) -> dict[str, int]:
    lines = subprocess.run(
        ["nm", "-DS", library], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    fields = [line.split() for line in lines]
    return {parts[3]: int(parts[1], 16) for parts in fields if len(parts) == 4}
