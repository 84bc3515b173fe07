"""Problem: a word problem with a worked solution, and what its templates are made of.

A template is a function of a `Draw`; it tells a story, works it out step by step with a `Work`, and
returns a Problem. Everything follows from the seed. The wording of a question varies; that of a
solution is fixed by its template, because a solution is what the model learns to write.
Templates register themselves here; the stories/ folder holds them.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

# A step of a solution, as `Work` writes it and as a checker may read it back.
STEP = re.compile(r"\$?(\d+) ([-+*/]) \$?(\d+) = \$?(\d+)")
_NUMBER = re.compile(r"\d+")
_RESERVED_ONE_IN = 16


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_FEMALE = _words(
    "Ada Alice Amy Anna Bella Carla Clara Daisy Ella Emma Eva Fiona Grace Hana Holly Iris Ivy Jane "
    "Julia Kate Lena Lily Lucy Maria Maya Mia Nina Nora Olga Paula Rosa Ruth Sara Sofia Tara Zoe"
)
_MALE = _words(
    "Adam Alex Ben Carl Dan David Eli Eric Felix Frank George Henry Hugo Ian Ivan Jack Jonas Kai "
    "Leo Liam Luis Mark Max Milo Nick Noah Omar Oscar Paul Peter Ray Sam Simon Theo Tom Victor"
)
_THINGS = _words(
    "pencil notebook marble sticker balloon ribbon button shell stamp candle postcard magnet "
    "badge bead eraser crayon cup plate key spoon"
)
_FRUIT = _words("apple pear peach lemon orange plum melon mango carrot potato onion tomato pepper")
_BAKED = _words("cookie muffin cake pie bun roll pancake waffle cupcake donut")


@dataclass(frozen=True)
class Person:
    """Somebody in a story, with pronouns."""

    name: str
    he: str
    his: str
    him: str

    def __str__(self) -> str:
        """The name, so that f-strings read like the story."""
        return self.name

    @property
    def He(self) -> str:  # noqa: N802
        """The pronoun at the beginning of a sentence."""
        return self.he.capitalize()


@dataclass(frozen=True)
class Thing:
    """Something that can be counted."""

    one: str

    @property
    def many(self) -> str:
        """The plural."""
        return self.one + ("es" if self.one.endswith(("o", "ch", "sh", "x", "s")) else "s")

    def __str__(self) -> str:
        """The plural, which stories need most."""
        return self.many

    def count(self, number: int) -> str:
        """A number of them."""
        return f"{number} {self.one if number == 1 else self.many}"


@dataclass(frozen=True)
class Problem:
    """question: the user's message. solution: the reasoning. reply: the answer in a sentence, whose
    last number is `answer`. facts: numbers the question gives in words (half: 2).
    """

    template: str
    question: str
    solution: str
    reply: str
    answer: int
    facts: frozenset[int] = frozenset()


class Draw:
    """Seeded choices of a story. Two draws of people or things never give the same one."""

    def __init__(self, rng: random.Random) -> None:
        """rng: what all choices come from."""
        self.rng = rng
        self._used: set[str] = set()

    def pick(self, *options: str) -> str:
        """One wording of several."""
        return self.rng.choice(options)

    def number(self, low: int, high: int, step: int = 1) -> int:
        """A number from low to high, both included."""
        return self.rng.randrange(low, high + 1, step)

    def person(self) -> Person:
        """Somebody new."""
        if self.rng.random() < 0.5:
            return Person(self._fresh(_FEMALE), "she", "her", "her")
        return Person(self._fresh(_MALE), "he", "his", "him")

    def thing(self) -> Thing:
        """A small object."""
        return Thing(self._fresh(_THINGS))

    def fruit(self) -> Thing:
        """A fruit or vegetable."""
        return Thing(self._fresh(_FRUIT))

    def baked(self) -> Thing:
        """Something from a bakery."""
        return Thing(self._fresh(_BAKED))

    def part(self, *choices: int) -> tuple[int, str]:
        """A fraction 1/n by name."""
        n = self.rng.choice(choices or (2, 3, 4, 5))
        return n, {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth", 10: "a tenth"}[n]

    def times(self) -> tuple[int, str]:
        """A small factor by name."""
        n = self.rng.choice((2, 3, 4))
        return n, {2: "twice", 3: "three times", 4: "four times"}[n]

    def _fresh(self, names: Sequence[str]) -> str:
        while (name := self.rng.choice(names)) in self._used:
            pass
        self._used.add(name)
        return name


@dataclass
class Work:
    """A worked solution as it is written. Every step states both numbers and the result."""

    lines: list[str] = field(default_factory=list)

    def add(self, what: str, a: int, b: int) -> int:
        """A + b."""
        return self._step(what, a, "+", b, a + b)

    def sub(self, what: str, a: int, b: int) -> int:
        """A - b, never below zero."""
        assert a >= b, (what, a, b)
        return self._step(what, a, "-", b, a - b)

    def mul(self, what: str, a: int, b: int) -> int:
        """A * b."""
        return self._step(what, a, "*", b, a * b)

    def div(self, what: str, a: int, b: int) -> int:
        """A / b, which must come out whole."""
        assert a % b == 0, (what, a, b)
        return self._step(what, a, "/", b, a // b)

    def total(self, what: str, *numbers: int) -> int:
        """The sum of several numbers, one addition at a time."""
        result = numbers[0]
        for number in numbers[1:]:
            result = self.add(what, result, number)
        return result

    def done(self, question: str, reply: str, answer: int, *facts: int) -> Problem:
        """The problem whose solution this is. The template's name is filled in by `make`."""
        text = "\n".join(self.lines)
        return Problem("", question, text, reply, answer, frozenset(facts))

    def _step(self, what: str, a: int, sign: str, b: int, result: int) -> int:
        self.lines.append(f"{what}: {a} {sign} {b} = {result}.")
        return result


Template = Callable[[Draw], Problem]
TEMPLATES: dict[str, Template] = {}
HELD_OUT: dict[str, Template] = {}  # never trained on


def template(function: Template) -> Template:
    """Register a template under its name."""
    TEMPLATES[function.__name__] = function
    return function


def held_out(function: Template) -> Template:
    """Register a template that training never sees."""
    HELD_OUT[function.__name__] = function
    return function


def make(
    seed: int, *, test: bool = False, unseen: bool = False, stories: Sequence[str] = ()
) -> Problem:
    """The problem of a seed.

    test: of those that `is_reserved` keeps from training, else of the others. unseen: of the
    templates that training never sees. stories: only these templates; none named: all.
    """
    import tools.train.stories  # noqa: F401  registers all templates

    choices = HELD_OUT if unseen else TEMPLATES
    names = sorted(stories or choices)
    rng = random.Random(f"problem {seed}")
    while True:
        name = rng.choice(names)
        problem = replace(choices[name](Draw(rng)), template=name)
        if is_reserved(problem) == test:
            return problem


def is_reserved(problem: Problem) -> bool:
    """Whether a problem is for tests alone: one in sixteen, by its template and its numbers.

    So no test repeats what was trained, not even in other words and with other names.
    """
    numbers = " ".join(_NUMBER.findall(problem.solution))
    return zlib.crc32(f"{problem.template} {numbers}".encode()) % _RESERVED_ONE_IN == 0


def is_right(problem: Problem, answer: str) -> bool:
    """Whether the last number of a reply's answer is the problem's."""
    numbers = _NUMBER.findall(answer.replace(",", ""))
    return bool(numbers) and int(numbers[-1]) == problem.answer
