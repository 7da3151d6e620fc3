"""The comparison of a tuner's choice with uniform k_chunk, and its verdict."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.bench.tuned import SHAPE, best_uniform, fails, report

NATS = {"0/0/0/0/0": 4.0, "4/4/4/4/4": 3.5, "16/16/16/16/16": 3.3, "64/64/64/64/64": 3.2}
SLOWDOWNS = {"4": 3.0, "16": 5.0, "64": 9.0}
CHOICE = {"qkv": 8, "o": 0, "gate_up": 4, "down": 8, "head": 2}


def measured(nats: float, slowdown: float = 4.0, budget: str = "5") -> dict[str, Any]:
    """A model whose choice has so much loss."""
    return {
        "perplexity": {key: math.exp(value) for key, value in {**NATS, "8/0/4/8/2": nats}.items()},
        "times": {"tuned": {budget: {"k_chunk": CHOICE, "slowdown": slowdown}}, "uniform": SLOWDOWNS},
    }


@pytest.mark.parametrize(("budget", "k_chunk"), [(2.9, 0), (3.0, 4), (4.9, 4), (5.0, 16), (8.0, 16), (20.0, 64)])
def test_the_best_uniform_k_chunk_fits_by_its_own_slowdown(budget: float, k_chunk: int) -> None:
    assert best_uniform(SLOWDOWNS, NATS, budget) == (k_chunk, NATS["/".join([str(k_chunk)] * 5)])


def test_more_compensation_can_be_worse() -> None:
    assert best_uniform(SLOWDOWNS, {**NATS, "64/64/64/64/64": 3.6}, 20) == (16, 3.3)


def test_a_row_has_both_sides_and_the_share() -> None:
    row = report({"small": measured(3.37)}).splitlines()[-1]
    assert "| 8 / 0 / 4 / 8 / 2 |" in row
    assert row.endswith("| 16 | 27.11 | 90 % |")  # 0.63 nats against 0.70
    assert report({"small": {"perplexity": {}}}).count("\n") == 1


@pytest.mark.parametrize("name", ["smollm2", SHAPE])
def test_the_verdict_can_fail(name: str) -> None:
    """85 % of 0.7 nats are 0.595: 3.41 falls just short, whatever the choice's own slowdown is."""
    assert fails({name: measured(3.4)}) == []
    assert fails({name: measured(3.4, slowdown=2.0)}) == []
    (said,) = fails({name: measured(3.41, slowdown=2.0)})
    assert said == f"{name} at 5 %: 84 % of what a uniform k_chunk of 16 recovers"


def test_a_choice_that_makes_it_worse_fails_where_nothing_uniform_fits() -> None:
    assert fails({"smollm2": measured(4.01, slowdown=1.0, budget="2")})
    assert fails({"smollm2": measured(4.0, slowdown=1.0, budget="2")}) == []


def test_a_broken_promise_fails() -> None:
    assert fails({"smollm2": measured(3.3, slowdown=7.5)}) == ["smollm2 at 5 %: decoding slows by 7.5 %"]


def test_models_that_decide_nothing_do_not_fail() -> None:
    assert fails({"demo": measured(5.0)}) == []
