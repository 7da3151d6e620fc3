"""Exchanges about numbers, days and months: what can be computed rather than written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from assets.demo_model.exchange import Exchange
from assets.demo_model.topics import words

LARGEST_TERM = 20
"""Sums and differences use whole numbers from 0 to this one."""
LARGEST_FACTOR = 10
"""Products use factors from 0 to this one."""
TOO_HARD = "That is too hard for me. I only do sums with small numbers."

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_UNITS = (
    ("minutes", "hour", 60),
    ("hours", "day", 24),
    ("days", "week", 7),
    ("seconds", "minute", 60),
    ("months", "year", 12),
    ("metres", "kilometre", 1000),
    ("grams", "kilogram", 1000),
    ("centimetres", "metre", 100),
)


def _operation(kind: str, sign: str, a: int, b: int, result: int) -> Iterator[Exchange]:
    key = f"{kind} {a} {b}"
    for frame in words(kind):
        ask = frame.format(a=a, b=b)
        yield Exchange(group="numbers", topic=kind, ask=ask, answer=f"{a} {sign} {b} = {result}", key=key)


def arithmetic() -> Iterator[Exchange]:
    """Sums, differences and products of small whole numbers; a pair of numbers is held out with all its phrasings."""
    terms, factors = range(LARGEST_TERM + 1), range(LARGEST_FACTOR + 1)
    for a in terms:
        for b in terms:
            yield from _operation("add", "+", a, b, a + b)
            if b <= a:
                yield from _operation("subtract", "-", a, b, a - b)
    for a in factors:
        for b in factors:
            yield from _operation("multiply", "*", a, b, a * b)


def too_hard() -> Iterator[Exchange]:
    """Sums and products with large numbers, declined."""
    for step in range(160):
        a, b = 317 + step * 7919 % 9680, 211 + step * 6133 % 9780
        for kind in ("add", "subtract", "multiply"):
            frames = words(kind)
            for frame in (frames[step % len(frames)], frames[(step + 3) % len(frames)]):
                ask = frame.format(a=max(a, b), b=min(a, b))
                yield Exchange(group="numbers", topic="too_hard", ask=ask, answer=TOO_HARD, key=f"{kind} {a} {b}")


def comparisons() -> Iterator[Exchange]:
    """Which of two numbers under a hundred is larger."""
    for a in range(0, 100, 3):
        for b in range(1, 100, 7):
            if a == b:
                continue
            frames = words("larger")
            ask = frames[(a + b) % len(frames)].format(a=a, b=b)
            answer = f"{max(a, b)} is larger than {min(a, b)}."
            yield Exchange(group="numbers", topic="larger", ask=ask, answer=answer, key=f"larger {a} {b}")


def counting() -> Iterator[Exchange]:
    """Counting to a number up to 20."""
    for n in range(2, 21):
        for frame in words("count"):
            answer = ", ".join(str(i) for i in range(1, n + 1)) + "."
            yield Exchange(group="numbers", topic="count", ask=frame.format(n=n), answer=answer)


def calendar() -> Iterator[Exchange]:
    """The day or month before or after another."""
    for unit, names in (("day", _DAYS), ("month", _MONTHS)):
        for i, name in enumerate(names):
            for kind, step in (("after", 1), ("before", -1)):
                other = names[(i + step) % len(names)]
                for frame in words(kind):
                    ask = frame.format(unit=unit, x=name)
                    answer = f"{other} comes {kind} {name}."
                    yield Exchange(group="numbers", topic=f"{unit} {kind}", ask=ask, answer=answer)


def units() -> Iterator[Exchange]:
    """How many small units one large unit has."""
    for small, large, count in _UNITS:
        each = "an" if large == "hour" else "a"
        answer = f"{each.capitalize()} {large} has {count} {small}."
        for ask in (
            f"How many {small} are in {each} {large}?",
            f"How many {small} does {each} {large} have?",
            f"How many {small} are there in one {large}?",
            f"Tell me how many {small} make {each} {large}",
            f"What number of {small} is in one {large}?",
        ):
            yield Exchange(group="numbers", topic=f"{small} in {large}", ask=ask, answer=answer)


SOURCES: tuple[Callable[[], Iterator[Exchange]], ...] = (arithmetic, too_hard, comparisons, counting, calendar, units)
"""Every generator of this module."""
