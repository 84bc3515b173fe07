"""Progress: how long work is reported, and bars of it on a terminal.

Bars go to stderr, and show only for work that takes longer than two seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

SHOW_AFTER_S = 2.0

Progress = Callable[[str, int, int], None]  # what is going on, units done, units in total


class ProgressBars:
    """Called as `bars(what, done, total)`; a bar for each `what` that lasts. Use with `with`.

    rich is imported when the first bar is shown. One thread.
    """

    def __init__(self, *, enabled: bool | None = None) -> None:
        """Bars show if `enabled`; by default only if stderr is a terminal."""
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._started: dict[str, float] = {}
        self._bars: dict[str, Any] = {}
        self._progress: Any = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Report: `done` of `total` units of `what`."""
        if not self._enabled:
            return
        now = time.monotonic()
        began = self._started.setdefault(what, now)
        if what not in self._bars:
            if now - began < SHOW_AFTER_S or done >= total:
                return
            self._bars[what] = self._open().add_task(what, total=total)
        self._progress.update(self._bars[what], completed=done, total=total)

    def close(self) -> None:
        """Take the bars off the screen. Idempotent."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._bars.clear()
        self._started.clear()

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> Any:
        if self._progress is None:
            from rich import progress
            from rich.console import Console

            self._progress = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TextColumn("{task.percentage:>3.0f}%"),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True, force_terminal=True),
                transient=True,
            )
            self._progress.start()
        return self._progress
