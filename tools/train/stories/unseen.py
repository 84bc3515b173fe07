"""Stories that training never sees: they show what is learnt beyond the templates."""

from __future__ import annotations

from tools.train.problem import Draw, Problem, Work, held_out


@held_out
def bus(d: Draw) -> Problem:
    start, off, on = d.number(15, 50), d.number(2, 12), d.number(2, 15)
    question = d.pick(
        f"{start} people are on a bus. At the first stop {off} get off and {on} get on. How many "
        "people are on the bus now?",
        f"A bus with {start} people stops. {off} people leave it and {on} new people enter. How "
        "many does it carry now?",
    )
    w = Work()
    left = w.sub("After some leave", start, off)
    now = w.add("Now", left, on)
    return w.done(question, f"There are {now} people on the bus.", now)


@held_out
def aquarium(d: Draw) -> Problem:
    tanks, per, sold = d.number(3, 9), d.number(4, 12), d.number(2, 11)
    question = d.pick(
        f"A pet shop has {tanks} tanks with {per} fish each. It sells {sold} fish. How many fish "
        "remain?",
        f"There are {per} fish in each of {tanks} tanks. {sold} fish are sold. How many are left?",
    )
    w = Work()
    total = w.mul("Fish", tanks, per)
    left = w.sub("Left", total, sold)
    return w.done(question, f"{left} fish are left.", left)


@held_out
def charity(d: Draw) -> Problem:
    a, b, item = d.person(), d.person(), d.baked()
    n, m, price = d.number(5, 30), d.number(5, 30), d.number(2, 9)
    question = (
        f"{a} brings {n} {item} to a sale and {b} brings {m}. All are sold for ${price} each. How "
        "much money do they raise?"
    )
    w = Work()
    total = w.add(f"All {item}", n, m)
    money = w.mul("Money", total, price)
    return w.done(question, f"They raise ${money}.", money)


@held_out
def letters(d: Draw) -> Problem:
    who, friends, pages, weeks = d.person(), d.number(2, 6), d.number(2, 5), d.number(2, 9)
    question = (
        f"{who} writes a letter of {pages} pages to each of {friends} friends every week. How many "
        f"pages does {who.he} write in {weeks} weeks?"
    )
    w = Work()
    week = w.mul("Pages in a week", pages, friends)
    total = w.mul("In all", week, weeks)
    return w.done(question, f"{who} writes {total} pages.", total)


@held_out
def elevator(d: Draw) -> Problem:
    people, trips, more = d.number(4, 12), d.number(2, 9), d.number(3, 20)
    total = people * trips + more
    question = (
        f"{total} people wait for a lift that takes {people} people at a time. {more} of them take "
        "the stairs. How many times does the lift go?"
    )
    w = Work()
    left = w.sub("For the lift", total, more)
    count = w.div("Trips", left, people)
    return w.done(question, f"The lift goes {count} times.", count)
