"""Shared memory: what the processes of a group map of each other. Nothing of it has a name.

Owns: pages that lie in host memory, the words at their start that hosts tell each other by, and
symmetric memory on GPUs of several processes, by CUDA IPC. Does not know: what is launched when.

    pages    a memfd a process; the others open it through /proc/PID/fd. It ends with its last map,
             so a killed process leaves nothing behind.
    GPU      cuIpcGetMemHandle -> meeting -> cuIpcOpenMemHandle -> marks -> meeting -> all came?
             If not: symmetric memory in the pages, which each process registers with its GPU.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt import _native
from gpurt.errors import DeviceError, RankError
from gpurt.executors.cuda_driver import Device
from gpurt.executors.symmetric import GpuMemory
from gpurt.plan import align_up
from gpurt.process_group import ProcessGroup

BOARD_BYTES = mmap.PAGESIZE  # words at the start of each process's pages; the rest is symmetric
# A smaller allocation may share its block with others, and a block is exported as a whole.
EXPORT_ALIGN_BYTES = 2 << 20
_WORD_STRIDE = 64

log = logging.getLogger("gpurt")


class Word(IntEnum):
    """What a host says of itself, in the first page of its own memory. They only grow."""

    LAUNCHED = 0  # number of the launch; of rank 0: that it asks for
    ENDED = 1  # the last launch whose workers have all left
    ABORTED = 2  # the last launch that it ended by force
    STAGE = 3  # Stage
    ASKED = 4  # number of the errand; of rank 0: that the others are to do
    ANSWERED = 5  # the last errand that it did


class Stage(IntEnum):
    """How far a rank is."""

    PREPARED = 0
    FOLLOWS = 1
    CLOSED = 2  # it launches nothing any more
    UNMAPPED = 3  # it touches nobody's memory any more


class Pages:
    """Memory of all ranks: of each one BOARD_BYTES of words and `size_bytes` of symmetric memory.

    Words may be read and written by any thread.
    """

    def __init__(self, group: ProcessGroup, size_bytes: int) -> None:
        """Make this rank's, and map the others'. Raises: RankError."""
        self._rank = group.rank
        own = os.memfd_create("gpurt")
        try:
            os.ftruncate(own, BOARD_BYTES + align_up(size_bytes, mmap.PAGESIZE))
            tickets = group.exchange("pages", own)
            self._maps = [
                _map(own if rank == group.rank else f"/proc/{process}/fd/{file}", rank)
                for rank, (process, file) in enumerate(zip(group.processes, tickets, strict=True))
            ]
            group.exchange("mapped", None)
        finally:
            os.close(own)  # the maps stay

    @property
    def symmetric(self) -> tuple[NDArray[np.uint8], ...]:
        """Symmetric memory of each rank, mapped here; it lives as long as the arrays."""
        return tuple(pages[BOARD_BYTES:] for pages in self._maps)

    def read(self, rank: int, word: Word) -> int:
        """What a rank says."""
        return _native.load_acquire_u64(self._address(rank, word))

    def say(self, word: Word, value: int) -> None:
        """Tell all others; what this process reads next it reads after that."""
        _native.store_release_u64(self._address(self._rank, word), value)
        _native.fence_seq_cst()

    def _address(self, rank: int, word: Word) -> int:
        return int(self._maps[rank].ctypes.data) + word * _WORD_STRIDE


class ProcessMemory:
    """This rank's symmetric memory on a GPU, and where this process sees the others'.

    All ranks make, unmap and free theirs together.
    """

    addresses: tuple[int, ...]  # by rank

    def __init__(self, group: ProcessGroup, index: int, pages: Pages, size_bytes: int) -> None:
        """Map the GPUs' memory, else the pages. index: of this rank's GPU. Raises: DeviceError
        saying what failed where.
        """
        self._group, self._device, self._pages = group, Device.open(index), pages
        self._size_bytes = align_up(size_bytes, EXPORT_ALIGN_BYTES)
        self._own: GpuMemory | None = None
        self._imported: list[int] = []
        self._registered: list[NDArray[np.uint8]] = []
        failures: list[str] = []
        for export in (self._export, self._register):
            try:
                tickets = self._agree("export", export)
                self._agree("import", partial(self._import, tickets))
                self._agree("prove", self._prove)
                return
            except DeviceError as error:
                failures.append(str(error))
            self.unmap()
            group.exchange("unmapped", None)  # only then may others free what was mapped here
            self.free()
            if len(failures) == 1:
                log.warning("%s; ranks meet in host memory", failures[0])
        msg = f"ranks reach neither each other's GPUs ({failures[0]}) nor host memory"
        msg = f"{msg} ({failures[1]}) - at rank {group.rank}"
        raise DeviceError(f"{msg} - run them as threads of one process: --tp without torchrun")

    def unmap(self) -> None:
        """Let the others' memory go: no kernel here may run. Idempotent."""
        with self._device.current():
            while self._imported:
                self._device.forget(self._imported.pop())

    def free(self) -> None:
        """Give this rank's back, once no other rank maps it. Idempotent."""
        if self._own is not None:
            self._own.free()
            self._own = None
        with self._device.current():
            while self._registered:
                self._device.unregister(self._registered.pop())

    # ---- helpers: one step on all ranks ------------------------------------------------------
    def _agree(self, what: str, step: Callable[[], Any]) -> list[Any]:
        """What a step gave, by rank. Raises: DeviceError, on all ranks, if it failed on one."""
        value, problem = None, ""
        try:
            value = step()
        except DeviceError as error:
            problem = str(error)
        answers = self._group.exchange(what, [value, problem])
        for rank, (_, why) in enumerate(answers):
            if why:
                raise DeviceError(f"rank {rank}, {what}: {why}")
        return [given for given, _ in answers]

    def _export(self) -> str | None:
        self._own = GpuMemory(self._device, self._group.rank, self._size_bytes)
        with self._device.current():
            return self._device.export(self._own.address).hex()

    def _register(self) -> str | None:
        with self._device.current():
            for array in self._pages.symmetric:
                self._device.register(array)
                self._registered.append(array)
        own = self._registered[self._group.rank]
        self._own = GpuMemory(self._device, self._group.rank, self._size_bytes, own)
        return None

    def _import(self, tickets: Sequence[str | None]) -> None:
        assert self._own is not None
        addresses = []
        with self._device.current():
            for rank, ticket in enumerate(tickets):
                if rank == self._group.rank:
                    addresses.append(self._own.address)
                elif ticket is None:
                    addresses.append(int(self._registered[rank].ctypes.data))
                else:
                    self._imported.append(self._device.map_exported(bytes.fromhex(ticket)))
                    addresses.append(self._imported[-1])
        self.addresses = tuple(addresses)
        self._own.mark(addresses)

    def _prove(self) -> None:
        assert self._own is not None
        if not self._own.is_marked(self._group.size):
            msg = "the mapping is claimed, but what another rank wrote did not come"
            raise DeviceError(f"{msg} - at cuda:{self._device.index}")


# ---- helpers ---------------------------------------------------------------------------------
def _map(file: int | str, rank: int) -> NDArray[np.uint8]:
    try:
        opened = file if isinstance(file, int) else os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            return np.frombuffer(mmap.mmap(opened, 0), np.uint8)
        finally:
            if opened != file:
                os.close(opened)
    except OSError as error:
        msg = f"cannot map the memory of rank {rank}: {error.strerror}"
        raise RankError(f"{msg} - at {file} - run all ranks as one user") from error
