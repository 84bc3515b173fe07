"""Stories about things that are collected, packed, shared and compared."""

from __future__ import annotations

from tools.train.problem import Draw, Problem, Work, template


@template
def few_more(d: Draw) -> Problem:
    who, item, have, more = d.person(), d.thing(), d.number(2, 9), d.number(2, 9)
    question = d.pick(
        f"{who} has {have} {item} and gets {more} more. How many {item} does {who.he} have now?",
        f"There are {have} {item} on the table. {who} adds {more}. How many are there?",
    )
    w = Work()
    total = w.add("Now", have, more)
    return w.done(question, f"There are {total} {item}.", total)


@template
def few_less(d: Draw) -> Problem:
    who, item, have, less = d.person(), d.thing(), d.number(6, 18), d.number(2, 6)
    question = d.pick(
        f"{who} has {have} {item} and loses {less}. How many {item} does {who.he} have left?",
        f"Of {have} {item} on the table {who} takes {less}. How many are left?",
    )
    w = Work()
    left = w.sub("Left", have, less)
    return w.done(question, f"{left} {item} are left.", left)


@template
def gave_away(d: Draw) -> Problem:
    a, b, item, have = d.person(), d.person(), d.thing(), d.number(20, 99)
    give, lose = d.number(3, have // 2), d.number(2, have // 3)
    question = d.pick(
        f"{a} has {have} {item}. {a.He} gives {give} to {b} and loses {lose}. How many {item} does "
        f"{a.he} have left?",
        f"Out of {have} {item}, {a} hands {b} {give} and drops {lose} on the way. How many remain?",
    )
    w = Work()
    left = w.sub("After the gift", have, give)
    left = w.sub("After the loss", left, lose)
    return w.done(question, f"{a} has {left} {item} left.", left)


@template
def packs(d: Draw) -> Problem:
    who, item, n, per, loose = (
        d.person(),
        d.thing(),
        d.number(2, 12),
        d.number(3, 12),
        d.number(2, 30),
    )
    box = d.pick("box", "pack", "bag", "tin")
    boxes = box + ("es" if box == "box" else "s")
    question = d.pick(
        f"{who} has {n} {boxes} with {per} {item} each and {loose} more on the table. How many "
        f"{item} does {who.he} have?",
        f"There are {per} {item} in a {box}. {who} owns {n} {boxes} and {loose} single {item}. "
        "How many is that in all?",
    )
    w = Work()
    packed = w.mul(f"In the {boxes}", n, per)
    total = w.add("In all", packed, loose)
    return w.done(question, f"{who} has {total} {item}.", total)


@template
def share_equally(d: Draw) -> Problem:
    who, item, n, each, keep = (
        d.person(),
        d.baked(),
        d.number(3, 9),
        d.number(2, 12),
        d.number(1, 12),
    )
    total = n * each + keep
    question = d.pick(
        f"{who} bakes {total} {item}, keeps {keep}, and shares the rest equally among {n} friends. "
        "How many does each friend get?",
        f"Of {total} {item} {who} puts {keep} aside. {n} children share the others evenly. How "
        f"many {item} are there for each child?",
    )
    w = Work()
    rest = w.sub("To share", total, keep)
    share = w.div("For each", rest, n)
    return w.done(question, f"Each gets {share} {item}.", share)


@template
def fraction_of(d: Draw) -> Problem:
    who, item, (n, word) = d.person(), d.fruit(), d.part()
    total, more = n * d.number(3, 20), d.number(2, 20)
    question = d.pick(
        f"{who} picks {total} {item} and eats {word} of them. Then {who.he} picks {more} more. How "
        f"many {item} does {who.he} have now?",
        f"A basket holds {total} {item}. {who} takes out {word} of them and puts in {more} others. "
        "How many are in the basket?",
    )
    w = Work()
    gone = w.div("Taken", total, n)
    left = w.sub("Left", total, gone)
    now = w.add("Now", left, more)
    return w.done(question, f"There are {now} {item} now.", now, n)


@template
def more_than(d: Draw) -> Problem:
    a, b, item, have, more = d.person(), d.person(), d.thing(), d.number(5, 60), d.number(2, 40)
    question = d.pick(
        f"{a} has {have} {item}. {b} has {more} more than {a}. How many {item} do they have "
        "together?",
        f"{b} owns {more} more {item} than {a}, who owns {have}. How many do the two have in all?",
    )
    w = Work()
    other = w.add(f"{b} has", have, more)
    both = w.add("Together", have, other)
    return w.done(question, f"Together they have {both} {item}.", both)


@template
def times_as_many(d: Draw) -> Problem:
    a, b, item, (n, word) = d.person(), d.person(), d.thing(), d.times()
    have = d.number(4, 40)
    question = d.pick(
        f"{a} has {have} {item} and {b} has {word} as many. How many more {item} does {b} have "
        f"than {a}?",
        f"{b} collected {word} as many {item} as {a}. {a} has {have}. By how many is {b} ahead?",
    )
    w = Work()
    other = w.mul(f"{b} has", have, n)
    more = w.sub("The difference", other, have)
    return w.done(question, f"{b} has {more} more {item}.", more, n)


@template
def three_people(d: Draw) -> Problem:
    a, b, c, item, (n, word) = d.person(), d.person(), d.person(), d.thing(), d.times()
    have, less = d.number(6, 30), d.number(2, 5)
    question = d.pick(
        f"{a} has {have} {item}. {b} has {word} as many as {a}, and {c} has {less} fewer than {a}. "
        f"How many {item} do all three have?",
        f"{b} has {word} as many {item} as {a}. {c} has {less} fewer than {a}. If {a} has {have}, "
        "how many are there altogether?",
    )
    w = Work()
    second = w.mul(f"{b} has", have, n)
    third = w.sub(f"{c} has", have, less)
    total = w.total("Together", have, second, third)
    return w.done(question, f"All three have {total} {item}.", total, n)


@template
def seats(d: Draw) -> Problem:
    rows, per = d.number(5, 20), d.number(4, 12)
    taken = d.number(5, rows * per - 5)
    place = d.pick("theatre", "hall", "bus", "tent", "stadium", "classroom")
    question = d.pick(
        f"A {place} has {rows} rows of {per} seats. {taken} seats are taken. How many are free?",
        f"{taken} people sit in a {place} with {rows} rows of {per} seats each. How many seats are "
        "empty?",
    )
    w = Work()
    total = w.mul("Seats", rows, per)
    free = w.sub("Free", total, taken)
    return w.done(question, f"{free} seats are free.", free)


@template
def dozens(d: Draw) -> Problem:
    who, n, used = d.person(), d.number(2, 9), d.number(3, 20)
    item = d.pick("eggs", "roses", "rolls", "lemons")
    question = d.pick(
        f"{who} buys {n} dozen {item} and uses {used} of them. How many are left?",
        f"After using {used} of {n} dozen {item}, how many {item} does {who} have?",
    )
    w = Work()
    total = w.mul(f"All {item}", n, 12)
    left = w.sub("Left", total, used)
    return w.done(question, f"{left} {item} are left.", left, 12)


@template
def class_percent(d: Draw) -> Problem:
    percent = d.rng.choice((10, 20, 25, 50))
    parts = 100 // percent
    total = parts * d.number(3, 15)
    what = d.pick("walk to school", "play chess", "have a pet", "like music", "can swim")
    question = d.pick(
        f"A school group has {total} children. {percent}% of them {what}. How many do not?",
        f"{percent}% of {total} students {what}. How many students are the others?",
    )
    w = Work()
    w.div(f"{percent}% is one part of", 100, percent)
    some = w.div("Those who do", total, parts)
    others = w.sub("The others", total, some)
    return w.done(question, f"It is {others}.", others, 100)


@template
def garden(d: Draw) -> Problem:
    who, rows, per, each = d.person(), d.number(3, 9), d.number(3, 9), d.number(2, 9)
    plant = d.pick("tomato", "pepper", "rose", "bean", "melon")
    fruit = "flowers" if plant == "rose" else "fruits"
    question = d.pick(
        f"{who} plants {rows} rows of {per} {plant} plants. Each plant gives {each} {fruit}. How "
        f"many {fruit} are there?",
        f"In {who}'s garden there are {rows} rows with {per} {plant} plants each, and every plant "
        f"bears {each} {fruit}. How many {fruit} is that?",
    )
    w = Work()
    plants = w.mul("Plants", rows, per)
    total = w.mul(f"All {fruit}", plants, each)
    return w.done(question, f"There are {total} {fruit}.", total)


@template
def teams(d: Draw) -> Problem:
    a, b, size = d.number(10, 40), d.number(10, 40), d.number(3, 9)
    b += -(a + b) % size
    question = d.pick(
        f"{a} girls and {b} boys form teams of {size}. How many teams are there?",
        f"A camp has {a} girls and {b} boys. How many teams of {size} can they make?",
    )
    w = Work()
    total = w.add("Children", a, b)
    count = w.div("Teams", total, size)
    return w.done(question, f"There are {count} teams.", count)


@template
def twice_then(d: Draw) -> Problem:
    who, item, have, more = d.person(), d.thing(), d.number(5, 40), d.number(3, 30)
    n, word = d.rng.choice(((2, "doubles"), (3, "triples")))
    question = d.pick(
        f"{who} has {have} {item}. {who.He} {word} {who.his} collection and then finds {more} "
        "more. How many are there now?",
        f"First {who} {word} {who.his} {have} {item}, then {who.he} gets {more} as a present. How "
        f"many {item} does {who.he} have?",
    )
    w = Work()
    bigger = w.mul("Grown to", have, n)
    now = w.add("Now", bigger, more)
    return w.done(question, f"{who} has {now} {item} now.", now, n)


@template
def shelves(d: Draw) -> Problem:
    n, per, gone, back = d.number(3, 12), d.number(5, 12), d.number(5, 14), d.number(2, 9)
    place = d.pick("library", "shop", "school", "club")
    question = d.pick(
        f"A {place} has {n} shelves with {per} books each. {gone} books are lent and {back} come "
        "back. How many books are there now?",
        f"There are {n} shelves of {per} books in a {place}. People take {gone} and bring back "
        f"{back}. How many books does it have now?",
    )
    w = Work()
    total = w.mul("Books", n, per)
    left = w.sub("After lending", total, gone)
    now = w.add("Now", left, back)
    return w.done(question, f"There are {now} books now.", now)


@template
def legs(d: Draw) -> Problem:
    a, b = d.number(2, 15), d.number(2, 15)
    four, two = d.pick("cows", "dogs", "goats", "horses"), d.pick("hens", "ducks", "geese")
    question = d.pick(
        f"A farm has {a} {four} and {b} {two}. How many legs do they have together?",
        f"There are {a} {four} and {b} {two} in a yard. How many legs is that?",
    )
    w = Work()
    first = w.mul(f"Legs of {four}", a, 4)
    second = w.mul(f"Legs of {two}", b, 2)
    total = w.add("Together", first, second)
    return w.done(question, f"They have {total} legs.", total, 4, 2)
