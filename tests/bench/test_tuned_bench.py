"""The comparison of a tuner's choice with uniform k_chunk."""

from __future__ import annotations

import math

import pytest

from tests.bench.tuned import best_uniform, report

NATS = {"0/0/0/0/0": 4.0, "4/4/4/4/4": 3.5, "16/16/16/16/16": 3.3, "64/64/64/64/64": 3.2}
SLOWDOWNS = {"4": 3.0, "16": 5.0, "64": 9.0}


@pytest.mark.parametrize(
    ("slowdown", "k_chunk", "nats"),
    [(2.9, 0, 4.0), (3.0, 4, 3.5), (4.0, 10, 3.4), (5.0, 16, 3.3), (8.0, 52, 3.225), (20.0, 64, 3.2)],
)
def test_the_best_uniform_k_chunk_is_interpolated(slowdown: float, k_chunk: float, nats: float) -> None:
    assert best_uniform(SLOWDOWNS, NATS, slowdown) == pytest.approx((k_chunk, nats))


def test_noise_does_not_make_more_channels_faster() -> None:
    assert best_uniform({"4": 3.0, "16": 2.0, "64": 9.0}, NATS, 2.5) == (0, 4.0)


def test_more_compensation_can_be_worse() -> None:
    assert best_uniform(SLOWDOWNS, {**NATS, "64/64/64/64/64": 3.6}, 20) == (16, 3.3)


def test_a_row_has_both_sides_and_the_share() -> None:
    choice = {"qkv": 8, "o": 0, "gate_up": 4, "down": 8, "head": 2}
    perplexity = {key: math.exp(value) for key, value in {**NATS, "8/0/4/8/2": 3.37}.items()}
    own = {
        "perplexity": perplexity,
        "times": {
            "tuned": {"5": {"k_chunk": choice, "slowdown": 4.0}},
            "by_time": {"5": {"k_chunk": dict.fromkeys(choice, 4), "slowdown": 3.0}},
            "uniform": SLOWDOWNS,
        },
    }
    row = report({"small": own}).splitlines()[-1]
    assert "| 8 / 0 / 4 / 8 / 2 |" in row
    assert "| 105 % |" in row  # 0.63 nats against 0.60
    assert report({"small": {"perplexity": {}}}).count("\n") == 1
