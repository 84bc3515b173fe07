"""Stories put together at random: somebody has some of a thing, then two to four things happen.

Kinds of happenings and their order are drawn, so there are thousands of structures. What follows
from one step is the number that the next begins with.
"""

from __future__ import annotations

from collections.abc import Callable

from tools.train.problem import Draw, Person, Problem, Thing, Work, template

# Each takes what there is and returns a sentence and what there is then.
Happening = Callable[[Draw, Work, Person, Thing, int, set[int]], tuple[str, int]]
_MAX = 400  # beyond it, nothing multiplies


def _gets(d: Draw, w: Work, who: Person, item: Thing, have: int, _: set[int]) -> tuple[str, int]:
    n = d.number(2, 40)
    verb = d.pick("finds", "gets", "buys", "wins")
    return f"{who.He} {verb} {item.count(n)}.", w.add("After getting more", have, n)


def _loses(d: Draw, w: Work, who: Person, item: Thing, have: int, _: set[int]) -> tuple[str, int]:
    if have < 2:
        return _gets(d, w, who, item, have, _)
    n = d.number(1, have // 2)
    verb = d.pick("loses", "gives away", "sells", "throws away")
    return f"{who.He} {verb} {item.count(n)}.", w.sub("After losing some", have, n)


def _parcels(d: Draw, w: Work, who: Person, item: Thing, have: int, _: set[int]) -> tuple[str, int]:
    n, per = d.number(2, 9), d.number(2, 9)
    pack = d.pick("bags", "boxes", "packs")
    verb = d.pick("brings", "buys", "opens")
    new = w.mul(f"In the {pack}", n, per)
    return f"{who.He} {verb} {n} {pack} of {per} {item}.", w.add("With those", have, new)


def _friends(d: Draw, w: Work, who: Person, item: Thing, have: int, _: set[int]) -> tuple[str, int]:
    n = d.number(2, 6)
    each = d.number(1, max(1, have // (2 * n)))
    if n * each > have:
        return _gets(d, w, who, item, have, _)
    gone = w.mul("Given to friends", n, each)
    verb = d.pick("gives", "hands", "sends")
    return f"{who.He} {verb} {n} friends {each} each.", w.sub("After the gifts", have, gone)


def _half(
    d: Draw, w: Work, who: Person, item: Thing, have: int, facts: set[int]
) -> tuple[str, int]:
    divisors = [n for n in (2, 3, 4, 5) if have % n == 0 and have >= 2 * n]
    if not divisors:
        return _gets(d, w, who, item, have, facts)
    n, word = d.part(*divisors)
    facts.add(n)
    gone = w.div("The part that goes", have, n)
    verb = d.pick("gives away", "sells", "loses")
    return f"{who.He} {verb} {word} of the {item}.", w.sub("After that", have, gone)


def _doubles(
    d: Draw, w: Work, who: Person, item: Thing, have: int, facts: set[int]
) -> tuple[str, int]:
    if have > _MAX // 4:
        return _loses(d, w, who, item, have, facts)
    n, word = d.rng.choice(((2, "doubles"), (3, "triples")))
    facts.add(n)
    return f"{who.He} {word} what {who.he} has.", w.mul("Grown to", have, n)


def _brother(
    d: Draw, w: Work, who: Person, _item: Thing, have: int, _: set[int]
) -> tuple[str, int]:
    n, m = d.number(2, 20), d.number(2, 20)
    a, b = d.person(), d.person()
    new = w.add("From the two", n, m)
    return f"{a} gives {who.him} {n} and {b} gives {who.him} {m}.", w.add("With those", have, new)


_HAPPENINGS: tuple[Happening, ...] = (_gets, _loses, _parcels, _friends, _half, _doubles, _brother)


def _tell(d: Draw, count: int) -> Problem:
    who, item, have = d.person(), d.thing(), d.number(4, 60)
    w, facts, sentences, number = Work(), set[int](), [], have
    last: Happening | None = None
    for _ in range(count):
        happening = d.rng.choice([h for h in _HAPPENINGS if h is not last])
        sentence, number = happening(d, w, who, item, number, facts)
        sentences.append(sentence)
        last = happening
    start = d.pick(
        f"{who} has {item.count(have)}.",
        f"{who} owns {item.count(have)}.",
        f"{who} starts with {item.count(have)}.",
    )
    end = d.pick(
        f"How many {item} does {who.he} have now?",
        f"How many {item} does {who} have in the end?",
        f"How many {item} are there at the end?",
    )
    question = " ".join([start, *sentences, end])
    reply = f"{who} has {item.count(number)} in the end."
    return w.done(question, reply, number, *facts)


@template
def chain_of_two(d: Draw) -> Problem:
    return _tell(d, 2)


@template
def chain_of_three(d: Draw) -> Problem:
    return _tell(d, 3)


@template
def chain_of_four(d: Draw) -> Problem:
    return _tell(d, 4)
