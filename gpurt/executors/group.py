"""Group: the executors of several ranks as one Executor. Rank 0's host memory is its front.

Owns: that all ranks are launched together and end together. Does not know: what ranks tell each
other (scheduler/ranks.hpp), where they meet (symmetric.py), and where one of them runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt import _native
from gpurt.executors import host, program
from gpurt.executors.base import Executor, Options, RawTrace, catch_up
from gpurt.executors.symmetric import GpuMemory, SymmetricMap, free_all, map_gpus
from gpurt.graph import Graph
from gpurt.plan import Plan
from gpurt.planner.check_ranks import check_group
from gpurt.progress import Progress


def load(
    plans: Sequence[Plan],
    graphs: Sequence[Graph],
    options: Options,
    devices: Sequence[str],
    progress: Progress | None = None,
) -> Group:
    """Load a group's plans, one a device, by rank.

    progress: called as (what, done, total). Raises: PlanError if they are not of one group,
    DeviceError for devices that cannot reach each other, and what loading one plan raises.
    """
    check_group(plans)
    ranks = [replace(options, rank=rank, rank_count=len(plans)) for rank in range(len(plans))]
    size = program.symmetric_layout(plans[0], ranks[0]).size_bytes
    rows = list(zip(plans, graphs, ranks, strict=True))
    if plans[0].target.kind == "host":
        arrays = [host.map_zeroed(size) for _ in plans]
        shared = SymmetricMap(tuple(int(array.ctypes.data) for array in arrays), arrays)
        parking = _native.Parking()
        return Group([host.load(*row, progress, parking, shared) for row in rows])
    from gpurt.executors import cuda

    indices = [int(name.removeprefix("cuda:")) for name in devices]
    memories = map_gpus(indices, size, plans[0].name)
    shared = SymmetricMap(tuple(memory.address for memory in memories), memories)
    loaded: list[Executor] = []
    try:
        for row, index in zip(rows, indices, strict=True):
            loaded.append(cuda.load(*row, progress, index, shared))
    except BaseException:
        for executor in loaded:
            executor.close()
        free_all(memories)
        raise
    return Group(loaded, memories)


class Group:
    """Several ranks. Thread-safe but for `launch` and `close`, as every Executor."""

    def __init__(self, ranks: Sequence[Executor], memories: Sequence[GpuMemory] = ()) -> None:
        """Loaded executors, in the order of their ranks; memories: freed after all of them."""
        self._ranks, self._memories = tuple(ranks), memories
        self.plan, self.host, self.launches = ranks[0].plan, ranks[0].host, 0
        self.host.peers = tuple(executor.host for executor in ranks[1:])

    @property
    def ranks(self) -> tuple[Executor, ...]:
        """By rank."""
        return self._ranks

    def launch(self) -> None:
        """Launch all; those that are there wait for the others. Raises: DeviceError, ClosedError;
        then no rank stays.
        """
        try:
            for executor in self._ranks:
                executor.launches = self.launches  # also where one was not launched last time
                executor.launch()
        except BaseException:
            self.host.request_abort()
            while not self.join(1.0):
                pass
            raise
        finally:
            self.launches += 1

    def running(self) -> bool:
        """Whether a worker of any rank is there."""
        return any(executor.running() for executor in self._ranks)

    def join(self, timeout_s: float) -> bool:
        """Wait until no rank's worker runs; False on time-out."""
        deadline = time.monotonic() + timeout_s
        return all(e.join(max(0.0, deadline - time.monotonic())) for e in self._ranks)

    def read(self, buffer_name: str) -> NDArray[Any]:
        """A copy of rank 0's buffer."""
        return self._ranks[0].read(buffer_name)

    def write(self, buffer_name: str, array: NDArray[Any]) -> None:
        """Fill a state buffer of every rank, once all have ended the last step of rank 0."""
        last = int(self.host.control["heartbeat"])
        for executor in self._ranks:
            catch_up(executor, last)
            executor.write(buffer_name, array)

    def counters(self) -> NDArray[np.uint64]:
        """Of rank 0."""
        return self._ranks[0].counters()

    def fault_cause(self) -> BaseException | None:
        """What a Python body of some rank raised in the last launch."""
        causes = (executor.fault_cause() for executor in self._ranks)
        return next((cause for cause in causes if cause is not None), None)

    def raw_trace(self) -> RawTrace:
        """Of rank 0."""
        return self._ranks[0].raw_trace()

    def raw_traces(self) -> list[RawTrace]:
        """By rank."""
        return [executor.raw_trace() for executor in self._ranks]

    def close(self) -> None:
        """End all ranks, then give back their memory: until then others write to it."""
        self.host.request_abort()
        while not self.join(1.0):
            pass  # a Python body runs to its end
        for executor in self._ranks:
            executor.close()
        free_all(self._memories)
