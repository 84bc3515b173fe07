"""sample on the GPU against the definition in graphs/ops/sample.py."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from gpurt import wire
from gpurt.graphs.ops.sample import sample_row
from tests.gpu.one_task import OneTask, Step

ROWS = 16


@cache
def runner(team_warps: int = 16) -> OneTask:
    return OneTask("sample", team_warps=team_warps)


def slot_states(count: int, **values: Any) -> np.ndarray[Any, Any]:
    states = np.zeros(count, wire.SLOT_STATE)
    states["top_p"] = 1.0
    for name, value in values.items():
        states[name] = value
    return states


def tokens(logits: np.ndarray[Any, Any], step: Step, team: int = 16) -> list[int]:
    buffer = np.full((ROWS, logits.shape[1]), np.nan, np.float32)
    buffer[: len(logits)] = logits
    out = runner(team).run([buffer, None], [logits.shape[1]], [(0, ROWS, 0, 0)], step)
    assert out[-1] is not None
    return [int(t) for t in out[-1][: len(step.sample_rows)]]


@pytest.mark.parametrize("vocab", [7, 512, 49152, 151936])
def test_greedy_takes_the_largest_and_the_lowest_of_equals(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((4, vocab)).astype(np.float32)
    logits[1, [vocab // 3, vocab - 1]] = 9.0
    logits[2] = -0.0
    logits[2, 1] = 0.0  # equal to -0: the first wins
    step = Step([0] * 4, range(4), sample_rows=[0, 1, 2, 3], slot_states=slot_states(1))
    assert tokens(logits, step) == [int(np.argmax(row)) for row in logits]


@pytest.mark.parametrize("top_k", [0, 1, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.05])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_a_draw_equals_the_definition(top_k: int, top_p: float, temperature: float) -> None:
    rng = np.random.default_rng(7)
    logits = (3 * rng.standard_normal((ROWS, 4096))).astype(np.float32)
    states = slot_states(1, temperature=temperature, top_k=top_k, top_p=top_p, seed=11)
    positions = list(range(100, 100 + ROWS))
    step = Step([0] * ROWS, positions, sample_rows=list(range(ROWS)), slot_states=states)
    got = tokens(logits, step)
    want = [
        sample_row(
            row, temperature=temperature, top_k=top_k, top_p=top_p, seed=11, position=position
        )
        for row, position in zip(logits, positions, strict=True)
    ]
    # The definition is in float64: at most one draw in this many lies on a rounding boundary.
    assert sum(a != b for a, b in zip(got, want, strict=True)) <= 1, (got, want)


def test_equal_logits_are_drawn_by_index() -> None:
    logits = np.zeros((ROWS, 1000), np.float32)
    states = slot_states(1, temperature=1.0, top_k=500, seed=3)
    step = Step([0] * ROWS, range(ROWS), sample_rows=list(range(ROWS)), slot_states=states)
    got = tokens(logits, step)
    want = [
        sample_row(logits[0], temperature=1.0, top_k=500, seed=3, position=p) for p in range(ROWS)
    ]
    assert got == want
    assert len(set(got)) > 4


def test_rows_of_several_slots_use_their_own_values() -> None:
    rng = np.random.default_rng(1)
    logits = (2 * rng.standard_normal((3, 2048))).astype(np.float32)
    states = slot_states(3)
    states["temperature"] = [0.0, 0.7, 1.3]
    states["seed"] = [0, 5, 6]
    step = Step([2, 0, 1, 1], [9, 8, 7, 8], sample_rows=[0, 1, 3], slot_states=states)
    want = [
        sample_row(logits[0], temperature=1.3, seed=6, position=9),
        sample_row(logits[1], temperature=0.0),
        sample_row(logits[2], temperature=0.7, seed=5, position=8),
    ]
    assert tokens(logits, step) == pytest.approx(want)


def test_a_team_of_one_warp_draws_the_same() -> None:
    rng = np.random.default_rng(2)
    logits = (2 * rng.standard_normal((ROWS, 49152))).astype(np.float32)
    states = slot_states(1, temperature=0.9, top_p=0.95, top_k=1000, seed=1)
    step = Step([0] * ROWS, range(ROWS), sample_rows=list(range(ROWS)), slot_states=states)
    assert tokens(logits, step, 16) == tokens(logits, step, 1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_logit_that_is_no_number_is_a_fault_with_row_and_column(value: float) -> None:
    logits = np.zeros((2, 512), np.float32)
    logits[1, 77] = value
    step = Step([0, 0], [0, 1], sample_rows=[0, 1], slot_states=slot_states(1))
    tokens(logits, step)
    fault = runner(16).fault
    assert fault["kind"] == wire.FaultKind.NON_FINITE
    assert list(fault["detail"][:2]) == [1, 77]
