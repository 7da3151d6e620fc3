"""Offers: the best way to decode within a budget, its description, and storage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tuner.offers import DecodingMode, Offers, best

PLAIN = DecodingMode(target="plain", gamma=0, seconds=0.010, perplexity=12.0)
COMPENSATED = DecodingMode(target="compensated", gamma=0, seconds=0.011, perplexity=11.0)
DRAFTED = DecodingMode(target="compensated", gamma=1, seconds=0.0105, perplexity=11.0, acceptance_rate=0.8)
RESIDUAL = DecodingMode(target="residual", gamma=0, seconds=0.020, perplexity=10.03)
FAST = DecodingMode(target="residual", gamma=3, seconds=0.0125, perplexity=10.03, acceptance_rate=0.9)
WAYS = (PLAIN, COMPENSATED, DRAFTED, RESIDUAL, FAST)


def offers(*ways: DecodingMode, full: float | None = 10.0) -> Offers:
    return Offers(budget_percent=5.0, ways=ways or WAYS, full=full, seconds=3.0, date="2026-11-22T12:00:00+00:00")


@pytest.mark.parametrize(
    ("ways", "budget", "expected"),
    [
        ((PLAIN, RESIDUAL, FAST), 0, PLAIN),
        ((PLAIN, COMPENSATED, RESIDUAL), 5, COMPENSATED),  # though it was slower here: the tuner knows better
        (WAYS, 6, DRAFTED),
        ((PLAIN, DRAFTED, RESIDUAL), 4, PLAIN),  # drafts are held to no budget but this one
        (WAYS, 24, DRAFTED),
        (WAYS, 25, FAST),
        (WAYS, 100, FAST),
        ((PLAIN, COMPENSATED, RESIDUAL), 100, RESIDUAL),
        ((PLAIN, COMPENSATED, RESIDUAL), 12, COMPENSATED),
        ((PLAIN, replace(COMPENSATED, perplexity=11.995)), 50, PLAIN),
        ((replace(FAST, seconds=0.008), PLAIN), 0, replace(FAST, seconds=0.008)),
    ],
)
def test_the_least_loss_within_the_budget(
    ways: tuple[DecodingMode, ...], budget: float, expected: DecodingMode
) -> None:
    assert best(ways, budget) == expected


def test_what_may_not_be_taken_is_passed_over() -> None:
    found = replace(offers(), budget_percent=100.0)
    assert found.best() == FAST == found.chosen
    assert found.best(drafts=False) == RESIDUAL
    assert found.best(residual=False) == DRAFTED
    assert found.best(drafts=False, residual=False) == COMPENSATED
    assert found.slowdown_percent(FAST) == pytest.approx(25)


def test_words() -> None:
    found = offers()
    assert found.words(FAST) == (
        "within 0.3 % of full precision, 25 % slower than low bits alone (low bits with all residuals; "
        "3 tokens drafted per round, 90% accepted)"
    )
    assert (
        found.words(PLAIN) == "within 20 % of full precision, no slower than low bits alone (low bits alone; no drafts)"
    )
    assert "within 0.4 %" in found.words(replace(FAST, perplexity=10.0301)), "no loss is told smaller than it is"
    assert found.words(replace(FAST, perplexity=9.9)).startswith("as good as full precision, 25 % slower")
    assert offers(full=None).words(PLAIN).startswith("perplexity 12.00 (full precision unknown), no slower")
