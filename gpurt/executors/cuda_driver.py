"""The CUDA driver, as the executor uses it: one context, memory, streams, one error class.

Owns: calls into cuda.bindings and what they mean when they fail. Knows nothing of plans.
Importing this module starts nothing; `Device.open()` makes the context.

The context is gpurt's own, not the device's primary one that torch uses. The GPU shares time
between contexts, so torch's allocation, free, lazy loading and synchronise never wait for a
resident kernel; in one context with it they waited for its end (tools/LOG.md, 2026-11-29: the same
torch work took 1 ms instead of 370, and the kernel ran as fast). Memory of one context cannot be
reached from the other: arrays come in and go out through the host.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.doctor import MIN_CAPABILITY
from gpurt.errors import DeviceError

STAGING_BYTES = 4 << 20  # pinned, for copies while a kernel is resident
# Made once and never destroyed: pinned memory that a late reader still views lies in them.
_CONTEXTS: dict[int, Any] = {}
_CONTEXTS_LOCK = threading.Lock()
_HINT = 'use device="host", or see `gpurt doctor`'


def bindings() -> Any:
    """The module cuda.bindings.driver. Raises: DeviceError if cuda-python is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        msg = f"cuda-python is not installed ({error}) - at device cuda"
        raise DeviceError(f"{msg} - pip install 'gpurt[cuda]', or use device=\"host\"") from error
    return driver


def check(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call. Raises: DeviceError naming the call, the code and its text."""
    code, *values = result
    if int(code) != 0:
        raise DeviceError(f"{what} failed: {_explain(code)} - at device cuda - {_HINT}")
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True)
class Limits:
    """What the device says of itself."""

    name: str
    arch: str  # "sm_90a"
    sm_count: int
    smem_bytes: int  # one block's limit, opted in
    l2_bytes: int
    memory_bytes: int
    clock_khz: int  # the most an SM's clock runs at
    kernel_timeout: bool  # a display is attached: the driver ends long kernels
    cooperative: bool


class Device:
    """One GPU and gpurt's context on it. `with device:` makes it current for the calling thread."""

    def __init__(self, index: int, handle: Any, context: Any, limits: Limits) -> None:
        """Use `open`."""
        self.index, self.handle, self.context, self.limits = index, handle, context, limits
        self._driver = bindings()

    @staticmethod
    def open(index: int = 0) -> Device:
        """The device, its context made on first use. Raises: DeviceError saying what is missing."""
        driver = bindings()
        where = f"at device cuda:{index}"
        try:
            code = driver.cuInit(0)[0]
        except Exception as error:  # a missing libcuda raises classes of its own
            text = " ".join(str(error).split())
            raise DeviceError(f"no NVIDIA driver: {text} - {where} - {_HINT}") from error
        if int(code) != 0:
            raise DeviceError(f"no usable GPU: {_explain(code)} - {where} - {_HINT}")
        count = check(driver.cuDeviceGetCount(), "cuDeviceGetCount")
        if not 0 <= index < count:
            msg = f"this machine has {count} CUDA devices, device {index} was asked for - {where}"
            raise DeviceError(f"{msg} - use cuda:0 to cuda:{max(count - 1, 0)}, or host")
        handle = check(driver.cuDeviceGet(index), "cuDeviceGet")
        limits = _limits(driver, handle, where)
        with _CONTEXTS_LOCK:
            if index not in _CONTEXTS:
                _CONTEXTS[index] = _make_context(driver, handle)
        return Device(index, handle, _CONTEXTS[index], limits)

    @contextmanager
    def current(self) -> Iterator[None]:
        """This context on top of the calling thread's stack."""
        check(self._driver.cuCtxPushCurrent(self.context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent()

    # ---- other devices -----------------------------------------------------------------------
    def can_reach(self, peer: Device) -> bool:
        """Whether the driver says that kernels here can address the peer's memory."""
        if peer.index == self.index:
            return False
        can = self._driver.cuDeviceCanAccessPeer(self.handle, peer.handle)
        return bool(check(can, "cuDeviceCanAccessPeer"))

    def reach(self, peer: Device) -> None:
        """Map the peer's memory here, at its own addresses; this context is current."""
        result = self._driver.cuCtxEnablePeerAccess(peer.context, 0)
        known = self._driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
        if int(result[0]) != int(known):
            check(result, f"cuCtxEnablePeerAccess from cuda:{self.index} to cuda:{peer.index}")

    # ---- other processes ---------------------------------------------------------------------
    def export(self, pointer: int) -> bytes:
        """A ticket by which other processes of this machine can map what `allocate` gave."""
        handle = check(self._driver.cuIpcGetMemHandle(pointer), "cuIpcGetMemHandle")
        return ctypes.string_at(handle.getPtr(), self._driver.CU_IPC_HANDLE_SIZE)

    def map_exported(self, ticket: bytes) -> int:
        """Map what another process exported. Returns: where it lies in this context."""
        handle = self._driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), ticket, self._driver.CU_IPC_HANDLE_SIZE)
        flags = int(self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return int(check(self._driver.cuIpcOpenMemHandle(handle, flags), "cuIpcOpenMemHandle"))

    def forget(self, pointer: int) -> None:
        """Undo `map_exported`. No kernel here may run."""
        self._driver.cuIpcCloseMemHandle(pointer)

    def register(self, array: NDArray[np.uint8]) -> None:
        """Let every device of this process see host memory, at its own address; page-aligned."""
        driver, address = self._driver, int(array.ctypes.data)
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        check(driver.cuMemHostRegister(address, array.nbytes, flags), "cuMemHostRegister")
        self._check_unified(address)

    def unregister(self, array: NDArray[np.uint8]) -> None:
        """Undo `register`."""
        self._driver.cuMemHostUnregister(int(array.ctypes.data))

    # ---- memory ------------------------------------------------------------------------------
    def allocate(self, size_bytes: int, what: str) -> int:
        """Device memory. Raises: DeviceError with asked and free bytes."""
        code, pointer = self._driver.cuMemAlloc(max(size_bytes, 256))
        if int(code) != 0:
            free, total = check(self._driver.cuMemGetInfo(), "cuMemGetInfo")
            msg = f"{what} needs {size_bytes:,} bytes, {free:,} of {total:,} are free"
            where = f"at device cuda:{self.index} ({self.limits.name})"
            raise DeviceError(f"{msg} - {where} - free memory or plan a smaller context")
        return int(pointer)

    def free(self, pointer: int) -> None:
        """Give device memory back. The driver waits for every running kernel first."""
        self._driver.cuMemFree(pointer)

    def host_mapped(self, size_bytes: int) -> NDArray[np.uint8]:
        """Zeroed pinned memory that the device sees at the same address.

        It lives as long as an array views it, so a late reader never touches freed memory.
        Raises: DeviceError without unified addressing, or if it cannot be had.
        """
        driver = self._driver
        flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
        address = int(check(driver.cuMemHostAlloc(max(size_bytes, 4096), flags), "cuMemHostAlloc"))
        self._check_unified(address)
        ctypes.memset(address, 0, size_bytes)
        view = _PinnedView(address, size_bytes)
        weakref.finalize(view, _free_pinned, address, self.context)
        return np.asarray(view)

    def _check_unified(self, address: int) -> None:
        driver = self._driver
        seen = int(check(driver.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer"))
        if seen != address:
            msg = "host memory has another address on the device (no unified addressing)"
            raise DeviceError(f"{msg} - at device cuda:{self.index} - {_HINT}")

    # ---- streams and copies ------------------------------------------------------------------
    def stream(self) -> Any:
        """A stream that the legacy default stream does not wait for."""
        flags = int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return check(self._driver.cuStreamCreate(flags), "cuStreamCreate")

    def is_idle(self, stream: Any) -> bool:
        """Whether all work of a stream is done. Raises: DeviceError if that work failed."""
        code = self._driver.cuStreamQuery(stream)[0]
        if int(code) == int(self._driver.CUresult.CUDA_ERROR_NOT_READY):
            return False
        if int(code) != 0:
            # Such an error stays with its context: the next Runtime gets another one.
            with _CONTEXTS_LOCK:
                _CONTEXTS.pop(self.index, None)
        check((code,), "the resident kernel")
        return True

    def wait(self, stream: Any) -> None:
        """Until all work of a stream is done."""
        check(self._driver.cuStreamSynchronize(stream), "cuStreamSynchronize")

    def upload(
        self, pointer: int, array: NDArray[Any], staging: NDArray[np.uint8], stream: Any
    ) -> None:
        """Copy an array to the device through pinned `staging`; done when it returns."""
        source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for begin in range(0, source.nbytes, staging.nbytes):
            part = source[begin : begin + staging.nbytes]
            staging[: part.nbytes] = part
            result = self._driver.cuMemcpyHtoDAsync(
                pointer + begin, staging.ctypes.data, part.nbytes, stream
            )
            check(result, "cuMemcpyHtoDAsync")
            self.wait(stream)

    def download(
        self, pointer: int, size_bytes: int, staging: NDArray[np.uint8], stream: Any
    ) -> NDArray[np.uint8]:
        """Copy device memory to a new array through pinned `staging`."""
        out = np.empty(size_bytes, np.uint8)
        for begin in range(0, size_bytes, staging.nbytes):
            count = min(staging.nbytes, size_bytes - begin)
            result = self._driver.cuMemcpyDtoHAsync(
                staging.ctypes.data, pointer + begin, count, stream
            )
            check(result, "cuMemcpyDtoHAsync")
            self.wait(stream)
            out[begin : begin + count] = staging[:count]
        return out

    def copy_to_device(
        self, pointer: int, pinned: NDArray[np.uint8], size_bytes: int, stream: Any
    ) -> None:
        """Copy the start of pinned memory, in stream order; it must not change until then."""
        result = self._driver.cuMemcpyHtoDAsync(
            pointer, int(pinned.ctypes.data), size_bytes, stream
        )
        check(result, "cuMemcpyHtoDAsync")

    def copy_within(self, pointer: int, source: int, size_bytes: int, stream: Any) -> None:
        """Copy device memory to device memory, in stream order."""
        result = self._driver.cuMemcpyDtoDAsync(pointer, source, size_bytes, stream)
        check(result, "cuMemcpyDtoDAsync")

    def destroy(self, stream: Any) -> None:
        """Give a stream back."""
        self._driver.cuStreamDestroy(stream)

    def fill(self, pointer: int, byte: int, size_bytes: int, stream: Any) -> None:
        """Fill device memory, in stream order."""
        if size_bytes:
            check(
                self._driver.cuMemsetD8Async(pointer, byte, size_bytes, stream), "cuMemsetD8Async"
            )


class Kernel:
    """A compiled kernel, loaded: its resources are known and its code lies on the device."""

    def __init__(self, device: Device, cubin: bytes, name: str) -> None:
        """Load `name` of a cubin. Raises: DeviceError if the device cannot load it."""
        self._driver, self.device = bindings(), device
        self._module = check(self._driver.cuModuleLoadData(cubin), "cuModuleLoadData")
        self._function = check(
            self._driver.cuModuleGetFunction(self._module, name.encode()), "cuModuleGetFunction"
        )
        attribute = self._driver.CUfunction_attribute
        # Asking for attributes also loads the code, where loading is lazy: nothing may be loaded
        # while the kernel is resident.
        self.register_count = self._attribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS)
        self.local_bytes = self._attribute(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)

    def _attribute(self, which: Any) -> int:
        return int(
            check(self._driver.cuFuncGetAttribute(which, self._function), "cuFuncGetAttribute")
        )

    def symbol(self, name: str) -> tuple[int, int]:
        """Address and bytes of a module variable."""
        pointer, size = check(
            self._driver.cuModuleGetGlobal(self._module, name.encode()), "cuModuleGetGlobal"
        )
        return int(pointer), int(size)

    def resident_blocks(self, threads: int, smem_bytes: int) -> int:
        """Blocks of one SM that run at once, asked of the driver for this very kernel.

        Raises: DeviceError if a block needs more shared memory than the device gives one.
        """
        limit = self.device.limits.smem_bytes
        if smem_bytes > limit:
            msg = f"one block needs {smem_bytes:,} bytes of shared memory, the device has {limit:,}"
            where = f"at device cuda:{self.device.index} ({self.device.limits.name})"
            raise DeviceError(f"{msg} - {where} - plan for this device: fewer stages fit")
        which = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(self._driver.cuFuncSetAttribute(self._function, which, smem_bytes), "shared memory")
        return int(
            check(
                self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    self._function, threads, smem_bytes
                ),
                "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            )
        )

    def launch(self, blocks: int, threads: int, smem_bytes: int, stream: Any) -> None:
        """Cooperative: the driver refuses a grid whose blocks cannot all be resident."""
        result = self._driver.cuLaunchCooperativeKernel(
            *(self._function, blocks, 1, 1, threads, 1, 1, smem_bytes, stream), 0
        )
        check(result, f"launching {blocks} blocks of {threads} threads")

    def unload(self) -> None:
        """Unload the module. No kernel of it may run."""
        self._driver.cuModuleUnload(self._module)


class _PinnedView:
    """An array's base: while any view of it lives, so does the memory."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _make_context(driver: Any, handle: Any) -> Any:
    try:
        result = driver.cuCtxCreate(None, 0, handle)
    except TypeError:  # cuda-bindings before 13 has no creation parameters
        result = driver.cuCtxCreate(0, handle)
    context = check(result, "cuCtxCreate")
    driver.cuCtxPopCurrent()  # it came on top of this thread's stack
    return context


def _free_pinned(address: int, context: Any) -> None:
    driver = bindings()
    driver.cuCtxPushCurrent(context)
    driver.cuMemFreeHost(address)
    driver.cuCtxPopCurrent()


def _limits(driver: Any, handle: Any, where: str) -> Limits:
    names = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        which = getattr(names, "CU_DEVICE_ATTRIBUTE_" + name)
        return int(check(driver.cuDeviceGetAttribute(which, handle), "cuDeviceGetAttribute"))

    raw = check(driver.cuDeviceGetName(128, handle), "cuDeviceGetName")
    name = bytes(raw).split(b"\0")[0].decode()
    capability = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    if capability < MIN_CAPABILITY:
        has, need = (".".join(map(str, c)) for c in (capability, MIN_CAPABILITY))
        msg = f"{name} has compute capability {has}, gpurt needs {need}"
        raise DeviceError(f"{msg} - {where} - {_HINT}")
    return Limits(
        name=name,
        arch=f"sm_{capability[0]}{capability[1]}a",
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        smem_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        memory_bytes=int(check(driver.cuDeviceTotalMem(handle), "cuDeviceTotalMem")),
        clock_khz=attribute("CLOCK_RATE"),
        kernel_timeout=bool(attribute("KERNEL_EXEC_TIMEOUT")),
        cooperative=bool(attribute("COOPERATIVE_LAUNCH")),
    )


def _explain(code: Any) -> str:
    driver = bindings()
    try:
        name, text = driver.cuGetErrorName(code)[1], driver.cuGetErrorString(code)[1]
        return f"{name.decode()} ({text.decode()})"
    except Exception:  # the driver itself is missing
        return str(code)
