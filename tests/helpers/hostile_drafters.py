"""Drafters for tests, as Python bodies: right, wrong, and such as no drafter should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gpurt.body import body
from gpurt.graph import Graph
from gpurt.graphs.ops.draft_ngram import committed

Fill = Callable[[np.ndarray, np.ndarray], None]  # sampled, proposals [slots, 16]


def add_python_drafter(graph: Graph, fill: Fill, proposals: int) -> Graph:
    """The graph with `fill` as its drafter."""
    assert graph.sampled is not None
    written = graph.draft(proposals)
    with graph.at("draft"):
        graph.task(body("python_drafter", fill), [graph.sampled], [written])
    return graph


class Follower:
    """Knows the text, and so what is right: for one request in slot 0 whose prompt is one step.

    right: how many proposals are right; those behind are not. `restart` before each request.
    """

    def __init__(self, text: Sequence[int], vocab: int, limit: int, right: int = 15) -> None:
        self.text, self.vocab, self.limit, self.right = list(text), vocab, limit, right
        self.restart()

    def restart(self) -> None:
        """Forget the request before."""
        self.made: list[int] = []
        self.proposed: list[int] = []

    def __call__(self, sampled: np.ndarray, proposals: np.ndarray) -> None:
        fed = [self.made[-1] if self.made else -1, *self.proposed]
        self.made += committed(fed, sampled[: len(fed)].tolist())
        at = len(self.made)
        ahead = self.text[at : at + self.limit]
        self.proposed = [
            token if i < self.right else (token + 1) % self.vocab for i, token in enumerate(ahead)
        ]
        proposals[0, 0] = len(self.proposed)
        proposals[0, 1 : 1 + len(self.proposed)] = self.proposed


def constant(token: int, count: int = 15) -> Fill:
    """Always the same token, for every slot."""

    def fill(sampled: np.ndarray, proposals: np.ndarray) -> None:
        del sampled
        proposals[:, 0] = count
        proposals[:, 1:] = token

    return fill


def repeats(sampled: np.ndarray, proposals: np.ndarray) -> None:
    """The token of the first sampled row, again and again."""
    proposals[:, 0] = 15
    proposals[:, 1:] = sampled[0]


def scattered(vocab: int, seed: int = 0) -> Fill:
    """Random tokens, a tenth of them no tokens at all, and counts of which some pass all bounds."""
    rng = np.random.default_rng(seed)

    def fill(sampled: np.ndarray, proposals: np.ndarray) -> None:
        del sampled
        proposals[:, 1:] = rng.integers(0, vocab, proposals[:, 1:].shape)
        proposals[:, 1:][rng.random(proposals[:, 1:].shape) < 0.1] = 0xFFFFFFFF
        proposals[:, 0] = rng.choice([0, 1, 7, 15, 16, 0x7FFFFFFF, 0xFFFFFFFF], len(proposals))

    return fill
