"""Exchanges about whole numbers, with a line of working where the result is not known by heart."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from assets.demo_model.exchange import Exchange
from assets.demo_model.topics import content, words

LARGEST = 100
"""Terms, dividends and compared numbers are whole numbers from 0 to this one."""
TOO_HARD_PRODUCT = "That product is too hard for me. One of the factors must be at most 10."
TOO_HARD = "That is too large for me. I calculate with numbers up to 100."

_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """A number from 0 to 100 in words."""
    if number < len(_ONES):
        return _ONES[number]
    if number == LARGEST:
        return "one hundred"
    tens, ones = divmod(number, 10)
    return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")


def add(a: int, b: int) -> str:
    """`a + b` with its working: tens and ones apart."""
    if b < 10 <= a:
        tens, ones = a - a % 10, a % 10
        return f"{a} + {b}: {tens} and {ones} + {b} = {ones + b}, together {a + b}."
    if a < 10 <= b:
        tens, ones = b - b % 10, b % 10
        return f"{a} + {b}: {tens} and {a} + {ones} = {a + ones}, together {a + b}."
    if a < 10 or not (a % 10 or b % 10):
        return f"{a} + {b} = {a + b}."
    round_a, round_b = a - a % 10, b - b % 10
    first = f"{round_a} + {round_b} = {round_a + round_b}"
    return f"{a} + {b}: {first} and {a % 10} + {b % 10} = {a % 10 + b % 10}, together {a + b}."


def subtract(a: int, b: int) -> str:
    """`a - b` with its working: first the tens of `b`, then its ones. Below zero it turns the numbers round."""
    if a < b:
        return f"{a} - {b}: {b} - {a} = {b - a}, so it is below zero: -{b - a}."
    tens, ones = b - b % 10, b % 10
    if not tens or not ones:
        return f"{a} - {b} = {a - b}."
    return f"{a} - {b}: {a} - {tens} = {a - tens} and {a - tens} - {ones} = {a - b}, which leaves {a - b}."


def multiply(a: int, b: int) -> str:
    """`a × b`; tens and ones apart where one factor is above 10, declined where both are above 12."""
    large, small = max(a, b), min(a, b)
    if large <= 12 or small <= 1 or (not large % 10 and small <= 10):
        return f"{a} × {b} = {a * b}."
    return f"{a} × {b}: {_parts(large, small)}, together {a * b}." if small <= 10 else TOO_HARD_PRODUCT


def _parts(large: int, small: int) -> str:
    """Both partial products, and their sum by tens where it crosses a hundred."""
    tens, ones = large - large % 10, large % 10
    first, second = tens * small, ones * small
    told = f"{tens} × {small} = {first} and {ones} × {small} = {second}"
    if first % 100 + second < 100:
        return told
    middle = first + second - second % 10
    return f"{told}, {first} + {second - second % 10} = {middle}" + (f" and {second % 10} more" if second % 10 else "")


def divide(a: int, b: int) -> str:
    """`a ÷ b`: the tens of the quotient (or five times `b`), then the rest of it, then what is left over."""
    if b == 0:
        return "Nothing can be divided by 0."
    whole, rest = divmod(a, b)
    start, left = f"{a} ÷ {b}", f" with {rest} left over" if rest else ""
    if not a or b == 1:
        return f"{start} = {whole}."
    if not whole:
        return f"{start}: {b} is larger than {a}, so {start} = 0{left}."
    first = whole - whole % 10 if whole > 10 else min(5, whole)
    steps, now = [], a
    for part in (first, whole - first):
        if part:
            steps.append(f"{b} × {part} = {b * part} and {now} - {b * part} = {now - b * part}")
            now -= b * part
    return f"{start}: {', '.join(steps)}, so {start} = {whole}{left}."


_SOLVE: dict[str, Callable[[int, int], str]] = {
    "add": add,
    "subtract": subtract,
    "multiply": multiply,
    "divide": divide,
}
KINDS = tuple(_SOLVE)
"""The four operations."""


def key(kind: str, a: int, b: int) -> str:
    """Split key of a calculation; the order of terms and factors does not matter."""
    if kind in {"add", "multiply"}:
        a, b = min(a, b), max(a, b)
    return f"{kind} {a} {b}"


def calculation(kind: str, a: int, b: int, frame: str) -> Exchange:
    """A calculation asked with a frame of `content/frames.toml`."""
    return Exchange(
        group="arithmetic", topic=kind, ask=frame.format(a=a, b=b), answer=_SOLVE[kind](a, b), key=key(kind, a, b)
    )


def problems(kind: str) -> Iterator[tuple[int, int]]:
    """Every pair of numbers of an operation, results below zero and remainders left out.

    Products have a factor up to 10, or both up to 12; quotients are whole.
    """
    numbers = range(LARGEST + 1)
    for a in numbers:
        for b in numbers:
            fits = {
                "add": True,
                "subtract": b <= a,
                "multiply": min(a, b) <= 10 or max(a, b) <= 12,
                "divide": b > 0 and a % b == 0,
            }
            if fits[kind]:
                yield a, b


def draw_pair(rng: random.Random, kind: str) -> tuple[int, int]:
    """Numbers for an operation, small and round ones somewhat oftener than by chance."""
    if kind == "divide":
        b = rng.choice((rng.randrange(1, 11), rng.randrange(2, 11), rng.randrange(1, 51)))
        if rng.random() < 0.4:
            b = b if rng.random() < 0.15 else rng.randrange(2, 13)
            return rng.randrange(0 if rng.random() < 0.1 else b, LARGEST + 1), b
        return b * rng.randrange(LARGEST // b + 1), b
    if kind == "multiply":
        if rng.random() < 0.4:
            return rng.randrange(13), rng.randrange(13)
        if rng.random() < 0.06:
            return rng.randrange(11, LARGEST + 1), rng.randrange(11, LARGEST + 1)
        pair = [rng.randrange(11), rng.randrange(11, LARGEST + 1)]
        rng.shuffle(pair)
        return pair[0], pair[1]
    a, b = rng.randrange(LARGEST + 1), rng.randrange(LARGEST + 1)
    if rng.random() < 0.2:
        a, b = rng.randrange(21), rng.randrange(21)
    if kind == "subtract" and rng.random() < 0.95:
        a, b = max(a, b), min(a, b)
    return a, a if kind == "subtract" and rng.random() < 0.03 else b


def draw(rng: random.Random) -> Exchange:
    """A calculation, now and then told as something that happens."""
    kind = rng.choices(KINDS, (2, 2, 3, 5))[0]
    a, b = draw_pair(rng, kind)
    frame = rng.choice(words(kind))
    if rng.random() < 0.12 and min(a, b) >= 2:
        frame = _tale_frame(rng, kind)
        if kind == "subtract" and a < b:
            a, b = b, a
        if kind == "divide" and a % b:
            a -= a % b
    return calculation(kind, a, b, frame)


def _tale_frame(rng: random.Random, kind: str) -> str:
    frame: str = rng.choice(content("sums")[kind])
    names = words("names")
    slots = {"name": rng.choice(names), "other": rng.choice(names), "things": rng.choice(content("sums")["things"])}
    for slot, value in slots.items():
        frame = frame.replace("{" + slot + "}", value)
    return frame


def too_hard(rng: random.Random) -> Exchange:
    """A sum, difference, product or quotient with a large number, declined."""
    kind = rng.choice(KINDS)
    a, b = rng.choice((rng.randrange(101, 1000), rng.randrange(101, 10000))), rng.randrange(2, 5000)
    if rng.random() < 0.3 and kind != "divide":
        a, b = b % LARGEST, a
    ask = rng.choice(words(kind)).format(a=a, b=b)
    return Exchange(group="numbers", topic="too_hard", ask=ask, answer=TOO_HARD, key=f"too hard {kind} {a} {b}")


def result_of(answer: str) -> int | None:
    """The number a calculation ends with, or None if it has no whole result from 0 up."""
    last = answer.rstrip(".").rsplit(" ", 1)[-1]
    return int(last) if answer[0].isdigit() and last.isdigit() else None


def then(rng: random.Random, total: int) -> Exchange | None:
    """A calculation that goes on with a result, or None if the drawn one does not fit numbers up to 100."""
    kind = rng.choice(("then_add", "then_subtract", "then_multiply", "then_double", "then_half"))
    b = rng.randrange(1, 21)
    if kind in {"then_double", "then_half"}:
        b = 2
    elif kind == "then_multiply":
        b = rng.randrange(2, 11)
    operation = {"then_add": "add", "then_subtract": "subtract", "then_half": "divide"}.get(kind, "multiply")
    if total > LARGEST or (operation == "subtract" and b > total) or (operation == "divide" and total % b):
        return None
    ask = rng.choice(words(kind)).format(b=b)
    answer = _SOLVE[operation](total, b)
    return Exchange(group="arithmetic", topic=kind, ask=ask, answer=answer, key=key(operation, total, b))
