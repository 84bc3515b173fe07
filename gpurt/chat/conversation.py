"""Conversation: what was said, in pairs of a message and its answer, and the file that keeps it.

The file is JSON, so that other programs can read and write it:

    {"format": "gpurt chat", "version": 1, "model": "smollm2", "system": null,
     "settings": {"temperature": 0.7, ...}, "messages": [{"role": "user", "content": "Hi"}, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gpurt.errors import BoundError, ChatError, RequestError
from gpurt.json_file import read_json_file
from gpurt.request import Sampling

FORMAT = "gpurt chat"
VERSION = 1
ROLES = ("user", "assistant")


@dataclass(frozen=True)
class Settings:
    """Sampling of every reply. max_tokens None: as many as `gpurt run` makes."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self, vocab: int) -> None:
        """Raises: RequestError for a value that no request may have."""
        limit = 1 if self.max_tokens is None else self.max_tokens
        Sampling(limit, self.temperature, self.top_k, self.top_p, self.seed).check(vocab)

    def __str__(self) -> str:
        """What differs from greedy decoding, in a few words."""
        if self.temperature == 0:
            return "greedy"
        parts = [f"temperature {self.temperature:g}"]
        parts += [f"top-k {self.top_k}"] if self.top_k else []
        parts += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        return ", ".join([*parts, f"seed {self.seed}"])


@dataclass
class Conversation:
    """system: None for the model's own. messages: of users and assistants in turn."""

    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def exchanges(self) -> int:
        """Messages that have their answer."""
        return len(self.messages) // 2

    def framed(self) -> list[dict[str, str]]:
        """All messages, the system's first."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def ask(self, text: str) -> None:
        """A message without an answer so far."""
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """The answer to the last message."""
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> str | None:
        """Forget the last message and its answer, if it has one. Returns: the message."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        return self.messages.pop()["content"] if self.messages else None

    def fit(
        self, encode: Callable[[Sequence[dict[str, str]]], list[int]], capacity: int
    ) -> tuple[list[int], int]:
        """Forget the oldest exchanges until the chat has at most `capacity` tokens; the system
        message and the last message stay. Returns: its ids, and how many exchanges were forgotten.

        Raises: BoundError if the last message alone is too long; then nothing is forgotten.
        """
        kept = list(self.messages)
        while True:
            prompt = encode(replace(self, messages=kept).framed())
            if len(prompt) <= capacity:
                forgotten = (len(self.messages) - len(kept)) // 2
                self.messages = kept
                return prompt, forgotten
            if len(kept) < 3:
                what = f"the message has {len(prompt)} tokens with its frame, room is {capacity}"
                raise BoundError(f"{what} - at chat - shorten it, or use a larger --context")
            del kept[:2]


def counted(exchanges: int) -> str:
    """`1 exchange`, `2 exchanges`."""
    return f"{exchanges} exchange{'' if exchanges == 1 else 's'}"


def save_chat(path: str | Path, conversation: Conversation, settings: Settings, model: str) -> None:
    """Write the file. Raises: ChatError if the path cannot be written."""
    record = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "system": conversation.system,
        "settings": asdict(settings),
        "messages": conversation.messages,
    }
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"cannot write the chat: {error.strerror}"
        raise ChatError(f"{what} - at {path} - choose another path") from error


def load_chat(path: str | Path, vocab: int) -> tuple[Conversation, Settings, str]:
    """Conversation, settings and the model's name. Raises: ChatError naming what is wrong."""
    record = read_json_file(path, "the chat", ChatError, "pass what /save wrote")
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ChatError(f'no "format": "{FORMAT}" - at {path} - pass what /save wrote')
    version = record.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        what = f"chat file of version {version}, this gpurt reads up to {VERSION}"
        raise ChatError(f"{what} - at {path} - update gpurt")
    settings = _settings(record.get("settings", {}), vocab, path)
    system = record.get("system")
    if not isinstance(system, str | None):
        raise _wrong("system", system, path)
    conversation = Conversation(system, _messages(record.get("messages"), path))
    return conversation, settings, str(record.get("model", ""))


# ---- helpers ---------------------------------------------------------------------------------
def _messages(values: Any, path: str | Path) -> list[dict[str, str]]:
    if not isinstance(values, list):
        raise _wrong("messages", values, path)
    found = []
    for place, value in enumerate(values):
        role = ROLES[place % 2]
        if not isinstance(value, dict) or value.get("role") != role:
            raise _wrong(f"messages[{place}]", value, path, f"its role must be {role}")
        content = value.get("content")
        if not isinstance(content, str):
            raise _wrong(f"messages[{place}].content", content, path)
        found.append({"role": role, "content": content})
    if len(found) % 2:
        what = f"message {len(found) - 1} has no answer"
        raise ChatError(f"{what} - at {path} - end with an assistant's message")
    return found


def _settings(values: Any, vocab: int, path: str | Path) -> Settings:
    known = {f.name for f in fields(Settings)}
    if not isinstance(values, dict) or values.keys() - known:
        raise _wrong("settings", values, path, f"known are {', '.join(sorted(known))}")
    settings = Settings(**values)
    try:
        settings.check(vocab)
    except RequestError as error:
        raise ChatError(str(error).replace("at submit", f"at settings of {path}")) from error
    return settings


def _wrong(
    where: str, value: Any, path: str | Path, hint: str = "see what /save writes"
) -> ChatError:
    shown = json.dumps(value)[:40]
    return ChatError(f"{where} is {shown} - at {path} - {hint}")
