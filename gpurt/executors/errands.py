"""Errands: what rank 0 has the other processes do while they follow it, and what they bring back.

    rank 0: file <- question; ASKED = n         another, in `attend`: sees n, does it
            their files, once ANSWERED == n                           file <- answer; ANSWERED = n

A question and an answer are arrays by name, as numpy stores them (.npz), in a memfd a process that
the others keep open: they may be large (spans), and come seldom (a trace, an input). A question
that rank 0 gave up waiting for may be overwritten while it is read; its number and the checksums
tell. Does not know: what is asked.
"""

from __future__ import annotations

import io
import os
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpurt.errors import RankError
from gpurt.executors.shared import Pages, Stage, Word
from gpurt.process_group import ProcessGroup

Arrays = Mapping[str, NDArray[Any]]

_NUMBER = "number"
_NAP_S = 0.0005


class Errands:
    """This process's end of them. One thread at a time may ask, or answer."""

    def __init__(self, group: ProcessGroup, pages: Pages) -> None:
        """Made by all ranks together. Raises: RankError."""
        self._group, self._pages, self._number = group, pages, 0
        self._lock = threading.Lock()  # another thread may close
        own = os.memfd_create("gpurt")
        tickets = group.exchange("errands", own)
        self._files = [
            own if rank == group.rank else _open(f"/proc/{process}/fd/{file}", rank)
            for rank, (process, file) in enumerate(zip(group.processes, tickets, strict=True))
        ]

    def ask(self, what: str, question: Arrays, wait_s: float) -> list[Arrays]:
        """By rank 0. Returns: the answers of ranks 1, 2, ...

        Raises: RankError for one that is gone, has left, or had not answered after `wait_s`.
        """
        self._number += 1
        self._put(question)
        self._pages.say(Word.ASKED, self._number)
        deadline = time.monotonic() + wait_s
        return [self._answer_of(rank, what, deadline) for rank in range(1, self._group.size)]

    def answer(self, serve: Callable[[Arrays], Arrays]) -> None:
        """By the others, now and then: do what rank 0 asks for, if it does."""
        asked = self._pages.read(0, Word.ASKED)
        if asked == self._number:
            return
        with self._lock:
            question = self._get(0, asked) if self._files else None
            if question is not None:  # else the next one is being written
                reply = serve(question)
                self._number = asked
                self._put(reply)
                self._pages.say(Word.ANSWERED, asked)

    def close(self) -> None:
        """Close the files. Idempotent."""
        with self._lock:
            while self._files:
                os.close(self._files.pop())

    # ---- helpers -----------------------------------------------------------------------------
    def _answer_of(self, rank: int, what: str, deadline: float) -> Arrays:
        while True:
            gone = self._group.is_gone(rank)  # asked first: what it did before its end is there
            left = self._pages.read(rank, Word.STAGE) >= Stage.CLOSED
            if self._pages.read(rank, Word.ANSWERED) >= self._number:
                found = self._get(rank, self._number)
                assert found is not None
                return found
            if gone:
                raise RankError(self._group.describe_lost(rank))
            if left or time.monotonic() > deadline:
                msg = f"rank {rank} {'has left' if left else 'does not answer'} - at rank 0, {what}"
                raise RankError(f"{msg} - every other rank must be in Runtime.follow()")
            time.sleep(_NAP_S)

    def _put(self, arrays: Arrays) -> None:
        stored, file = io.BytesIO(), self._files[self._group.rank]
        named: dict[str, Any] = {**arrays, _NUMBER: np.array(self._number)}
        np.savez(stored, **named)
        os.ftruncate(file, 0)
        os.pwrite(file, stored.getbuffer(), 0)

    def _get(self, rank: int, number: int) -> Arrays | None:
        """Of a rank's file, if it has the whole of that number."""
        file = self._files[rank]
        stored = io.BytesIO(os.pread(file, os.fstat(file).st_size, 0))
        try:
            with np.load(stored, allow_pickle=False) as opened:
                arrays = dict(opened)
        except (ValueError, EOFError, OSError, zipfile.BadZipFile):
            return None
        return arrays if arrays.pop(_NUMBER) == number else None


def _open(path: str, rank: int) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        msg = f"cannot open the errands of rank {rank}: {error.strerror}"
        raise RankError(f"{msg} - at {path} - run all ranks as one user") from error
