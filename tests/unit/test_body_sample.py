"""The host's sample at every SIMD level: greedy, the distribution, the RNG and its faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpurt import wire
from gpurt.graphs.ops.sample import SAMPLE, sample_row, uniform
from tests.helpers.host_bodies import bodies, guarded, levels
from tests.helpers.oracle import step_rows

LEVELS = levels()
NON_FINITE = int(wire.FaultKind.NON_FINITE)


def run(
    level: str,
    logits: NDArray[np.float32],
    positions: list[int] | None = None,
    scratch_bytes: int = 1 << 20,
    **sampling: Any,
) -> tuple[list[int], int, list[int]]:
    """(tokens, FaultKind, detail): row j is sampled in slot j with the same sampling values."""
    rows, vocab = logits.shape
    slots = np.zeros(rows, wire.SLOT_STATE)
    slots["top_p"] = 1.0
    for name, value in sampling.items():
        slots[name] = value
    step = step_rows([0] * rows, positions or [0] * rows, range(rows), range(rows))
    sampled = np.full(rows, 0xFFFFFFFF, np.uint32)
    kind, detail = bodies(level).run(
        SAMPLE,
        {"logits": guarded(logits), "sampled": sampled},
        {"vocab": vocab},
        step,
        slots=slots,
        scratch_bytes=scratch_bytes,
    )
    return [int(t) for t in sampled], kind, detail


def draws(level: str, logits: NDArray[np.float32], count: int, **sampling: Any) -> NDArray[Any]:
    """Tokens of `count` positions of one request, all in one step."""
    many = np.repeat(logits[None, :], count, axis=0)
    tokens, kind, _ = run(level, many, list(range(count)), **sampling)
    assert kind == 0
    return np.array(tokens)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", [1, 2, 15, 17, 1000, 1024, 1025, 49152])
def test_temperature_zero_takes_the_largest(level: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((5, vocab)).astype(np.float32)
    logits[0, -1], logits[1, 0] = 50, 50
    tokens, kind, _ = run(level, logits)
    assert kind == 0
    assert tokens == np.argmax(logits, axis=1).tolist()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_the_lowest_index_wins_ties(level: str, temperature: float) -> None:
    logits = np.full((3, 5000), -1.0, np.float32)
    logits[0, [4999, 7, 3000]] = 2.0
    logits[1, [1030, 1029]] = 2.0
    logits[2] = -3.0
    tokens, _, _ = run(level, logits, seed=0)
    assert tokens == [7, 1029, 0]
    tokens, _, _ = run(level, logits, temperature=temperature, top_k=1)
    assert tokens == [7, 1029, 0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("column", [0, 3, 2049, 3000])
def test_nan_and_infinity_are_a_fault_that_names_row_and_column(
    level: str, bad: float, column: int
) -> None:
    logits = np.zeros((3, 3001), np.float32)
    logits[1, column] = bad
    for temperature in (0.0, 1.0):
        _, kind, detail = run(level, logits, temperature=temperature)
        assert kind == NON_FINITE
        assert detail[:3] == [1, column, 0]


@pytest.mark.parametrize("level", LEVELS)
def test_minus_infinity_masks_a_token_but_not_all(level: str) -> None:
    logits = np.full((1, 2000), -np.inf, np.float32)
    _, kind, _ = run(level, logits)
    assert kind == NON_FINITE
    logits[0, [5, 1500]] = [1.0, 2.0]
    assert run(level, logits)[0] == [1500]
    assert set(draws(level, logits[0], 200, temperature=2.0)) == {5, 1500}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocab", [100, 1000, 49152])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"top_k": 1},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_p": 0.01},
        {"top_k": 50, "top_p": 0.95},
        {"top_k": 10**6, "top_p": 0.5},
    ],
    ids=str,
)
def test_tokens_equal_the_definition_in_float64(
    level: str, vocab: int, sampling: dict[str, Any]
) -> None:
    rng = np.random.default_rng(vocab)
    count = 40 if vocab > 10000 else 200
    logits = (3 * rng.standard_normal((count, vocab))).astype(np.float32)
    positions = [int(p) for p in rng.integers(0, 8192, count)]
    values = {"temperature": 0.8, "seed": 1234567890123, **sampling}
    got, kind, _ = run(level, logits, positions, **values)
    assert kind == 0
    want = [
        sample_row(row, position=position, **values)
        for row, position in zip(logits, positions, strict=True)
    ]
    # A draw may fall on a boundary that float32 weights move by 1e-7 of the whole.
    assert sum(a != b for a, b in zip(got, want, strict=True)) <= (1 if vocab > 10000 else 0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8)])
def test_draws_follow_the_distribution(level: str, top_k: int, top_p: float) -> None:
    count, temperature = 20000, 0.7
    logits = np.linspace(0, 3, 12).astype(np.float32)
    weights = np.exp(logits.astype(np.float64) / temperature)
    weights /= weights.sum()
    keep = np.argsort(-weights)
    if top_k:
        keep = keep[:top_k]
    if top_p < 1:
        keep = keep[: int(np.searchsorted(np.cumsum(weights[keep]), top_p)) + 1]
    expected = weights[keep] / weights[keep].sum() * count
    tokens = draws(level, logits, count, temperature=temperature, top_k=top_k, top_p=top_p, seed=9)
    seen = np.bincount(tokens, minlength=12)
    assert seen.sum() == seen[keep].sum()
    chi_square = float(np.sum((seen[keep] - expected) ** 2 / expected))
    degrees = len(keep) - 1
    # Mean `degrees`, deviation sqrt(2 degrees): 5 deviations, with a fixed seed.
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)


def test_the_rng_is_splitmix64_of_seed_and_position() -> None:
    # The first output of splitmix64 from state 0 is 0xe220a8397b1dcdaf.
    assert uniform(0, 0) == (0xE220A8397B1DCDAF >> 40) / 2**24


@pytest.mark.parametrize("level", LEVELS)
def test_a_draw_is_where_the_rng_says(level: str) -> None:
    # 2^12 equal tokens: the token is the number in [0, 1) in steps of 2^-12.
    logits = np.zeros(4096, np.float32)
    for seed in (0, 1, 2**63 + 5, 2**64 - 1):
        tokens = draws(level, logits, 50, temperature=1.0, seed=seed)
        assert tokens.tolist() == [int(uniform(seed, p) * 4096) for p in range(50)]


@pytest.mark.parametrize("level", LEVELS)
def test_a_draw_depends_on_seed_and_position_alone(level: str) -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal(3000).astype(np.float32)
    together = draws(level, logits, 16, temperature=1.0, seed=77)
    for position in range(16):
        alone, _, _ = run(level, logits[None], [position], temperature=1.0, seed=77)
        assert alone == [together[position]]
        starved, _, _ = run(level, logits[None], [position], 64, temperature=1.0, seed=77)
        assert starved == alone
    assert (draws(level, logits, 16, temperature=1.0, seed=78) != together).any()


@pytest.mark.parametrize("level", LEVELS)
def test_extreme_temperatures_stay_within_the_vocabulary(level: str) -> None:
    logits = np.linspace(-5, 5, 777).astype(np.float32)
    assert set(draws(level, logits, 20, temperature=1e-30)) == {776}
    assert len(set(draws(level, logits, 200, temperature=1e30))) > 100
