"""What the command line's chat is shown on and typed into: a terminal, if there is one."""

from __future__ import annotations

import sys
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


def source(chat: Chat, *, keeps_history: bool) -> Source:
    """The keyboard, or the lines of standard input."""
    from gpurt.chat.source import PipedSource, TypedSource, history_path

    if not is_terminal():
        return PipedSource(sys.stdin.buffer)
    return TypedSource(chat.status, history_path() if keeps_history else None)
