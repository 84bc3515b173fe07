"""Protocol bugs planted in the simulation are found within a bounded number of seeds."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.sim.test_protocol import simulate

# planted bug: (seeds within which it must show, what shows it). Without the race check, so that a
# wrong value or a hang has to tell, for those whose text says neither "race" nor "overtakes".
PLANTED = {
    "signal_before_data": (40, r"read stale data"),
    "rearm_without_release": (150, r"polled wrong data|no end after"),
    "list_past_drain": (60, r"no end after"),
    "gate_reopens": (80, r"another step's StepState"),
    "claim_past_drain": (60, r"no end after"),
    "counter_wraps": (40, r"no end after"),
    "lost_abort_exit": (40, r"no end after .* abort 1"),
    "no_fence": (1500, r"no end after"),
    "weak_steps_open": (40, r"races with|stale|wrong"),
    "weak_arrivals": (80, r"races with|stale|wrong"),
    "weak_slots": (100, r"races with|stale|wrong"),
    "weak_idle": (150, r"races with|stale|wrong"),
    "weak_mirror_tail": (1500, r"races with|stale|wrong"),
    "weak_submit_tail": (40, r"races with|stale|wrong"),
    "weak_token_count": (40, r"races with|stale|wrong"),
    "weak_finish": (40, r"races with|stale|wrong|without all"),
    "weak_tickets": (40, r"stale data|which lacks it|after round"),
    "publish_before_data": (40, r"stale data of its decider"),
    "round_before_count": (60, r"which lacks it|after round|stale data"),
    "absent_forgotten": (40, r"no end after"),
    "early_compensation": (120, r"read stale data|before its producer"),
    "turn_changes": (40, r"another variant|another step's|no end after|after round"),
    "round_of_steps": (40, r"no end after|after round"),
    "weak_turns": (10_000, r"no end after|another step's|another variant|after round"),
}
REPLAY = re.compile(r"^replay: make sim SEED=(\d+) CASE=(\w+)$", re.MULTILINE)


def find(program: Path, case: str, count: int) -> subprocess.CompletedProcess[str]:
    done = simulate(program, case, 1, count)
    assert done.returncode == 1, f"{count} seeds did not find it: {done.stdout}"
    return done


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_bug_is_found(case: str, sim_program: Path) -> None:
    count, symptom = PLANTED[case]
    assert re.search(symptom, find(sim_program, case, count).stdout.splitlines()[0])


def test_the_printed_command_replays_the_failure_exactly(sim_program: Path) -> None:
    found = find(sim_program, "rearm_without_release", 150)
    replay = REPLAY.search(found.stdout)
    assert replay is not None
    again = simulate(sim_program, replay[2], int(replay[1]), 1)
    assert again.stdout == found.stdout
