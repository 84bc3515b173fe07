"""Runs task records of one body on the GPU, each in a block of its own, without the scheduler.

So a body is compared with graphs/ops/<body>.py task by task, over step states that a whole run
would not meet: any rows, slots and positions, NaN past every valid end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt import wire
from gpurt.body import STAGE_BYTES, STAGE_ROOM_BYTES
from gpurt.executors.cuda_compile import GENERATED, SCRATCH_BYTES, SLOT_BYTES, compile_source
from gpurt.executors.cuda_driver import Device, Kernel
from gpurt.executors.program import param_bits
from gpurt.plan import TASK_EXPERT_STREAM, TASK_RING

CONTEXT = 512
# Those that have the whole weight ring as their room get all of its stages, others two.
RING_BODIES = ("attention_rows",)
RING_STAGES = {16: 6, 1: 5}  # by warps of a team, as in kernels
# Of each record, and which arguments are the weights and the routes.
Streams = tuple[Sequence[Any], int, int] | None

HEADER = "one_task.cuh"
RUNNER = """
#include "one_task.cuh"

extern "C" __constant__ gpurt::Program gpurt_program;
extern "C" __device__ gpurt::u64 records;

extern "C" __constant__ gpurt::Program gpurt_program = {};
extern "C" __device__ gpurt::u64 records = 0;

extern "C" __global__ void __launch_bounds__(gpurt::kTeamThreads + 32, 1) run_tasks() {
  using namespace gpurt;
  if (threadIdx.x == 0) start_one(at<const TaskRecord>(records)[blockIdx.x]);
  __syncthreads();
  if (threadIdx.x < kTeamThreads) {
    run_one();
  } else if (threadIdx.x == kTeamThreads) {
    load_one();
  }
}
"""


@dataclass
class Step:
    """A step's rows: slot and position of each; which of them are sampled; their RowFlags."""

    slots: Sequence[int]
    positions: Sequence[int]
    tokens: Sequence[int] = ()
    sample_rows: Sequence[int] = ()
    number: int = 0
    flags: Sequence[int] = ()
    slot_states: NDArray[Any] = field(default_factory=lambda: np.zeros(4, wire.SLOT_STATE))


class OneTask:
    """Compiles one body and runs records of it. `struct`: its C++ type, if not its name. features:
    macros that cuda_compile defines for plans that need them.
    """

    def __init__(
        self, body: str, struct: str = "", team_warps: int = 16, features: Sequence[str] = ()
    ) -> None:
        self.team_warps = team_warps
        self.flags = TASK_RING if body in RING_BODIES else 0
        stages, scratch = (RING_STAGES[team_warps], team_warps) if self.flags else (2, 1)
        room = STAGE_BYTES if self.flags else STAGE_ROOM_BYTES
        self.smem_bytes = stages * room + SCRATCH_BYTES[scratch] + SLOT_BYTES
        self.device = Device.open()
        arch = self.device.limits.arch
        generated = headers(body, struct, team_warps, features)
        self.compiled = compile_source(RUNNER, arch, headers=generated, name="runner.cu")
        self.threads = team_warps * 32 + 32  # the loader's warp too
        with self.device.current():
            self.kernel = Kernel(self.device, self.compiled.cubin, "run_tasks")
            self.stream = self.device.stream()
            self.staging = self.device.host_mapped(1 << 20)
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
        streams: Streams = None,
    ) -> list[NDArray[Any] | None]:
        """Every argument after one record per coordinate has run; `sampled` tokens come last.

        streams: of each record, if the body streams: what it does, and the places of its weights
        and of its routes among the arguments.
        """
        with self.device.current():
            memory = _Memory(self.device, self.staging, self.stream)
            addresses = [0 if a is None else memory.put(a) for a in arguments]
            program = self._program(memory, step, payload_set_bytes)
            records = task_records(addresses, params, coords, payload_mask, streams)
            records["flags"] |= self.flags
            memory.write(self.kernel.symbol("gpurt_program")[0], program.reshape(1))
            at = np.array([memory.put(records)], np.uint64)
            memory.write(self.kernel.symbol("records")[0], at)
            self.kernel.resident_blocks(self.threads, self.smem_bytes)
            self.kernel.launch(len(coords), self.threads, self.smem_bytes, self.stream)
            self.device.wait(self.stream)
            self.fault = memory.host["host_control"].view(wire.HOST_CONTROL)[0]["fault"].copy()
            out: list[NDArray[Any] | None] = [
                None if a is None else memory.get(address, a)
                for a, address in zip(arguments, addresses, strict=True)
            ]
            capacity = int(program["rows_capacity"])
            size = wire.step_state_bytes(capacity)
            raw = memory.get(int(program["step_state"]), np.zeros(size, np.uint8))
            out.append(raw[wire.sampled_offset_bytes(capacity) :].view(np.uint32))
            memory.free()
        return out

    def _program(self, memory: _Memory, step: Step, payload_set_bytes: int) -> NDArray[Any]:
        rows = len(step.slots)
        capacity = max(16, rows)
        state = np.zeros(wire.step_state_bytes(capacity), np.uint8)
        head = state[: wire.STEP_STATE.itemsize].view(wire.STEP_STATE)
        head["step"], head["round"] = step.number, step.number
        head["rows"], head["rows_capacity"] = rows, capacity
        head["sample_count"] = len(step.sample_rows)
        begin = wire.STEP_STATE.itemsize
        row = state[begin : begin + capacity * wire.ROW_STATE.itemsize].view(wire.ROW_STATE)
        row["slot"][:rows], row["position"][:rows] = step.slots, step.positions
        row["token"][: len(step.tokens)] = step.tokens
        row["flags"][: len(step.flags)] = step.flags
        begin += capacity * wire.ROW_STATE.itemsize
        sample = state[begin : begin + 4 * capacity].view(np.uint32)
        sample[: len(step.sample_rows)] = step.sample_rows
        program = np.zeros((), wire.PROGRAM)
        program["step_state"] = memory.put(state)
        program["slots"] = memory.put(step.slot_states)
        program["device_control"] = memory.put(np.zeros(1, wire.DEVICE_CONTROL))
        host = self.device.host_mapped(4096)
        memory.host["host_control"] = host[: wire.HOST_CONTROL.itemsize]
        program["host_control"] = int(host.ctypes.data)
        program["rows_capacity"], program["slot_count"] = capacity, len(step.slot_states)
        program["wait_timeout_ns"] = 500_000_000
        program["payload_set_bytes"] = payload_set_bytes
        program["rank_count"] = 1
        program["counters"] = memory.put(np.zeros(8, np.uint64))  # all deciders have run
        program["context_capacity"] = CONTEXT
        return program


def task_records(
    addresses: Sequence[int],
    params: Sequence[float],
    coords: Sequence[tuple[int, int, int, int]],
    payload_mask: int,
    streams: Streams,
) -> NDArray[Any]:
    records = np.zeros(len(coords), wire.TASK_RECORD)
    for index, tile in enumerate(coords):
        record = records[index]
        record["task_index"], record["tile"] = index, tile
        record["addr"][: len(addresses)] = addresses
        record["param"][: len(params)] = [param_bits(p) for p in params]
        record["payload_mask"] = payload_mask
        if streams is None or streams[0][index] is None:
            continue
        stream, weights, routes = streams[0][index], addresses[streams[1]], addresses[streams[2]]
        record["stream_base"] = weights + stream.offset_bytes
        record["stream_bytes"], record["flags"] = stream.size_bytes, TASK_EXPERT_STREAM
        unit = wire.EXPERT_STRIDE_UNIT
        record["param"][wire.PARAM_EXPERT_STRIDE] = stream.stride_bytes // unit
        record["param"][wire.PARAM_EXPERT_STAGE] = stream.stage_bytes // unit
        record["addr"][wire.ADDR_LIVE_SLOTS] = routes
        record["addr"][wire.ADDR_EXPERT_ID] = routes + stream.expert_id_bytes
    return records


def headers(
    body: str, struct: str, team_warps: int, features: Sequence[str] = ()
) -> dict[str, str]:
    """What RUNNER includes besides the device's own files."""
    return {
        GENERATED: header(body, struct, team_warps, features),
        HEADER: (Path(__file__).resolve().parent / HEADER).read_text(),
    }


def header(body: str, struct: str, team_warps: int, features: Sequence[str] = ()) -> str:
    """bodies.gen.cuh with one body."""
    is_ring = body in RING_BODIES
    stages, room = (RING_STAGES[team_warps], STAGE_BYTES) if is_ring else (2, STAGE_ROOM_BYTES)
    listed, own = struct or body, ""
    if is_ring:
        listed, own = "one_ring", f"struct one_ring : {struct}, RingBody<{struct}> {{}};"
    return "\n".join(
        [
            "#pragma once",
            '#include "types.hpp"',
            f"namespace gpurt {{ constexpr u32 kTeamWarps = {team_warps}, kStageCount = {stages},"
            f" kStageRoom = {room}; }}",
            *(f"#define {name} 1" for name in features),
            f"#define GPURT_EXPERTS {int(body == 'expert_matvec')}",
            f"#define GPURT_RING {int(body in RING_BODIES)}",
            '#include "bodies/body_list.cuh"',
            f'#include "bodies/{body}.cuh"',
            f"namespace gpurt {{ {own} using Bodies = BodyList<{listed}>; }}",
        ]
    )


class _Memory:
    """Device memory of one run."""

    def __init__(self, device: Device, staging: NDArray[np.uint8], stream: Any) -> None:
        self.device, self.staging, self.stream = device, staging, stream
        self.blocks: list[int] = []
        self.host: dict[str, NDArray[np.uint8]] = {}

    def put(self, array: NDArray[Any]) -> int:
        pointer = self.device.allocate(array.nbytes, "a test")
        self.blocks.append(pointer)
        self.write(pointer, array)
        return pointer

    def write(self, pointer: int, array: NDArray[Any]) -> None:
        self.device.upload(pointer, array, self.staging, self.stream)

    def get(self, pointer: int, like: NDArray[Any]) -> NDArray[Any]:
        raw = self.device.download(pointer, like.nbytes, self.staging, self.stream)
        return raw.view(like.dtype).reshape(like.shape)

    def free(self) -> None:
        for pointer in self.blocks:
            self.device.free(pointer)


def first_difference(
    got: NDArray[Any], want: NDArray[Any], tolerance: float, **about: Any
) -> str | None:
    """None, or the first coordinate beyond tolerance x the largest value, with both values."""
    scale = float(np.abs(want).max()) if want.size else 0.0
    bad = ~(np.abs(got.astype(np.float64) - want) <= tolerance * max(scale, 1e-30))
    if not bad.any():
        return None
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{int(bad.sum())} differ, first at {at}: got {got[at]}, want {want[at]}; {about}"


def reference_arrays(arrays: Mapping[str, NDArray[Any] | None]) -> dict[str, NDArray[Any]]:
    """Float32 copies for a reference; bf16 bit patterns are converted."""
    from gpurt.buffer import bf16
    from gpurt.graphs.ops.dtypes import to_float32

    out = {}
    for name, array in arrays.items():
        if array is not None:
            converted = to_float32(array, bf16) if array.dtype == np.uint16 else array.copy()
            out[name] = converted
    return out
