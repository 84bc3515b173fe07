"""Watchdog: a thread that looks after kernels while requests are in flight and nobody reads.

It turns faults into errors, and launches again for requests that were queued when a kernel had to
yield. It sleeps while nothing is in flight. It knows sessions, not the Runtime, so that a Runtime
nobody holds can be freed.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpurt.session import Session

INTERVAL_S = 0.02

log = logging.getLogger("gpurt")


class Watchdog:
    """Watches `sessions`, a list that its owner changes under its own lock."""

    def __init__(self, sessions: list[Session]) -> None:
        self._sessions = sessions
        self._wakeup = threading.Condition()
        self._busy = False
        self._stopped = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Something was submitted."""
        with self._wakeup:
            self._busy = True
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(
                    target=self._run, name="gpurt-watchdog", daemon=True
                )
                self._thread.start()
            self._wakeup.notify_all()

    def stop(self) -> None:
        """End the thread and wait for it. Idempotent."""
        with self._wakeup:
            self._stopped = True
            self._wakeup.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._wakeup:
                # What came while this thread was looking around must not wait for a call.
                if not self._stopped:
                    self._wakeup.wait(INTERVAL_S if self._busy else None)
                if self._stopped:
                    return
                self._busy = False
            for session in list(self._sessions):
                try:
                    session.tend()
                except Exception:  # the next look may do better; readers look for themselves
                    log.exception("the watchdog could not look after %s", session.plan.name)
                if session.in_flight:
                    self._busy = True
