"""Phases: where the time of a case goes, as its parts report their progress."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpurt.progress import Progress


class Phases:
    """A Progress that passes on what it hears, and keeps the seconds of each `what`."""

    def __init__(
        self, case: str, progress: Progress, tell: Callable[[str], None] | None = None
    ) -> None:
        """tell: called with one line at the begin of every phase."""
        self._case, self._progress, self._tell = case, progress, tell
        self._first = self._began = time.monotonic()
        self._what = ""
        self._seconds: dict[str, float] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        """Report: `done` of `total` units of `what`. Another `what` ends the one before."""
        if what != self._what:
            now = self._ended()
            self._what = what
            if self._tell is not None:
                self._tell(f"{self._case}: {now - self._first:.1f} s: {what}")
        self._progress(what, done, total)

    def note(self) -> str:
        """The seconds of every phase, in the order of their first begin."""
        self._ended()
        return "seconds: " + ", ".join(f"{what} {s:.1f}" for what, s in self._seconds.items() if s)

    # ---- helpers -------------------------------------------------------------------------
    def _ended(self) -> float:
        now = time.monotonic()
        if self._what:
            self._seconds[self._what] = self._seconds.get(self._what, 0.0) + now - self._began
        self._began = now
        return now
