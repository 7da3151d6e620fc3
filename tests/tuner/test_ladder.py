"""The ladder: settings made by losses and times, and the choice among measured ones."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from models.losses import TypeLosses
from tests.grid import grid
from tuner.devices import DEVICES
from tuner.errors import ShapeError
from tuner.ladder import (
    LEVELS,
    MOST_READINGS,
    READINGS,
    TARGETS,
    Maker,
    Setting,
    best,
    bound,
    compensated,
    scatter,
    type_loss,
)
from tuner.search import Search
from tuner.shapes import SHAPES, LayerShape
from tuner.simulate import SimulatedTimer

LAYERS = (
    LayerShape("qkv", 960, 576, 30),
    LayerShape("o", 576, 576, 30),
    LayerShape("down", 576, 1536, 30),
    LayerShape("head", 49152, 576, 1),
)
APART = (*LAYERS[:2], replace(LAYERS[2], count=29), LAYERS[3], LayerShape("layers.29.down", 576, 1536, 1))
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

    def percent(self, k_chunk: Mapping[str, int], layers: tuple[LayerShape, ...] = LAYERS) -> float:
        extra = sum(
            layer.count * (self.seconds(layer.type, 0, k_chunk[layer.kind]) - self.base[layer.type]) for layer in layers
        )
        return 100 * extra / sum(layer.count * self.base[layer.kind] for layer in LAYERS)

    def maker(self, layers: tuple[LayerShape, ...] = LAYERS, losses: TypeLosses | None = LOSSES) -> Maker:
        return Maker(layers, Search(LAYERS, self, sm_count=None), losses)


def lost(k_chunk: Mapping[str, int]) -> float:
    return sum(type_loss(LOSSES, layer, k_chunk[layer.kind]) for layer in LAYERS)


NOTHING = dict.fromkeys((layer.kind for layer in LAYERS), 0)


@pytest.mark.parametrize("seed", grid(range(4), {0, 1}))
@pytest.mark.parametrize("budget", grid([2.5, 5, 10, 40], {2.5, 10}))
def test_no_levels_recover_more_in_the_same_time(seed: int, budget: float) -> None:
    """Against all combinations of the levels; what a step too many would take is spent in a smaller one."""
    device = Steps(seed)
    found = device.maker().setting(4.0, budget)
    assert found.predicted_slowdown_percent == pytest.approx(device.percent(found.k_chunk))
    assert found.predicted_slowdown_percent <= budget * (1 + 1e-9)
    assert found.predicted_won == pytest.approx(lost(NOTHING) - lost(found.k_chunk))
    assert (found.target, set(found.n_tb.values())) == (4.0, {0})
    most = 0.0
    for chosen in itertools.product((0, *LEVELS), repeat=len(LAYERS)):
        k_chunk = {layer.kind: value for layer, value in zip(LAYERS, chosen, strict=True)}
        if device.percent(k_chunk) <= budget:
            most = max(most, lost(NOTHING) - lost(k_chunk))
    assert found.predicted_won >= 0.99 * most


def test_more_time_recovers_more_and_what_costs_nothing_is_taken() -> None:
    device = Steps()
    won = [device.maker().setting(target, target).predicted_won or 0.0 for target in TARGETS]
    assert won == sorted(set(won))
    device.step = device.slope = dict.fromkeys(device.step, 0.0)
    assert set(device.maker().setting(4.0, 4.0).k_chunk.values()) == {LEVELS[-1]}


def test_the_last_blocks_mlp_comes_before_that_of_the_others() -> None:
    """It has four tenths of the loss for a thirtieth of the time."""
    device = Steps()
    maker = device.maker(APART)
    assert maker.lost == device.maker().lost == pytest.approx(lost(NOTHING))
    found = maker.setting(2.0, 2.0)
    assert found.k_chunk["layers.29.down"] > found.k_chunk["down"]
    assert found.predicted_slowdown_percent == pytest.approx(device.percent(found.k_chunk, APART))
    assert (found.predicted_won or 0) > (device.maker().setting(2.0, 2.0).predicted_won or 0)


def test_without_losses_the_papers_search_decides_and_the_last_block_is_as_the_others() -> None:
    device = Steps()
    found = device.maker(APART, None).setting(16.0, 16.0)
    searched = Search(LAYERS, device, sm_count=None).within(16.0)
    assert {kind: found.k_chunk[kind] for kind in NOTHING} == searched.k_chunk
    assert found.k_chunk["layers.29.down"] == found.k_chunk["down"]
    assert found.predicted_slowdown_percent == pytest.approx(searched.predicted_slowdown_percent)
    assert (found.predicted_won, device.maker(APART, None).lost) == (None, None)


def test_on_a_gpu_the_search_comes_first_and_nothing_is_lost_to_it() -> None:
    spec, layers = DEVICES["rtx-4050m"], SHAPES["llama-3.2-1b"].layers
    losses = TypeLosses(k_chunk=(0, 4, 32, 256), nats={layer.kind: (0.4, 0.2, 0.1, 0.02) for layer in layers}, tokens=1)
    search = Search(
        layers, SimulatedTimer(spec, layers, 3.0), sm_count=spec.sm_count, limit=spec.shared_bytes_per_block
    )
    maker = Maker(layers, search, losses, sm_count=spec.sm_count, limit=spec.shared_bytes_per_block)
    found, searched = maker.setting(5.0, 5.0), search.within(5.0)
    assert found.n_tb == searched.n_tb
    won = sum(type_loss(losses, layer, 0) - type_loss(losses, layer, searched.k_chunk[layer.kind]) for layer in layers)
    assert (found.predicted_won or 0) >= won
    assert found.predicted_slowdown_percent <= 5.0 * (1 + 1e-9)
    assert max(found.k_chunk.values()) <= 367, "more does not fit into a block's shared memory"


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
    layers = [LayerShape("gate_up", 8, 8, 1)]
    with pytest.raises(ShapeError, match="losses of gate_up are missing"):
        Maker(layers, Search(layers, Steps(), sm_count=None), LOSSES)


def measured(target: float, *slowdowns: float, won: float | None = None, loss: float | None = None) -> Setting:
    return Setting(
        target=target, k_chunk={"o": int(target)}, n_tb={"o": 0}, predicted_won=won, slowdowns=slowdowns, loss=loss
    )


def test_a_setting_is_held_to_more_than_its_median() -> None:
    """By twice the scatter of all settings' readings over the root of their number; few readings are none."""
    quiet, loud = measured(2, 2.0, 2.0, 2.0), measured(4, 3.0, 4.0, 5.0)
    assert scatter([]) == scatter([quiet]) == 0.25, "readings that agree by chance"
    assert scatter([loud]) == pytest.approx(1.5)
    assert bound(loud, 1.5) == pytest.approx(4 + 3 / math.sqrt(3))
    assert bound(measured(4, *[4.0] * MOST_READINGS), 1.5) == pytest.approx(5.0)
    assert bound(measured(4, *[4.0] * (READINGS - 1)), 0.25) == math.inf
    assert scatter([measured(4, 3.9, 4.0, 4.3, 90.0, 4.1)]) < 1, "an outlier hardly counts"


def test_the_best_within_the_budget() -> None:
    settings = [measured(2, *[2.0] * 3), measured(4, *[4.6] * 3), measured(8, *[4.8] * 3), measured(16, *[2.2] * 2)]
    assert best(settings, 2.0) is None, "the next reading may be above it"
    assert best(settings, 2.3) == settings[0]
    assert best(settings, 5.0) == settings[1]
    assert best(settings, 5.1) == settings[2]
    won = [replace(setting, predicted_won=1 / setting.target) for setting in settings]
    assert best(won, 5.1) == won[0]


def test_what_the_text_says_decides_once_it_was_read_with_all_that_fit() -> None:
    settings = [measured(2, *[2.0] * 3, won=0.1, loss=0.5), measured(4, *[4.0] * 3, won=0.2, loss=0.6)]
    assert best(settings, 5.0, without=0.8) == settings[0]
    assert best(settings, 5.0, without=0.4) is None, "no compensation makes the text better"
    assert best(settings, 5.0) == settings[1]
    unread = [settings[0], replace(settings[1], loss=None)]
    assert best(unread, 5.0, without=0.8) == unread[1]
    assert best(unread, 3.0, without=0.8) == unread[0]
    assert best([*settings, measured(8, *[4.5] * 3, loss=0.5)], 5.0, without=0.8) == settings[0], "the faster of equals"


@pytest.mark.parametrize("seed", range(20))
def test_the_budget_is_kept_under_noise(seed: int) -> None:
    """Of settings a tenth apart and readings that scatter by a percent, the chosen one is within the budget."""
    rng = random.Random(seed)
    settings = [
        measured(true, *[rng.gauss(true, 1.0) for _ in range(READINGS)], won=true)
        for true in (2.0, 3.0, 4.0, 4.5, 5.0, 5.5, 6.0, 8.0)
    ]
    found = best(settings, 5.0)
    assert found is None or found.target <= 5.5
