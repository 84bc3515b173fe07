"""Group: the executors of several ranks as one Executor. Rank 0's host memory is its front.

Owns: that all ranks know each other's symmetric memory, are launched together and end together.
Does not know: what ranks tell each other (scheduler/ranks.hpp), and where one of them runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpurt import _native
from gpurt.errors import DeviceError
from gpurt.executors import host
from gpurt.executors.base import Executor, Options, RawTrace
from gpurt.graph import Graph
from gpurt.plan import Plan
from gpurt.planner.check_ranks import check_group
from gpurt.progress import Progress

if TYPE_CHECKING:
    from gpurt.executors import cuda

_LAG_NAP_S = 20e-6  # ranks end a step within one of its hops

log = logging.getLogger("gpurt")


def load(
    plans: Sequence[Plan],
    graphs: Sequence[Graph],
    options: Options,
    devices: Sequence[str],
    progress: Progress | None = None,
) -> Group:
    """Load a group's plans, one a device, by rank.

    progress: called as (what, done, total). Raises: DeviceError for devices that cannot reach each
    other, and what loading one plan raises.
    """
    ranks = [replace(options, rank=rank, rank_count=len(plans)) for rank in range(len(plans))]
    rows = list(zip(plans, graphs, ranks, devices, strict=True))
    if plans[0].target.kind == "host":
        parking = _native.Parking()
        return Group([host.load(p, g, o, progress, parking) for p, g, o, _ in rows])
    from gpurt.executors import cuda

    def load_all(staged: bool) -> list[cuda.CudaExecutor]:
        indices = [int(name.removeprefix("cuda:")) for *_, name in rows]
        loaded: list[cuda.CudaExecutor] = []
        try:
            for (p, g, o, _), index in zip(rows, indices, strict=True):
                loaded.append(cuda.load(p, g, o, progress, index, staged))
        except BaseException:
            _close(loaded)
            raise
        return loaded

    for staged in (False, True):
        loaded = load_all(staged)
        if _is_mapped(loaded):
            return Group(loaded)
        _close(loaded)
        log.warning("%s: no peer access, ranks meet in host memory", ", ".join(devices))
    msg = f"{', '.join(devices)} reach neither each other nor host memory"
    raise DeviceError(f"{msg} - at {plans[0].name} - run on one of them")


def _is_mapped(loaded: Sequence[cuda.CudaExecutor]) -> bool:
    """Whether every rank's writes came to every other rank's symmetric memory."""
    for executor in loaded:
        if not executor.reach([other for other in loaded if other is not executor]):
            return False
    return all(executor.is_marked() for executor in loaded)


def _close(loaded: Sequence[Executor]) -> None:
    for executor in loaded:
        executor.close()


class RankExecutor(Executor, Protocol):
    """An Executor that can be a rank."""

    @property
    def symmetric_address(self) -> int:
        """Where its symmetric memory begins, for all ranks."""

    def connect(self, addresses: Sequence[int]) -> None:
        """Tell it where every rank's symmetric memory begins, before the first launch."""


class Group:
    """Several ranks. Thread-safe but for `launch` and `close`, as every Executor."""

    def __init__(self, ranks: Sequence[RankExecutor]) -> None:
        """Connect loaded executors, in the order of their ranks. Raises: PlanError if their plans
        are not those of one group.
        """
        check_group([executor.plan for executor in ranks])
        self._ranks = tuple(ranks)
        self.plan, self.host, self.launches = ranks[0].plan, ranks[0].host, 0
        self.host.peers = tuple(executor.host for executor in ranks[1:])
        addresses = [executor.symmetric_address for executor in ranks]
        for executor in ranks:
            executor.connect(addresses)

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
            while executor.running() and int(executor.host.control["heartbeat"]) < last:
                time.sleep(_LAG_NAP_S)
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

    def close(self) -> None:
        """End all ranks, then give back their memory: until then others write to it."""
        self.host.request_abort()
        while not self.join(1.0):
            pass  # a Python body runs to its end
        for executor in self._ranks:
            executor.close()
