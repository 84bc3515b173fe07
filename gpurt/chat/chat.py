"""Chat: what a line means, who answers it, and how a reply ends early.

Ctrl-C while a reply comes asks the device to stop it, and raises nothing: what came stays, the chat
goes on. A second one raises, in case the first one finds nobody.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpurt.channels import ANSWER
from gpurt.chat import timeline
from gpurt.chat.commands import help_text, parse_setting, settings_commands, split_command
from gpurt.chat.conversation import Conversation, Settings, counted, load_chat, save_chat
from gpurt.errors import ChatError, GpurtError, RequestError
from gpurt.reply import Part, Reply, stats_line
from gpurt.serving import DEFAULT_MAX_TOKENS, channels_of, encode_chat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpurt.chat.screen import Screen
    from gpurt.graph import Graph
    from gpurt.loaders import Model
    from gpurt.request import Request
    from gpurt.runtime import Runtime

MIN_REPLY_TOKENS = 64  # room that a reply must have; less, and old exchanges are left out
NO_REPLY = "no reply so far - at chat - send a message first"

# Gives the next line, to begin with the text it is given; None: there is none any more.
Source = Callable[[str], str | None]


class Chat:
    """One conversation. `run` answers lines until they end. One thread."""

    def __init__(
        self,
        runtime: Runtime,
        model: Model,
        graph: Graph,
        screen: Screen,
        settings: Settings | None = None,
        *,
        system: str | None = None,
        stops: Sequence[str] = (),
    ) -> None:
        self._runtime, self._model, self._graph = runtime, model, graph
        self._screen, self._stops = screen, stops
        self._settings = Settings() if settings is None else settings
        self._conversation = Conversation(system)
        self._last: Request | None = None
        self._counted: Request | None = None  # the one that read the conversation as it is
        self._asides: list[Part] = []  # of the last reply
        self._draft = ""  # what the next line begins with
        self._edits = False  # the next message replaces the last one
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: screen.say(help_text()),
            "/clear": self._clear,
            "/system": self._system,
            "/edit": self._edit,
            "/retry": self._retry,
            "/reasoning": self._reasoning,
            "/stats": self._stats,
            "/trace": self._trace,
            "/save": self._save,
            "/load": self._load,
        }
        for name in settings_commands():
            self._commands[name] = partial(self._set, name)

    def run(self, source: Source) -> None:
        """Answer every line until they end or one is /quit."""
        while True:
            draft, self._draft = self._draft, ""
            try:
                line = source(draft)
                if line is None or line.strip() == "/quit":
                    return
                self._handle(line.strip())
            except GpurtError as error:
                self._screen.say(f"gpurt: {error}")  # the chat outlives a failed reply

    @property
    def last(self) -> Request | None:
        """The request of the last reply."""
        return self._last

    def status(self) -> str:
        """Where the chat stands, in one line, what changes most first."""
        used, speed = 0, []
        if self._counted is not None:
            stats = self._counted.stats
            used = stats.prompt_tokens + stats.completion_tokens
            if stats.tokens_per_second is not None:
                speed.append(f"{stats.tokens_per_second:.1f} tokens/s")
            if stats.accepted_per_step is not None:
                speed.append(f"{stats.accepted_per_step:.2f} a step")
        config = self._runtime.config
        where = f"{self._model.name} on {config.device}, {config.workers} workers"
        context = f"context {used} of {self._graph.context}"
        return " | ".join([context, *speed, str(self._settings), where])

    # ---- lines ---------------------------------------------------------------------------
    def _handle(self, line: str) -> None:
        edits, self._edits = self._edits, False
        if not line:
            if edits:
                self._screen.say("(the message stays as it was)")
            return
        name, text = split_command(line)
        if name:
            self._commands[name](text)
            return
        self._answer(text, instead=edits)

    def _answer(self, text: str, *, instead: bool = False) -> None:
        """Answer a message; `instead` of the last one. If that fails, all is as before."""
        before = list(self._conversation.messages)
        if instead:
            self._conversation.take_back()
        self._conversation.ask(text)
        try:
            with _interrupts() as interrupt:
                reply = self._reply(interrupt)
        except BaseException:
            self._conversation.messages = before
            raise
        self._conversation.answer(reply.answer)

    def _reply(self, interrupt: _Interrupt) -> Reply:
        request = self._last = self._counted = self._submit()
        interrupt.stop = request.cancel
        reply = Reply(request, self._model.tokenizer, self._stops, channels_of(self._model))
        self._asides = []
        self._screen.begin(self.status)
        notice = "failed"
        try:
            for part in reply.parts():
                if part.channel not in ("", ANSWER):
                    self._asides.append(part)
                self._screen.add(part)
            notice = "stopped" if reply.finish_reason == "cancelled" else ""
            if reply.finish_reason == "length":
                count = request.stats.completion_tokens
                notice = f"ends after {count} tokens; /max-tokens sets the limit"
        finally:
            self._screen.end(notice)
        return reply

    def _submit(self) -> Request:
        settings, graph = self._settings, self._graph
        wanted = settings.max_tokens or DEFAULT_MAX_TOKENS
        room = graph.context + 1 - min(wanted, MIN_REPLY_TOKENS)
        prompt, forgotten = self._conversation.fit(lambda m: encode_chat(self._model, m), room)
        if forgotten:
            self._screen.say(f"(context full: {counted(forgotten)} left out, the oldest first)")
        return self._runtime.submit(
            graph,
            prompt,
            max_tokens=min(wanted, graph.context + 1 - len(prompt)),
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            seed=settings.seed,
            stop_ids=self._model.stop_ids,
            after=self._last if self._last is not None and self._last.ended_well else None,
        )

    # ---- commands ------------------------------------------------------------------------
    def _clear(self, _: str) -> None:
        self._begin(Conversation(self._conversation.system))
        self._screen.say("(forgotten)")

    def _system(self, text: str) -> None:
        if text:
            self._begin(Conversation(text))
            self._screen.say("(system message set, conversation forgotten)")
        else:
            self._screen.say(self._conversation.system or "(the model's own)")

    def _edit(self, text: str) -> None:
        message = self._last_message()
        if text:
            self._answer(text, instead=True)
        else:
            self._draft, self._edits = message, True

    def _retry(self, _: str) -> None:
        message = self._last_message()
        if self._settings.temperature > 0:
            self._settings = replace(self._settings, seed=self._settings.seed + 1)
        self._answer(message, instead=True)

    def _last_message(self) -> str:
        if not self._conversation.messages:
            raise ChatError("no message so far - at chat - send one first")
        return self._conversation.messages[-2]["content"]

    def _set(self, name: str, text: str) -> None:
        settings = self._settings
        if text:
            settings = replace(settings, **parse_setting(name, text))  # type: ignore[arg-type]
            try:
                settings.check(self._graph.vocab)
            except RequestError as error:
                raise ChatError(str(error).replace("at submit", f"at {name}")) from error
            self._settings = settings
        value = getattr(settings, name.removeprefix("/").replace("-", "_"))
        shown = DEFAULT_MAX_TOKENS if value is None else value
        self._screen.say(f"({name.removeprefix('/')} is {shown:g})")

    def _reasoning(self, _: str) -> None:
        if not self._asides:
            self._screen.say("(the last reply has an answer alone)")
        channel = ""
        said: list[str] = []
        for part in self._asides:
            if part.channel != channel:
                channel = part.channel
                said.append(f"{chr(10) if said else ''}[{channel}]\n")
            said.append(part.text)
        if said:
            self._screen.say("".join(said))

    def _stats(self, _: str) -> None:
        stats = self._answered().stats
        self._screen.say(f"{stats_line(stats)}, {counted(self._conversation.exchanges)}")

    def _trace(self, path: str) -> None:
        trace = self._answered().trace()
        self._screen.say(timeline.show(trace, path))

    def _save(self, path: str) -> None:
        save_chat(_path(path, "/save"), self._conversation, self._settings, self._model.name)
        self._screen.say(f"(saved {counted(self._conversation.exchanges)} to {path})")

    def _load(self, path: str) -> None:
        loaded = load_chat(_path(path, "/load"), self._graph.vocab)
        conversation, self._settings, model = loaded
        self._begin(conversation)
        other = f", said by {model}" if model != self._model.name else ""
        count = counted(self._conversation.exchanges)
        self._screen.say(f"(loaded {count}{other}; {self._settings})")

    def _begin(self, conversation: Conversation) -> None:
        self._conversation, self._counted = conversation, None

    def _answered(self) -> Request:
        if self._last is None:
            raise ChatError(NO_REPLY)
        return self._last


# ---- helpers ---------------------------------------------------------------------------------
def _path(text: str, command: str) -> Path:
    if not text:
        raise ChatError(f"no file - at {command} - use {command} FILE")
    return Path(text).expanduser()


class _Interrupt:
    """What Ctrl-C does meanwhile. `stop` may come later than Ctrl-C does."""

    def __init__(self) -> None:
        self.pressed = False
        self._stop: Callable[[], None] | None = None

    @property
    def stop(self) -> Callable[[], None] | None:
        """Ends what is going on."""
        return self._stop

    @stop.setter
    def stop(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        if self.pressed:
            stop()

    def __call__(self, *_: Any) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        if self._stop is not None:
            self._stop()


@contextmanager
def _interrupts() -> Iterator[_Interrupt]:
    """Ctrl-C calls `stop`; pressed again, it raises. Only the main thread hears it."""
    interrupt = _Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
