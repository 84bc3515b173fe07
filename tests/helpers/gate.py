"""A gate in a graph: tests hold its steps still instead of hoping that they are slow."""

from __future__ import annotations

import threading

from gpurt.body import body

WAIT_S = 30  # then something is broken; give the runtime a longer wait time-out than that


class Gate:
    """Lets through as many steps of a graph as were opened, and tells of those that came."""

    def __init__(self, graph):
        self._arrived, self._opened = threading.Semaphore(0), threading.Semaphore(0)
        graph.task(body("gate", self._hold), [], [graph.activation("gate", [1], "f32")])

    def _hold(self, out):
        self._arrived.release()
        if not self._opened.acquire(timeout=WAIT_S):
            msg = "nobody opened the gate"
            raise TimeoutError(msg)
        out.fill(1)

    def wait(self):
        """Until one more step is held."""
        assert self._arrived.acquire(timeout=WAIT_S)

    def open(self, steps=1000):
        """Let so many steps through."""
        self._opened.release(steps)
