"""A model and a runtime that answer at once and as they are told, so that a chat's own work shows.

    python -m tests.helpers.chat_double FOLDER [--no-history] [--small]

is a chat on the terminal with them; with --small, its context is of 120 tokens, a character each.
Its replies by message:

    hold    "holding ", then nothing until Ctrl-C, or until FOLDER/gate is there; then "released"
    md      Markdown: a heading, bold words, code
    long    a paragraph of 60 words
    else    "N characters, sum S" of the message
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

from gpurt.chat import Chat, terminal
from gpurt.graph import Graph
from gpurt.request import Result, Stats
from tests.helpers.hand_trace import hand_trace

MARKDOWN = "# Title\n\nSome **bold** words.\n\n```python\nprint(1)\n\nprint(2)\n```\n\nLast line."
LONG = " ".join(f"word{i}" for i in range(60))
POLL_S = 0.02


class Words:
    """A tokenizer of single characters."""

    def encode(self, text, *, control=True):
        del control
        return [ord(c) for c in text]

    def stream(self):
        return self

    def push(self, token):
        return chr(token)

    def finish(self):
        return ""


class Template:
    """A line a message, the role by its first letter."""

    def encode(self, tokenizer, messages):
        return tokenizer.encode("".join(f"{m['role'][0]}:{m['content']}\n" for m in messages))


class FakeModel:
    name, path, stop_ids = "fake", "nowhere", ()
    tokenizer, chat = Words(), Template()


class FakeRequest:
    """Gives its text; then holds, if it has a gate, until that is there or it is cancelled."""

    def __init__(self, text, *, error=None, gate=None, during=None, reason="stop"):
        self.tokens = [ord(c) for c in text]
        self.error, self.gate, self.during, self.reason = error, gate, during, reason
        self.cancelled = threading.Event()
        self.stats = Stats(3, len(text), len(text), 0, 1.5, 42.0)

    ended_well = True

    def __iter__(self):
        yield from self.tokens
        if self.during is not None:
            self.during()
        if self.error is not None:
            raise self.error
        if self.gate is not None:
            while not self.gate.exists() and not self.cancelled.wait(POLL_S):
                pass
            if not self.cancelled.is_set():
                yield from map(ord, "released")

    def cancel(self):
        self.cancelled.set()

    def result(self):
        return Result(self.tokens, "cancelled" if self.cancelled.is_set() else self.reason)

    def trace(self):
        return hand_trace(3)


class FakeRuntime:
    """Answers "ok1", "ok2" ..., or what `next` holds; keeps the prompts as text."""

    config = SimpleNamespace(device="host", workers=2)

    def __init__(self):
        self.prompts, self.next, self.options = [], [], {}

    def submit(self, graph, prompt, **options):
        del graph
        self.prompts.append("".join(chr(t) for t in prompt))
        self.options = options
        return self.next.pop(0) if self.next else FakeRequest(f"ok{len(self.prompts)}")


class ScriptedRuntime(FakeRuntime):
    """Answers by message, as the module says."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def submit(self, graph, prompt, **options):
        del graph, options
        text = "".join(map(chr, prompt))
        message = text[text.rindex("u:") + 2 : -1]
        if message == "hold":
            return FakeRequest("holding ", gate=self.folder / "gate")
        told = {"md": MARKDOWN, "long": LONG}
        about = f"{len(message)} characters, sum {sum(map(ord, message))}"
        return FakeRequest(told.get(message, about))


def main() -> None:
    folder, *options = sys.argv[1:]
    context = 120 if "--small" in options else 30_000
    graph = Graph("fake", context=context, vocab=0x110000)
    runtime = ScriptedRuntime(Path(folder))
    chat = Chat(runtime, FakeModel(), graph, terminal.screen())
    with terminal.typed_ahead():
        chat.run(terminal.source(chat, keeps_history="--no-history" not in options))


if __name__ == "__main__":
    main()
