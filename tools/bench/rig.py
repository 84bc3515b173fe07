"""Rig: one Plan on one GPU with torch memory, for benches that time launches and compare bits.

Not the executor: it launches, waits with a time limit, aborts a hung kernel, and shows all memory
as torch tensors. Weights are made on the GPU, so gigabytes of them cost no packing time.
"""

from __future__ import annotations

import os
import sys
import time
import types
from typing import Any

import numpy as np
import torch

if "gpurt._native" not in sys.modules:
    try:
        import gpurt._native  # noqa: F401
    except ImportError:
        # The GPU benches need none of the host executor: a bare GPU machine need not build it.
        sys.modules["gpurt._native"] = types.ModuleType("gpurt._native")

from gpurt import wire
from gpurt.executors import program
from gpurt.executors.base import Options
from gpurt.executors.cuda_compile import KernelCode, compile_kernel
from gpurt.executors.cuda_driver import Device, Kernel, bindings, check
from gpurt.plan import Plan

__all__ = ["Options", "Rig"]
HANG_S = 8.0


class Rig:
    """A loaded plan. arenas: torch tensors by memory kind, on the GPU."""

    def __init__(self, plan: Plan, arenas: dict[str, torch.Tensor], options: Options) -> None:
        self.plan, self.arenas, self.options = plan, arenas, options
        torch.zeros(1, device="cuda")  # torch's context is the primary one
        self.device = _torch_device()
        with self.device.current():
            self.code: KernelCode = compile_kernel(plan, {}, self.device.limits.arch)
            self.kernel = Kernel(self.device, self.code.cubin, "gpurt_persistent")
            self.symbol, _ = self.kernel.symbol("gpurt_program")
            self.smem_bytes = self._word("gpurt_shared_bytes")
            self.threads = self._word("gpurt_block_threads")
            self.kernel.resident_blocks(self.threads, self.smem_bytes)
        self.stream = torch.cuda.Stream()
        self.sections: dict[str, torch.Tensor] = {}
        self._sections()

    def _word(self, name: str) -> int:
        from cuda.bindings import driver

        pointer, size = self.kernel.symbol(name)
        out = np.zeros(1, np.uint32)
        driver.cuMemcpyDtoH(out.ctypes.data, pointer, size)
        return int(out[0])

    def _sections(self) -> None:
        addresses = {}
        for name, section in program.zeroed(self.plan, self.options).items():
            size = max(section.size_bytes, 256)
            if section.place == "host":
                self.sections[name] = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            else:
                self.sections[name] = torch.zeros(size, dtype=torch.uint8, device="cuda")
            addresses[name] = self.sections[name].data_ptr()
        bases = {kind: tensor.data_ptr() for kind, tensor in self.arenas.items()}
        places = program.buffer_addresses(self.plan, bases, addresses["step_state"])
        for name, array in program.constants(self.plan, self.code.bodies, places).items():
            flat = np.frombuffer(array.tobytes() or bytes(256), np.uint8).copy()
            self.sections[name] = torch.from_numpy(flat).cuda()
            addresses[name] = self.sections[name].data_ptr()
        header = program.header(self.plan, self.options, addresses)
        self.header = torch.from_numpy(np.frombuffer(header.tobytes(), np.uint8).copy()).cuda()
        self.zeroed = [n for n in program.zeroed(self.plan, self.options) if n != "records"]

    def host(self, name: str, dtype: Any, shape: tuple[int, ...] = ()) -> Any:
        """A host section as a numpy view."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return self.sections[name].numpy()[:size].view(dtype).reshape(shape)

    def read(self, name: str, dtype: Any) -> Any:
        """A copy of a device section."""
        raw = self.sections[name].cpu().numpy()
        return raw[: raw.size // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize].view(dtype)

    def run(self, steps: int) -> float:
        """One launch of `steps` steps. Returns: milliseconds of the kernel. Exits on a hang."""
        from cuda.bindings import driver

        for name in self.zeroed:
            self.sections[name].zero_()
        idle = wire.field_offset(wire.DEVICE_CONTROL, "idle")
        self.sections["device_control"][idle] = 1  # the controller owns admission
        torch.cuda.synchronize()
        requests = self.host("requests", wire.REQUEST_RECORD, (1,))
        requests[0]["kind"], requests[0]["max_tokens"] = wire.RequestKind.STEPS, steps
        control = self.host("host_control", wire.HOST_CONTROL)
        control["submit_tail"] = 1
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with self.device.current():
            stream = self.stream.cuda_stream
            driver.cuMemcpyDtoDAsync(self.symbol, self.header.data_ptr(), 320, stream)
            begin.record(self.stream)
            self.kernel.launch(self.plan.target.workers, self.threads, self.smem_bytes, stream)
            end.record(self.stream)
        self._wait(end, control)
        self.output = self.host("outputs", wire.REQUEST_OUTPUT, (1,))[0]
        return begin.elapsed_time(end)

    def _wait(self, end: torch.cuda.Event, control: Any) -> None:
        limit = time.monotonic() + HANG_S
        while not end.query():
            if time.monotonic() > limit:
                print("HUNG", control["kernel_state"], "workers", control["workers_in"], flush=True)
                print("heartbeat", control["heartbeat"], control["fault"], flush=True)
                control["abort_request"] = 1
                time.sleep(3)
                print("ended by abort" if end.query() else "STILL HUNG", control["fault"])
                sys.stdout.flush()
                os._exit(3)

    @property
    def fault(self) -> Any:
        """The launch's fault record, kind 0 if there is none."""
        return self.host("host_control", wire.HOST_CONTROL)["fault"]

    def step_us(self) -> float:
        """Microseconds a step by the request's own times."""
        out = self.output
        return (int(out["end_ns"]) - int(out["begin_ns"])) / 1e3 / max(int(out["steps"]), 1)


def _torch_device() -> Device:
    """The device with torch's context: its streams and tensors are then usable with our calls."""
    context = check(bindings().cuCtxGetCurrent(), "cuCtxGetCurrent")
    device = Device.open(0)
    return Device(device.index, device.handle, context, device.limits)
