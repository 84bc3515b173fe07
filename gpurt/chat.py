"""Chat: a conversation in the terminal, or through a pipe.

Owns: history, commands, what Ctrl-C and Ctrl-D mean. Every turn is one request that carries the
whole chat; when that no longer fits the context, the oldest exchanges are left out, and it says so.

  Ctrl-C   stops a reply and keeps the chat; in an empty line it does nothing
  Ctrl-D   leaves
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from gpurt.errors import BoundError, GpurtError
from gpurt.reply import Reply
from gpurt.serving import DEFAULT_MAX_TOKENS, channels_of, encode_chat

if TYPE_CHECKING:
    from gpurt.graph import Graph
    from gpurt.loaders import Model
    from gpurt.request import Request
    from gpurt.runtime import Runtime

HELP = """\
/help           this list
/reset          forget the conversation
/system TEXT    set the system message and forget the conversation; alone: show it
/stats          figures of the last reply
/trace [FILE]   timeline of the last reply; with FILE, save it for gpurt trace
/quit           leave (Ctrl-D too); Ctrl-C stops a reply"""
MIN_REPLY_TOKENS = 64  # room that a reply must have; less, and old exchanges are left out


@dataclass(frozen=True)
class ChatOptions:
    """Sampling of every reply."""

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stops: Sequence[str] = ()
    system: str | None = None


class Chat:
    """One conversation. `run` reads lines until the end."""

    def __init__(
        self, runtime: Runtime, model: Model, graph: Graph, options: ChatOptions, out: TextIO
    ) -> None:
        self._runtime, self._model, self._graph = runtime, model, graph
        self._options, self._out = options, out
        self._system = options.system
        self._messages: list[dict[str, str]] = []
        self._last: Request | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._say(HELP),
            "/reset": self._reset,
            "/system": self._set_system,
            "/stats": self._stats,
            "/trace": self._trace,
        }

    def run(self, lines: Iterator[str]) -> None:
        """Answer every line until they end or one is /quit."""
        for raw in lines:
            line = raw.strip()
            if line == "/quit":
                return
            try:
                self._handle(line)
            except GpurtError as error:
                self._say(f"gpurt: {error}")  # the chat outlives a failed reply
            except KeyboardInterrupt:
                self._forget_unanswered()
                self._say("(stopped)")

    @property
    def last(self) -> Request | None:
        """The request of the last reply."""
        return self._last

    # ---- lines ---------------------------------------------------------------------------
    def _handle(self, line: str) -> None:
        if not line:
            return
        if not line.startswith("/"):
            self._answer(line)
            return
        name, _, argument = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            self._say(f"{name} is no command; /help lists them")
        else:
            command(argument.strip())

    def _answer(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        try:
            self._last = self._submit()
            model = self._model
            reply = Reply(self._last, model.tokenizer, self._options.stops, channels_of(model))
            stopped = self._stream(reply)
        except GpurtError:
            self._forget_unanswered()
            raise
        self._messages.append({"role": "assistant", "content": reply.answer})
        self._say(" (stopped)" if stopped else "")

    def _forget_unanswered(self) -> None:
        if self._last is not None:
            self._last.cancel()
        if self._messages and self._messages[-1]["role"] == "user":
            self._messages.pop()

    def _stream(self, reply: Reply) -> bool:
        """Print the reply as it comes. Returns whether Ctrl-C stopped it."""
        try:
            for piece in reply:
                self._out.write(piece)
                self._out.flush()
        except KeyboardInterrupt:
            reply.stop()
            return True
        except GpurtError:
            self._say("")  # the error comes on a line of its own
            raise
        return False

    def _submit(self) -> Request:
        options, graph = self._options, self._graph
        wanted = options.max_tokens or DEFAULT_MAX_TOKENS
        prompt = self._fit(graph.context + 1 - min(wanted, MIN_REPLY_TOKENS))
        return self._runtime.submit(
            graph,
            prompt,
            max_tokens=min(wanted, graph.context + 1 - len(prompt)),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            stop_ids=self._model.stop_ids,
        )

    def _fit(self, capacity: int) -> list[int]:
        """Ids of the chat; oldest exchanges are forgotten until it has at most `capacity`."""
        forgotten = 0
        while True:
            system = [{"role": "system", "content": self._system}] if self._system else []
            prompt = encode_chat(self._model, [*system, *self._messages])
            if len(prompt) <= capacity:
                break
            if len(self._messages) < 3:
                what = f"the message has {len(prompt)} tokens with its frame, room is {capacity}"
                raise BoundError(f"{what} - at chat - shorten it, or use a larger --context")
            del self._messages[:2]
            forgotten += 1
        if forgotten:
            plural = "exchange" if forgotten == 1 else "exchanges"
            self._say(f"(context full: the oldest {forgotten} {plural} left out)")
        return prompt

    # ---- commands ------------------------------------------------------------------------
    def _reset(self, _: str) -> None:
        self._messages.clear()
        self._say("(forgotten)")

    def _set_system(self, text: str) -> None:
        if text:
            self._system = text
            self._messages.clear()
            self._say("(system message set, conversation forgotten)")
        else:
            self._say(self._system or "(the model's own)")

    def _stats(self, _: str) -> None:
        if self._last is None:
            self._say("(no reply yet)")
            return
        stats = self._last.stats
        self._say(stats_line(stats) + f", {len(self._messages) // 2} exchanges")

    def _trace(self, path: str) -> None:
        if self._last is None:
            self._say("(no reply yet)")
            return
        trace = self._last.trace()
        if path:
            trace.save(Path(path))
            self._say(f"(saved to {path})")
            return
        from rich.console import Console

        from gpurt.trace.view import show

        show(trace, Console(file=self._out))

    def _say(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()


def stats_line(stats: Any) -> str:
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


def input_lines(prompt: str) -> Iterator[str]:
    """Lines of the terminal, edited and with history; or of a pipe, whatever its bytes are."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        for line in sys.stdin.buffer:
            yield line.decode("utf-8", errors="replace")
        return
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    words = WordCompleter(
        ["/help", "/reset", "/system", "/stats", "/trace", "/quit"], sentence=True
    )
    session: PromptSession[str] = PromptSession(completer=words, complete_while_typing=False)
    while True:
        try:
            yield session.prompt(prompt)
        except KeyboardInterrupt:
            continue  # the line is dropped, the chat goes on
        except EOFError:
            return
