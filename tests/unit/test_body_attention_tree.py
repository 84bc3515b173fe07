"""Attention over a tree of proposals has, row by row, the bits of the row's own path."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt.body import StepRows
from gpurt.graphs.ops.attention import SPAN, ring_pages
from gpurt.graphs.ops.attention_commit import ATTENTION_COMMIT
from tests.helpers.host_bodies import bodies, levels
from tests.helpers.oracle import step_rows
from tests.helpers.trees import ancestor_bits, depths, random_parents
from tests.unit.test_body_attention import STATES, Case

LEVELS = levels()
SLOT, OTHER = 1, 2


def tree_step(parents: list[int], anchor: int) -> tuple[StepRows, list[int]]:
    """A block that is a tree, in front of it a row of another slot; and all rows' ancestors."""
    positions = [7, *(anchor + depth for depth in depths(parents))]
    step = step_rows([0] * len(positions), positions, [OTHER] + [SLOT] * (len(parents) + 1))
    return step, [0, *ancestor_bits(parents)]


def path_of(row: int, parents: list[int]) -> list[int]:
    path = [row]
    while path[0]:
        path.insert(0, parents[path[0] - 1])
    return path


def at(case: Case, position: int) -> tuple[int, int]:
    """The page of a position of the slot, and its place there."""
    table = case.arrays["page_table"]
    return int(table[SLOT, position // case.page % table.shape[1]]), position % case.page


def cut(case: Case, path: list[int], anchor: int) -> Case:
    """The rows of a path alone, as a chain of the same step."""
    rows = [1 + row for row in path]
    step = step_rows([0] * len(path), [anchor + i for i in range(len(path))], [SLOT] * len(path))
    alone = replace(case, step=step)
    alone.arrays = case.arrays | {name: case.arrays[name][rows].copy() for name in ("q", "kv")}
    alone.arrays["out"] = np.full_like(alone.arrays["q"][:, : case.heads * case.head_dim], np.nan)
    return alone


SHAPES = {
    "plain": ({}, 40),
    "crosses a page": ({"page": 4}, 41),
    "ring": ({"page": 4, "window": 9}, 43),
    "first": ({"page": 4}, 0),
    "bf16": ({"cache": "bf16", "qk_norm": True}, 30),
    "e4m3": ({"cache": "e4m3", "head_dim": 10, "gated": True}, 30),
    "spans": ({"context": 2 * SPAN, "splits": 2, "heads": 2, "kv_heads": 1}, SPAN - 4),
}


def tree_case(shape: str, parents: list[int], seed: int) -> tuple[Case, list[int], int]:
    options, anchor = SHAPES[shape]
    step, ancestors = tree_step(parents, anchor)
    case = Case(step, seed=seed, **({"head_dim": 16} | options))
    assert ring_pages(case.window, len(step.token), case.context, case.page)
    return case, ancestors, anchor


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_of_a_tree_has_the_bits_of_its_path(level: str, shape: str) -> None:
    rng = random.Random(len(shape))
    for seed in range(4 if shape == "spans" else 12):
        parents = random_parents(rng, 15)
        case, ancestors, anchor = tree_case(shape, parents, seed)
        got = case.run(level, ancestors=ancestors)["out"]
        other = case.run(level)["out"][0]
        assert np.array_equal(got[0], other)  # a row of no tree sees nothing of one
        for row in range(1, 16):
            path = path_of(row, parents)
            alone = cut(case, path, anchor).run(level)["out"]
            assert np.array_equal(got[1 + row], alone[-1]), (parents, row)


def cache_of(arrays: dict[str, NDArray[np.float32]], name: str, where: tuple[int, int]) -> bytes:
    return arrays[name][where[0], :, where[1]].tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_commit_leaves_the_cache_of_the_accepted_path_alone(shape: str) -> None:
    rng = random.Random(len(shape))
    library, lengths = bodies("portable"), set()
    for seed in range(12):
        parents = random_parents(rng, 15)
        case, ancestors, anchor = tree_case(shape, parents, seed)
        path = path_of(rng.randrange(16), parents)
        made = case.run("portable", ancestors=ancestors)
        tokens = np.arange(100, 117, dtype=np.uint32)  # each its own, so that one path is right
        sampled = np.zeros(17, np.uint32)
        for before, after in itertools.pairwise(path):
            sampled[1 + before] = tokens[1 + after]
        step = replace(case.step, token=tokens, sample_rows=np.arange(17, dtype=np.uint32))
        width = case.head_dim * case.arrays["k_cache"].dtype.itemsize
        per_slot = case.arrays["page_table"].shape[1]
        params = (case.kv_heads, width, case.page, per_slot)
        kind, _ = library.run(
            ATTENTION_COMMIT,
            made | {"sampled": sampled},
            dict(zip(ATTENTION_COMMIT.params, params, strict=True)),
            step,
            ancestors=ancestors,
            proposal_rows=range(2, 17),
        )
        assert kind == 0
        alone = cut(case, path, anchor).run("portable")
        first = max(0, anchor + 1 - case.window) if case.window else 0
        for name in STATES:
            for position in range(first, anchor + len(path)):
                where = at(case, position)
                assert cache_of(made, name, where) == cache_of(alone, name, where), (path, position)
        lengths.add(len(path))
    assert len(lengths) > 3
