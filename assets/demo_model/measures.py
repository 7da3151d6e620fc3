"""Exchanges about comparing, counting, number words, units, days and months."""

from __future__ import annotations

import random
from collections.abc import Callable

from assets.demo_model.exchange import Exchange
from assets.demo_model.numbers import LARGEST, add, divide, in_words, multiply, too_hard
from assets.demo_model.topics import words

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_ORDINALS = (
    *("first", "second", "third", "fourth", "fifth", "sixth"),
    *("seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth"),
)
_UNITS = (
    ("minutes", "hour", "hours", 60),
    ("hours", "day", "days", 24),
    ("days", "week", "weeks", 7),
    ("seconds", "minute", "minutes", 60),
    ("months", "year", "years", 12),
    ("metres", "kilometre", "kilometres", 1000),
    ("grams", "kilogram", "kilograms", 1000),
    ("centimetres", "metre", "metres", 100),
    ("millimetres", "centimetre", "centimetres", 10),
    ("cents", "euro", "euros", 100),
    ("bits", "byte", "bytes", 8),
)
_ROUND = (10, 100, 1000)


def _made(topic: str, ask: str, answer: str, key: str) -> Exchange:
    return Exchange(group="numbers", topic=topic, ask=ask, answer=answer, key=key)


def _pair(rng: random.Random) -> tuple[int, int]:
    a = rng.randrange(LARGEST + 1)
    b = rng.choice(
        (rng.randrange(LARGEST + 1), min(LARGEST, a - a % 10 + rng.randrange(10)), rng.randrange(LARGEST + 1))
    )
    return a, b


def working(a: int, b: int) -> str:
    """What is compared: the tens of two numbers, and their ones where the tens agree."""
    tens, ones = (a // 10, b // 10), (a % 10, b % 10)
    told = f"{a} has {'1 ten' if tens[0] == 1 else f'{tens[0]} tens'} and {b} has {tens[1]}"
    if tens[0] != tens[1]:
        return f"{told}, and {max(tens)} is more than {min(tens)}"
    told += f", the ones are {ones[0]} and {ones[1]}"
    return told if a == b else f"{told}, and {max(ones)} is more than {min(ones)}"


def compare(rng: random.Random) -> Exchange:
    """Which of two numbers is larger or smaller."""
    a, b = _pair(rng)
    kind = rng.choice(("larger", "larger", "smaller"))
    ask = rng.choice(words(kind)).format(a=a, b=b)
    chosen = max(a, b) if kind == "larger" else min(a, b)
    end = "so they are equal" if a == b else f"so {chosen} is {kind}"
    return _made(kind, ask, f"{working(a, b)}, {end}.", f"compare {min(a, b)} {max(a, b)}")


def is_more(rng: random.Random) -> Exchange:
    """Whether one number is larger or smaller than another."""
    a, b = _pair(rng)
    kind = rng.choice(("is_larger", "is_smaller"))
    truth = a > b if kind == "is_larger" else a < b
    word = kind.removeprefix("is_")
    end = f"so yes, {a} is {word}" if truth else f"so no, {a} is not {word}"
    ask = rng.choice(words(kind)).format(a=a, b=b)
    return _made(kind, ask, f"{working(a, b)}, {end}.", f"compare {min(a, b)} {max(a, b)}")


def parity(rng: random.Random) -> Exchange:
    """Whether a number is even."""
    a = rng.randrange(1, LARGEST * 2)
    answer = f"{a} ends in {a % 10}, so it is {'odd' if a % 2 else 'even'}."
    return _made("parity", rng.choice(words("parity")).format(a=a), answer, f"parity {a}")


def neighbour(rng: random.Random) -> Exchange:
    """The number before or after another."""
    a = rng.randrange(1, LARGEST)
    kind, step, word = rng.choice((("successor", 1, "after"), ("predecessor", -1, "before")))
    return _made(kind, rng.choice(words(kind)).format(a=a), f"{a + step} comes {word} {a}.", f"{kind} {a}")


def number_words(rng: random.Random) -> Exchange:
    """A number in words or in digits."""
    a = rng.randrange(LARGEST + 1)
    if rng.random() < 0.5:
        ask = rng.choice(words("in_words")).format(a=a)
        return _made("in_words", ask, f"{a} is {in_words(a)}.", f"in words {a}")
    text = in_words(a)
    return _made(
        "from_words", rng.choice(words("from_words")).format(w=text), f"{text} is {a}.".capitalize(), f"digits {a}"
    )


def doubles(rng: random.Random) -> Exchange:
    """Double, half, or square of a number."""
    kind = rng.choice(("double", "half", "square"))
    a = rng.randrange(1, 11) if kind == "square" else rng.randrange(0, 51)
    ask = rng.choice(words(kind)).format(a=2 * a if kind == "half" else a)
    if kind == "half":
        return _made(kind, ask, divide(2 * a, 2), f"half {a}")
    answer = add(a, a) if kind == "double" else multiply(a, a)
    return _made(kind, ask, answer, f"{kind} {a}")


def chain(rng: random.Random) -> Exchange:
    """A sum of three small numbers."""
    a, b, c = (rng.randrange(1, 31) for _ in range(3))
    answer = f"{a} + {b} = {a + b} and {a + b} + {c} = {a + b + c}, together {a + b + c}."
    key = " ".join(str(n) for n in sorted((a, b, c)))
    return _made("chain", rng.choice(words("chain")).format(a=a, b=b, c=c), answer, f"chain {key}")


def counting(rng: random.Random) -> Exchange:
    """Counting up to 20 or down from it."""
    n = rng.randrange(2, 21)
    kind = rng.choice(("count", "count", "count_down"))
    frame = rng.choice(words(kind))
    numbers = range(1, n + 1) if kind == "count" else range(n, 0, -1)
    answer = ", ".join(str(i) for i in numbers) + "."
    return _made(kind, frame.format(n=n), answer, f"{kind} {n} {frame}")


def calendar(rng: random.Random) -> Exchange:
    """The day or month before or after another, and days some days away."""
    unit, names = rng.choice((("day", _DAYS), ("month", _MONTHS)))
    i = rng.randrange(len(names))
    if rng.random() < 0.3:
        steps = rng.randrange(2, 5)
        way = [names[(i + step) % len(names)] for step in range(1, steps + 1)]
        ask = rng.choice(
            (
                f"Which {unit} is {steps} {unit}s after {names[i]}?",
                f"What {unit} comes {steps} {unit}s after {names[i]}?",
                f"It is {names[i]}. Which {unit} is it in {steps} {unit}s?",
            )
        )
        return _made("away", ask, f"{', '.join(way)}: it is {way[-1]}.", f"{unit} {names[i]} {steps}")
    kind, step = rng.choice((("after", 1), ("before", -1)))
    frame = rng.choice(words(kind))
    answer = f"{names[(i + step) % len(names)]} comes {kind} {names[i]}."
    return _made(f"{unit} {kind}", frame.format(unit=unit, x=names[i]), answer, f"{names[i]} {kind} {frame}")


def months(rng: random.Random) -> Exchange:
    """How long a month is, and which one it is."""
    i = rng.randrange(12)
    month, length = _MONTHS[i], _LENGTHS[i]
    days = "28 days, and 29 in a leap year" if i == 1 else f"{length} days"
    topic, ask, answer = rng.choice(
        (
            ("length", f"How many days does {month} have?", f"{month} has {days}."),
            ("length", f"How many days are in {month}?", f"{month} has {days}."),
            ("length", f"How long is {month}?", f"{month} has {days}."),
            ("length", f"How many days has {month}?", f"{month} has {days}."),
            ("which", f"Which month is the {_ORDINALS[i]}?", f"{month} is the {_ORDINALS[i]} month."),
            ("which", f"What is the {_ORDINALS[i]} month?", f"{month} is the {_ORDINALS[i]} month."),
            ("which", f"What is the {_ORDINALS[i]} month of the year?", f"{month} is the {_ORDINALS[i]} month."),
            ("which", f"Which month of the year is {month}?", f"{month} is the {_ORDINALS[i]} month."),
            ("which", f"What number is the month {month}?", f"{month} is the {_ORDINALS[i]} month."),
        )
    )
    return _made(f"month {topic}", ask, answer, f"month: {ask}")


def units(rng: random.Random) -> Exchange:
    """How many small units a number of large ones has, and back."""
    small, large, larges, count = rng.choice(_UNITS)
    each = "an" if large == "hour" else "a"
    one = f"{each.capitalize()} {large} has {count} {small}"
    n = rng.randrange(2, 11)
    names = {"small": small, "large": large, "larges": larges, "each": each, "n": n, "total": n * count}
    form = rng.random()
    if form < 0.35:
        frame = rng.choice(words("unit_one"))
        return _made("unit", frame.format(**names), f"{one}.", f"unit {small} {large} {frame}")
    if form < 0.75:
        ask = rng.choice(words("unit_many")).format(**names)
        way = "" if count in _ROUND else f" {multiply(n, count)}"
        answer = f"{one}.{way} So {n} {larges} have {n * count} {small}."
        return _made("units", ask, answer, f"units {small} {large} {n}")
    ask = rng.choice(words("unit_back")).format(**names)
    way = "" if count in _ROUND else f" {count} × {n} = {n * count}."
    return _made("units", ask, f"{one}.{way} So {n * count} {small} are {n} {larges}.", f"back {small} {large} {n}")


_SHARES: tuple[tuple[Callable[[random.Random], Exchange], int], ...] = (
    (compare, 5),
    (is_more, 4),
    (parity, 2),
    (neighbour, 2),
    (number_words, 2),
    (doubles, 3),
    (chain, 3),
    (counting, 3),
    (calendar, 3),
    (months, 2),
    (units, 4),
    (too_hard, 3),
)


def draw(rng: random.Random) -> Exchange:
    """An exchange of one of the kinds of this module, or a calculation that is too large."""
    kinds, shares = zip(*_SHARES, strict=True)
    made: Exchange = rng.choices(kinds, shares)[0](rng)
    return made
