"""A gate in a graph: tests hold its steps still instead of hoping that they are slow."""

from __future__ import annotations

import threading

from gpurt.body import body


class Gate:
    """Lets through as many steps of a graph as were opened: so a cancel races with nothing."""

    def __init__(self, graph):
        self.steps = threading.Semaphore(0)
        gate = body("gate", self.hold)
        graph.task(gate, [], [graph.activation("gate", [1], "f32")])

    def hold(self, out):
        if not self.steps.acquire(timeout=30):
            msg = "nobody opened the gate"
            raise TimeoutError(msg)
        out.fill(1)

    def open(self, steps=1000):
        self.steps.release(steps)
