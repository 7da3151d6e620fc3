from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tuner.devices import DEVICES
from tuner.errors import BudgetError, Cancelled, TimerError
from tuner.progress import Report
from tuner.search import Configuration, Search
from tuner.shapes import SHAPES
from tuner.simulate import SimulatedTimer
from tuner.verify import hold

FOUND = Configuration(
    n_tb_max=8, n_tb={"o": 4, "down": 8}, k_chunk={"o": 40, "down": 20}, predicted_slowdown_percent=4.9
)


def scaled(found: Configuration, share: float) -> Configuration:
    k_chunk = {kind: math.floor(share * count) for kind, count in found.k_chunk.items()}
    return replace(found, k_chunk=k_chunk, predicted_slowdown_percent=share * found.predicted_slowdown_percent)


def proportional(percent_per_channel: float) -> tuple[list[dict[str, int]], object]:
    tried: list[dict[str, int]] = []

    def slowdown(k_chunk: Mapping[str, int], n_tb: Mapping[str, int]) -> float:
        assert n_tb == FOUND.n_tb
        tried.append(dict(k_chunk))
        return percent_per_channel * sum(k_chunk.values())

    return tried, slowdown


def test_what_holds_stays() -> None:
    tried, slowdown = proportional(0.05)
    assert hold(FOUND, slowdown, 5, scaled) == (FOUND, pytest.approx(3.0))
    assert tried == [{"o": 40, "down": 20}] * 2, "two readings of three decide"


def test_it_backs_off_until_it_holds() -> None:
    tried, slowdown = proportional(0.2)
    found, measured = hold(FOUND, slowdown, 5, scaled, readings=1)
    assert measured == pytest.approx(0.2 * sum(found.k_chunk.values()))
    assert measured <= 5
    assert found.n_tb == FOUND.n_tb
    share = max(found.k_chunk.values()) / 40
    assert found.predicted_slowdown_percent == pytest.approx(4.9 * share, rel=0.1), "the prediction follows"
    assert sum(found.k_chunk.values()) >= 0.8 * 25
    assert len(tried) <= 4


def test_it_gives_up_where_nothing_holds() -> None:
    found, measured = hold(FOUND, lambda *_: 50.0, 5, scaled)
    assert found.k_chunk == {"o": 0, "down": 0}
    assert (measured, found.predicted_slowdown_percent) == (0.0, 0.0)


def test_nothing_to_compensate_is_not_measured() -> None:
    empty = Configuration(n_tb_max=None, n_tb={"o": 0}, k_chunk={"o": 0}, predicted_slowdown_percent=0.0)
    assert hold(empty, lambda *_: pytest.fail("measured"), 5, scaled) == (empty, 0.0)


def test_a_slowdown_below_zero_holds() -> None:
    assert hold(FOUND, lambda *_: -0.4, 5, scaled) == (FOUND, -0.4)


@pytest.mark.parametrize("readings", [(80.0, 3.0, 2.0), (3.0, 80.0, 2.0), (2.0, 3.0)])
def test_a_single_outlier_changes_nothing(readings: tuple[float, ...]) -> None:
    following = iter(readings)
    assert hold(FOUND, lambda *_: next(following), 5, scaled) == (FOUND, 3.0)


@pytest.mark.parametrize("percent", [math.nan, math.inf])
def test_a_slowdown_that_cannot_be_is_refused(percent: float) -> None:
    with pytest.raises(TimerError, match="tune again"):
        hold(FOUND, lambda *_: percent, 5, scaled)


def test_a_device_that_vanishes_is_told() -> None:
    def gone(*_: object) -> float:
        raise TimerError("the device is gone")

    with pytest.raises(TimerError, match="gone"):
        hold(FOUND, gone, 5, scaled)


@pytest.mark.parametrize("budget", [0, -2.5, 101, math.nan])
def test_a_budget_out_of_range_is_refused(budget: float) -> None:
    with pytest.raises(BudgetError):
        hold(FOUND, lambda *_: 0.0, budget, scaled)


@pytest.mark.parametrize("readings", [0, 2, -1])
def test_a_median_needs_an_odd_number(readings: int) -> None:
    with pytest.raises(ValueError, match="odd"):
        hold(FOUND, lambda *_: 0.0, 5, scaled, readings=readings)


def test_it_stops_and_tells() -> None:
    reports: list[Report] = []
    asked = iter([False] * 3)
    with pytest.raises(Cancelled):
        hold(FOUND, lambda *_: 9.0, 5, scaled, progress=reports.append, cancelled=lambda: next(asked, True))
    assert [report.message for report in reports] == [
        "decoding with 100% of the compensation found",
        "decoding with 56% of the compensation found",
    ]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("device", ["rtx-4090", "rtx-4050m"])
def test_the_promise_holds_under_noise(device: str, seed: int) -> None:
    """Every time is 5 % off either way; the true slowdown of what is promised stays within the budget and its noise."""
    rng = random.Random(seed)
    layers, spec, budget = SHAPES["llama-3-8b"].layers, DEVICES[device], 5.0
    exact = SimulatedTimer(spec, layers, 3)

    class Noisy:
        measured = True

        def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
            return exact.seconds(kind, n_tb, k_chunk) * rng.uniform(0.95, 1.05)

    def true_slowdown(k_chunk: Mapping[str, int], n_tb: Mapping[str, int]) -> float:
        base = sum(layer.count * exact.seconds(layer.kind, 0, 0) for layer in layers)
        spent = sum(layer.count * exact.seconds(layer.kind, n_tb[layer.kind], k_chunk[layer.kind]) for layer in layers)
        return (spent / base - 1) * 100

    def measured_slowdown(k_chunk: Mapping[str, int], n_tb: Mapping[str, int]) -> float:
        return (1 + true_slowdown(k_chunk, n_tb) / 100) * rng.uniform(0.998, 1.002) * 100 - 100

    search = Search(layers, Noisy(), sm_count=spec.sm_count, limit=spec.shared_bytes_per_block)
    held, measured = hold(search.within(budget), measured_slowdown, budget, search.smaller)
    assert measured <= budget
    assert true_slowdown(held.k_chunk, held.n_tb) <= budget + 0.2
    assert any(held.k_chunk.values())
