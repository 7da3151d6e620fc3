"""Offers: the best way to decode within a budget, its description, and storage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.test_profiles import KEY
from tuner.offers import Offers, OfferStore, Way, best

PLAIN = Way(target="plain", gamma=0, seconds=0.010, perplexity=12.0)
COMPENSATED = Way(target="compensated", gamma=0, seconds=0.011, perplexity=11.0)
DRAFTED = Way(target="compensated", gamma=1, seconds=0.0105, perplexity=11.0, acceptance_rate=0.8)
RESIDUAL = Way(target="residual", gamma=0, seconds=0.020, perplexity=10.03)
FAST = Way(target="residual", gamma=3, seconds=0.0125, perplexity=10.03, acceptance_rate=0.9)
WAYS = (PLAIN, COMPENSATED, DRAFTED, RESIDUAL, FAST)


def offers(*ways: Way, full: float | None = 10.0) -> Offers:
    return Offers(key=KEY, ways=ways or WAYS, full=full, seconds=3.0, date="2026-11-22T12:00:00+00:00")


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
def test_the_least_loss_within_the_budget(ways: tuple[Way, ...], budget: float, expected: Way) -> None:
    assert best(ways, budget) == expected


def test_what_may_not_be_taken_is_passed_over() -> None:
    found = replace(offers(), key=replace(KEY, budget_percent=100.0))
    assert found.best() == FAST == found.chosen
    assert found.best(drafts=False) == RESIDUAL
    assert found.best(residual=False) == DRAFTED
    assert found.best(drafts=False, residual=False) == COMPENSATED
    assert found.slowdown_percent(FAST) == pytest.approx(25)


def test_words() -> None:
    found = offers()
    assert found.words(FAST) == (
        "within 0.3 % of full precision at 0.8 x the low-bit speed (low bits with all residuals; "
        "3 tokens drafted per round, 90% accepted)"
    )
    assert found.words(PLAIN) == "within 20 % of full precision at 1 x the low-bit speed (low bits alone; no drafts)"
    assert "within 0.4 %" in found.words(replace(FAST, perplexity=10.0301)), "no loss is told smaller than it is"
    assert found.words(replace(FAST, perplexity=9.9)).startswith("as good as full precision at 0.8 x")
    assert offers(full=None).words(PLAIN).startswith("perplexity 12.00 (full precision unknown) at 1 x")


def test_what_is_saved_is_found_again(tmp_path: Path) -> None:
    store = OfferStore(tmp_path)
    assert store.find(KEY) is None
    store.save(offers())
    assert store.find(KEY) == offers()
    assert store.find(replace(KEY, budget_percent=9.0)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"ways": []},
        {"full": -1.0},
        {"more": 1},
        {"ways": [{"target": "magic", "gamma": 0, "seconds": 1.0, "perplexity": 2.0, "acceptance_rate": None}]},
        {"ways": [{"target": "plain", "gamma": 0, "seconds": 0.0, "perplexity": 2.0, "acceptance_rate": None}]},
        {"ways": [{"target": "plain", "gamma": -1, "seconds": 1.0, "perplexity": 2.0, "acceptance_rate": None}]},
    ],
)
def test_a_damaged_file_counts_as_absent(tmp_path: Path, change: dict[str, Any]) -> None:
    store = OfferStore(tmp_path)
    store.save(offers())
    (file,) = tmp_path.glob("*.offers.json")
    data = json.loads(file.read_text())
    data["profile"].update(change)
    file.write_text(json.dumps(data))
    assert store.find(KEY) is None
