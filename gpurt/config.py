"""RuntimeConfig: one dial (`device`) and everything that follows from it; GPURT_* variables.

Owns: option checks, the choice of device, worker counts, what the environment says. Importing it
starts no CUDA; `resolve` with a CUDA device asks the driver for its properties.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from gpurt.body import Target
from gpurt.errors import ConfigError, DeviceError
from gpurt.wire import RANKS_MAX

if TYPE_CHECKING:
    from gpurt.process_group import ProcessGroup

PolicyName = Literal["static", "claim", "ready"]
EdgeChoice = Literal["counter", "payload", "auto"]
PolicyChoice = PolicyName | Literal["auto"] | Mapping[str, PolicyName]

POLICIES = ("static", "claim", "ready")
EDGES = ("counter", "payload", "auto")
MAX_HOST_WORKERS = 1024
# A kernel that must go before it took its first request would be launched once more for it.
MIN_RESIDENCY_MS = 1
# Read elsewhere: the folder of compiled kernels and of fetched models, the host bodies' ISA, the
# folder where processes meet.
OTHER_VARIABLES = ("GPURT_CACHE_DIR", "GPURT_SIMD", "GPURT_RENDEZVOUS")
VARIABLES = ("GPURT_DEBUG", "GPURT_TRACE", *OTHER_VARIABLES)
# GPURT_DEBUG: logging levels of 1 (options, launches, faults), 2 (requests), 3 (plans), 4 (waits).
DEBUG_LEVELS = {1: 20, 2: 15, 3: 10, 4: 5}
# What `gpurt plan --device NAME` can plan for without the device: SM count, architecture, shared
# memory of one block, L2 (NVIDIA's published figures).
KNOWN_TARGETS: dict[str, tuple[int, str, int, int]] = {
    "h100": (132, "sm_90a", 232448, 50 << 20),
    "h200": (132, "sm_90a", 232448, 60 << 20),
    "b200": (148, "sm_100a", 232448, 126 << 20),
}


@dataclass(frozen=True)
class Environment:
    """What the GPURT_* variables say. debug: 0 to 4. trace_path: where to write a Perfetto file."""

    debug: int = 0
    trace_path: Path | None = None


@dataclass(frozen=True)
class RuntimeConfig:
    """A Runtime's options after checks, with what was derived from `device`."""

    device: str  # "host" or "cuda:0"; of several ranks: rank 0's
    devices: tuple[str, ...]  # one a rank
    device_name: str
    target: Target
    policy: PolicyChoice
    edges: EdgeChoice
    linger_ms: float
    residency_ms: float
    wait_timeout_ms: float
    resident: bool
    trace_enabled: bool
    queue_capacity: int
    prefill_rows: int | None
    step_rows: tuple[int, ...] | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def workers(self) -> int:
        """Workers of a launch: SMs of the GPU, or threads."""
        return self.target.workers

    def __str__(self) -> str:
        """The dial first, then what follows from it, one a line."""
        t = self.target
        stays = "until close()" if self.resident else f"{self.linger_ms:g} ms after a request"
        limit = "none" if self.resident or not self.residency_ms else f"{self.residency_ms:g} ms"
        rows: list[tuple[str, object]] = [
            ("device", f"{', '.join(self.devices)} ({self.device_name})"),
            ("workers", f"{t.workers} {'SMs' if t.kind == 'cuda' else 'threads'}"),
            ("policy", self.policy if isinstance(self.policy, str) else dict(self.policy)),
            ("edges", self.edges),
            ("stays", stays),
            ("residency", limit),
            ("wait_timeout", f"{self.wait_timeout_ms:g} ms"),
            ("queue", f"{self.queue_capacity} requests"),
            ("step_rows", "the usual" if self.step_rows is None else list(self.step_rows)),
            ("prefill_rows", "as the step" if self.prefill_rows is None else self.prefill_rows),
            ("trace", "on" if self.trace_enabled else "off"),
        ]
        if t.kind == "cuda":
            smem = f"{t.smem_bytes / 1024:g} KB shared memory, {t.l2_bytes >> 20} MB L2"
            rows[2:2] = [("team", f"{t.team_warps} warps"), ("arch", f"{t.arch}, {smem}")]
        rows += [("note", note) for note in self.notes]
        return "\n".join(f"{name:<13} {value}" for name, value in rows)


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """The GPURT_* variables. Raises: ConfigError for an unknown name or a malformed value."""
    variables = os.environ if variables is None else variables
    for name in variables:
        if name.startswith("GPURT_") and name not in VARIABLES:
            known = ", ".join(VARIABLES)
            raise ConfigError(f"{name} is no setting of gpurt - at the environment - use {known}")
    level = variables.get("GPURT_DEBUG", "0")
    if level not in ("0", "1", "2", "3", "4"):
        msg = f"GPURT_DEBUG is {level!r} - at the environment - use 0, 1, 2, 3 or 4"
        raise ConfigError(msg)
    path = variables.get("GPURT_TRACE")
    if path is not None and not path.endswith(".json"):
        msg = f"GPURT_TRACE is {path!r} - at the environment - name a file that ends in .json"
        raise ConfigError(msg)
    return Environment(int(level), Path(path) if path else None)


def resolve(
    device: str | Sequence[str] = "auto",
    *,
    workers: int | None = None,
    policy: str | Mapping[str, str] = "static",
    edges: str = "auto",
    team_warps: int = 16,
    linger_ms: float = 200,
    residency_ms: float = 1000,
    wait_timeout_ms: float = 2000,
    resident: bool = False,
    trace: bool = True,
    queue_capacity: int = 64,
    prefill_rows: int | None = None,
    step_rows: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> RuntimeConfig:
    """Check every option and derive the rest. Raises: ConfigError, DeviceError."""
    chosen = check_policy(policy)
    if team_warps not in (1, 16):
        raise ConfigError(f"team_warps is {team_warps!r} - at Runtime - use 16 or 1")
    _number("linger_ms", linger_ms, above_zero=True, hint="use resident=True to keep the kernel")
    _number("residency_ms", residency_ms, hint="0 sets no limit")
    if 0 < residency_ms < MIN_RESIDENCY_MS:
        what = f"residency_ms is {residency_ms!r}"
        raise ConfigError(f"{what} - at Runtime - use {MIN_RESIDENCY_MS} or more, or 0: no limit")
    _number("wait_timeout_ms", wait_timeout_ms, above_zero=True, hint="use more than 0")
    _count("queue_capacity", queue_capacity, 1, 65536)
    if prefill_rows is not None:
        _count("prefill_rows", prefill_rows, 1, 65536)
    sizes = None if step_rows is None else tuple(step_rows)
    for size in sizes or ():
        _count("step_rows", size, 1, 65536)
    if workers is not None:
        _count("workers", workers, 1, MAX_HOST_WORKERS)
    names, device_name, target, notes = _devices(device, workers, team_warps, group)
    return RuntimeConfig(
        device=names[0],
        devices=names,
        device_name=device_name,
        target=target,
        policy=chosen,
        edges=check_edges(edges),
        linger_ms=float(linger_ms),
        residency_ms=float(residency_ms),
        wait_timeout_ms=float(wait_timeout_ms),
        resident=bool(resident),
        trace_enabled=bool(trace),
        queue_capacity=queue_capacity,
        prefill_rows=prefill_rows,
        step_rows=sizes,
        notes=notes,
    )


def rank_devices(device: str, ranks: int) -> str | list[str]:
    """`device` itself for one rank, else one device for each: host threads, or the GPUs from its
    number on. Raises: ConfigError.
    """
    _count("--tp", ranks, 1, RANKS_MAX)
    if ranks == 1:
        return device
    name = resolve(device).device
    if name == "host":
        return [name] * ranks
    first = int(name.removeprefix("cuda:"))
    return [f"cuda:{first + rank}" for rank in range(ranks)]


def check_policy(policy: str | Mapping[str, str]) -> PolicyChoice:
    """One policy, `auto`, or operators and their policies. Raises: ConfigError."""
    choices = [policy] if isinstance(policy, str) else list(policy.values())
    for choice in choices:
        if choice not in POLICIES and policy != "auto":
            known = ", ".join((*POLICIES, "auto") if isinstance(policy, str) else POLICIES)
            raise ConfigError(f"policy is {choice!r} - at Runtime - use one of {known}")
    return cast("PolicyChoice", policy)


def check_edges(edges: str) -> EdgeChoice:
    """Raises: ConfigError for an unknown kind of edge."""
    if edges not in EDGES:
        raise ConfigError(f"edges is {edges!r} - at Runtime - use one of {', '.join(EDGES)}")
    return cast("EdgeChoice", edges)


def plan_target(device: str, workers: int | None, team_warps: int = 16) -> tuple[Target, str]:
    """The Target of `gpurt plan --device`, and the device's own name: this machine's, or a known
    GPU's by name.

    Raises: DeviceError, ConfigError.
    """
    if device in KNOWN_TARGETS:
        sms, arch, smem_bytes, l2_bytes = KNOWN_TARGETS[device]
        count = sms if workers is None else workers
        target = Target("cuda", count, team_warps, arch, smem_bytes, l2_bytes)
        return target, f"NVIDIA {device.upper()}"
    config = resolve(device, workers=workers, team_warps=team_warps)
    return config.target, config.device_name


def host_workers() -> int:
    """Threads this process may really run at once: its affinity, cut by the container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = count or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        pass  # no cgroup v2 here: the affinity stands
    return count


def host_name() -> str:
    """The CPU's model name, or "CPU"."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "CPU"


# ---- helpers ---------------------------------------------------------------------------------
def _devices(
    device: str | Sequence[str],
    workers: int | None,
    team_warps: int,
    group: ProcessGroup | None,
) -> tuple[tuple[str, ...], str, Target, tuple[str, ...]]:
    if isinstance(device, str):
        if group is None:
            name, device_name, target, notes = _device(device, workers, team_warps)
            return (name,), device_name, target, notes
        place = group.local_rank, group.size
        name, device_name, target, notes = _device(device, workers, team_warps, *place)
        note = f"rank {group.rank} of {group.size}, a process each"
        return (name,), device_name, target, (*notes, note)
    if group is not None:
        msg = f"{len(device)} devices for rank {group.rank} of {group.size} processes"
        raise ConfigError(f"{msg} - at Runtime(device=[...]) - name one: each process has its own")
    count = len(device)
    if not 1 <= count <= RANKS_MAX:
        msg = f"{count} devices - at Runtime(device=[...])"
        raise ConfigError(f"{msg} - give one for each rank, at most {RANKS_MAX}")
    if workers is None and set(device) == {"host"}:
        workers = max(1, host_workers() // count)  # ranks share the cores
    found = [_device(name, workers, team_warps) for name in device]
    names = tuple(name for name, *_ in found)
    first = found[0][2]
    for name, _, target, _ in found:
        if target != first:
            what = f"{names[0]} is {first.kind} {first.arch} of {first.workers} workers, {name}"
            what += f" {target.kind} {target.arch} of {target.workers}"
            raise ConfigError(f"{what} - at Runtime(device=[...]) - ranks need equal devices")
    if first.kind == "cuda" and len(set(names)) < count:
        msg = f"devices are {', '.join(names)}"
        raise ConfigError(f"{msg} - at Runtime(device=[...]) - give each rank a GPU of its own")
    return names, found[0][1], first, found[0][3]


def _device(
    device: str, workers: int | None, team_warps: int, gpu: int = 0, sharers: int = 1
) -> tuple[str, str, Target, tuple[str, ...]]:
    """gpu: added to the number that `device` names. sharers: of the cores, if it is the host."""
    if device not in ("auto", "host", "cuda") and not (
        device.startswith("cuda:") and device[5:].isdigit()
    ):
        raise ConfigError(f"device is {device!r} - at Runtime - use auto, host or cuda:0")
    notes: tuple[str, ...] = ()
    if device != "host":
        from gpurt.doctor import probe_cuda

        index = gpu + (int(device[5:]) if device.startswith("cuda:") else 0)
        probe = probe_cuda(index)
        if probe.usable:
            count = probe.sm_count if workers is None else workers
            if count > probe.sm_count:
                msg = f"workers is {count}, but {probe.name} has {probe.sm_count} SMs"
                raise ConfigError(f"{msg} - at Runtime - use at most {probe.sm_count}")
            target = Target("cuda", count, team_warps, probe.arch, probe.smem_bytes, probe.l2_bytes)
            return f"cuda:{index}", probe.name, target, notes
        if device != "auto":
            msg = f"no usable CUDA device {index}: {probe.reason}"
            raise DeviceError(f"{msg} - at Runtime(device={device!r}) - use device='host'")
        notes = (f"host, because CUDA is not usable: {probe.reason}",)
    count = max(1, host_workers() // sharers) if workers is None else workers
    return "host", host_name(), Target("host", count), notes


def _number(what: str, value: float, *, above_zero: bool = False, hint: str) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (above_zero and value == 0):
        raise ConfigError(f"{what} is {value!r} - at Runtime - {hint}")


def _count(what: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{what} is {value!r} - at Runtime - use {low} to {high}")
