"""Process group: processes as the ranks of one model, on one machine.

    group = from_environment()                    # None unless several processes were started
    graph = build(config, weights, tp_size=group.size, tp_rank=group.rank)
    with Runtime(group=group) as runtime:
        runtime.prepare(graph)                    # every rank, in the same order
        if group.rank: runtime.follow()           # until rank 0 closes its Runtime
        else: print(list(runtime.submit(graph, prompt)))

Owns: who the ranks are, how they meet (a Store), and that the end of a process is seen. Does not
know: the memory they share (executors/symmetric.py), and what they run. Under torchrun the Store is
torch's; nothing else of torch is needed, and without torchrun nothing of it is loaded.

A rank that gives up leaves in order: it posts its exit code, and whoever waits for it sees that.
A process that is killed posts nothing; its process handle tells.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from gpurt.errors import ConfigError, RankError
from gpurt.wire import RANKS_MAX

JOIN_TIMEOUT_S = 1800.0  # as torch: another rank may be loading a model from a slow disk
LEAVE_TIMEOUT_S = 30.0  # for the others to report and leave, too
LOST_EXIT_CODE = 2
_NAP_S = 0.001
_NAP_MAX_S = 0.02


class Store(Protocol):
    """Where ranks meet: keys that every rank sees once one has set them. A subset of
    torch.distributed.Store.
    """

    def set(self, key: str, value: bytes, /) -> object:
        """Set a key, once."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these are set. Returns at once."""

    def get(self, key: str, /) -> bytes:
        """The value of a key that is set."""


class FolderStore:
    """A Store in a folder that every rank sees: a file a key. A new, empty one for each start."""

    def __init__(self, folder: Path) -> None:
        """Raises: ConfigError if it is no folder."""
        if not folder.is_dir():
            raise ConfigError(f"no such folder - at {folder} - make it, empty, for each start")
        self._folder = folder

    def set(self, key: str, value: bytes, /) -> None:
        """See Store. Readers see all of the value or nothing."""
        partial = self._path(f"{key}.{os.getpid()}.partial")
        partial.write_bytes(value)
        partial.replace(self._path(key))

    def check(self, keys: list[str], /) -> bool:
        """See Store."""
        return all(self._path(key).exists() for key in keys)

    def get(self, key: str, /) -> bytes:
        """See Store."""
        return self._path(key).read_bytes()

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", ".")


class ProcessGroup:
    """This process as one rank of `size`. Thread-safe but for `exchange` and `leave`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        local_rank: int | None = None,
        timeout_s: float = JOIN_TIMEOUT_S,
    ) -> None:
        """Meet the others; returns once all are there. local_rank: number of this rank's GPU.
        timeout_s: how long a rank waits for another one, here and when graphs are prepared.

        Raises: ConfigError, RankError.
        """
        if not 0 <= rank < size <= RANKS_MAX:
            msg = f"rank {rank} of {size} - at the environment"
            raise ConfigError(f"{msg} - ranks count from 0, and there are at most {RANKS_MAX}")
        self.rank, self.size = rank, size
        self.local_rank = rank if local_rank is None else local_rank
        self._store, self._timeout_s, self._meetings = store, timeout_s, 0
        self._handles: dict[int, int] = {}  # of the processes of other ranks: file, rank
        self._gone: set[int] = set()
        self.processes = self._meet()

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Give every rank a value that JSON can hold. Returns: those of all ranks, by rank.

        All ranks call it as often, for the same `what`. Raises: RankError naming the rank that has
        gone, that is at something else, or did not come.
        """
        self._meetings += 1
        key = f"gpurt/{self._meetings}"
        self._call(self._store.set, f"{key}/{self.rank}", json.dumps([what, value]).encode())
        values = []
        for rank in range(self.size):
            came, answer = json.loads(self._await(f"{key}/{rank}", rank, what))
            if came != what:
                msg = f"rank {rank} is at {came!r}, rank {self.rank} at {what!r}"
                raise RankError(f"{msg} - at meeting {self._meetings} - start all the same way")
            values.append(answer)
        return values

    def lost(self) -> int | None:
        """The first rank whose process is gone, or None."""
        return min(self._find_gone(), default=None)

    def is_gone(self, rank: int) -> bool:
        """Whether the process of a rank is gone."""
        return rank in self._find_gone()

    def describe_lost(self, rank: int) -> str:
        """What to say of a rank that is gone."""
        msg = f"the process of rank {rank} ({self.processes[rank]}) is gone"
        return f"{msg} - at rank {self.rank} - see its log for why, then start all ranks again"

    def leave(self, code: int) -> int:
        """Post this process's exit code; returns once all others did or are gone, 30 s at most.

        Returns: the highest one: what every rank exits with.
        """
        codes = [code]
        try:
            self._store.set(f"gpurt/exit/{self.rank}", str(code).encode())
            deadline = time.monotonic() + LEAVE_TIMEOUT_S
            codes.extend(self._exit_code(rank, deadline) for rank in range(self.size))
        except (RuntimeError, OSError):
            pass  # who kept the store has left already
        return max(codes)

    # ---- helpers -----------------------------------------------------------------------------
    def _meet(self) -> list[int]:
        """Process ids by rank."""
        if not hasattr(os, "pidfd_open") or not hasattr(os, "memfd_create"):
            msg = "this system shares no memory by process handles"
            raise RankError(f"{msg} - at rank {self.rank} - use Linux 5.3 or newer")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        where = f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
        places = self.exchange("join", [where, os.getpid()])
        for rank, (place, process) in enumerate(places):
            if place != where:
                msg = f"rank {rank} runs on another machine or in another container"
                raise RankError(f"{msg} - at rank {self.rank} - start all ranks on one machine")
            if rank == self.rank:
                continue
            try:
                self._handles[os.pidfd_open(process)] = rank
            except ProcessLookupError:
                self._gone.add(rank)
        return [int(process) for _, process in places]

    def _await(self, key: str, rank: int, what: str) -> bytes:
        deadline, nap_s = time.monotonic() + self._timeout_s, _NAP_S
        while True:
            gone = self.lost()  # asked first: what a process set before its end is there
            if self._call(self._store.check, [key]):
                return bytes(self._call(self._store.get, key))
            if gone is not None:
                raise RankError(self.describe_lost(gone))
            if self._call(self._store.check, [f"gpurt/exit/{rank}"]):
                msg = f"rank {rank} has left"
                raise RankError(f"{msg} - at rank {self.rank}, {what} - see that rank's report")
            if time.monotonic() > deadline:
                msg = f"rank {rank} did not come within {self._timeout_s:g} s"
                raise RankError(f"{msg} - at rank {self.rank}, {what} - start all {self.size}")
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _NAP_MAX_S)

    def _exit_code(self, rank: int, deadline: float) -> int:
        key = f"gpurt/exit/{rank}"
        while True:
            gone = self.is_gone(rank)
            if self._store.check([key]):
                return int(self._store.get(key))
            if gone or time.monotonic() > deadline:
                return LOST_EXIT_CODE
            time.sleep(_NAP_S)

    def _find_gone(self) -> set[int]:
        poll = select.poll()  # one a call: two threads cannot share one
        for handle in self._handles:
            poll.register(handle, select.POLLIN)
        return self._gone | {self._handles[handle] for handle, _ in poll.poll(0)}

    def _call(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except (RuntimeError, OSError) as error:  # torch's are of RuntimeError
            msg = f"the store failed: {' '.join(str(error).split())}"
            raise RankError(f"{msg} - at rank {self.rank} - see whether torchrun lives") from error


_joined: list[ProcessGroup] = []  # a process joins once


def from_environment(variables: Mapping[str, str] | None = None) -> ProcessGroup | None:
    """The group that RANK and WORLD_SIZE say this process is of, as torchrun sets them; None if
    they are not set, or it is alone. Waits for the others. A process joins once.

    They meet in the folder GPURT_RENDEZVOUS if that is set, else through torch.distributed.
    Raises: ConfigError, RankError.
    """
    if _joined:
        return _joined[0]
    variables = os.environ if variables is None else variables
    place = find_place(variables)
    if place is None:
        return None
    rank, size = place
    local = _number(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else rank
    folder = variables.get("GPURT_RENDEZVOUS")
    store: Store
    if folder:
        store = FolderStore(Path(folder))
    elif "MASTER_ADDR" in variables:
        from gpurt.torch_store import open_store

        store = open_store()
    else:
        msg = f"RANK is {rank} of {size}, but neither MASTER_ADDR nor GPURT_RENDEZVOUS is set"
        raise ConfigError(f"{msg} - at the environment - use torchrun, or name an empty folder")
    _joined.append(ProcessGroup(store, rank, size, local_rank=local))
    return _joined[0]


def find_place(variables: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """(rank, size) of the group that the environment names, without joining it. Raises: ConfigError
    for what is no number.
    """
    variables = os.environ if variables is None else variables
    if "WORLD_SIZE" not in variables or "RANK" not in variables:
        return None
    rank, size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    return (rank, size) if size > 1 else None


def joined() -> ProcessGroup | None:
    """What `from_environment` returned, if it was called."""
    return _joined[0] if _joined else None


def _number(variables: Mapping[str, str], name: str) -> int:
    value = variables[name]
    if not value.isdecimal():
        raise ConfigError(f"{name} is {value!r} - at the environment - torchrun sets a number")
    return int(value)
