"""Data: batches of packed chats, each a pure function of (seed, index).

Nothing is stored: worker processes make batches ahead, and a run that is resumed at step n asks for
batch n. Chats never repeat. Knows no model and no torch, so that workers start quickly.

A row holds whole chats beside each other; document numbers them from 1, and 0 is padding.
"""

from __future__ import annotations

import bisect
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.train.dialogue import chat
from tools.train.text import Document, Encoder

_CHATS_PER_BATCH = 1 << 14  # more than any batch holds, so that batches share none
_MISSES_MAX = 64  # chats that fit nowhere before a batch counts as full


@dataclass(frozen=True)
class Batch:
    """ids: [rows, length] uint16. document: [rows, length], 0 for padding. position: within the
    document. reply: what the model says itself.
    """

    ids: NDArray[np.uint16]
    document: NDArray[np.uint16]
    position: NDArray[np.uint16]
    reply: NDArray[np.bool_]


@dataclass(frozen=True)
class Shape:
    """What a batch is made from, beside its index. packed: many chats a row, or one.
    talk, stories: as in `dialogue.chat`.
    """

    tokenizer: Path
    seed: int
    rows: int
    length: int
    packed: bool = True
    talk: float = 0.1
    stories: tuple[str, ...] = ()


def make_batch(shape: Shape, index: int, encoder: Encoder) -> Batch:
    """Batch `index`."""
    rows, length = shape.rows, shape.length
    batch = Batch(
        np.zeros((rows, length), np.uint16),
        np.zeros((rows, length), np.uint16),
        np.zeros((rows, length), np.uint16),
        np.zeros((rows, length), np.bool_),
    )
    first = (shape.seed << 40) + index * _CHATS_PER_BATCH
    room = [(length, row) for row in range(rows)]  # sorted
    count, misses, seed = np.zeros(rows, np.uint16), 0, first
    while misses < _MISSES_MAX and room:
        document = encoder.document(chat(seed, shape.talk, shape.stories))
        seed += 1
        at = bisect.bisect_left(room, (len(document.ids), -1))
        if at == len(room):
            misses += 1
            continue
        left, row = room.pop(at)
        count[row] += 1
        _place(batch, row, length - left, int(count[row]), document)
        if shape.packed:
            bisect.insort(room, (left - len(document.ids), row))
    return batch


class Stream:
    """Batches from `start` on, made ahead by `workers` processes; 0: made here. Use with `with`."""

    def __init__(self, shape: Shape, start: int = 0, workers: int | None = None) -> None:
        """workers: None leaves one core to the trainer."""
        self._shape, self._next = shape, start
        self._workers = max(0, (os.cpu_count() or 1) - 1) if workers is None else workers
        self._pool: ProcessPoolExecutor | None = None
        self._ahead: deque[Future[Batch]] = deque()
        if self._workers:
            # Not forked: a process that has used CUDA, or has threads, must not be.
            self._pool = ProcessPoolExecutor(
                self._workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(shape,),
            )
        else:
            self._encoder = Encoder(shape.tokenizer)

    def __iter__(self) -> Iterator[Batch]:
        """Never ends."""
        while True:
            if self._pool is None:
                yield make_batch(self._shape, self._next, self._encoder)
                self._next += 1
                continue
            while len(self._ahead) < 3 * self._workers:
                self._ahead.append(self._pool.submit(_work, self._next))
                self._next += 1
            yield self._ahead.popleft().result()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


# ---- helpers ---------------------------------------------------------------------------------
def _place(batch: Batch, row: int, begin: int, number: int, document: Document) -> None:
    end = begin + len(document.ids)
    batch.ids[row, begin:end] = document.ids
    batch.document[row, begin:end] = number
    batch.position[row, begin:end] = np.arange(end - begin)
    batch.reply[row, begin:end] = document.reply


_shape: Shape
_encoder: Encoder


def _begin(shape: Shape) -> None:
    global _shape, _encoder  # a worker process has one of each
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which saves first
    _shape, _encoder = shape, Encoder(shape.tokenizer)


def _work(index: int) -> Batch:
    return make_batch(_shape, index, _encoder)
