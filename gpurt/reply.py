"""Reply: a request's tokens as text, cut where a stop string begins. For the command line.

The device knows stop ids only. Stop strings are matched here, on the text as it comes: what could
be the beginning of one is held back, so nothing beyond a stop string is ever shown, and the
request is cancelled when one is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gpurt.channels import ChannelStream
from gpurt.errors import RequestError

if TYPE_CHECKING:
    from gpurt.channels import ChannelFormat
    from gpurt.request import Request
    from gpurt.tokenizer import TextStream, Tokenizer


class StopMatcher:
    """Passes text through until one of `stops` is complete; keeps back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises: RequestError for an empty stop string."""
        if any(not s for s in stops):
            raise RequestError("a stop string is empty - at --stop - give at least one character")
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to show now."""
        if self.found is not None:
            return ""
        self._held += text
        hits = [(at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if hits:
            at, self.found = min(hits)
            shown, self._held = self._held[:at], ""
            return shown
        keep = self._overlap()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(s) for s in self._stops), default=0)
        for length in range(min(longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(s.startswith(tail) for s in self._stops):
                return length
        return 0


class Reply:
    """One reply as it streams. Iterate once for pieces of text; then read the rest.

    token_ids: up to the token that completed a stop string. text: all that was shown.
    finish_reason: as in Result; "stop" for a stop string.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        stops: Sequence[str] = (),
        channels: ChannelFormat | None = None,
    ) -> None:
        """Without a tokenizer the pieces are token ids. channels: to show them apart."""
        if stops and tokenizer is None:
            msg = "a stop string needs a tokenizer"
            raise RequestError(f"{msg} - at --stop - this model has none: use --max-tokens")
        self.request = request
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason = ""
        self._stream: TextStream | ChannelStream | None = None
        if tokenizer is not None:
            self._stream = tokenizer.stream() if channels is None else channels.stream(tokenizer)
        self._matcher = StopMatcher(stops)

    def __iter__(self) -> Iterator[str]:
        """Pieces of text as they come. Raises: FaultError."""
        for token in self.request:
            self.token_ids.append(token)
            piece = self._piece(token)
            if piece:
                self.text += piece
                yield piece
            if self._matcher.found is not None:
                self.request.cancel()
                break
        if self._stream is not None and self._matcher.found is None:
            piece = self._matcher.push(self._stream.finish()) + self._matcher.finish()
            if piece:
                self.text += piece
                yield piece
        self.finish_reason = self.request.result().finish_reason
        if self._matcher.found is not None:
            self.finish_reason = "stop"

    @property
    def answer(self) -> str:
        """The text without reasoning and commentary: what a chat goes on with."""
        return self._stream.answer if isinstance(self._stream, ChannelStream) else self.text

    def stop(self) -> None:
        """End it now: what came stays."""
        self.request.cancel()
        self.finish_reason = self.request.result().finish_reason

    def _piece(self, token: int) -> str:
        if self._stream is None:
            return f"{' ' if len(self.token_ids) > 1 else ''}{token}"
        return self._matcher.push(self._stream.push(token))
