"""Numbers in the dialogues: results, workings and comparisons are right, and held out by the numbers."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from assets.demo_model import corpus, measures, numbers
from assets.demo_model.corpus import Writer
from assets.demo_model.exchange import split_of

_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "×": int.__mul__, "÷": int.__floordiv__}
_RESULTS = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__, "divide": int.__floordiv__}


def _equations(text: str) -> list[tuple[int, str, int, int]]:
    found = re.findall(r"(\d+) ([-+×÷]) (\d+) = (\d+)", text)
    return [(int(a), sign, int(b), int(result)) for a, sign, b, result in found]


@pytest.mark.parametrize("kind", numbers.KINDS)
def test_every_calculation_and_its_working_is_right(kind: str) -> None:
    seen = 0
    for a, b in numbers.problems(kind):
        exchange = numbers.calculation(kind, a, b, "{a} {b}")
        assert numbers.result_of(exchange.answer) == _RESULTS[kind](a, b)
        equations = _equations(exchange.answer)
        assert equations or " and " in exchange.answer
        for first, sign, second, result in equations:
            assert _OPERATIONS[sign](first, second) == result, exchange.answer
        seen += 1
    assert seen > 450


@pytest.mark.parametrize("kind", numbers.KINDS)
def test_numbers_are_held_out_with_all_their_phrasings(kind: str) -> None:
    held = [pair for pair in numbers.problems(kind) if split_of(numbers.key(kind, *pair)) == "held_out"]
    assert 0.05 < len(held) / len(list(numbers.problems(kind))) < 0.11
    if kind in {"add", "multiply"}:
        assert all(split_of(numbers.key(kind, b, a)) == "held_out" for a, b in held)


def test_what_is_not_whole_below_zero_or_too_large() -> None:
    told = "50 ÷ 7: 7 × 5 = 35 and 50 - 35 = 15, 7 × 2 = 14 and 15 - 14 = 1, so 50 ÷ 7 = 7 with 1 left over."
    assert numbers.divide(50, 7) == told
    told = "72 ÷ 6: 6 × 10 = 60 and 72 - 60 = 12, 6 × 2 = 12 and 12 - 12 = 0, so 72 ÷ 6 = 12."
    assert numbers.divide(72, 6) == told
    assert numbers.divide(24, 8) == "24 ÷ 8: 8 × 3 = 24 and 24 - 24 = 0, so 24 ÷ 8 = 3."
    assert numbers.divide(0, 8) == "0 ÷ 8 = 0."
    assert numbers.divide(3, 7) == "3 ÷ 7: 7 is larger than 3, so 3 ÷ 7 = 0 with 3 left over."
    assert numbers.divide(5, 0) == "Nothing can be divided by 0."
    assert numbers.subtract(3, 8) == "3 - 8: 8 - 3 = 5, so it is below zero: -5."
    assert numbers.multiply(47, 38) == numbers.TOO_HARD_PRODUCT
    assert numbers.add(47, 38) == "47 + 38: 40 + 30 = 70 and 7 + 8 = 15, together 85."
    assert numbers.result_of(numbers.TOO_HARD) is None


def test_every_division_with_a_remainder_is_right() -> None:
    for a in range(1, numbers.LARGEST + 1):
        for b in range(2, numbers.LARGEST + 1):
            whole, rest = divmod(a, b)
            answer = numbers.divide(a, b)
            if rest:
                assert answer.endswith(f" {whole} with {rest} left over."), answer
                assert numbers.result_of(answer) is None
            for first, sign, second, result in _equations(answer):
                assert _OPERATIONS[sign](first, second) == result, answer


def test_products_that_cross_a_hundred_are_summed_by_tens() -> None:
    told = "56 × 9: 50 × 9 = 450 and 6 × 9 = 54, 450 + 50 = 500 and 4 more, together 504."
    assert numbers.multiply(56, 9) == told
    assert numbers.multiply(75, 4) == "75 × 4: 70 × 4 = 280 and 5 × 4 = 20, 280 + 20 = 300, together 300."
    assert numbers.multiply(23, 4) == "23 × 4: 20 × 4 = 80 and 3 × 4 = 12, together 92."


@pytest.mark.parametrize(
    ("number", "text"), [(0, "zero"), (17, "seventeen"), (40, "forty"), (85, "eighty-five"), (100, "one hundred")]
)
def test_numbers_in_words(number: int, text: str) -> None:
    assert numbers.in_words(number) == text


def test_follow_up_sums_continue_the_sum() -> None:
    writer, rng, seen = Writer("train", 1), random.Random(1), 0
    for _ in range(600):
        turns = writer.thread(rng, "arithmetic")
        for before, after in itertools.pairwise(turns):
            if after.topic.startswith("then_"):
                seen += 1
                assert after.answer.startswith(f"{numbers.result_of(before.answer)} ") or "÷" in after.answer
    assert seen > 100


def test_comparisons_are_right() -> None:
    rng = random.Random(2)
    for _ in range(500):
        exchange = measures.compare(rng)
        a, b = (int(n) for n in re.findall(r"\d+", exchange.ask))
        chosen = min(a, b) if exchange.topic == "smaller" else max(a, b)
        ending = "so they are equal." if a == b else f"so {chosen} is {exchange.topic}."
        assert exchange.answer.endswith(ending)
    for _ in range(500):
        exchange = measures.is_more(rng)
        a, b = (int(n) for n in re.findall(r"\d+", exchange.ask)[:2])
        truth = a > b if exchange.topic == "is_larger" else a < b
        assert (", so yes, " in exchange.answer) == truth


def test_measures_draw_every_kind_and_right_equations() -> None:
    rng = random.Random(3)
    made = [measures.draw(rng) for _ in range(1500)]
    assert len({exchange.topic for exchange in made}) > 18
    for exchange in made:
        assert exchange.key
        assert "{" not in exchange.ask + exchange.answer
        for a, sign, b, result in _equations(exchange.answer):
            assert _OPERATIONS[sign](a, b) == result


def test_days_some_days_away() -> None:
    rng = random.Random(4)
    days = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
    seen = 0
    for _ in range(300):
        exchange = measures.calendar(rng)
        if exchange.topic == "away" and exchange.key.startswith("day"):
            _, start, steps = exchange.key.split()
            assert exchange.answer.endswith(f"it is {days[(days.index(start) + int(steps)) % 7]}.")
            seen += 1
    assert seen > 10


def test_groups_of_conversations_have_the_shares_that_are_written() -> None:
    assert sum(corpus.SHARES.values()) == 100
