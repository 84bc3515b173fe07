"""Ranks of a process group that are threads of this process, for what needs no process to end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpurt.errors import GpurtError
from gpurt.process_group import FolderStore, ProcessGroup


def together(folder: Path, size: int, act: Callable[[ProcessGroup], Any]) -> list[Any]:
    """What `act(group)` gives on each rank, in a thread each; or the GpurtError it raised."""
    store = FolderStore(folder)

    def run(rank: int) -> Any:
        try:
            return act(ProcessGroup(store, rank, size, timeout_s=60))
        except GpurtError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
