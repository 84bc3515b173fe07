"""Which proposals of a block are accepted: device/acceptance.hpp against the plain rule."""

from __future__ import annotations

import random

import numpy as np

from gpurt import wire
from gpurt.graphs.ops.draft_ngram import committed
from tests.helpers.host_bodies import bodies
from tests.helpers.trees import accepted_path, ancestor_bits, random_parents

SAMPLE, PROPOSAL = wire.RowFlags.SAMPLE, wire.RowFlags.PROPOSAL


def random_step(rng: random.Random) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Rows as (token, flags), and the sample rows of every block."""
    rows: list[tuple[int, int]] = []
    blocks: list[list[int]] = []
    vocab = rng.choice([1, 2, 3, 50])  # few tokens, so that many proposals are right
    for _ in range(rng.randint(1, 5)):
        rows += [(rng.randrange(vocab), 0)] * rng.choice([0, 0, 1, 4])  # of a prompt
        begin = len(rows)
        rows.append((rng.randrange(vocab), SAMPLE))
        rows += [(rng.randrange(vocab), SAMPLE | PROPOSAL) for _ in range(rng.randint(0, 15))]
        blocks.append(list(range(begin, len(rows))))
    return rows, blocks


def test_accepted_proposals_are_those_of_the_plain_rule() -> None:
    rng = random.Random(7)
    library = bodies("portable")
    seen = set()
    for _ in range(5000):
        rows, blocks = random_step(rng)
        states = np.zeros(len(rows), wire.ROW_STATE)
        states["token"], states["flags"] = zip(*rows, strict=True)
        sample_rows = np.array([r for block in blocks for r in block], np.uint32)
        vocab = 1 + max(token for token, _ in rows)
        sampled = np.array([rng.randrange(vocab) for _ in sample_rows], np.uint32)
        first = 0
        for block in blocks:
            fed = [rows[r][0] for r in block]
            made = committed(fed, sampled[first : first + len(block)].tolist())
            got = library.accept(states, sample_rows, sampled, first)
            assert got == (len(block), len(made) - 1), (fed, sampled, first)
            seen.add(got)
            first += len(block)
    assert {(16, 15), (16, 0), (1, 0), (16, 7)} <= seen


def test_accepted_rows_of_a_tree_are_those_of_the_plain_rule() -> None:
    rng = random.Random(8)
    library = bodies("portable")
    seen = set()
    for _ in range(5000):
        trees = [random_parents(rng, rng.randint(0, 15)) for _ in range(rng.randint(1, 3))]
        vocab = rng.choice([1, 2, 3, 4])
        rows = [len(tree) + 1 for tree in trees]
        states = np.zeros(sum(rows), wire.ROW_STATE)
        states["token"] = [rng.randrange(vocab) for _ in states]
        ancestors = [bits for tree in trees for bits in ancestor_bits(tree)]
        proposal = [index > 0 for count in rows for index in range(count)]
        states["flags"] = np.array(ancestors) << 16 | SAMPLE | PROPOSAL * np.array(proposal)
        sampled = np.array([rng.randrange(vocab) for _ in states], np.uint32)
        first = 0
        for tree, count in zip(trees, rows, strict=True):
            block = slice(first, first + count)
            tokens = states["token"][block][1:].tolist()
            path = accepted_path(tokens, tree, sampled[block].tolist())
            got = library.accepted_rows(
                states, np.arange(len(states), dtype=np.uint32), sampled, first
            )
            assert got == path, (tree, tokens, sampled[block])
            seen.add((len(path), path[-1] - len(path) + 1))
            first += count
    assert {(1, 0), (16, 0)} <= seen
    assert max(skipped for _, skipped in seen) > 8


def test_what_a_block_commits_is_its_targets_tokens() -> None:
    assert committed([5], [7]) == [7]
    assert committed([5, 7, 8, 9], [7, 8, 1, 4]) == [7, 8, 1]  # 9 is not 1: its 4 says nothing
    assert committed([5, 7, 8, 9], [7, 8, 9, 4]) == [7, 8, 9, 4]
    assert committed([5, 6, 8], [7, 8, 9]) == [7]
