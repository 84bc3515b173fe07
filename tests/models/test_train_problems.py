"""The generator of word problems: seeded, right by another evaluator, with tests kept apart."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

import tools.train.stories
from tools.train.dialogue import chat
from tools.train.problem import (
    HELD_OUT,
    TEMPLATES,
    Draw,
    Problem,
    is_reserved,
    is_right,
    make,
)

ALL = {**TEMPLATES, **HELD_OUT}
DRAWS = 60
assert tools.train.stories


def fault_of(problem: Problem) -> str | None:
    """What is wrong with a solution, by reading its text: every line is one right step whose
    numbers are in the question or were worked out before, and the last result is the answer.
    """
    known = {int(number) for number in re.findall(r"\d+", problem.question)} | problem.facts
    result = None
    for line in problem.solution.split("\n"):
        found = re.fullmatch(r"[^:]+: (\d+) ([-+*/]) (\d+) = (\d+)\.", line)
        if found is None:
            return f"no step: {line}"
        a, b, result = int(found[1]), int(found[3]), int(found[4])
        exact = {
            "+": result == a + b,
            "-": result == a - b,
            "*": result == a * b,
            "/": b != 0 and result * b == a,
        }
        if not exact[found[2]]:
            return f"wrong: {line}"
        if not {a, b} <= known:
            return f"a number from nowhere: {line}"
        known.add(result)
    return None if result == problem.answer else f"ends with {result}, not {problem.answer}"


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_story_is_worked_out_right(name):
    for seed in range(DRAWS):
        problem = ALL[name](Draw(random.Random(seed)))
        assert fault_of(problem) is None, problem
        assert is_right(problem, problem.reply)
        assert problem.answer >= 0
        assert "{" not in problem.question


def test_the_evaluator_sees_what_is_wrong():
    problem = make(1)
    last = problem.solution.split("\n")[-1]
    number = re.findall(r"\d+", last)[-1]
    wrong = problem.solution.replace(f"= {number}.", f"= {int(number) + 1}.")
    assert "wrong" in (fault_of(replace(problem, solution=wrong)) or "")
    assert "ends with" in (fault_of(replace(problem, answer=problem.answer + 1)) or "")
    assert "no step" in (fault_of(replace(problem, solution="It is 7.")) or "")
    assert "nowhere" in (fault_of(replace(problem, question="How many?", facts=frozenset())) or "")


def test_a_problem_follows_from_its_seed_alone():
    assert [make(seed) for seed in range(20)] == [make(seed) for seed in range(20)]
    assert len({make(seed).question for seed in range(200)}) > 190


def test_problems_for_tests_are_none_that_is_trained():
    trained = [make(seed) for seed in range(3000)]
    tests = [make(seed, test=True) for seed in range(100)]
    unseen = [make(seed, unseen=True) for seed in range(50)]
    assert not any(is_reserved(problem) for problem in trained)
    assert all(is_reserved(problem) for problem in tests)
    numbers = {(p.template, *re.findall(r"\d+", p.solution)) for p in trained}
    assert not numbers & {(p.template, *re.findall(r"\d+", p.solution)) for p in tests}
    assert {p.template for p in unseen} == set(HELD_OUT)
    assert not {p.template for p in trained} & set(HELD_OUT)


def test_chats_train_on_no_reserved_problem():
    tests = {make(seed, test=True).question for seed in range(2000)}
    said = {exchange.user for seed in range(2000) for exchange in chat(seed)}
    assert not tests & said


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("She has 42 left.", True),
        ("She had 50 and has $42.", True),
        ("42", True),
        ("She has 420 left.", False),
        ("Of 42 she has 7.", False),
        ("I do not know.", False),
        ("", False),
    ],
)
def test_an_answer_is_its_last_number(answer, right):
    assert is_right(Problem("", "", "", "", 42), answer) is right


def test_chats_hold_talk_and_problems_in_turns():
    chats = [chat(seed, talk=0.5) for seed in range(400)]
    assert {len(exchanges) for exchanges in chats} == {1, 2, 3}
    answers = {exchange.answer for exchanges in chats for exchange in exchanges}
    assert "You are welcome!" in answers
    assert chat(7) == chat(7)
    few = {e.thought.split(":")[0] for s in range(50) for e in chat(s, 0, ("few_more",))}
    assert few == {"Now"}
