"""The simulated memory reaches the outcomes that errors need, and none that C++ forbids."""

import subprocess
from pathlib import Path

import pytest

SEEDS = 3000

# name: outcomes (values the readers saw, in order) that must appear, and ones that never may.
EXPECTED = {
    "message_passing_relaxed": ({"00", "01", "10", "11"}, set()),
    "message_passing_no_acquire": ({"00", "01", "10", "11"}, set()),
    "message_passing_release_acquire": ({"00", "01", "11"}, {"10"}),
    "store_buffering": ({"00", "01", "10", "11"}, set()),
    "store_buffering_fenced": ({"01", "10", "11"}, {"00"}),
    "load_buffering_acquire": ({"00", "01", "10"}, {"11"}),
    "coherence_of_reads": ({"00", "01", "11"}, {"10"}),
    "coherence_through_a_third": ({"00", "01", "11"}, {"10"}),
    "independent_reads": ({"1010", "0000", "1111"}, set()),
    "release_sequence": ({"000", "211"}, {"200", "201", "210"}),
    "adds_are_exact": ({"01", "10"}, {"00", "11"}),
}


@pytest.fixture(scope="module")
def outcomes(litmus_program: Path) -> dict[str, set[str]]:
    done = subprocess.run(
        [litmus_program, str(SEEDS)], capture_output=True, text=True, check=True, timeout=60
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: set(found) for name, *found in lines}


@pytest.mark.parametrize("name", EXPECTED)
def test_exactly_the_allowed_outcomes_appear(name: str, outcomes: dict[str, set[str]]) -> None:
    must, never = EXPECTED[name]
    width = max(len(outcome) for outcome in must)
    found = {outcome[:width] for outcome in outcomes[name]}
    assert must <= found
    assert not never & found


def test_relaxed_stores_to_two_words_may_land_in_either_order(
    outcomes: dict[str, set[str]],
) -> None:
    finals = {outcome.split("/")[1] for outcome in outcomes["write_write_reordering"]}
    assert finals == {"11", "12", "21", "22"}


def test_a_seed_replays_exactly(litmus_program: Path) -> None:
    runs = [
        subprocess.run([litmus_program, "50"], capture_output=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
