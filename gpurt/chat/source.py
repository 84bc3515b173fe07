"""Sources: where a chat's lines come from, a pipe or the keyboard.

A line is text; bytes that are no UTF-8 are refused with their place, and the next line is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gpurt.chat.commands import COMMANDS, Command
from gpurt.errors import ChatError

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

PROMPT = "> "
CONTINUED = "  "


class PipedSource:
    """Every line of a pipe or file."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._number = stream, 0

    def __call__(self, draft: str) -> str | None:
        """The next line. Raises: ChatError for one that is no UTF-8."""
        del draft
        raw = self._stream.readline()
        if not raw:
            return None
        self._number += 1
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            what = f"byte {error.start} of line {self._number} is not UTF-8"
            raise ChatError(f"{what} - at standard input - convert it; not sent") from None


class TypedSource:
    """A terminal: edited lines of one or more rows, with history and completion.

    status: the line below. history: where lines are kept; None: nowhere.
    """

    def __init__(self, status: Callable[[], str], history: Path | None) -> None:
        from prompt_toolkit import PromptSession

        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            prompt_continuation=CONTINUED,
            key_bindings=_keys(),
            completer=_completer(),
            complete_while_typing=False,
            history=_history(history),
            bottom_toolbar=status,
        )

    def __call__(self, draft: str) -> str | None:
        """The next line; empty after Ctrl-C. Raises: ChatError for one that is no UTF-8."""
        try:
            text = self._session.prompt(PROMPT, default=draft)
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None
        return checked_text(text)


def checked_text(text: str) -> str:
    """The text of a terminal. Raises: ChatError where the terminal sent bytes that are no UTF-8;
    they come as lone surrogates.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"character {error.start} came as a byte that is not UTF-8"
        raise ChatError(f"{what} - at the terminal - set it to UTF-8; not sent") from None
    return text


def history_path() -> Path:
    """Where typed lines are kept between chats: in the user's state folder."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "gpurt" / "chat_history"


# ---- helpers ---------------------------------------------------------------------------------
def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter (which is Escape, Enter) and Ctrl-J go to a new row."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    def send(press: Any) -> None:
        press.current_buffer.validate_and_handle()

    def new_row(press: Any) -> None:
        press.current_buffer.insert_text("\n")

    keys.add("enter")(send)
    keys.add("escape", "enter")(new_row)
    keys.add("c-j")(new_row)
    return keys


def _completer() -> Completer:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    paths = PathCompleter(expanduser=True)

    class Commands(Completer):
        """Names of commands, then what they take."""

        def get_completions(self, document: Any, press: Any) -> Iterable[Completion]:
            """See Completer."""
            text = document.text_before_cursor
            name, space, argument = text.partition(" ")
            if not text.startswith("/") or "\n" in text:
                return
            if not space:
                for command in COMMANDS:
                    if command.name.startswith(name):
                        yield _named(command, len(name))
                return
            for command in COMMANDS:
                if command.name == name and command.takes_path:
                    yield from paths.get_completions(Document(argument), press)
                elif command.name == name:
                    for value in command.suggestions:
                        if value.startswith(argument):
                            yield Completion(value, -len(argument))

    def _named(command: Command, typed: int) -> Completion:
        return Completion(command.name, -typed, display_meta=command.about.splitlines()[0])

    return Commands()


def _history(path: Path | None) -> History:
    """Kept in a file that only its owner reads; where that cannot be, in memory."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            """A line that is no text is not kept; a full disk does not end the chat."""
            try:
                string.encode("utf-8")
                super().store_string(string)
            except (UnicodeEncodeError, OSError):
                return

    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return Kept(str(path))
