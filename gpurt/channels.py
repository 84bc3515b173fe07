"""Channels: the chat format of Muse models, and a reply cut into reasoning, commentary and answer.

A turn is `<|start|>`, a header, `<|message|>`, the content and an end; the header is the role and,
in the assistant's turns, ` to=` a receiver. A prompt ends after `<|start|>assistant`; the model
writes the rest:

   to=self<|message|>REASONING<|eom|><|start|>assistant to=user<|message|>ANSWER<|eot|>

The format is data: a model whose tokenizer has these four control tokens speaks it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpurt.tokenizer import Tokenizer

ANSWER = "answer"
_LABELS = {"user": ANSWER, "self": "reasoning", "commentary": "commentary"}
_RECEIVER = re.compile(r"to=(\S+)")


@dataclass(frozen=True)
class ChannelFormat:
    """Names of the control tokens. eom ends a message of a turn, eot the turn."""

    start: str = "<|start|>"
    message: str = "<|message|>"
    eom: str = "<|eom|>"
    eot: str = "<|eot|>"

    @property
    def tokens(self) -> tuple[str, ...]:
        """All that a tokenizer must have."""
        return (self.start, self.message, self.eom, self.eot)

    def __call__(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a chat, up to where the assistant's reply begins."""
        return "".join(text for text, _ in self._pieces(messages))

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a chat. A control token's name inside a message stays text."""
        ids: list[int] = []
        for text, control in self._pieces(messages):
            if control:
                found = tokenizer.id_of(text)
                assert found is not None, "a format is chosen by its tokens"
                ids.append(found)
            else:
                ids += tokenizer.encode(text, control=False)
        return ids

    def stream(self, tokenizer: Tokenizer) -> ChannelStream:
        """A detokeniser for one reply."""
        return ChannelStream(self, tokenizer)

    def _pieces(self, messages: Sequence[Mapping[str, str]]) -> Iterable[tuple[str, bool]]:
        for message in messages:
            to = " to=user" if message["role"] == "assistant" else ""
            yield self.start, True
            yield f"{message['role']}{to}", False
            yield self.message, True
            yield message["content"], False
            yield self.eot, True
        yield self.start, True
        yield "assistant", False


class ChannelStream:
    """Ids in, text out, in whole characters. channel: where the text that `push` returned belongs;
    empty before the first message. One thread, one reply.
    """

    def __init__(self, form: ChannelFormat, tokenizer: Tokenizer) -> None:
        """A reply begins within the header of its first message."""
        ids = {name: tokenizer.id_of(name) for name in form.tokens}
        self._begins, self._says = ids[form.start], ids[form.message]
        self._ends = {ids[form.eom], ids[form.eot]}
        self._tokenizer, self._text = tokenizer, tokenizer.stream()
        self._header: str | None = ""
        self.channel = ""

    def push(self, token: int) -> str:
        """The text that this token completes."""
        if token == self._begins or token in self._ends:
            rest = self._text.finish() if self._header is None else ""
            self._header, self._text = "", self._tokenizer.stream()
            return rest
        if token == self._says:
            self.channel = self._receiver((self._header or "") + self._text.finish())
            self._header, self._text = None, self._tokenizer.stream()
            return ""
        piece = self._text.push(token)
        if self._header is None:
            return piece
        self._header += piece
        return ""

    def finish(self) -> str:
        """What is left at the end. A reply that never named a channel is text as it is."""
        rest = self._text.finish()
        if self._header is None:
            return rest
        unsaid = self._header + rest
        self._header = ""
        return "" if self.channel else unsaid

    def _receiver(self, header: str) -> str:
        found = _RECEIVER.search(header)
        receiver = found.group(1) if found else "user"
        return _LABELS.get(receiver, f"tool {receiver}")
