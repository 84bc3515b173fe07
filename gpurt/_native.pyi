"""The compiled module: scheduler/module.cpp."""

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

class Parking:
    """Where workers without an open step sleep; one for all ranks of a process.

    hears_all: False if rank 0 is another process, whose wake-up does not come here.
    """

    def __init__(self, hears_all: bool = True) -> None: ...

class HostExecutor:
    """Threads as workers over one wire.PROGRAM. `memory` is kept until the last worker ended."""

    def __init__(
        self,
        program_address: int,
        bodies: Sequence[str | None],
        callbacks: list[Callable[[], object] | None],
        memory: object,
        scratch_bytes: int,
        parking: Parking,
    ) -> None:
        """bodies[i] names the built-in body of records whose `body` is i; None: callbacks[task]."""

    def launch(self) -> bool:
        """Zero all counters and start the workers; False if the last ones still run."""

    def running(self) -> bool: ...
    def join(self, timeout_s: float) -> bool: ...
    def abort(self) -> None: ...
    def wake(self) -> None: ...
    def body_error(self) -> BaseException | None:
        """What a callback raised first in the last launch."""

def wire_layout() -> dict[str, tuple[int, dict[str, tuple[int, int]]]]: ...
def wire_constants() -> dict[str, int]: ...
def body_names() -> list[str]: ...
def simd_level() -> str:
    """Instructions that the bodies use: portable, avx2 or avx512.

    Raises: ValueError if GPURT_SIMD is none of them, or more than this CPU has.
    """

def dlpack_view(source: object) -> NDArray[Any]:
    """A numpy view of a CPU tensor; bf16 as uint16 bit patterns."""

def pack_mma16_units(w: int, rows: int, k: int, group: int, units: int) -> None:
    """device/bodies/mma16_units.hpp; w and units are addresses."""

def pack_nvfp4_units(
    byte_table: int, scale_table: int, blocks: int, rows: int, count: int, units: int
) -> None:
    """device/bodies/expert_units.hpp; all but the counts are addresses."""

def clock_ns() -> int: ...
def wait_output(output_address: int, seen_count: int, timeout_s: float) -> tuple[int, int]: ...
def load_acquire_u32(address: int) -> int: ...
def load_acquire_u64(address: int) -> int: ...
def store_release_u32(address: int, value: int) -> None: ...
def store_release_u64(address: int, value: int) -> None: ...
def add_u32(address: int, value: int) -> int: ...
def fence_seq_cst() -> None: ...
