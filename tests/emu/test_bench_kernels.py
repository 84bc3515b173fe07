"""The bench's own kernels: experts beside ours compute the same function, primitives end."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpurt.bench import grouped, made_up, primitives
from gpurt.bench.case import Workload
from gpurt.bench.machine import Machine
from gpurt.body import Target
from gpurt.buffer import bf16, nvfp4
from gpurt.graphs.ops.dtypes import to_bf16, to_float32
from tests.emu.device import EmulatedDevice, EmulatedKernel, compile_source

ENTRY = """
#include "grouped_experts.cuh"
extern "C" __constant__ gpurt::GroupedExperts given = {};
extern "C" __global__ void run_given() {
  gpurt::u32* staged = reinterpret_cast<gpurt::u32*>(emu::shared);
  if (given.scales != 0) return gpurt::grouped_experts<true>(given, blockIdx.x, staged);
  gpurt::grouped_experts<false>(given, blockIdx.x, staged);
}
"""
EXPERTS, ROWS, TOP_K = 5, 6, 2
# Of expert 0 more users than go at once, then two; of 2 one; of 1 none.
CHOSEN = [[0, 2], [0, 3], [0, 3], [0, 3], [0, 4], [0, 4]]


def users_of() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    counts = np.zeros(EXPERTS, np.int32)
    users, pairs = np.zeros((2, EXPERTS, ROWS), np.int32)
    for row, chosen in enumerate(CHOSEN):
        for rank, expert in enumerate(chosen):
            users[expert, counts[expert]] = row
            pairs[expert, counts[expert]] = row * TOP_K + rank
            counts[expert] += 1
    return counts, users, pairs


def run(shape: grouped.Shape, arrays: dict[str, np.ndarray]) -> np.ndarray:
    device = EmulatedDevice.open()
    kernel = EmulatedKernel(device, compile_source(ENTRY, "", headers={}).cubin, "run_given")
    stream = device.stream()
    addresses: dict[str, int] = {}
    for name, array in arrays.items():
        addresses[name] = device.allocate(array.nbytes, name)
        device.upload(addresses[name], array, None, stream)
    given = grouped.Arguments(
        **addresses, n=shape.n, k=shape.k, rows=shape.rows, swiglu=int(shape.swiglu)
    )
    ctypes.memmove(kernel.symbol("given")[0], ctypes.addressof(given), ctypes.sizeof(given))
    kernel.launch(shape.blocks, grouped.THREADS, shape.smem_bytes, stream)
    y = arrays["y"]
    return device.download(addresses["y"], y.nbytes, None, stream).view(np.float32).reshape(y.shape)


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("swiglu", [True, False])
def test_every_pair_gets_its_experts_product(quantised: bool, swiglu: bool) -> None:
    n, k = 40, 544  # a tile and a part of one; a lane has one block of columns or two
    kind = nvfp4 if quantised else bf16
    shape = grouped.Shape(EXPERTS, n, k, ROWS, swiglu, quantised)
    stored = made_up.matrix((EXPERTS, n, k), kind)
    w = to_float32(stored, kind).reshape(EXPERTS, n, k)
    counts, users, pairs = users_of()
    x = np.random.default_rng(3).standard_normal((ROWS, k), np.float32)
    second = 2.0 ** -np.arange(2 * EXPERTS, dtype=np.float32).reshape(EXPERTS, 2)
    second *= np.float32(made_up.nvfp4_scale(k))
    width = n // 2 if swiglu else n
    arrays: dict[str, Any] = {"x": x, "counts": counts, "users": users, "pairs": pairs}
    arrays["y"] = np.full((ROWS * TOP_K, width), np.nan, np.float32)
    if quantised:
        blocks = stored.reshape(EXPERTS, n, k // 16, 9)
        arrays["w"] = np.ascontiguousarray(blocks[..., :8])
        arrays["scales"], arrays["second"] = np.ascontiguousarray(blocks[..., 8]), second
    else:
        arrays["w"] = np.ascontiguousarray(stored)
    got = run(shape, arrays)
    rounded = to_float32(to_bf16(x), bf16)
    for row, chosen in enumerate(CHOSEN):
        for rank, expert in enumerate(chosen):
            z = w[expert] @ rounded[row]
            scale = second[expert] if quantised else np.ones(2, np.float32)
            if swiglu:
                gate, up = z[0::2] * scale[0], z[1::2] * scale[1]
                z = gate / (1 + np.exp(-gate)) * up
            else:
                z = z * scale[0]
            np.testing.assert_allclose(got[row * TOP_K + rank], z, rtol=2e-4, atol=2e-4)


def test_every_primitive_ends_and_states_its_time(monkeypatch: Any) -> None:
    short = tuple(replace(p, rounds=6) for p in primitives.PRIMITIVES)
    monkeypatch.setattr(primitives, "PRIMITIVES", short)
    monkeypatch.setattr(primitives, "compile_source", compile_source)
    monkeypatch.setattr("gpurt.executors.cuda_driver.Device", EmulatedDevice)
    monkeypatch.setattr("gpurt.executors.cuda_driver.Kernel", EmulatedKernel)
    machine = Machine("cuda", "emulated", Target("cuda", 3), "", "", "abc", "2026-01-01", 1e9)
    side = primitives.Primitives(machine, Workload(None, lambda: 0), lambda *_: None)
    assert side.measure() > 0
    assert side.note().count(" us") == len(short)
    side.close()
