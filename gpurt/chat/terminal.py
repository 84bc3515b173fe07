"""What the command line's chat is shown on and typed into: a terminal, if there is one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpurt.chat.screen import MarkdownScreen, PlainScreen

if TYPE_CHECKING:
    from gpurt.chat.chat import Chat, Source
    from gpurt.chat.screen import Screen


def is_terminal() -> bool:
    """Whether somebody types and reads."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def screen() -> Screen:
    """Markdown for a terminal, text for all else."""
    if not is_terminal():
        return PlainScreen(sys.stdout)
    from rich.console import Console

    return MarkdownScreen(Console())


@contextmanager
def typed_ahead() -> Iterator[None]:
    """Meanwhile the next prompt gets what is typed while a model loads or a reply comes, as it was
    typed: unseen until then, Enter as Enter. Ctrl-C is what it was. Without a terminal: nothing.
    """
    if not is_terminal():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    inward, outward, control, local, *rest = termios.tcgetattr(sys.stdin)
    quiet = local & ~(termios.ECHO | termios.ICANON)
    changed = [inward & ~termios.ICRNL, outward, control, quiet, *rest]
    termios.tcsetattr(sys.stdin, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def source(chat: Chat, *, keeps_history: bool) -> Source:
    """The keyboard, or the lines of standard input."""
    from gpurt.chat.source import PipedSource, TypedSource, history_path

    if not is_terminal():
        return PipedSource(sys.stdin.buffer)
    return TypedSource(chat.status, history_path() if keeps_history else None)
