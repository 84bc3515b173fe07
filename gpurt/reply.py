"""Reply: a request's tokens as text, cut where a stop string begins. For the command line.

The device knows stop ids only. Stop strings are matched here, on the text as it comes: what could
be the beginning of one is held back, so nothing beyond a stop string is ever shown, and the
request is cancelled when one is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gpurt.channels import ANSWER, ChannelStream
from gpurt.errors import RequestError

if TYPE_CHECKING:
    from gpurt.channels import ChannelFormat
    from gpurt.request import Request, Stats
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


class Part(NamedTuple):
    """Text of one channel; a model without channels has one, named by the empty string."""

    channel: str
    text: str


class Reply:
    """One reply as it streams. Iterate once, over it or over `parts`; then read the rest.

    token_ids: up to the token that completed a stop string. text: all that was shown, each channel
    under its name in brackets. answer: the text without reasoning and commentary: what a chat goes
    on with. finish_reason: as in Result; "stop" for a stop string.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer | None,
        stops: Sequence[str] = (),
        channels: ChannelFormat | None = None,
    ) -> None:
        """Without a tokenizer the pieces are token ids. channels: to tell them apart."""
        if stops and tokenizer is None:
            msg = "a stop string needs a tokenizer"
            raise RequestError(f"{msg} - at --stop - this model has none: use --max-tokens")
        self.request = request
        self.token_ids: list[int] = []
        self.text = ""
        self.answer = ""
        self.finish_reason = ""
        self._stream: TextStream | ChannelStream | None = None
        if tokenizer is not None:
            self._stream = tokenizer.stream() if channels is None else channels.stream(tokenizer)
        self._matcher = StopMatcher(stops)

    def __iter__(self) -> Iterator[str]:
        """Pieces of text as they come. Raises: FaultError."""
        channel = ""
        for part in self.parts():
            heading = ""
            if part.channel != channel:
                channel = part.channel
                heading = f"{self.text and chr(10) * 2}[{channel}]\n"
            self.text += heading + part.text
            yield heading + part.text

    def parts(self) -> Iterator[Part]:
        """The same by channel, without headings; no part is empty. Raises: FaultError."""
        channel = ""
        for token in self.request:
            self.token_ids.append(token)
            piece = self._push(token)
            now = self._stream.channel if isinstance(self._stream, ChannelStream) else ""
            if now != channel:
                # A stop string lies within one channel.
                yield from self._part(channel, self._matcher.finish())
                channel = now
            yield from self._part(channel, self._matcher.push(piece))
            if self._matcher.found is not None:
                self.request.cancel()
                break
        if self._stream is not None and self._matcher.found is None:
            rest = self._matcher.push(self._stream.finish()) + self._matcher.finish()
            yield from self._part(channel, rest)
        self.finish_reason = self.request.result().finish_reason
        if self._matcher.found is not None:
            self.finish_reason = "stop"

    def _part(self, channel: str, text: str) -> Iterator[Part]:
        if not text:
            return
        if channel in ("", ANSWER):
            self.answer += text
        yield Part(channel, text)

    def _push(self, token: int) -> str:
        if self._stream is None:
            return f"{' ' if len(self.token_ids) > 1 else ''}{token}"
        return self._stream.push(token)


def stats_line(stats: Stats) -> str:
    """Figures of a reply in one line."""
    parts = [f"{stats.prompt_tokens} prompt tokens, {stats.completion_tokens} tokens"]
    if stats.time_to_first_token_ms is not None:
        parts.append(f"first after {stats.time_to_first_token_ms:.1f} ms")
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.accepted_per_step is not None:
        parts.append(f"{stats.accepted_per_step:.2f} tokens a step")
    launches = "no launch" if stats.launches == 0 else f"{stats.launches} launch"
    return ", ".join([*parts, launches])
