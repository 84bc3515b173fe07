"""Stories about prices, wages and savings, in whole dollars."""

from __future__ import annotations

from tools.train.problem import Draw, Problem, Work, template


def _paid(draw: Draw, cost: int) -> int:
    """A round sum of at least `cost`."""
    step = draw.rng.choice((5, 10, 20, 50))
    return (cost // step + 1) * step


@template
def change(d: Draw) -> Problem:
    who, item, n, price = d.person(), d.thing(), d.number(2, 9), d.number(2, 12)
    paid = _paid(d, n * price)
    question = d.pick(
        f"{who} buys {n} {item} for ${price} each and pays with ${paid}. How much change does "
        f"{who.he} get?",
        f"One {item.one} costs ${price}. {who} takes {n} of them and gives the clerk ${paid}. "
        f"How many dollars does {who.he} get back?",
        f"At the shop {who} picks {n} {item} at ${price} apiece. {who.He} pays ${paid}. "
        "What is the change?",
    )
    w = Work()
    cost = w.mul(f"The {item} cost", n, price)
    left = w.sub("The change", paid, cost)
    return w.done(question, f"{who} gets ${left} back.", left)


@template
def two_items(d: Draw) -> Problem:
    who, a, b = d.person(), d.fruit(), d.fruit()
    n, m, p, q = d.number(2, 9), d.number(2, 9), d.number(2, 9), d.number(2, 9)
    question = d.pick(
        f"{who} buys {n} {a} at ${p} each and {m} {b} at ${q} each. How much does {who.he} pay in "
        "total?",
        f"{a.many.capitalize()} cost ${p} each and {b} cost ${q} each. What do {n} {a} and {m} "
        f"{b} cost together?",
        f"For a party {who} needs {n} {a} and {m} {b}. One {a.one} is ${p} and one {b.one} is "
        f"${q}. What is the bill?",
    )
    w = Work()
    first = w.mul(f"The {a} cost", n, p)
    second = w.mul(f"The {b} cost", m, q)
    both = w.add("Together", first, second)
    return w.done(question, f"The total is ${both}.", both)


@template
def discount(d: Draw) -> Problem:
    who, price, percent = d.person(), d.number(20, 200, 20), d.rng.choice((10, 20, 25, 50))
    thing = d.pick("jacket", "lamp", "bicycle", "chair", "tent", "radio", "watch", "table")
    question = d.pick(
        f"A {thing} costs ${price}. {who} gets {percent}% off. How much does {who.he} pay?",
        f"The price of a {thing} is ${price}, but today it is {percent}% cheaper. What does it "
        "cost now?",
        f"{who} has a coupon for {percent}% off a {thing} of ${price}. What is the new price?",
    )
    parts = 100 // percent
    w = Work()
    w.div(f"{percent}% is one part of", 100, percent)
    off = w.div("The discount", price, parts)
    now = w.sub("The new price", price, off)
    return w.done(question, f"The {thing} costs ${now} now.", now, 100)


@template
def saving_up(d: Draw) -> Problem:
    who, weekly, weeks, have = d.person(), d.number(3, 12), d.number(3, 12), d.number(5, 60)
    goal = have + weekly * weeks
    thing = d.pick("bicycle", "camera", "guitar", "phone", "drum", "telescope", "skateboard")
    question = d.pick(
        f"{who} wants a {thing} that costs ${goal}. {who.He} has ${have} and saves ${weekly} a "
        f"week. In how many weeks can {who.he} buy it?",
        f"{who} saves ${weekly} every week for a {thing} of ${goal}. {who.He} already has ${have}. "
        "How many more weeks does it take?",
    )
    w = Work()
    missing = w.sub("Missing", goal, have)
    count = w.div("Weeks", missing, weekly)
    return w.done(question, f"{who} needs {count} weeks.", count)


@template
def wages(d: Draw) -> Problem:
    who, hours, rate, days, tip = (
        d.person(),
        d.number(3, 9),
        d.number(8, 15),
        d.number(2, 6),
        d.number(5, 50),
    )
    question = d.pick(
        f"{who} works {hours} hours a day for {days} days and earns ${rate} an hour. {who.He} also "
        f"gets ${tip} in tips. How much does {who.he} earn in total?",
        f"A job pays ${rate} per hour. {who} works {days} days of {hours} hours each and gets a "
        f"bonus of ${tip}. What does {who.he} make?",
    )
    w = Work()
    worked = w.mul("Hours", hours, days)
    pay = w.mul("Pay", worked, rate)
    total = w.add("In total", pay, tip)
    return w.done(question, f"{who} earns ${total}.", total)


@template
def split_bill(d: Draw) -> Problem:
    friends, share, drinks = d.number(3, 8), d.number(6, 25), d.number(8, 40)
    food = friends * share - drinks
    if food <= 0:
        food += friends * drinks
    question = d.pick(
        f"{friends} friends eat out. The food costs ${food} and the drinks ${drinks}. They split "
        "the bill evenly. How much does each pay?",
        f"A dinner for {friends} people costs ${food} for food and ${drinks} for drinks. "
        "Everyone pays the same. What is one share?",
    )
    w = Work()
    bill = w.add("The bill", food, drinks)
    each = w.div("Each share", bill, friends)
    return w.done(question, f"Each person pays ${each}.", each)


@template
def profit(d: Draw) -> Problem:
    who, item, n = d.person(), d.baked(), d.number(5, 30)
    price, cost = d.number(4, 9), d.number(1, 3)
    question = d.pick(
        f"{who} bakes {n} {item}. Each one costs ${cost} to make and sells for ${price}. What is "
        f"{who.his} profit if all are sold?",
        f"Making one {item.one} costs ${cost}. {who} sells {n} of them for ${price} each. How much "
        f"profit does {who.he} make?",
    )
    w = Work()
    each = w.sub(f"Profit of one {item.one}", price, cost)
    total = w.mul("Profit of all", each, n)
    return w.done(question, f"{who} makes a profit of ${total}.", total)


@template
def tickets(d: Draw) -> Problem:
    adults, children, price, less = d.number(2, 6), d.number(2, 9), d.number(8, 20), d.number(2, 6)
    place = d.pick("zoo", "museum", "cinema", "circus", "pool", "fair")
    question = d.pick(
        f"A ticket for the {place} costs ${price} for adults and ${less} less for children. What "
        f"do {adults} adults and {children} children pay?",
        f"{adults} adults and {children} children go to the {place}. Adults pay ${price} each, "
        f"children ${less} less than adults. How much is it in total?",
    )
    w = Work()
    child = w.sub("A child's ticket", price, less)
    first = w.mul("Adults", adults, price)
    second = w.mul("Children", children, child)
    total = w.add("Together", first, second)
    return w.done(question, f"They pay ${total}.", total)


@template
def pocket_money(d: Draw) -> Problem:
    who, have, got = d.person(), d.number(20, 90), d.number(5, 40)
    n, word = d.part(2, 3, 4, 5)
    have += (-(have + got)) % n
    question = d.pick(
        f"{who} has ${have} and gets ${got} for {who.his} birthday. {who.He} spends {word} of all "
        f"{who.his} money. How much is left?",
        f"With ${have} in {who.his} purse, {who} earns ${got} more. Then {who.he} spends {word} of "
        f"it all. How many dollars does {who.he} still have?",
    )
    w = Work()
    total = w.add("All the money", have, got)
    spent = w.div("Spent", total, n)
    left = w.sub("Left", total, spent)
    return w.done(question, f"{who} has ${left} left.", left, n)


@template
def price_of_one(d: Draw) -> Problem:
    a, n, price, m = d.fruit(), d.number(2, 9), d.number(2, 9), d.number(2, 12)
    question = d.pick(
        f"{n} {a} cost ${n * price}. How much do {m} {a} cost?",
        f"If you pay ${n * price} for {n} {a}, what do you pay for {m} {a}?",
        f"A bag of {n} {a} costs ${n * price}. At the same price, what are {m} {a}?",
    )
    w = Work()
    one = w.div(f"One {a.one}", n * price, n)
    total = w.mul(f"All {a}", one, m)
    return w.done(question, f"{m} {a} cost ${total}.", total)


@template
def budget(d: Draw) -> Problem:
    who, have, n, price, other = (
        d.person(),
        d.number(100, 300, 10),
        d.number(2, 9),
        d.number(5, 9),
        0,
    )
    other = d.number(5, have - n * price - 5)
    a, b = d.pick("books", "shirts", "plants", "games"), d.pick("shoes", "a bag", "a hat")
    question = d.pick(
        f"{who} has ${have}. {who.He} buys {n} {a} at ${price} each and {b} for ${other}. How much "
        f"money does {who.he} have left?",
        f"From ${have}, {who} pays ${other} for {b} and buys {n} {a} for ${price} each. What "
        "remains?",
    )
    w = Work()
    first = w.mul(f"The {a} cost", n, price)
    spent = w.add("Spent", first, other)
    left = w.sub("Left", have, spent)
    return w.done(question, f"{who} has ${left} left.", left)


@template
def rent(d: Draw) -> Problem:
    who, pay, cost, food, months = d.person(), d.number(500, 900, 50), d.number(200, 400, 50), 0, 0
    food, months = d.number(50, 90, 10), d.number(2, 9)
    question = d.pick(
        f"{who} earns ${pay} a month. Rent is ${cost} and food ${food} a month. How much can "
        f"{who.he} save in {months} months?",
        f"Every month {who} gets ${pay} and pays ${cost} for rent and ${food} for food. What is "
        f"left over after {months} months?",
    )
    w = Work()
    spent = w.add("Spent in a month", cost, food)
    saved = w.sub("Saved in a month", pay, spent)
    total = w.mul("Saved in all", saved, months)
    return w.done(question, f"{who} saves ${total}.", total)
