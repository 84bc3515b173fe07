"""HostBodies: the host bodies at one SIMD level, called from numpy arrays without an executor.

The headers are compiled once into a shared library under build/, named by their content. Each
level loads a copy of its own, since a process reads GPURT_SIMD only once per library.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt import wire
from gpurt.body import Body, StepRows

ROOT = Path(__file__).resolve().parents[2]
LEVELS = ("portable", "avx2", "avx512")
FLAGS = ("-std=c++20", "-O3", "-DNDEBUG", "-ffp-contract=off", "-fPIC", "-shared")
# Without the last two, a second copy of the library would share the first one's statics.
FLAGS += ("-fno-gnu-unique", "-Wl,-Bsymbolic")
POISON = np.float32(np.nan)
_LIBC = ctypes.CDLL(None, use_errno=True)


@functools.cache
def library() -> Path:
    """The compiled bodies; built on first use."""
    here = Path(__file__)
    kernels = (here.with_name(f"{name}_kernels.hpp") for name in ("peak", "decode"))
    sources = [*sorted((ROOT / "device").rglob("*.hpp")), *kernels]
    sources.append(here.with_suffix(".cpp"))
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:16]
    path = ROOT / "build" / "test_bodies" / f"bodies_{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".so", delete=False) as made:
            include = (f"-I{ROOT / 'device'}", f"-I{here.parent}")
            command = ["g++", *FLAGS, *include, str(sources[-1]), "-o", made.name]
            subprocess.run(command, check=True)
            os.replace(made.name, path)
    return path


class SimdError(Exception):
    """The library refused GPURT_SIMD."""


class HostBodies:
    """The bodies of one level. Raises: SimdError with the library's message."""

    def __init__(self, level: str) -> None:
        before = os.environ.get("GPURT_SIMD")
        with tempfile.TemporaryDirectory() as folder:
            copy = shutil.copy(library(), Path(folder) / "bodies.so")
            self._library = ctypes.CDLL(copy)
        os.environ["GPURT_SIMD"] = level
        try:
            message = ctypes.create_string_buffer(256)
            if self._library.body_level(message, 256) < 0:
                raise SimdError(message.value.decode())
        finally:
            if before is None:
                del os.environ["GPURT_SIMD"]
            else:
                os.environ["GPURT_SIMD"] = before
        for name in ("body_peak_read", "body_peak_codes"):
            getattr(self._library, name).restype = ctypes.c_double
        self.level = level
        self.best_ns = 0.0

    def run(
        self,
        body: Body,
        arrays: Mapping[str, NDArray[Any]],
        params: Mapping[str, int | float],
        step: StepRows,
        *,
        coords: Sequence[Sequence[int]] = ((0, 0, 0, 0),),
        slots: NDArray[Any] | None = None,
        scratch_bytes: int = 1 << 22,
        repeats: int = 1,
        plan_rows: int | None = None,
        proposal_rows: Sequence[int] = (),
        ancestors: Sequence[int] = (),
    ) -> tuple[int, list[int]]:
        """Run one task per element of `coords`. Returns (FaultKind, detail).

        plan_rows: rows that the plan can carry; None: those of the step. proposal_rows: the step's
        rows that hold a proposal. ancestors: of each row, as device/row_path.hpp has them.
        """
        records = np.zeros(len(coords), wire.TASK_RECORD)
        for i, arg in enumerate(body.args):
            if arg.name in arrays:
                assert arrays[arg.name].flags.c_contiguous
                records["addr"][:, i] = arrays[arg.name].ctypes.data
        for i, name in enumerate(body.params):
            records["param"][:, i] = _bits(params[name])
        records["tile"][:] = [(*c, *(0,) * (4 - len(c))) for c in coords]
        capacity = plan_rows or len(step.token)
        state = step_bytes(step, capacity, proposal_rows, ancestors)
        if slots is None:
            slots = np.zeros(1 + int(step.slot.max(initial=0)), wire.SLOT_STATE)
        scratch = np.full(scratch_bytes // 4 + 16, POISON)
        base = (scratch.ctypes.data + 63) // 64 * 64
        detail = np.zeros(4, np.uint32)
        best = ctypes.c_double()
        kind = self._library.body_run(
            body.name.encode(),
            *(ctypes.c_void_p(records.ctypes.data), len(records)),
            *(ctypes.c_void_p(state.ctypes.data), capacity),
            ctypes.c_void_p(slots.ctypes.data),
            *(ctypes.c_void_p(base), ctypes.c_uint64(scratch_bytes)),
            *(repeats, ctypes.c_void_p(detail.ctypes.data), ctypes.byref(best)),
        )
        self.best_ns = best.value
        return kind, [int(v) for v in detail]

    def accept(
        self,
        rows: NDArray[Any],
        sample_rows: NDArray[np.uint32],
        sampled: NDArray[np.uint32],
        first: int,
    ) -> tuple[int, int]:
        """(rows of the block that begins with sample row `first`, proposals accepted of it)."""
        both = self._accept(rows, sample_rows, sampled, first)
        return both >> 16, (both & 0xFFFF).bit_count() - 1

    def accepted_rows(
        self,
        rows: NDArray[Any],
        sample_rows: NDArray[np.uint32],
        sampled: NDArray[np.uint32],
        first: int,
    ) -> list[int]:
        """The rows of that block which the target agrees with, the anchor's with them."""
        both = self._accept(rows, sample_rows, sampled, first)
        return [row for row in range(16) if both >> row & 1]

    def _accept(
        self,
        rows: NDArray[Any],
        sample_rows: NDArray[np.uint32],
        sampled: NDArray[np.uint32],
        first: int,
    ) -> int:
        assert all(a.flags.c_contiguous for a in (rows, sample_rows, sampled))
        places = (ctypes.c_void_p(a.ctypes.data) for a in (rows, sample_rows, sampled))
        return int(self._library.body_accept(*places, len(sample_rows), first))

    def decode_nvfp4(self, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        """[n, 9] blocks as [n, 16] floats, without their second-level scale."""
        assert blocks.flags.c_contiguous
        values = np.full((len(blocks), 16), POISON)
        source, to = (ctypes.c_void_p(array.ctypes.data) for array in (blocks, values))
        self._library.body_decode_nvfp4(source, len(blocks), to)
        return values

    def read_gbps(self, size_bytes: int, repeats: int) -> float:
        """GB/s at which this core reads an array of that size again and again."""
        count = size_bytes // 256 * 64
        array, total = np.ones(count, np.float32), ctypes.c_float()
        best = self._library.body_peak_read(
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_uint64(count),
            repeats,
            ctypes.byref(total),
        )
        return 4 * count / float(best)

    def codes_gmacs(self, repeats: int) -> float:
        """GMAC/s of block codes in registers with activations in L1: no unpacking, no scales."""
        block, codes = np.ones(34, np.uint8), np.ones(12 * 32, np.int16)
        scale, count, total = np.ones(2, np.float32), 20000, ctypes.c_float()
        best = self._library.body_peak_codes(
            *(ctypes.c_void_p(a.ctypes.data) for a in (block, codes, scale)),
            ctypes.c_uint64(count),
            repeats,
            ctypes.byref(total),
        )
        return 8 * 32 * count / float(best)


@functools.cache
def bodies(level: str) -> HostBodies:
    """The bodies of a level, loaded once. Raises: SimdError if this CPU lacks it."""
    return HostBodies(level)


def levels() -> list[str]:
    """The levels this CPU has."""
    flags = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.split())
            break
    have = ["portable"]
    if {"avx2", "fma", "f16c"} <= flags:
        have.append("avx2")
        if {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"} <= flags:
            have.append("avx512")
    return have


def step_bytes(
    step: StepRows,
    capacity: int,
    proposal_rows: Sequence[int] = (),
    ancestors: Sequence[int] = (),
) -> NDArray[np.uint8]:
    """StepState and its tails, as a body finds them in a plan of `capacity` rows."""
    rows = len(step.token)
    head = np.zeros((), wire.STEP_STATE)
    head["rows"], head["sample_count"] = rows, len(step.sample_rows)
    head["rows_capacity"] = capacity
    states = np.zeros(capacity, wire.ROW_STATE)
    for name in ("token", "slot", "position"):
        states[name][:rows] = getattr(step, name)
    states["flags"][step.sample_rows] |= np.uint32(wire.RowFlags.SAMPLE)
    states["flags"][list(proposal_rows)] |= np.uint32(wire.RowFlags.PROPOSAL)
    states["flags"][: len(ancestors)] |= np.array(ancestors, np.uint32) << 16
    sample_rows = np.zeros(capacity, np.uint32)
    sample_rows[: len(step.sample_rows)] = step.sample_rows
    parts = (head, states, sample_rows, np.zeros(capacity, np.uint32))
    return np.frombuffer(b"".join(part.tobytes() for part in parts), np.uint8).copy()


def guarded(array: NDArray[Any]) -> NDArray[Any]:
    """A copy that ends where memory ends: a body that reads past it crashes."""
    page = mmap.PAGESIZE
    whole = (array.nbytes + page - 1) // page * page
    memory = mmap.mmap(-1, whole + page)
    raw = np.frombuffer(memory, np.uint8)
    if _LIBC.mprotect(ctypes.c_void_p(raw.ctypes.data + whole), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    view = raw[whole - array.nbytes : whole].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def random_weight(rng: np.random.Generator, rows: int, columns: int, dtype: str) -> NDArray[Any]:
    """A weight matrix as stored: model-like values in any float or block dtype."""
    if dtype == "nvfp4":
        codes = rng.integers(0, 256, (rows, columns // 16, 9), np.uint8)
        codes[..., 8] = rng.integers(8, 48, (rows, columns // 16))  # scales of 2^-6 to 2^-1
        return codes.reshape(rows, -1)
    if dtype in ("q4_1", "q8_0"):
        count = columns // 32
        scale = rng.uniform(0.002, 0.02, (rows, count, 1)).astype(np.float16)
        if dtype == "q8_0":
            codes = rng.integers(-127, 128, (rows, count, 32), np.int8)
            parts = [scale.view(np.uint8), codes.view(np.uint8)]
        else:
            minimum = (-7.5 * scale.astype(np.float32)).astype(np.float16)
            codes = rng.integers(0, 256, (rows, count, 16), np.uint8)
            parts = [scale.view(np.uint8), minimum.view(np.uint8), codes]
        return np.ascontiguousarray(np.concatenate(parts, axis=-1).reshape(rows, -1))
    from gpurt.buffer import DTYPES
    from gpurt.graphs.ops.dtypes import to_storage

    values = rng.standard_normal((rows, columns)).astype(np.float32) * np.float32(0.05)
    return to_storage(values, DTYPES[dtype])


def _bits(value: float) -> int:
    if isinstance(value, int):
        return value
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
