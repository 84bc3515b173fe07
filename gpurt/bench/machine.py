"""Machine: what a figure belongs to: device, driver, clocks, commit, and the bandwidth measured in
the same run, which every floor is made from.
"""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

import gpurt
from gpurt.body import Target
from gpurt.ceiling import remember
from gpurt.errors import GpurtError

Kind = Literal["host", "cuda"]
_HOST_BYTES = 512 << 20  # well beyond any cache
_HOST_ROUNDS = 5
_COPY_BYTES = 2 << 30
_COPIES = 10
_COPY_ROUNDS = 3
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,power.limit"


class UnavailableError(GpurtError):
    """A case or a peer cannot run on this machine."""


@dataclass(frozen=True)
class Machine:
    """One device of this machine. bandwidth: bytes a second that reading or copying reached."""

    kind: Kind
    name: str
    target: Target
    driver: str
    clocks: str
    commit: str
    date: str
    bandwidth: float

    def floor_us(self, size_bytes: int) -> float:
        """Microseconds in which `size_bytes` could come in."""
        return size_bytes / self.bandwidth * 1e6

    def as_dict(self) -> dict[str, object]:
        """For the JSON line."""
        return {
            "device": self.name,
            "driver": self.driver,
            "clocks": self.clocks,
            "workers": self.target.workers,
            "bandwidth_gb_per_s": round(self.bandwidth / 1e9, 1),
        }


def host_machine(workers: int | None = None) -> Machine:
    """The CPU: all threads this process may use, or `workers`."""
    from gpurt.config import resolve

    target = resolve("host", workers=workers).target
    from gpurt._native import simd_level
    from gpurt.config import host_name

    name = f"none: {host_name()}, {target.workers} threads, {simd_level()}"
    bandwidth = read_bandwidth(target.workers)
    remember(host_name(), target.workers, bandwidth / 1e9)
    return _machine("host", name, target, "", "", bandwidth)


def cuda_machine() -> Machine:
    """GPU 0. Raises: UnavailableError with the reason if there is none that can be used."""
    from gpurt.config import plan_target
    from gpurt.doctor import probe_cuda

    probe = probe_cuda(0)
    if not probe.usable:
        raise UnavailableError(f"no usable GPU: {probe.reason}")
    bandwidth = copy_bandwidth()
    target, _ = plan_target("cuda:0", None)
    remember(probe.name, target.workers, bandwidth / 1e9)
    return _machine("cuda", probe.name, target, _driver_version(), _gpu_clocks(), bandwidth)


def read_bandwidth(threads: int, size_bytes: int = _HOST_BYTES) -> float:
    """Bytes a second that all threads together read from memory: what weights can come in at."""
    data = np.ones(size_bytes // 4, np.float32)
    parts = np.array_split(data, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_HOST_ROUNDS):
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, data.nbytes / (time.perf_counter() - began))
    return best


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of copies within device memory; the best of some rounds."""
    from gpurt.executors.cuda_driver import Device

    device = Device.open(0)
    with device.current():
        blocks = [device.allocate(_COPY_BYTES, "a copy's side") for _ in range(2)]
        stream, best = device.stream(), 0.0
        for block in blocks:
            device.fill(block, 1, _COPY_BYTES, stream)
        device.wait(stream)
        for _ in range(_COPY_ROUNDS):
            began = time.perf_counter()
            for _ in range(_COPIES):
                device.copy_within(blocks[1], blocks[0], _COPY_BYTES, stream)
            device.wait(stream)
            best = max(best, 2 * _COPIES * _COPY_BYTES / (time.perf_counter() - began))
        for block in blocks:
            device.free(block)
        device.destroy(stream)
    return best


def commit() -> str:
    """The checkout's commit, with `+` if files differ; of an installed package, its version."""
    folder = Path(gpurt.__file__).resolve().parent
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return gpurt.__version__


# ---- helpers ---------------------------------------------------------------------------------
def _machine(
    kind: Kind, name: str, target: Target, driver: str, clocks: str, bandwidth: float
) -> Machine:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Machine(kind, name, target, driver, clocks, commit(), today, bandwidth)


def _driver_version() -> str:
    try:
        found = re.search(r"Module\s+(?:for \S+\s+)?(\d[\d.]+)", _DRIVER_FILE.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def _gpu_clocks() -> str:
    """Clocks and power limit as nvidia-smi states them, empty without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, f"--query-gpu={_CLOCKS}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    sm, memory, most, power = (part.strip() for part in done.stdout.strip().split(","))
    return f"SM {sm} of {most}, memory {memory}, {power}"
