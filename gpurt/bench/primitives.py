"""Primitives: what hops, barriers and claims cost on this GPU, by device/primitives.cuh."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpurt.bench.case import Workload
from gpurt.bench.machine import Machine
from gpurt.errors import DeviceError
from gpurt.executors.cuda_compile import Compiled, compile_source
from gpurt.progress import Progress

SOURCE = '#include "primitives.cuh"\n'
ENTRIES = ("hop", "grid_barrier", "claim")
ARGUMENTS = np.dtype(
    [
        ("words", "<u8"),
        ("failed", "<u8"),
        ("rounds", "<u4"),
        ("blocks", "<u4"),
        ("pollers", "<u4"),
        ("kind", "<u4"),
    ]
)
_WORDS_BYTES = 4 << 20
_WARP = 32


@dataclass(frozen=True)
class Primitive:
    """One figure: microseconds of one round, which is `parts` of what is named."""

    name: str
    entry: str
    rounds: int
    threads: int = _WARP
    pollers: int = 1
    kind: int = 0
    parts: int = 1


PRIMITIVES = (
    Primitive("hop, relaxed", "hop", 20000, kind=0, parts=2),
    Primitive("hop, release to acquire", "hop", 20000, kind=1, parts=2),
    Primitive("hop, data, fence, flag", "hop", 20000, kind=2, parts=2),
    *(
        Primitive(f"grid barrier, {n} pollers an SM", "grid_barrier", 2000, 32 * n, n)
        for n in (1, 4, 16)
    ),
    *(Primitive(f"ticket, {n} claimers an SM", "claim", 1 << 20, 32 * n, n) for n in (1, 16)),
)


def compile_primitives(arch: str) -> Compiled:
    """The kernels for `arch`."""
    return compile_source(SOURCE, arch, headers={}, name="primitives.cu")


class Primitives:
    """All primitives; the figure is the relaxed hop, the note has the others."""

    def __init__(self, machine: Machine, workload: Workload, progress: Progress) -> None:
        """Compile and load. Raises: DeviceError."""
        from gpurt.executors.cuda_driver import Device, Kernel

        del workload, progress
        self.blocks = machine.target.workers
        self.device: Any = Device.open(0)
        compiled = compile_primitives(machine.target.arch)
        with self.device.current():
            self.kernels = {n: Kernel(self.device, compiled.cubin, n) for n in ENTRIES}
            self.stream = self.device.stream()
            self.words = self.device.allocate(_WORDS_BYTES + 256, "words of the primitives")
            self.staging = self.device.host_mapped(4096)
        self.figures: dict[str, list[float]] = {p.name: [] for p in PRIMITIVES}
        self.measure()
        self.figures = {p.name: [] for p in PRIMITIVES}

    def measure(self) -> float:
        """Microseconds of the relaxed hop. Raises: DeviceError if a wait did not end."""
        with self.device.current():
            for primitive in PRIMITIVES:
                self.figures[primitive.name].append(self._one(primitive))
        return self.figures[PRIMITIVES[0].name][-1]

    def rest(self) -> None:
        """Nothing stays on the device."""

    def note(self) -> str:
        """The median of each."""
        return ", ".join(f"{n} {np.median(v):.3g} us" for n, v in self.figures.items())

    def close(self) -> None:
        """Give the memory back."""
        with self.device.current():
            self.device.free(self.words)
            self.device.destroy(self.stream)

    def _one(self, primitive: Primitive) -> float:
        device, kernel = self.device, self.kernels[primitive.entry]
        arguments = np.zeros(1, ARGUMENTS)
        arguments["words"], arguments["failed"] = self.words, self.words + _WORDS_BYTES
        arguments["rounds"], arguments["kind"] = primitive.rounds, primitive.kind
        arguments["blocks"], arguments["pollers"] = self.blocks, primitive.pollers
        device.fill(self.words, 0, _WORDS_BYTES + 256, self.stream)
        device.upload(kernel.symbol("primitive")[0], arguments, self.staging, self.stream)
        device.wait(self.stream)
        began = time.perf_counter()
        kernel.launch(self.blocks, primitive.threads, 0, self.stream)
        device.wait(self.stream)
        us = (time.perf_counter() - began) * 1e6 / primitive.rounds / primitive.parts
        failed = device.download(self.words + _WORDS_BYTES, 4, self.staging, self.stream)
        if failed.any():
            msg = f"{primitive.name} waited for too long - at bench primitives"
            raise DeviceError(f"{msg} - see gpurt doctor")
        return us
