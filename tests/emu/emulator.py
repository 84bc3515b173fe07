"""Builds a CUDA body for the CPU and runs its records: OneTask's twin for machines without a GPU.

The real device/ folder is compiled by g++, with ptx.cuh and atomics.hpp replaced and three lines
of storage qualifiers adapted. It shows wrong values, misaligned accesses and unfinished barriers;
it does not show races, the memory model, or what approximate instructions round to.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt import wire
from gpurt.executors.program import param_bits
from gpurt.source import source_dir
from tests.gpu.one_task import OneTask, Step, header

HERE = Path(__file__).resolve().parent
GUARD_BYTES = 256  # past every array: all ones, a NaN for whoever reads on
FAILURES = {1: "a block never ended", 2: "a thread left a collective or a barrier open"}
# The emulator's global memory is the process's: no storage class names it.
ADAPTED = {
    "bodies/context.cuh": ('extern "C" __constant__', 'extern "C"'),
    "shared_memory.cuh": ("extern __shared__ __align__(128)", "extern"),
    "spin.cuh": ("GPURT_FN void raise_fault", "void raise_fault"),
}


class EmulatedTask(OneTask):
    """Compiles one body for the CPU and runs records of it, with OneTask's signature."""

    def __init__(
        self, body: str, struct: str = "", team_warps: int = 16, features: Sequence[str] = ()
    ) -> None:
        self.library = _build(header(body, struct, team_warps, features))
        self.fault = np.zeros((), wire.FAULT)

    def run(
        self,
        arguments: Sequence[NDArray[Any] | None],
        params: Sequence[float],
        coords: Sequence[tuple[int, int, int, int]],
        step: Step,
        *,
        payload_mask: int = 0,
        payload_set_bytes: int = 0,
    ) -> list[NDArray[Any] | None]:
        memory = _Memory()
        views = [None if a is None else memory.view(a) for a in arguments]
        self.device: Any = memory
        program = self._program(memory, step, payload_set_bytes)  # type: ignore[arg-type]
        records = np.zeros(len(coords), wire.TASK_RECORD)
        for index, tile in enumerate(coords):
            record = records[index]
            record["task_index"], record["tile"] = index, tile
            record["addr"][: len(views)] = [0 if v is None else v.ctypes.data for v in views]
            record["param"][: len(params)] = [param_bits(p) for p in params]
            record["payload_mask"] = payload_mask
        fault = np.zeros(1, wire.FAULT)
        code = self.library.run_tasks(
            ctypes.c_void_p(memory.put(records)),
            len(coords),
            ctypes.c_void_p(memory.put(program.reshape(1))),
            ctypes.c_void_p(fault.ctypes.data),
        )
        assert code == 0, FAILURES[code]
        self.fault = fault[0].copy()
        out: list[NDArray[Any] | None] = [
            None if view is None or array is None else view.view(array.dtype).reshape(array.shape)
            for view, array in zip(views, arguments, strict=True)
        ]
        state = memory.views[int(program["step_state"])]
        out.append(state[wire.sampled_offset_bytes(16) :].view(np.uint32))
        return out


class _Memory:
    """Arrays at 256-byte addresses, as a GPU's allocator gives them; lives as long as one run."""

    def __init__(self) -> None:
        self.views: dict[int, NDArray[np.uint8]] = {}
        self.keep: list[NDArray[np.uint8]] = []
        self.host: dict[str, NDArray[np.uint8]] = {}

    def view(self, array: NDArray[Any]) -> NDArray[np.uint8]:
        raw = np.full(array.nbytes + 2 * GUARD_BYTES, 0xFF, np.uint8)
        self.keep.append(raw)
        begin = -raw.ctypes.data % GUARD_BYTES
        inside = raw[begin : begin + array.nbytes]
        inside[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.views[inside.ctypes.data] = inside
        return inside

    def put(self, array: NDArray[Any]) -> int:
        return int(self.view(array).ctypes.data)

    def host_mapped(self, size_bytes: int) -> NDArray[np.uint8]:
        return self.view(np.zeros(size_bytes, np.uint8))


@cache
def _build(generated: str) -> ctypes.CDLL:
    digest = hashlib.sha256(generated.encode()).hexdigest()[:16]
    folder = Path(tempfile.mkdtemp(prefix=f"gpurt-emu-{digest}-"))
    try:
        device = folder / "device"
        shutil.copytree(source_dir() / "device", device)
        for name in ("ptx.cuh", "atomics.hpp"):
            shutil.copy(HERE / name, device / name)
        for name, (theirs, ours) in ADAPTED.items():
            text = (device / name).read_text(encoding="utf-8")
            assert theirs in text, f"{name} no longer says {theirs!r}: adapt the emulator"
            (device / name).write_text(text.replace(theirs, ours), encoding="utf-8")
        (folder / "bodies.gen.cuh").write_text(generated, encoding="utf-8")
        library = folder / "body.so"
        command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
        command += ["-fpermissive", f"-I{folder}", f"-I{HERE}", f"-I{device}"]
        done = subprocess.run(
            [*command, str(HERE / "runner.cpp"), "-o", str(library)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[:4000]
        return ctypes.CDLL(str(library))
    finally:
        shutil.rmtree(folder)
