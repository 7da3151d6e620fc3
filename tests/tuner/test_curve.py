from __future__ import annotations

from xml.etree import ElementTree as ET

import matplotlib as mpl
import pytest

from tuner.curve import Curve, knee_curves
from tuner.errors import ShapeError
from tuner.plot import svg, terminal
from tuner.search import Configuration
from tuner.shapes import LayerShape
from tuner.simulate import tune_simulated

CURVES = (
    Curve(kind="qkv", n_tb=8, points=((0, 1.0), (8, 1.01), (16, 1.02), (32, 1.3))),
    Curve(kind="down", n_tb=0, points=((0, 1.0), (16, 1.05), (32, 1.1))),
)


class Knee:
    measured = False

    def seconds(self, kind: str, n_tb: int, k_chunk: int) -> float:
        return 2.0 + max(0, k_chunk - 10)


def test_a_curve_is_relative_to_the_product_alone() -> None:
    found = Configuration(n_tb_max=4, n_tb={"o": 4}, k_chunk={"o": 0}, predicted_slowdown_percent=0)
    (curve,) = knee_curves([LayerShape("o", 64, 64, 1)], Knee(), found)
    points = ((0, 1.0), *((k, 1.0) for k in (2, 4, 6, 8, 10)), (12, 2.0), (14, 3.0), (16, 4.0))
    assert curve == Curve(kind="o", n_tb=4, points=points)


def test_curves_reach_past_what_was_found() -> None:
    found, layers, timer = tune_simulated("rtx-4050m", "llama-3-8b", 3, 5)
    curves = knee_curves(layers, timer, found, limit=49152)
    assert [(curve.kind, curve.n_tb) for curve in curves] == [(kind, found.n_tb[kind]) for kind in found.n_tb]
    for curve in curves:
        assert len(curve.points) == 9
        assert curve.points[0] == (0, 1.0)
        assert curve.points[-1][0] == 2 * found.k_chunk[curve.kind]
        assert curve.points[1][1] < 1.05 < curve.points[-1][1]
        values = [value for _, value in curve.points]
        assert values == sorted(values)


def test_other_block_counts_can_be_shown_beside() -> None:
    found, layers, timer = tune_simulated("rtx-4050m", "llama-3-8b", 3, 5)
    curves = knee_curves(layers, timer, found, limit=49152, others=True)
    counts = {curve.n_tb for curve in curves if curve.kind == "gate_up"}
    assert counts == {1, 2, 4, 8, found.n_tb["gate_up"]}


def test_on_a_processor_there_is_one_curve_a_type() -> None:
    found = Configuration(n_tb_max=None, n_tb={"o": 0}, k_chunk={"o": 600}, predicted_slowdown_percent=1)
    (curve,) = knee_curves([LayerShape("o", 64, 64, 1)], Knee(), found, others=True)
    assert (curve.n_tb, curve.points[-1][0]) == (0, 1024)


def test_a_terminal_plot_has_the_size_asked_for() -> None:
    text = terminal(CURVES, width=60, height=15, color=False)
    lines = text.splitlines()
    assert len(lines) == 15
    assert max(map(len, lines)) == 60
    assert "qkv, n_tb 8" in text
    assert "b down" in text
    assert "\x1b" not in text
    assert terminal(CURVES, width=60, height=15, color=False) == text


def test_a_terminal_plot_can_have_colors() -> None:
    assert "\x1b[" in terminal(CURVES, color=True)


def test_the_same_curves_give_the_same_picture() -> None:
    picture = svg(CURVES, title="knee curves")
    with mpl.rc_context({"lines.linewidth": 9, "text.usetex": True}):  # as a matplotlibrc found here would say
        assert svg(CURVES, title="knee curves") == picture
        assert mpl.rcParams["text.usetex"], "what others draw is as they want it"
    words = {element.text for element in ET.fromstring(picture).iter() if element.text}
    assert {"qkv, n_tb 8", "down", "k_chunk", "knee curves"} <= words
    assert b"<dc:date>" not in picture


def test_no_curves_are_refused() -> None:
    with pytest.raises(ShapeError, match="no curve"):
        terminal([])
    with pytest.raises(ShapeError, match="no curve"):
        svg([])
