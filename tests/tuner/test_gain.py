"""Choosing k_chunk by loss won back, against all combinations one by one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping

import pytest

from models.losses import TypeLosses
from tests.grid import grid
from tuner.errors import ShapeError
from tuner.gain import TIMED, best_choice
from tuner.losses import compensated, recovered_loss, total_loss, type_loss
from tuner.search import Configuration, Search, tune
from tuner.shapes import LayerShape
from tuner.verify import hold

LAYERS = (
    LayerShape("qkv", 960, 576, 30),
    LayerShape("o", 576, 576, 30),
    LayerShape("down", 576, 1536, 30),
    LayerShape("head", 49152, 576, 1),
)
LOSSES = TypeLosses(
    k_chunk=(0, 4, 32, 256),
    nats={
        "qkv": (0.33, 0.12, 0.08, 0.03),
        "o": (0.1, 0.075, 0.05, 0.015),
        "down": (0.44, 0.19, 0.1, 0.024),
        "head": (0.23, 0.065, 0.035, 0.015),
    },
    tokens=1,
)


class Steps:
    """A processor: choosing channels costs a step, every channel a little more."""

    measured = False

    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.base = {layer.kind: layer.weights * rng.uniform(0.8, 1.2) for layer in LAYERS}
        self.step = {layer.kind: 20 * layer.k * rng.uniform(0.5, 1.5) for layer in LAYERS}
        self.slope = {layer.kind: layer.weights / 1024 * rng.uniform(0.5, 2) for layer in LAYERS}

    def seconds(self, kind: str, _n_tb: int, k_chunk: int) -> float:
        return self.base[kind] + (self.step[kind] + self.slope[kind] * k_chunk if k_chunk else 0.0)

    def extra(self, k_chunk: Mapping[str, int]) -> float:
        return sum(
            layer.count * (self.seconds(layer.kind, 0, k_chunk[layer.kind]) - self.base[layer.kind]) for layer in LAYERS
        )

    def total(self) -> float:
        return sum(layer.count * self.base[layer.kind] for layer in LAYERS)


@pytest.mark.parametrize("seed", grid(range(4), {0, 1}))
@pytest.mark.parametrize("budget", grid([0.5, 2.5, 5, 10, 40], {2.5, 10}))
def test_nothing_wins_back_more_in_the_same_time(seed: int, budget: float) -> None:
    device = Steps(seed)
    found = Search(LAYERS, device, sm_count=None, losses=LOSSES).within(budget)
    spare = budget / 100 * device.total()
    assert device.extra(found.k_chunk) <= spare * (1 + 1e-9)
    grid = (0, *(k_chunk for k_chunk in TIMED if k_chunk <= 256))
    best = 0.0
    for chosen in itertools.product(grid, repeat=len(LAYERS)):
        k_chunk = {layer.kind: value for layer, value in zip(LAYERS, chosen, strict=True)}
        if device.extra(k_chunk) <= spare * 0.997:  # times are rounded up to parts of the budget
            best = max(best, recovered_loss(LOSSES, LAYERS, k_chunk))
    assert found.predicted_loss_won == pytest.approx(recovered_loss(LOSSES, LAYERS, found.k_chunk))
    assert found.predicted_loss_won >= best - 1e-9
    assert found.loss_without == pytest.approx(1.1)
    assert found.predicted_slowdown_percent == pytest.approx(100 * device.extra(found.k_chunk) / device.total())


def test_it_buys_quality_where_times_alone_buy_channels() -> None:
    """One channel in every layer costs more than the budget; the paper's search then leaves all small layers out."""
    device = Steps()
    device.step["o"] *= 30
    by_time = tune(LAYERS, device, budget_percent=1, sm_count=None)
    by_loss = Search(LAYERS, device, sm_count=None, losses=LOSSES).within(1)
    assert by_time.k_chunk["qkv"] == 0
    assert by_loss.k_chunk["o"] == 0
    assert by_loss.k_chunk["qkv"] > 0
    assert by_loss.predicted_loss_won is not None
    assert by_loss.predicted_loss_won > 1.5 * recovered_loss(LOSSES, LAYERS, by_time.k_chunk)
    assert by_time.predicted_loss_won is None


def test_what_costs_nothing_is_taken() -> None:
    device = Steps()
    device.step = dict.fromkeys(device.step, 0.0)
    device.slope = dict.fromkeys(device.slope, 0.0)
    found = Search(LAYERS, device, sm_count=None, losses=LOSSES).within(5)
    assert total_loss(LOSSES, LAYERS, found.k_chunk) == pytest.approx(0)


def test_few_points_are_timed_for_a_small_budget() -> None:
    asked: list[tuple[str, int]] = []
    device = Steps()

    def seconds(layer: LayerShape, k_chunk: int) -> float:
        asked.append((layer.kind, k_chunk))
        return device.seconds(layer.kind, 0, k_chunk)

    best_choice(LAYERS, {layer.kind: 1024 for layer in LAYERS}, seconds, LOSSES, 0.02 * device.total())
    assert {k_chunk for kind, k_chunk in asked if kind == "qkv"} < {0, *TIMED}
    assert max(k_chunk for kind, k_chunk in asked if kind == "head") < 1024


def test_limits_hold() -> None:
    device = Steps()
    limits = {"qkv": 6, "o": 0, "down": 367, "head": 1024}
    found = best_choice(
        LAYERS, limits, lambda layer, k_chunk: device.seconds(layer.kind, 0, k_chunk), LOSSES, 10 * device.total()
    )
    assert (found["qkv"], found["o"], found["down"]) == (6, 0, 367)


def test_on_a_gpu_the_two_phases_come_first_and_nothing_is_lost_to_them() -> None:
    """With thread blocks to divide the plan is the paper's; the choice wins back at least as much as its own."""
    device = Steps()
    paper = tune(LAYERS, device, budget_percent=10, sm_count=20, limit=49152)
    found = Search(LAYERS, device, sm_count=20, limit=49152, losses=LOSSES).within(10)
    assert (found.n_tb_max, found.n_tb) == (paper.n_tb_max, paper.n_tb)
    assert found.predicted_loss_won is not None
    assert found.predicted_loss_won >= recovered_loss(LOSSES, LAYERS, paper.k_chunk)
    assert found.predicted_slowdown_percent <= 10 + 1e-9


def test_less_is_chosen_anew_and_its_prediction_follows() -> None:
    device = Steps()
    search = Search(LAYERS, device, sm_count=None, losses=LOSSES)
    found = search.within(10)
    half = search.smaller(found, 0.5)
    assert half.predicted_slowdown_percent <= found.predicted_slowdown_percent / 2 + 1e-9
    assert half.predicted_slowdown_percent == pytest.approx(100 * device.extra(half.k_chunk) / device.total())
    device.step = dict.fromkeys(device.step, 0.0)  # half of the channels then takes half of the time
    search = Search(LAYERS, device, sm_count=None, losses=LOSSES)
    found = search.within(1)
    half = search.smaller(found, 0.5)
    scaled = {kind: value // 2 for kind, value in found.k_chunk.items()}
    assert device.extra(scaled) <= device.extra(found.k_chunk) / 2
    assert half.predicted_loss_won is not None
    assert half.predicted_loss_won > recovered_loss(LOSSES, LAYERS, scaled)


def test_the_prediction_follows_what_the_check_took_back() -> None:
    """Decoding is slower than its layers say; what holds is within the budget by its own measure."""
    device = Steps()
    search = Search(LAYERS, device, sm_count=None, losses=LOSSES)
    found = search.within(5)
    held, measured = hold(found, lambda k_chunk, _: 200 * device.extra(k_chunk) / device.total(), 5, search.smaller)
    assert measured <= 5
    assert held.k_chunk != found.k_chunk
    assert held.predicted_slowdown_percent == pytest.approx(measured / 2)
    assert held.predicted_loss_won == pytest.approx(recovered_loss(LOSSES, LAYERS, held.k_chunk))


def test_a_check_that_never_holds_ends_in_nothing() -> None:
    """Even where the layers' times say that compensation is free, so that a smaller time buys as much."""
    device = Steps()
    device.step = dict.fromkeys(device.step, 0.0)
    device.slope = dict.fromkeys(device.slope, 0.0)
    search = Search(LAYERS, device, sm_count=None, losses=LOSSES)
    tries: list[Mapping[str, int]] = []

    def slowdown(k_chunk: Mapping[str, int], _n_tb: Mapping[str, int]) -> float:
        tries.append(k_chunk)
        return 50.0

    held, measured = hold(search.within(5), slowdown, 5, search.smaller, readings=1)
    assert (set(held.k_chunk.values()), measured) == ({0}, 0)
    assert (held.predicted_slowdown_percent, held.predicted_loss_won) == (0, 0)
    assert len(tries) < 25


def test_losses_between_the_points() -> None:
    layer = LayerShape("qkv", 960, 1024, 1)
    at = {k_chunk: type_loss(LOSSES, layer, k_chunk) for k_chunk in range(1025)}
    assert [at[k_chunk] for k_chunk in LOSSES.k_chunk] == list(LOSSES.nats["qkv"])
    assert at[2] == pytest.approx((0.33 + 0.12) / 2)
    assert at[11] == pytest.approx(0.12 + math.log(11 / 4) / math.log(8) * (0.08 - 0.12))
    assert at[512] == pytest.approx(0.015)
    assert at[1024] == 0
    assert all(at[k_chunk] >= at[k_chunk + 1] for k_chunk in range(1024))


def test_a_narrow_layer_counts_by_its_channels() -> None:
    """With 64 inputs k_chunk 1 to 16 all compensate one channel."""
    layer = LayerShape("qkv", 96, 64, 1)
    assert [compensated(64, k_chunk) for k_chunk in (0, 1, 16, 17, 1024)] == [0, 1, 1, 2, 64]
    assert compensated(1536, 3) == 3 + 2
    assert type_loss(LOSSES, layer, 1) == type_loss(LOSSES, layer, 16) == 0.12
    assert 0.08 == type_loss(LOSSES, layer, 32) < 0.12


def test_a_loss_that_rises_counts_as_flat() -> None:
    losses = TypeLosses(k_chunk=(0, 4, 32), nats={"qkv": (0.2, 0.3, 0.1)}, tokens=1)
    layer = LayerShape("qkv", 960, 1024, 1)
    assert [type_loss(losses, layer, k_chunk) for k_chunk in (0, 2, 4, 32)] == pytest.approx([0.2, 0.2, 0.2, 0.1])


def test_a_layer_type_without_losses_is_refused() -> None:
    with pytest.raises(ShapeError, match="losses of gate_up are missing"):
        Search([LayerShape("gate_up", 8, 8, 1)], Steps(), sm_count=None, losses=LOSSES)


def test_a_configuration_without_losses_says_so() -> None:
    found = Configuration(n_tb_max=None, n_tb={}, k_chunk={}, predicted_slowdown_percent=0.0)
    assert (found.predicted_loss_won, found.loss_without) == (None, None)
