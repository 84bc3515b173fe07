"""Screens: how a chat's replies and notices are shown. What is said is the Chat's business.

PlainScreen writes text as it comes: for pipes, files and tests. MarkdownScreen renders Markdown:
blocks that are complete are printed for good, the open one is redrawn below them, over a status
line. Both fold reasoning and commentary to one line each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from gpurt.channels import ANSWER

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from gpurt.reply import Part

FRAMES_PER_S = 12  # redraws of an open block
FENCE = re.compile(r"\s*(```|~~~)")
# A terminal obeys these; a model's text must not command it.
CONTROL = {c: "\ufffd" for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\n\t"}


class Screen(Protocol):
    """Where a chat is shown. One thread."""

    def say(self, text: str) -> None:
        """A notice, on lines of its own."""

    def begin(self, status: Callable[[], str]) -> None:
        """A reply begins; status: its figures so far."""

    def add(self, part: Part) -> None:
        """More of the reply."""

    def end(self, notice: str = "") -> None:
        """The reply ends, whole or not, with a word about why."""


class Folds:
    """What was said beside the answer, in one line a channel."""

    def __init__(self) -> None:
        self._channel, self._text = "", ""

    def push(self, part: Part) -> tuple[str, str]:
        """(a line about a channel that ended, text of the answer)."""
        line = self.finish() if part.channel != self._channel else ""
        self._channel = part.channel
        if part.channel in ("", ANSWER):
            return line, part.text
        self._text += part.text
        return line, ""

    def finish(self) -> str:
        """The line about a channel that ends here."""
        line = f"({self._length}; /reasoning shows it)" if self._text else ""
        self._text = ""
        return line

    @property
    def line(self) -> str:
        """About the channel that is open; empty if that is the answer."""
        return f"{self._length} ..." if self._text else ""

    @property
    def _length(self) -> str:
        words = len(self._text.split())
        return f"{self._channel}, {words} word{'' if words == 1 else 's'}"


class PlainScreen:
    """Text as it comes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._folds = Folds()

    def say(self, text: str) -> None:
        """See Screen."""
        self._write(text + "\n")

    def begin(self, status: Callable[[], str]) -> None:
        """See Screen; a pipe has no status line."""
        del status
        self._folds = Folds()

    def add(self, part: Part) -> None:
        """See Screen."""
        line, text = self._folds.push(part)
        self._write((line and line + "\n") + text)

    def end(self, notice: str = "") -> None:
        """See Screen."""
        self._write(self._folds.finish() + (notice and f" ({notice})") + "\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class MarkdownScreen:
    """Markdown on a terminal of any size, also one that is resized meanwhile."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._folds = Folds()
        self._blocks = Blocks()
        self._live: Live | None = None
        self._status: Callable[[], str] = str
        self._is_first = True

    def say(self, text: str) -> None:
        """See Screen."""
        self._console.print(text.translate(CONTROL), style="dim", markup=False, highlight=False)

    def begin(self, status: Callable[[], str]) -> None:
        """See Screen."""
        from rich.live import Live

        self._folds, self._blocks, self._status = Folds(), Blocks(), status
        self._is_first = True
        # Redrawn by rich's thread, so that what came before a pause is seen during it.
        self._live = Live(
            console=self._console,
            get_renderable=self._open_part,
            refresh_per_second=FRAMES_PER_S,
            transient=True,
        )
        self._live.start(refresh=True)

    def add(self, part: Part) -> None:
        """See Screen."""
        line, text = self._folds.push(part)
        if line:
            self.say(line)
        for block in self._blocks.push(text.translate(CONTROL)):
            self._print(block)

    def draw(self) -> None:
        """Redraw the open part now."""
        if self._live is not None:
            self._live.refresh()

    def end(self, notice: str = "") -> None:
        """See Screen."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        if line := self._folds.finish():
            self.say(line)
        if rest := self._blocks.finish():
            self._print(rest)
        if notice:
            self.say(f"({notice})")

    def _print(self, block: str) -> None:
        from rich.markdown import Markdown

        if not self._is_first:
            self._console.print()
        self._is_first = False
        self._console.print(Markdown(block))

    def _open_part(self) -> RenderableType:
        from rich.console import Group
        from rich.markdown import Markdown
        from rich.text import Text

        parts: list[RenderableType] = [] if self._is_first else [""]
        if rest := self._blocks.rest.strip("\n"):
            parts.append(Markdown(rest))
        status = "  ".join(filter(None, (self._folds.line, self._status())))
        foot = Text(status, "reverse dim", no_wrap=True, overflow="ellipsis")
        return _Tail(Group(*parts), foot)


class Blocks:
    """Cuts Markdown as it comes into blocks: at blank lines outside of fences, before a line that
    is not indented (an indented one goes on with a list).
    """

    def __init__(self) -> None:
        self.rest = ""  # the open block
        self._scanned = 0  # begin of the first line that was not looked at
        self._after_blank = False
        self._fence = ""

    def push(self, text: str) -> list[str]:
        """The blocks that this completes."""
        self.rest += text
        blocks = []
        while self._scanned < len(self.rest):
            if self._after_blank and not self.rest[self._scanned].isspace():
                blocks.append(self._take(self._scanned))
                self._after_blank = False
            end = self.rest.find("\n", self._scanned)
            if end < 0:
                break
            self._look_at(self.rest[self._scanned : end])
            self._scanned = end + 1
        return [b for b in blocks if b]

    def finish(self) -> str:
        """The last block, empty if there is nothing in it."""
        return self._take(len(self.rest))

    def _look_at(self, line: str) -> None:
        self._after_blank = not line.strip() and not self._fence
        if found := FENCE.match(line):
            if not self._fence:
                self._fence = found[1]
            elif self._fence == found[1]:
                self._fence = ""

    def _take(self, length: int) -> str:
        block, self.rest = self.rest[:length], self.rest[length:]
        self._scanned = 0
        return block.strip("\n")


class _Tail:
    """The last lines of something that may be higher than the terminal, and a line below."""

    def __init__(self, body: RenderableType, foot: RenderableType) -> None:
        self._body, self._foot = body, foot

    def __rich_console__(self, console: Console, options: Any) -> Any:
        from rich.segment import Segment

        lines = console.render_lines(self._body, options.update(height=None), pad=False)
        room = max(1, console.size.height - 2)
        for line in lines[-room:]:
            yield from line
            yield Segment.line()
        yield self._foot
