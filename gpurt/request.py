"""Request: one submission as its caller sees it: tokens as they come, cancel, result, figures.

Owns: what was read from the ring so far, and how the request ended. The ring itself belongs to
gpurt/session.py. Every method may be called from any thread; waits release the GIL.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpurt.errors import BoundError, ClosedError, GpurtError, RequestError, TraceError
from gpurt.wire import STOP_IDS_PER_REQUEST

if TYPE_CHECKING:
    from gpurt.session import Session
    from gpurt.trace import Trace

MAX_SEED = (1 << 64) - 1
# A wait comes back this often, so that Ctrl-C and a fault are seen while no token arrives.
WAIT_SLICE_S = 0.05


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when to end. temperature 0 is greedy; top_k 0 and top_p 1 are off.

    max_tokens: tokens to generate; for a plain graph, steps to run.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def check(self, vocab: int) -> None:
        """Raises: RequestError for a value that no request may have."""
        _integer("max_tokens", self.max_tokens, 1, (1 << 32) - 1)
        _integer("top_k", self.top_k, 0, (1 << 32) - 1, "0 turns it off")
        _integer("seed", self.seed, 0, MAX_SEED)
        _real("temperature", self.temperature, 0.0, math.inf, "0 is greedy")
        _real("top_p", self.top_p, 0.0, 1.0, "use more than 0, at most 1; 1 turns it off")
        if self.top_p == 0:
            raise RequestError("top_p is 0 - at submit - use more than 0, at most 1")
        if len(self.stop_ids) > STOP_IDS_PER_REQUEST:
            msg = f"{len(self.stop_ids)} stop ids, at most {STOP_IDS_PER_REQUEST} fit a request"
            raise RequestError(f"{msg} - at submit - stop on strings instead")
        for token in self.stop_ids:
            _integer("a stop id", token, 0, max(vocab - 1, 0))


@dataclass(frozen=True)
class Stats:
    """Figures of one request, so far.

    time_to_first_token_ms: from submit to the first token, None before it. tokens_per_second: of
    the tokens after the first. launches: kernel launches made for it, 0 or 1. cached_tokens: of the
    prompt, those whose K/V an earlier request had left; known once the request is done.

    With a drafter, once the request is done: accepted_per_step: tokens committed by a step that
    verified, the target's own one included. accepted_by_position: in which share of these steps
    proposal 1, 2, ... was committed; 1 and their sum make accepted_per_step. draft_ms, verify_ms:
    of such a step, what its drafter took, and all the rest; None if no trace says it.
    """

    prompt_tokens: int
    completion_tokens: int
    steps: int
    launches: int
    time_to_first_token_ms: float | None
    tokens_per_second: float | None
    cached_tokens: int = 0
    accepted_per_step: float | None = None
    accepted_by_position: tuple[float, ...] | None = None
    draft_ms: float | None = None
    verify_ms: float | None = None


@dataclass(frozen=True)
class Result:
    """How a request ended. outputs: the graph's output buffers, for a graph that makes no tokens.

    finish_reason: "stop", "length", "cancelled" or "steps"; a fault raises instead.
    """

    token_ids: list[int]
    finish_reason: str
    outputs: dict[str, NDArray[Any]] = field(default_factory=dict)


@dataclass
class Timing:
    """When things happened: on the host's monotonic clock, and on the device's own."""

    submit_ns: int = 0
    watched: bool = False  # somebody waits for the first token
    first_seen_ns: int | None = None  # only if it was watched
    begin_ns: int = 0
    first_token_ns: int = 0
    end_ns: int = 0
    last_seen_ns: int = 0


class Request:
    """One submission. Made by `Runtime.submit`, never directly; keeps its Runtime alive."""

    def __init__(
        self, session: Session, owner: object, prompt: NDArray[np.uint32], sampling: Sampling
    ) -> None:
        self.sampling = sampling
        self.prompt = prompt
        self.prompt_tokens = len(prompt)
        # The rest is written by the session, under the session's lock.
        self.entry = -1
        self.sequence = -1
        self.launches = 0
        self.launch_index = 0
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.error: GpurtError | None = None
        self.outputs: dict[str, NDArray[Any]] = {}
        self.steps = 0
        self.cached_tokens = 0
        self.first_step = 0
        self.last_step = 0
        self.verify_steps = 0  # decode steps with a drafter
        self.accepted: list[int] = []  # how many of them committed proposal 1, 2, ...
        self._draft_times: tuple[float | None, float | None] | None = None
        self.timing = Timing(submit_ns=time.monotonic_ns())
        self.session = session
        self._owner = owner

    @property
    def done(self) -> bool:
        """Whether the request has ended and all of it was read."""
        return self.finish_reason is not None

    def __iter__(self) -> Iterator[int]:
        """Token ids in order, each as soon as it is there; every iterator starts from the first.

        Raises: FaultError once the tokens that came before the fault were given.
        """
        seen = 0
        while True:
            self.session.wait_beyond(self, seen)
            while seen < len(self.tokens):
                yield self.tokens[seen]
                seen += 1
            if self.done and seen == len(self.tokens):
                break
        self._raise_error()

    def cancel(self) -> None:
        """Ask the device to end it; the tokens it made stay readable. No effect once it ended."""
        self.session.cancel(self)

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the end. Raises: FaultError, or TimeoutError (the request goes on)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.done:
            left = WAIT_SLICE_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                msg = f"no end after {timeout_s:g} s - at request {self.sequence} - wait or cancel"
                raise TimeoutError(msg)
            self.session.wait_once(self, len(self.tokens), min(left, WAIT_SLICE_S))
        self._raise_error()
        return Result(list(self.tokens), str(self.finish_reason), dict(self.outputs))

    @property
    def ended_well(self) -> bool:
        """Whether the request has ended without an error: another one may go on after it."""
        return self.done and self.error is None

    @property
    def stats(self) -> Stats:
        """Figures so far; final once `done`."""
        count, timing = len(self.tokens), self.timing
        first_ms = None
        if timing.first_seen_ns is not None:
            first_ms = (timing.first_seen_ns - timing.submit_ns) / 1e6
        elif timing.first_token_ns and timing.begin_ns:
            first_ms = (timing.first_token_ns - timing.begin_ns) / 1e6
        shares = None
        if self.verify_steps:
            shares = tuple(n / self.verify_steps for n in self.accepted)
        draft_ms, verify_ms = self._times() if shares is not None else (None, None)
        return Stats(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=count,
            steps=self.steps,
            launches=self.launches,
            time_to_first_token_ms=first_ms,
            tokens_per_second=self._rate(count),
            cached_tokens=self.cached_tokens,
            accepted_per_step=None if shares is None else 1 + sum(shares),
            accepted_by_position=shares,
            draft_ms=draft_ms,
            verify_ms=verify_ms,
        )

    def trace(self) -> Trace:
        """The spans of this request's steps that are still kept.

        Raises: TraceError if tracing is off or a later launch took the rings, ClosedError.
        """
        return self.session.trace_of(self)

    # ---- helpers -----------------------------------------------------------------------------
    def _times(self) -> tuple[float | None, float | None]:
        """Of a verify step, drafting and the rest in ms; asked of the trace once."""
        if self._draft_times is None:
            from gpurt.trace.draft import draft_times

            try:
                self._draft_times = draft_times(self.trace())
            except (TraceError, ClosedError):
                self._draft_times = None, None
        return self._draft_times

    def _rate(self, count: int) -> float | None:
        if count < 2:
            return None
        timing = self.timing
        if timing.end_ns > timing.first_token_ns > 0:
            return (count - 1) * 1e9 / (timing.end_ns - timing.first_token_ns)
        if timing.first_seen_ns is not None and timing.last_seen_ns > timing.first_seen_ns:
            return (count - 1) * 1e9 / (timing.last_seen_ns - timing.first_seen_ns)
        return None

    def _raise_error(self) -> None:
        if self.error is not None:
            # A fresh object each time: several threads may read the same failed request.
            raise type(self.error)(*self.error.args) from self.error.__cause__


def check_prompt(
    prompt: Sequence[int] | NDArray[Any], vocab: int, context: int, max_tokens: int | None
) -> tuple[NDArray[np.uint32], int]:
    """The prompt as u32, and max_tokens (None: all that the context holds).

    The last token made is never fed back, so prompt + max_tokens may exceed the context by one.
    Raises: RequestError, BoundError.
    """
    ids = np.asarray(prompt)
    if ids.size == 0:
        raise RequestError("the prompt is empty - at submit - give at least one token")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        what = f"the prompt is {ids.dtype} of shape {list(ids.shape)}"
        raise RequestError(f"{what} - at submit - give a list of token ids")
    if ids.size > context:
        what = f"the prompt has {ids.size} tokens, the context {context}"
        raise BoundError(f"{what} - at submit - shorten it, or plan a longer context")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        where = int(np.argmax(ids == bad))
        what = f"token {bad} is outside the vocabulary of {vocab}"
        raise RequestError(f"{what} - at prompt[{where}] - use the model's own tokenizer")
    room = min(context, context + 1 - int(ids.size))
    if max_tokens is None:
        return ids.astype(np.uint32), room
    if isinstance(max_tokens, int) and max_tokens > room:
        what = f"{ids.size} prompt tokens and max_tokens {max_tokens} exceed the context {context}"
        raise BoundError(f"{what} - at submit - use max_tokens <= {room}")
    return ids.astype(np.uint32), max_tokens


def _integer(what: str, value: Any, low: int, high: int, hint: str = "") -> None:
    good = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not good or not low <= int(value) <= high:
        raise RequestError(f"{what} is {value!r} - at submit - {hint or f'use {low} to {high}'}")


def _real(what: str, value: Any, low: float, high: float, hint: str) -> None:
    good = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
    if not good or not low <= float(value) <= high or math.isinf(float(value)):
        raise RequestError(f"{what} is {value!r} - at submit - {hint}")
