"""Quality and slowdown of configurations around the chosen one."""

from __future__ import annotations

import pytest

from models.losses import TypeLosses
from tuner.curve import Curve
from tuner.losses import total_loss
from tuner.search import Configuration
from tuner.shapes import LayerShape
from tuner.tradeoff import tradeoff

LAYERS = (LayerShape("qkv", 1024, 1024, 3), LayerShape("down", 1024, 1024, 1))
LOSSES = TypeLosses(k_chunk=(0, 64), nats={"qkv": (0.3, 0.1), "down": (0.1, 0.05)}, tokens=1)


def configuration(**k_chunk: int) -> Configuration:
    return Configuration(
        n_tb_max=None,
        n_tb=dict.fromkeys(k_chunk, 0),
        k_chunk=k_chunk,
        predicted_slowdown_percent=6.0,
        predicted_loss_won=None,
        loss_without=None,
    )


def line(kind: str, slope: float) -> Curve:
    return Curve(kind=kind, n_tb=0, points=tuple((k, 1 + slope * k) for k in range(0, 65, 8)))


def test_the_configuration_is_on_the_curve_and_more_wins_more() -> None:
    found = configuration(qkv=32, down=16)
    points = tradeoff(found, [line("qkv", 0.002), line("down", 0.001)], LAYERS, LOSSES)
    assert points[0] == (0.0, 0.0)
    assert points == tuple(sorted(points))
    assert [won for _, won in points] == sorted(won for _, won in points)
    own = 1 - total_loss(LOSSES, LAYERS, found.k_chunk) / total_loss(LOSSES, LAYERS, {"qkv": 0, "down": 0})
    assert (pytest.approx(6.0), pytest.approx(own)) in points
    assert points[-1][0] == pytest.approx(12.0)


def test_a_time_that_noise_made_too_long_does_not_hide_the_configuration() -> None:
    found = configuration(qkv=32, down=0)
    bumpy = Curve(kind="qkv", n_tb=0, points=((0, 1.0), (16, 1.03), (24, 1.2), (32, 1.06), (64, 1.12)))
    points = tradeoff(found, [bumpy], LAYERS, LOSSES)
    own = 1 - total_loss(LOSSES, LAYERS, found.k_chunk) / total_loss(LOSSES, LAYERS, {"qkv": 0, "down": 0})
    assert (pytest.approx(6.0), pytest.approx(own)) in points
    assert points == tuple(sorted(points))
    assert [won for _, won in points] == sorted(won for _, won in points)


def test_where_nothing_is_compensated_or_measured_there_is_no_curve() -> None:
    assert tradeoff(configuration(qkv=0, down=0), [line("qkv", 0.002)], LAYERS, LOSSES) == ()
    assert tradeoff(configuration(qkv=8, down=8), [], LAYERS, LOSSES) == ()
    nothing_lost = TypeLosses(k_chunk=(0,), nats={"qkv": (0.0,), "down": (0.0,)}, tokens=1)
    assert tradeoff(configuration(qkv=8, down=8), [line("qkv", 0.002)], LAYERS, nothing_lost) == ()


def test_no_more_than_all_channels_are_compensated() -> None:
    points = tradeoff(configuration(qkv=900, down=900), [line("qkv", 0.002), line("down", 0.001)], LAYERS, LOSSES)
    assert points[-1][1] == pytest.approx(1.0)
