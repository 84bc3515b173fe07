"""Symmetric memory: what every rank of a group can address, made and proved before plans load.

    allocate, zeroed -> every rank writes its mark into every other's -> all marks came -> load

Owns: one rank's memory, how it is mapped, the proof that the mapping works, which a driver may
claim of one that does not. Does not know: what lies in it (scheduler/ranks.hpp), and plans.
Importing this module starts nothing.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpurt import wire
from gpurt.errors import DeviceError
from gpurt.executors.cuda_driver import Device

MARK_BYTE = 0x5A
_MARKS = wire.field_offset(wire.RANK_CONTROL, "pad")  # a byte a rank

log = logging.getLogger("gpurt")


@dataclass(frozen=True)
class SymmetricMap:
    """The memory of all ranks as one of them sees it. addresses: where each rank's begins, by rank.
    keep: what the memory lives in; it ends with the last holder.
    """

    addresses: tuple[int, ...]
    keep: object

    def view(self, rank: int, size_bytes: int) -> NDArray[np.uint8]:
        """A rank's memory as bytes, if it lies in the host's. Valid while `keep` is held."""
        block = (ctypes.c_uint8 * size_bytes).from_address(self.addresses[rank])
        return np.ctypeslib.as_array(block)


class GpuMemory:
    """One rank's, on its GPU, or where every GPU reaches it: in the host's."""

    def __init__(
        self, device: Device, rank: int, size_bytes: int, pinned: NDArray[np.uint8] | None = None
    ) -> None:
        """Allocate and zero it. pinned: use this instead, zeroed host memory that the GPU sees:
        slower, and needs no peer access. Raises: DeviceError.
        """
        self.device, self._rank, self._pinned = device, rank, pinned
        self._pointer = 0
        with device.current():
            self._stream, self._staging = device.stream(), device.host_mapped(4096)
            if pinned is None:
                self._pointer = device.allocate(size_bytes, f"symmetric memory of rank {rank}")
                device.fill(self._pointer, 0, size_bytes, self._stream)
                device.wait(self._stream)

    @property
    def address(self) -> int:
        """Where it begins."""
        return self._pointer if self._pinned is None else int(self._pinned.ctypes.data)

    def reach(self, other: GpuMemory) -> bool:
        """Map another rank's of this process. False: it cannot be."""
        if self._pinned is not None:
            return True
        with self.device.current():
            if not self.device.can_reach(other.device):
                return False
            self.device.reach(other.device)
        return True

    def mark(self, addresses: Sequence[int]) -> None:
        """Leave this rank's mark in all others'."""
        with self.device.current():
            for rank, address in enumerate(addresses):
                if rank != self._rank:
                    at = address + _MARKS + self._rank
                    self.device.fill(at, MARK_BYTE, 1, self._stream)
            self.device.wait(self._stream)

    def is_marked(self, ranks: int) -> bool:
        """Whether every other rank's mark came here."""
        at = self.address + _MARKS
        with self.device.current():
            marks = self.device.download(at, ranks, self._staging, self._stream)
        return bool((np.delete(marks, self._rank) == MARK_BYTE).all())

    def free(self) -> None:
        """Give it back: no kernel of any rank may run. Idempotent."""
        if self._stream is None:
            return
        with self.device.current():
            if self._pointer:
                self.device.free(self._pointer)
            self.device.destroy(self._stream)
        self._stream = self._pinned = None


def map_gpus(indices: Sequence[int], size_bytes: int, where: str) -> list[GpuMemory]:
    """Memory for ranks of one process, by rank: on the GPUs, else in the host's.

    indices: of the GPUs. where: the plan, for messages. Raises: DeviceError if some rank reaches
    neither.
    """
    devices = [Device.open(index) for index in indices]
    names = ", ".join(f"cuda:{index}" for index in indices)
    for staged in (False, True):
        made: list[GpuMemory] = []
        try:
            for rank, device in enumerate(devices):
                with device.current():
                    pinned = device.host_mapped(size_bytes) if staged else None
                made.append(GpuMemory(device, rank, size_bytes, pinned))
            if _all_reach(made):
                return made
        except BaseException:
            free_all(made)
            raise
        free_all(made)
        if not staged:
            log.warning("%s: no peer access, ranks meet in host memory", names)
    msg = f"{names} reach neither each other nor host memory"
    raise DeviceError(f"{msg} - at {where} - run on one of them")


def free_all(memories: Sequence[GpuMemory]) -> None:
    """See GpuMemory.free."""
    for memory in memories:
        memory.free()


def _all_reach(made: Sequence[GpuMemory]) -> bool:
    pairs = [(one, other) for one in made for other in made if one is not other]
    if not all(one.reach(other) for one, other in pairs):
        return False
    addresses = [memory.address for memory in made]
    for memory in made:
        memory.mark(addresses)
    return all(memory.is_marked(len(made)) for memory in made)
