"""Grouped: the stand-alone expert kernel of device/grouped_experts.cuh, launched on any stream.

The peer of our experts inside a CUDA graph of ordinary kernels. Works on addresses, so whoever owns
the memory (torch, in graphs/reference/muse_slice.py) need not be known here.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from gpurt.executors.cuda_compile import Compiled, compile_source

SOURCE = """
#include "grouped_experts.cuh"
#define GPURT_GROUPED(NAME, QUANTISED)                              \\
  extern "C" __global__ void __launch_bounds__(256, 2)              \\
      NAME(const gpurt::GroupedExperts g) {                         \\
    extern __shared__ __align__(16) gpurt::u32 staged[];            \\
    gpurt::grouped_experts<QUANTISED>(g, blockIdx.x, staged);       \\
  }
GPURT_GROUPED(run_grouped_nvfp4, true)
GPURT_GROUPED(run_grouped_bf16, false)
"""
ENTRIES = {True: "run_grouped_nvfp4", False: "run_grouped_bf16"}  # by quantised
THREADS, TILE, USERS = 256, 32, 4


class Arguments(ctypes.Structure):
    """gpurt::GroupedExperts."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "w", "scales", "second")),
        *((name, ctypes.c_uint64) for name in ("counts", "users", "pairs", "y")),
        *((name, ctypes.c_uint32) for name in ("n", "k", "rows", "swiglu")),
    )


@dataclass(frozen=True)
class Shape:
    """One half of the experts. rows: of a step."""

    experts: int
    n: int
    k: int
    rows: int
    swiglu: bool
    quantised: bool

    @property
    def blocks(self) -> int:
        """Of a launch."""
        return self.experts * -(-self.n // TILE)

    @property
    def smem_bytes(self) -> int:
        """Of a block: x of four users in bf16."""
        return USERS * self.k * 2


def compile_grouped(arch: str) -> Compiled:
    """The kernel for `arch`."""
    return compile_source(SOURCE, arch, headers={}, name="grouped.cu")


class GroupedKernel:
    """The kernel, loaded into the calling thread's current context."""

    def __init__(self, arch: str) -> None:
        """Compile and load. Raises: DeviceError."""
        from gpurt.executors.cuda_driver import bindings, check

        self._driver = driver = bindings()
        module = check(driver.cuModuleLoadData(compile_grouped(arch).cubin), "cuModuleLoadData")
        self._functions = {
            quantised: check(
                driver.cuModuleGetFunction(module, name.encode()), "cuModuleGetFunction"
            )
            for quantised, name in ENTRIES.items()
        }

    def launch(self, shape: Shape, addresses: dict[str, int], stream: int) -> None:
        """Queue one launch. addresses: of Arguments' fields; a missing one is 0."""
        from gpurt.executors.cuda_driver import check

        given = Arguments(
            **addresses, n=shape.n, k=shape.k, rows=shape.rows, swiglu=int(shape.swiglu)
        )
        pointers: Any = (ctypes.c_void_p * 1)(ctypes.addressof(given))
        result = self._driver.cuLaunchKernel(
            *(
                self._functions[shape.quantised],
                shape.blocks,
                1,
                1,
                THREADS,
                1,
                1,
                shape.smem_bytes,
                stream,
            ),
            *(ctypes.addressof(pointers), 0),
        )
        check(result, "cuLaunchKernel")
