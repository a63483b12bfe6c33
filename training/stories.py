"""Arithmetic word problems: each story draws its numbers, says what happens, and works the answer out step by step."""

import random
from collections.abc import Callable
from typing import NamedTuple

from training.words import BOXES, COLOURS, ITEMS, PEOPLE


class Story(NamedTuple):
    """A problem, its worked steps such as `12 + 7 = 19`, its answer, and the key that decides its split."""

    text: str
    steps: list[str]
    answer: int
    key: str


def _story(kind: str, numbers: tuple[int, ...], text: str, steps: list[str]) -> Story:
    return Story(text, steps, int(steps[-1].rsplit(" ", 1)[1]), f"{kind}/{numbers}")


def add(a: int, b: int) -> str:
    return f"{a} + {b} = {a + b}"


def subtract(a: int, b: int) -> str:
    return f"{a} - {b} = {a - b}"


def multiply(a: int, b: int) -> str:
    return f"{a} * {b} = {a * b}"


def divide(a: int, b: int) -> str:
    return f"{a} / {b} = {a // b}"


def buy_and_give(rng: random.Random) -> Story:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    c = rng.randint(1, a + b - 1)
    who, friend = rng.sample(PEOPLE, 2)
    item = rng.choice(ITEMS)
    first = rng.choice(
        (f"{who} has {a} {item}.", f"At first {who} has {a} {item}.", f"There are {a} {item} in the room of {who}.")
    )
    then = rng.choice((f"{who} buys {b} more", f"{who} finds {b} more", f"{who} gets {b} more from {friend}"))
    last = rng.choice((f"and gives {c} to {friend}.", f"and loses {c} of them.", f"and then sells {c}."))
    ask = rng.choice(
        (f"How many {item} does {who} have now?", f"How many {item} are left?", f"How many {item} remain?")
    )
    return _story("give", (a, b, c), f"{first} {then} {last} {ask}", [add(a, b), subtract(a + b, c)])


def boxes(rng: random.Random) -> Story:
    a, b = rng.randint(2, 12), rng.randint(2, 20)
    c = rng.randint(1, a * b - 1)
    who, item, box = rng.choice(PEOPLE), rng.choice(ITEMS), rng.choice(BOXES)
    first = rng.choice(
        (f"{who} packs {a} {box} with {b} {item} each.", f"There are {a} {box}, and each holds {b} {item}.")
    )
    last = rng.choice((f"{who} takes {c} {item} out.", f"Then {c} {item} are sold.", f"Later {c} {item} break."))
    ask = rng.choice((f"How many {item} are left?", f"How many {item} remain?"))
    return _story("boxes", (a, b, c), f"{first} {last} {ask}", [multiply(a, b), subtract(a * b, c)])


def two_people(rng: random.Random) -> Story:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    who, friend = rng.sample(PEOPLE, 2)
    item = rng.choice(ITEMS)
    text = rng.choice(
        (
            f"{who} has {a} {item}. {friend} has {b} more than {who}.",
            f"{friend} has {b} more {item} than {who}, who has {a}.",
        )
    )
    ask = rng.choice(
        (f"How many {item} do they have together?", f"How many {item} do {who} and {friend} have in total?")
    )
    return _story("two", (a, b), f"{text} {ask}", [add(a, b), add(a, a + b)])


def times_as_many(rng: random.Random) -> Story:
    a, k = rng.randint(2, 40), rng.randint(2, 5)
    who, friend = rng.sample(PEOPLE, 2)
    item = rng.choice(ITEMS)
    many = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[k]
    ask = rng.choice((f"How many {item} do they have together?", f"How many {item} is that in total?"))
    return _story(
        "times", (a, k), f"{who} has {a} {item} and {friend} has {many} as many. {ask}", [multiply(a, k), add(a, a * k)]
    )


def share(rng: random.Random) -> Story:
    b, q = rng.randint(2, 12), rng.randint(2, 20)
    extra = rng.randint(1, b * q - 1)
    who, item = rng.choice(PEOPLE), rng.choice(ITEMS)
    start = b * q - extra
    text = f"{who} has {start} {item} and gets {extra} more. {who} shares them equally among {b} friends."
    ask = rng.choice((f"How many {item} does each friend get?", f"How many {item} does each of them get?"))
    return _story("share", (start, extra, b), f"{text} {ask}", [add(start, extra), divide(b * q, b)])


def shopping(rng: random.Random) -> Story:
    a, b = rng.randint(2, 12), rng.randint(2, 15)
    paid = rng.randint(a * b + 1, a * b + 100)
    who, item = rng.choice(PEOPLE), rng.choice(ITEMS)
    first = rng.choice(
        (f"{who} buys {a} {item} for {b} dollars each", f"{who} wants {a} {item} that cost {b} dollars each")
    )
    ask = rng.choice(("How much money is left?", f"How many dollars does {who} get back?"))
    return _story(
        "shop", (a, b, paid), f"{first} and pays with {paid} dollars. {ask}", [multiply(a, b), subtract(paid, a * b)]
    )


def three_days(rng: random.Random) -> Story:
    a, b, c = (rng.randint(2, 99) for _ in range(3))
    who = rng.choice(PEOPLE)
    verb, unit = rng.choice(
        (("reads", "pages"), ("walks", "miles"), ("sells", "tickets"), ("bakes", "cookies"), ("picks", "flowers"))
    )
    text = rng.choice(
        (
            f"{who} {verb} {a} {unit} on Monday, {b} on Tuesday and {c} on Friday.",
            f"On Monday {who} {verb} {a} {unit}, on Tuesday {b}, and on Sunday {c}.",
        )
    )
    ask = rng.choice((f"How many {unit} is that in total?", f"How many {unit} is that in all?"))
    return _story("days", (a, b, c), f"{text} {ask}", [add(a, b), add(a + b, c)])


def reading(rng: random.Random) -> Story:
    a, b = rng.randint(2, 9), rng.randint(2, 20)
    total = rng.randint(a * b + 1, a * b + 200)
    who = rng.choice(PEOPLE)
    text = rng.choice(
        (
            f"A book has {total} pages. {who} reads {b} pages a day for {a} days.",
            f"{who} reads {b} pages of a book of {total} pages every day.",
        )
    )
    ask = "How many pages are left?" if text.startswith("A") else f"How many pages are left after {a} days?"
    return _story("book", (a, b, total), f"{text} {ask}", [multiply(b, a), subtract(total, a * b)])


def bus(rng: random.Random) -> Story:
    a, c = rng.randint(2, 99), rng.randint(1, 60)
    b = rng.randint(1, a)
    text = rng.choice(
        (
            f"There are {a} people on a bus. {b} get off and {c} get on.",
            f"A bus carries {a} people. At a stop {b} leave and {c} come in.",
        )
    )
    ask = rng.choice(("How many people are on the bus now?", "How many people are there now?"))
    return _story("bus", (a, b, c), f"{text} {ask}", [subtract(a, b), add(a - b, c)])


def colours(rng: random.Random) -> Story:
    total = rng.randint(10, 199)
    a = rng.randint(1, total - 2)
    b = rng.randint(1, total - a)
    item = rng.choice(ITEMS)
    one, two, three = rng.sample(COLOURS, 3)
    text = f"A jar holds {total} {item}. {a} are {one}, {b} are {two} and the rest are {three}."
    return _story("rest", (total, a, b), f"{text} How many are {three}?", [add(a, b), subtract(total, a + b)])


def plain_sum(rng: random.Random) -> Story:
    a, b = rng.randint(1, 999), rng.randint(1, 999)
    if rng.random() < 0.5:
        return _story(
            "sum",
            (a, b),
            rng.choice((f"What is {a} + {b}?", f"Add {a} and {b}.", f"How much is {a} plus {b}?")),
            [add(a, b)],
        )
    a, b = max(a, b), min(a, b)
    text = rng.choice((f"What is {a} - {b}?", f"Take {b} away from {a}.", f"How much is {a} minus {b}?"))
    return _story("difference", (a, b), text, [subtract(a, b)])


def plain_product(rng: random.Random) -> Story:
    a, b = rng.randint(2, 12), rng.randint(2, 20)
    if rng.random() < 0.5:
        return _story(
            "product", (a, b), rng.choice((f"What is {a} * {b}?", f"How much is {a} times {b}?")), [multiply(a, b)]
        )
    return _story(
        "quotient", (a * b, a), rng.choice((f"What is {a * b} / {a}?", f"Divide {a * b} by {a}.")), [divide(a * b, a)]
    )


STORIES: tuple[Callable[[random.Random], Story], ...] = (
    buy_and_give,
    boxes,
    two_people,
    times_as_many,
    share,
    shopping,
    three_days,
    reading,
    bus,
    colours,
    plain_sum,
    plain_product,
)


def draw(rng: random.Random) -> Story:
    """One random problem."""
    return rng.choice(STORIES)(rng)
