"""Stories about speed, time, work and ages."""

from __future__ import annotations

from tools.train.problem import Draw, Problem, Work, template


@template
def two_legs(d: Draw) -> Problem:
    who, v, t, u, s = (
        d.person(),
        d.number(3, 12),
        d.number(2, 9),
        d.number(20, 90, 10),
        d.number(2, 6),
    )
    question = d.pick(
        f"{who} hikes {t} hours at {v} miles an hour and then rides a bus for {s} hours at {u} "
        f"miles an hour. How far does {who.he} travel?",
        f"First {who} rides a bus for {s} hours at {u} miles per hour, after {t} hours on foot at "
        f"{v} miles per hour. How many miles is the whole trip?",
    )
    w = Work()
    first = w.mul("On foot", v, t)
    second = w.mul("By bus", u, s)
    total = w.add("The whole trip", first, second)
    return w.done(question, f"{who} travels {total} miles.", total)


@template
def travel_time(d: Draw) -> Problem:
    speed, hours, done = d.number(20, 90, 10), d.number(2, 9), 0
    done = d.number(10, 60, 10)
    vehicle = d.pick("train", "car", "bus", "boat", "truck")
    distance = speed * hours + done
    question = d.pick(
        f"A {vehicle} has to go {distance} miles. It has done {done} miles and goes {speed} miles "
        "an hour. How many hours are left?",
        f"Of a trip of {distance} miles a {vehicle} has finished {done}. How many more hours does "
        f"it take at {speed} miles an hour?",
    )
    w = Work()
    left = w.sub("Miles left", distance, done)
    time = w.div("Hours", left, speed)
    return w.done(question, f"It takes {time} hours.", time)


@template
def machine(d: Draw) -> Problem:
    item, rate, hours, bad = d.thing(), d.number(5, 40), d.number(2, 9), d.number(2, 9)
    question = d.pick(
        f"A machine makes {rate} {item} an hour. In {hours} hours, {bad} of them come out broken. "
        "How many good ones are there?",
        f"In {hours} hours a machine that makes {rate} {item} per hour spoils {bad}. How many "
        f"{item} are fine?",
    )
    w = Work()
    total = w.mul("Made", rate, hours)
    good = w.sub("Good", total, bad)
    return w.done(question, f"{good} {item} are good.", good)


@template
def reading(d: Draw) -> Problem:
    who, per, days, first = d.person(), d.number(5, 30), d.number(3, 12), d.number(10, 60)
    pages = per * days + first
    question = d.pick(
        f"{who} reads a book of {pages} pages. On Sunday {who.he} reads {first} pages, then {per} "
        "pages a day. How many more days does it take?",
        f"A book has {pages} pages. After the first {first} pages {who} reads {per} pages every "
        f"day. How many days does {who.he} need for the rest?",
    )
    w = Work()
    left = w.sub("Pages left", pages, first)
    count = w.div("Days", left, per)
    return w.done(question, f"{who} needs {count} days.", count)


@template
def age_later(d: Draw) -> Problem:
    a, b, age, more, years = (
        d.person(),
        d.person(),
        d.number(4, 30),
        d.number(2, 20),
        d.number(2, 15),
    )
    question = d.pick(
        f"{a} is {age} years old. {b} is {more} years older. How old will {b} be in {years} years?",
        f"{b} is {more} years older than {a}, who is {age}. What is {b}'s age after {years} years?",
    )
    w = Work()
    now = w.add(f"{b} is now", age, more)
    later = w.add("Later", now, years)
    return w.done(question, f"{b} will be {later} years old.", later)


@template
def age_sum(d: Draw) -> Problem:
    a, b, age, (n, word) = d.person(), d.person(), d.number(5, 20), d.times()
    role = d.pick("mother", "father", "aunt", "uncle", "teacher")
    question = d.pick(
        f"{a} is {age}. {a.He} has a {role} who is {word} as old. How old are the two together?",
        f"The {role} of {b} is {word} as old as {b}, who is {age}. What is the sum of their ages?",
    )
    w = Work()
    older = w.mul(f"The {role} is", age, n)
    total = w.add("Together", age, older)
    return w.done(question, f"Together they are {total} years old.", total, n)


@template
def age_back(d: Draw) -> Problem:
    a, b, then, years, (n, word) = (
        d.person(),
        d.person(),
        d.number(3, 12),
        d.number(2, 10),
        d.times(),
    )
    now = then + years
    question = d.pick(
        f"{a} is {now} years old. {years} years ago {b} was {word} as old as {a} was. How old is "
        f"{b} now?",
        f"{years} years ago {b} was {word} as old as {a}. Today {a} is {now}. What is {b}'s age?",
    )
    w = Work()
    past = w.sub(f"{a} was", now, years)
    other = w.mul(f"{b} was", past, n)
    age = w.add(f"{b} is", other, years)
    return w.done(question, f"{b} is {age} years old.", age, n)


@template
def tank(d: Draw) -> Problem:
    have, flow, minutes, out = d.number(10, 90), d.number(4, 12), d.number(3, 12), d.number(5, 20)
    what = d.pick("tank", "pool", "barrel", "tub")
    question = d.pick(
        f"A {what} holds {have} liters. {flow} liters flow in each minute for {minutes} minutes, "
        f"then {out} liters are used. How much is in it?",
        f"For {minutes} minutes a {what} with {have} liters gets {flow} liters a minute. After "
        f"{out} liters are taken out, how many liters remain?",
    )
    w = Work()
    new = w.mul("Flows in", flow, minutes)
    full = w.add("Then it holds", have, new)
    left = w.sub("Left", full, out)
    return w.done(question, f"There are {left} liters in the {what}.", left)


@template
def recipe(d: Draw) -> Problem:
    item, n, flour, k = d.baked(), d.number(4, 12), d.number(2, 9), d.number(2, 6)
    what = d.pick("eggs", "cups of flour", "spoons of sugar", "cups of milk")
    question = d.pick(
        f"A recipe for {n} {item} needs {flour} {what}. How many {what} are needed for {n * k} "
        f"{item}?",
        f"With {flour} {what} you can make {n} {item}. How many {what} do {n * k} {item} take?",
    )
    w = Work()
    batches = w.div("Batches", n * k, n)
    total = w.mul("Needed", flour, batches)
    return w.done(question, f"You need {total} {what}.", total)


@template
def minutes(d: Draw) -> Problem:
    who, hours, used, tasks = d.person(), d.number(2, 5), 0, d.number(2, 6)
    used = d.number(5, 20)
    task = d.pick("chapters", "rooms", "songs", "letters", "tests")
    question = d.pick(
        f"{who} has {hours} hours. {tasks} {task} take {who.him} {used} minutes each. How many "
        "minutes are left?",
        f"Each of {tasks} {task} takes {used} minutes. If {who} has {hours} hours, how many "
        f"minutes does {who.he} have left?",
    )
    w = Work()
    total = w.mul("Minutes", hours, 60)
    spent = w.mul("Spent", tasks, used)
    left = w.sub("Left", total, spent)
    return w.done(question, f"{left} minutes are left.", left, 60)


@template
def exercise(d: Draw) -> Problem:
    who, laps, length, weeks = d.person(), d.number(2, 9), d.number(2, 9), d.number(2, 6)
    days = d.number(2, 6)
    unit = d.pick("miles", "kilometers")
    question = d.pick(
        f"{who} runs {laps} laps of {length} {unit} on {days} days a week. How many {unit} is "
        f"that in {weeks} weeks?",
        f"A lap has {length} {unit}. {who} does {laps} laps a day, {days} days a week. How far "
        f"does {who.he} run in {weeks} weeks?",
    )
    w = Work()
    day = w.mul("In a day", laps, length)
    week = w.mul("In a week", day, days)
    total = w.mul("In all", week, weeks)
    return w.done(question, f"{who} runs {total} {unit}.", total)


@template
def workers(d: Draw) -> Problem:
    n, per, days, done = d.number(2, 9), d.number(2, 9), d.number(2, 9), 0
    done = d.number(1, 20)
    thing = d.pick("walls", "fences", "rooms", "boats", "doors")
    total = n * per * days + done
    question = d.pick(
        f"{n} workers paint {per} {thing} a day each. {done} of {total} {thing} are done. How "
        "many days do they need for the rest?",
        f"There are {total} {thing} to paint and {done} are ready. {n} workers each do {per} a "
        "day. In how many days are all ready?",
    )
    w = Work()
    left = w.sub("To do", total, done)
    day = w.mul("In a day", n, per)
    count = w.div("Days", left, day)
    return w.done(question, f"They need {count} days.", count)
