"""Trees of proposals: the rule in plain Python, random trees, and a drafter that grows them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from gpurt.body import body
from gpurt.graph import Graph
from gpurt.graphs.ops.attention_commit import commit_paths

Fill = Callable[
    [np.ndarray, np.ndarray, np.ndarray], None
]  # sampled, proposals, parents [slots,15]


def accepted_path(
    tokens: Sequence[int], parents: Sequence[int], sampled: Sequence[int]
) -> list[int]:
    """The rows of a block that the target agrees with, from row 0, the anchor, on.

    tokens, parents: of rows 1, 2, ...; a parent is a row. sampled: after each row.
    """
    path = [0]
    while True:
        right = [
            row
            for row, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1)
            if parent == path[-1] and token == sampled[path[-1]]
        ]
        if not right:
            return path
        path.append(right[0])


def random_parents(rng: random.Random, count: int) -> list[int]:
    """Of `count` proposals: chains, stars and all between."""
    reach = rng.choice([0, 1, 2, 4, 15])
    return [rng.randint(max(0, row - reach), row) for row in range(count)]


def depths(parents: Sequence[int]) -> list[int]:
    """Of rows 0, 1, ..., row 0 being the anchor."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """As device/row_path.hpp has them: all 0 if the parents make a chain."""
    if list(parents) == list(range(len(parents))):
        return [0] * (1 + len(parents))
    bits = [1]
    for row, parent in enumerate(parents, 1):
        bits.append(bits[parent] | 1 << row)
    return [0, *bits[1:]]


def add_tree_drafter(graph: Graph, fill: Fill, proposals: int) -> Graph:
    """The graph with `fill` as its drafter, of trees."""
    assert graph.sampled is not None
    written = graph.draft(proposals, tree=True)
    assert graph.parents is not None
    with graph.at("draft"):
        commit_paths(graph)
        graph.task(body("tree_drafter", fill), [graph.sampled], [written, graph.parents])
    return graph


class Grower:
    """Knows the text of one request in slot 0, whose prompt is one step, and grows random trees
    that hold it: somewhere among wrong branches, to a random depth. Remembers what was accepted.
    """

    def __init__(self, text: Sequence[int], vocab: int, limit: int, seed: int = 0) -> None:
        self.text, self.vocab, self.limit = list(text), vocab, limit
        self.rng = random.Random(seed)
        self.made = 0
        self.tree: tuple[list[int], list[int]] = [], []
        self.paths: list[list[int]] = []

    def __call__(self, sampled: np.ndarray, proposals: np.ndarray, parents: np.ndarray) -> None:
        path = accepted_path(*self.tree, sampled.tolist())
        self.paths.append(path)
        self.made += len(path)
        self.tree = self.grow(self.text[self.made :])
        count = len(self.tree[0])
        proposals[0, 0] = count
        proposals[0, 1 : 1 + count], parents[0, :count] = self.tree

    def grow(self, ahead: list[int]) -> tuple[list[int], list[int]]:
        """Tokens and parents. What the step would not verify is left out: `ahead` ends the text."""
        count = min(self.limit, len(ahead) - 1)
        tokens: list[int] = []
        parents: list[int] = []
        right = [0]  # rows of the text, from the anchor on
        for row in range(1, count + 1):
            wanted = ahead[len(right) - 1]
            if self.rng.random() < 0.4:
                parents.append(right[-1])
                tokens.append(wanted)
                right.append(row)
            else:
                parent = self.rng.randrange(row)
                follows = right.index(parent) if parent in right else None
                parents.append(parent)
                token = self.rng.randrange(self.vocab)
                if follows is not None and token == ahead[follows]:
                    token = (token + 1) % self.vocab
                tokens.append(token)
        return tokens, parents


def wild(vocab: int, seed: int = 0) -> Fill:
    """Nonsense of every kind: tokens and parents that are none, counts beyond all bounds."""
    rng = np.random.default_rng(seed)

    def fill(sampled: np.ndarray, proposals: np.ndarray, parents: np.ndarray) -> None:
        proposals[:, 1:] = rng.integers(0, vocab, proposals[:, 1:].shape)
        proposals[:, 1:][rng.random(proposals[:, 1:].shape) < 0.03] = 0xFFFFFFFF
        proposals[:, 1:][rng.random(proposals[:, 1:].shape) < 0.2] = sampled[0]
        proposals[:, 0] = rng.choice([0, 1, 7, 15, 16, 0x7FFFFFFF, 0xFFFFFFFF], len(proposals))
        parents[:] = rng.integers(0, 16, parents.shape)
        parents[rng.random(parents.shape) < 0.1] = 0xFFFFFFFF

    return fill
