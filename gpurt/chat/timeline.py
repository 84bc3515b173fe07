"""Timeline of a reply: on the screen, in a file, or as a page in the user's browser."""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpurt.trace import Trace

HERE = "-"
DESKTOPS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")  # any of them: a browser has where to show


def show(trace: Trace, path: str) -> str:
    """Write a page and open it; or what `path` asks for. Returns: what was done, or the view.

    Raises: TraceError if the path cannot be written.
    """
    if path == HERE:
        return _rendered(trace)
    if path:
        _write(trace, Path(path).expanduser())
        return f"(wrote {path})"
    page = Path(tempfile.mkdtemp(prefix="gpurt-")) / "reply.html"
    _write(trace, page)
    if _has_browser() and webbrowser.open(page.as_uri()):
        return f"(opened {page})"
    return f"(wrote {page}: open it in a browser)"


# ---- helpers ---------------------------------------------------------------------------------
def _write(trace: Trace, path: Path) -> None:
    from gpurt.trace.page import write_html
    from gpurt.trace.perfetto import write_perfetto

    if path.suffix == ".html":
        write_html(trace, path)
    elif path.suffix == ".json":
        write_perfetto(trace, path)
    else:
        trace.save(path)


def _has_browser() -> bool:
    """Whether one would open a window: a text browser would take the terminal from the chat."""
    seen = sys.stdout.isatty() and sys.stdin.isatty()
    return seen and (sys.platform == "darwin" or any(os.environ.get(name) for name in DESKTOPS))


def _rendered(trace: Trace) -> str:
    from io import StringIO

    from rich.console import Console

    from gpurt.trace.view import show as show_view

    out = StringIO()
    show_view(trace, Console(file=out, width=Console().width))
    return out.getvalue().rstrip()
