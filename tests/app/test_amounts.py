"""Amounts, durations, and cautious estimates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.amounts import Estimate, duration, perplexity, prompt_words
from runtime.errors import byte_count
from runtime.wire.device import PromptTuning


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (12_345, "12 kB"), (98_362_432, "98 MB"), (999.6e6, "1.0 GB"), (4.9e9, "4.9 GB")],
)
def test_bytes(count: float, shown: str) -> None:
    assert byte_count(count) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(8.4, "8 s"), (180, "3 min"), (7500, "2 h 05 min")])
def test_times(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_what_prompts_cost_is_said() -> None:
    found = PromptTuning(budget_percent=20, k_chunk=1024, measured_slowdown_percent=7.64, tokens=512)
    assert prompt_words(found) == "prompts are compensated fully; 7.6 % more time to the first word, 20 % allowed"
    assert "by 64 of 1024 channels" in prompt_words(replace(found, k_chunk=64))
    assert prompt_words(replace(found, k_chunk=0)) == "prompts are not compensated"


def test_nothing_is_told_of_a_step_that_has_just_begun() -> None:
    estimate = Estimate()
    for second in range(3):
        estimate.take(float(second), "quantize", second, 30)
        assert estimate.words == ""
    estimate.take(3.0, "quantize", 3, 30)
    assert estimate.words == "about 27 s left"


def test_a_few_seconds_are_not_counted_down() -> None:
    estimate = Estimate()
    for second in range(30):
        estimate.take(float(second), "quantize", second, 30)
    assert estimate.words == "nearly done"


def test_the_slower_of_late_and_whole_speed_counts() -> None:
    estimate = Estimate()
    for second in range(21):
        estimate.take(float(second), "quantize", second, 100)  # one a second
    for second in range(21, 60):
        estimate.take(float(second), "quantize", 20 + (second - 20) / 4, 100)  # then one in four
    assert estimate.left_s == pytest.approx((100 - 29.75) / 0.25)
    for second in range(60, 71):
        estimate.take(float(second), "quantize", 30 + 5 * (second - 60), 100)  # a fast stretch is not believed
    assert estimate.left_s == pytest.approx(20 / (80 / 70))


def test_the_parts_of_a_unit_differ() -> None:
    """Blocks of 60 seconds, the first 20 of which do a hundredth of each: what is told stays near the truth."""
    estimate, told = Estimate(), list[float]()
    for second in range(600):
        block, within = divmod(second, 60)
        done = block + (within / 2000 if within < 20 else 0.01 + 0.99 * (within - 20) / 40)
        estimate.take(float(second), "quantize", done, 24)
        if estimate.left_s is not None:
            told.append(estimate.left_s / (24 * 60 - second))
    assert len(told) > 560
    assert all(0.9 < share < 2 for share in told[:30])
    assert all(0.95 < share < 1.4 for share in told[30:])


def test_another_step_begins_anew() -> None:
    estimate = Estimate()
    for second in range(10):
        estimate.take(float(second), "download", second, 100)
    estimate.take(10.0, "quantize", 0, 24)
    assert estimate.words == ""
    assert estimate.speed is None


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (28.09, 33.25, "33.25 (+18 %)"),
        (28.09, 29.5, "29.50 (+5.0 %)"),
        (10.0, 9.98, "9.98 (-0.2 %)"),
        (None, 5.0, "5.00"),
        (5.0, None, ""),
    ],
)
def test_a_loss_in_percent(before: float | None, after: float | None, words: str) -> None:
    assert perplexity(before, after) == words
