"""ProcessRank: one rank of a process group as an Executor. Rank 0's speaks for all of them.

    rank 0    launch: LAUNCHED = n -> own workers     others   attend: see n -> LAUNCHED = n, launch
              running: own, or ENDED < n of others             workers left -> ENDED = n
              abort: ABORTED = n                               see it -> end own workers

What ranks tell each other while a kernel runs lies in symmetric memory, as with threads of one
process (scheduler/ranks.hpp). Owns: launch, end and report in the hosts' words, and that a process
that is gone ends the others' work. Does not know: who the processes are (gpurt/process_group.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt import _native, wire
from gpurt.errors import DeviceError, FaultError, PlanError, RankError
from gpurt.executors import host, program
from gpurt.executors.base import Executor, Options, RawTrace, Record, catch_up
from gpurt.executors.errands import Arrays, Errands
from gpurt.executors.shared import Pages, ProcessMemory, Stage, Word
from gpurt.executors.symmetric import SymmetricMap
from gpurt.faults import describe_faults
from gpurt.graph import Graph
from gpurt.plan import Plan
from gpurt.planner.check_ranks import group_digest
from gpurt.process_group import JOIN_TIMEOUT_S, ProcessGroup
from gpurt.progress import Progress

ABORT_GRACE_S = 1.0  # for ranks to hear from the one that gave up
DRAIN_GRACE_S = 5.0  # beyond the wait time-out
TRACE_WAIT_S = 5.0  # for the spans of another rank
CLOSE_WAIT_S = 10.0  # for others to touch this rank's GPU memory no more
_NAP_S = 0.0005

log = logging.getLogger("gpurt")


def load(
    plan: Plan,
    graph: Graph,
    options: Options,
    device: str,
    group: ProcessGroup,
    progress: Progress | None = None,
) -> ProcessRank:
    """Load this process's rank; returns once all ranks have loaded theirs.

    progress: called as (what, done, total). Raises: PlanError if ranks' plans differ, RankError,
    and what loading a plan raises.
    """
    _check_plans(plan, group)
    options = replace(options, rank=group.rank, rank_count=group.size)
    size = program.symmetric_layout(plan, options).size_bytes
    pages = Pages(group, size)
    memory: ProcessMemory | None = None
    own: Executor
    if plan.target.kind == "host":
        addresses = tuple(int(array.ctypes.data) for array in pages.symmetric)
        parking = _native.Parking(hears_all=group.rank == 0)
        own = host.load(plan, graph, options, progress, parking, SymmetricMap(addresses, pages))
    else:
        from gpurt.executors import cuda

        index = int(device.removeprefix("cuda:"))
        memory = ProcessMemory(group, index, pages, size)
        shared = SymmetricMap(memory.addresses, memory)
        own = cuda.load(plan, graph, options, progress, index, shared)
    errands = Errands(group, pages)
    group.exchange("load", None)
    return ProcessRank(own, options, group, pages, memory, errands)


class ProcessRank:
    """An Executor. Thread-safe but for `launch`, `attend` and `close`."""

    def __init__(
        self,
        own: Executor,
        options: Options,
        group: ProcessGroup,
        pages: Pages,
        memory: ProcessMemory | None,
        errands: Errands,
    ) -> None:
        """Made by `load`."""
        self.plan, self.host, self.launches = own.plan, own.host, 0
        self._own, self._group, self._pages, self._memory = own, group, pages, memory
        self._errands = errands
        self._drain_s = options.wait_timeout_ms / 1e3 + DRAIN_GRACE_S
        self._others = _Others(self, group, pages)
        self.host.peers = (self._others,)
        self._closed = False

    @property
    def ranks(self) -> tuple[Executor, ...]:
        """Itself: the others are not in this process."""
        return (self,)

    # ---- rank 0 ------------------------------------------------------------------------------
    def launch(self) -> None:
        """Ask all ranks to launch, and launch this one. Raises: RankError if one is gone,
        DeviceError, ClosedError.
        """
        lost = self._group.lost()
        if lost is not None:
            raise RankError(self._group.describe_lost(lost))
        for rank in self._others.ranks:
            if self._pages.read(rank, Word.STAGE) >= Stage.CLOSED:
                msg = f"rank {rank} has left - at launch {self.launches + 1} of {self.plan.name}"
                raise RankError(f"{msg} - see its report, then start all ranks again")
        self._launch_own(self.launches + 1)

    def running(self) -> bool:
        """Whether a worker of this rank, or by rank 0's account of any rank, is there."""
        with self._blame():
            return self._own.running() or any(map(self._others.is_busy, self._others.awaited))

    def join(self, timeout_s: float) -> bool:
        """Wait until no worker runs; False on time-out."""
        deadline = time.monotonic() + timeout_s
        with self._blame():
            while self._own.join(max(0.0, deadline - time.monotonic())):
                if not self.running():
                    return True
                if time.monotonic() > deadline:
                    break
                time.sleep(_NAP_S)
        return False

    def is_followed(self) -> bool:
        """Whether another rank takes what comes: it prepares nothing any more."""
        return any(self._pages.read(r, Word.STAGE) >= Stage.FOLLOWS for r in self._others.ranks)

    # ---- the others --------------------------------------------------------------------------
    def attend(self) -> bool:
        """One look at what rank 0 wants, by any other rank. Returns: whether rank 0 is still there.

        Raises: FaultError with this rank's report, once its workers have left; RankError if a
        process is gone while nothing runs.
        """
        self._pages.say(Word.STAGE, Stage.FOLLOWS)
        self._errands.answer(self._serve)
        asked = self._pages.read(0, Word.LAUNCHED)
        if asked > self.launches:
            self._launch_own(asked)
        if self._pages.read(self._group.rank, Word.ENDED) < self.launches:
            fault = self.host.fault()
            if fault is not None:
                self._give_up(int(fault["kind"]))
            if not self.running():
                self._pages.say(Word.ENDED, self.launches)
            return True
        lost = self._group.lost()
        if lost is not None:
            raise RankError(self._group.describe_lost(lost))
        return self._pages.read(0, Word.STAGE) < Stage.CLOSED

    def _give_up(self, kind: int) -> None:
        if kind != wire.FaultKind.RANK_LOST:
            self.join(ABORT_GRACE_S)
        self.host.request_abort()
        drained = self.join(self._drain_s)
        error = FaultError(describe_faults(self, drained))
        error.__cause__ = self._own.fault_cause()
        if drained:
            self._pages.say(Word.ENDED, self.launches)
        raise error

    # ---- this rank alone ---------------------------------------------------------------------
    def read(self, buffer_name: str) -> NDArray[Any]:
        """A copy of this rank's buffer."""
        return self._own.read(buffer_name)

    def write(self, buffer_name: str, array: NDArray[Any]) -> None:
        """Fill a state buffer of every rank, once all have ended the last step of rank 0. On other
        ranks than 0: of this rank.
        """
        if self._group.rank == 0:
            last = np.array(self.host.control["heartbeat"])
            given = {"data": array, "name": np.array(buffer_name), "heartbeat": last}
            self._errands.ask(f"input {buffer_name}", given, JOIN_TIMEOUT_S)
        self._own.write(buffer_name, array)

    def counters(self) -> NDArray[np.uint64]:
        """Of this rank."""
        return self._own.counters()

    def fault_cause(self) -> BaseException | None:
        """What a Python body of this rank raised in the last launch."""
        return self._own.fault_cause()

    def raw_trace(self) -> RawTrace:
        """Of this rank."""
        return self._own.raw_trace()

    def raw_traces(self) -> list[RawTrace]:
        """By rank; of this one alone if another does not give its own."""
        own = self._own.raw_trace()
        if self._group.rank:
            return [own]
        try:
            return [own, *map(_unpacked, self._errands.ask("a trace", {}, TRACE_WAIT_S))]
        except RankError as error:
            log.warning("%s; the trace is of rank 0 alone", error)
            return [own]

    def close(self) -> None:
        """End this rank's work, then give its memory back: once the others, too, write to it no
        more. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        if self._own.running():
            self.host.request_abort()
        while not self._own.join(1.0):
            pass  # a Python body runs to its end
        self._pages.say(Word.ENDED, self.launches)
        self._pages.say(Word.STAGE, Stage.CLOSED)
        self._errands.close()
        if self._memory is None:
            self._own.close()
            return
        free = self._others.wait_for(Stage.CLOSED)
        self._memory.unmap()
        self._pages.say(Word.STAGE, Stage.UNMAPPED)
        free = self._others.wait_for(Stage.UNMAPPED) and free
        self._own.close()
        if free:
            self._memory.free()
        else:
            log.warning("rank %d keeps its memory: another one may map it", self._group.rank)

    @contextmanager
    def _blame(self) -> Iterator[None]:
        """A GPU whose kernel met memory of a process that is gone fails; the message says whose."""
        try:
            yield
        except DeviceError as error:
            lost = self._group.lost()
            if lost is None:
                raise
            raise RankError(self._group.describe_lost(lost)) from error

    def _serve(self, question: Arrays) -> Arrays:
        """What rank 0 asks for: write an input, or give the spans."""
        if "data" not in question:
            return _packed(self._own.raw_trace())
        catch_up(self._own, int(question["heartbeat"]))
        self._own.write(str(question["name"]), question["data"])
        return {}

    def _launch_own(self, number: int) -> None:
        self._own.launches, self.launches = number - 1, number
        self._pages.say(Word.LAUNCHED, number)
        if self._group.rank != 0 and self._pages.read(0, Word.ABORTED) == number:
            self._pages.say(Word.ENDED, number)  # rank 0 waits for no one who came too late
            return
        try:
            self._own.launch()
        except BaseException:
            self._others.request_abort()
            self._pages.say(Word.ENDED, number)
            raise


class _Others:
    """The other ranks, as their hosts' words and process handles show them. A Peer."""

    def __init__(self, executor: ProcessRank, group: ProcessGroup, pages: Pages) -> None:
        self._executor, self._group, self._pages = executor, group, pages
        self.ranks = tuple(rank for rank in range(group.size) if rank != group.rank)
        self.awaited = self.ranks if group.rank == 0 else ()

    def request_abort(self) -> None:
        """See HostView.request_abort."""
        self._pages.say(Word.ABORTED, self._executor.launches)

    def own_fault(self) -> Record | None:
        """RANK_LOST if a process is gone, PEER if one ended this launch or left before it."""
        launch, fault = self._executor.launches, np.zeros((), wire.FAULT)
        lost = self._group.lost()
        if lost is not None:
            fault["kind"], fault["detail"][0] = wire.FaultKind.RANK_LOST, lost
            return fault
        if launch == 0:
            return None
        for rank in self.ranks:
            read = partial(self._pages.read, rank)
            came = read(Word.LAUNCHED) >= launch or rank == 0
            if read(Word.ABORTED) == launch or not (came or read(Word.STAGE) < Stage.CLOSED):
                fault["kind"], fault["detail"][0] = wire.FaultKind.PEER, rank
                return fault
        return None

    def is_busy(self, rank: int) -> bool:
        """Whether a rank has workers of the last launch, or will have."""
        launch, me = self._executor.launches, self._group.rank
        read = partial(self._pages.read, rank)
        if read(Word.ENDED) >= launch or read(Word.STAGE) >= Stage.CLOSED:
            return False
        # It says that it launches, then looks whether that launch was aborted; here it is the other
        # way round, so one of the two sees the other.
        if self._pages.read(me, Word.ABORTED) == launch and read(Word.LAUNCHED) < launch:
            return False
        return not self._group.is_gone(rank)

    def wait_for(self, stage: Stage) -> bool:
        """Until all others are as far, or gone. Returns: False after CLOSE_WAIT_S."""
        deadline = time.monotonic() + CLOSE_WAIT_S
        for rank in self.ranks:
            while self._pages.read(rank, Word.STAGE) < stage and not self._group.is_gone(rank):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_NAP_S)
        return True


def _packed(raw: RawTrace) -> Arrays:
    return {
        "spans": np.concatenate(raw.spans),
        "sampled": np.concatenate(raw.sampled),
        "sizes": np.array([[len(part) for part in ring] for ring in (raw.spans, raw.sampled)]),
        "summaries": raw.summaries,
        "tick_ns": np.array(raw.tick_ns),
        "dropped": np.array(raw.dropped),
    }


def _unpacked(arrays: Arrays) -> RawTrace:
    spans, sampled = (
        np.split(arrays[name], np.cumsum(sizes)[:-1])
        for name, sizes in zip(("spans", "sampled"), arrays["sizes"], strict=True)
    )
    last = float(arrays["tick_ns"]), int(arrays["dropped"])
    return RawTrace(spans, sampled, arrays["summaries"], *last)


def _check_plans(plan: Plan, group: ProcessGroup) -> None:
    digests = group.exchange(f"plan {plan.name}", group_digest(plan))
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            msg = f"the plans of ranks 0 and {rank} differ - at plan {plan.name}"
            raise PlanError(f"{msg} - start all with the same model, options and kind of device")
