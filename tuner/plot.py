"""Plots of knee curves for terminals and as SVG. The plotting libraries are imported on first use."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from tuner.curve import Curve
from tuner.errors import ShapeError

_X_LABEL = "k_chunk"
_Y_LABEL = "time / time without compensation"


def terminal(curves: Sequence[Curve], *, width: int = 80, height: int = 20, color: bool = True) -> str:
    """The curves as lines of text.

    Args:
        curves: What to draw.
        width: Columns.
        height: Lines.
        color: Whether to use colours; without, each curve has its own marker.

    Raises:
        ShapeError: no curves.
    """
    _check(curves)
    import plotext

    figure = plotext.figure
    figure.clear()
    try:
        figure.plot_size(max(width, 40), max(height, 10))
        figure.theme("simple" if color else "colorless")
        for curve, mark in zip(curves, _marks(len(curves), color), strict=True):
            ks, times = zip(*curve.points, strict=True)
            figure.draw(figure.signal(list(ks), list(times), marker=mark).lines().label(_name(curve)))
        figure.label(_X_LABEL, "x").label(_Y_LABEL, "y")
        text: str = figure.build().string(colorless=not color)
    finally:
        figure.clear()
    return text


def svg(curves: Sequence[Curve], *, title: str = "") -> bytes:
    """The curves as an SVG picture; the same curves give the same bytes.

    Raises:
        ShapeError: no curves.
    """
    _check(curves)
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    canvas: Any = FigureCanvasSVG
    with mpl.rc_context():
        mpl.rcdefaults()  # otherwise a matplotlibrc in the current folder applies, and could run LaTeX
        mpl.rcParams.update({"svg.hashsalt": "lowbit-chat", "svg.fonttype": "none", "font.family": "sans-serif"})
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for curve in curves:
            ks, times = zip(*curve.points, strict=True)
            axes.plot(ks, times, marker=".", label=_name(curve))
        axes.set(xlabel=_X_LABEL, ylabel=_Y_LABEL, title=title)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        picture = BytesIO()
        canvas(figure).print_svg(picture, metadata={"Date": None, "Creator": None})
        return picture.getvalue()


def _check(curves: Sequence[Curve]) -> None:
    if not curves:
        raise ShapeError("there is no curve to draw")


def _name(curve: Curve) -> str:
    return f"{curve.kind}, n_tb {curve.n_tb}" if curve.n_tb else curve.kind


def _marks(count: int, color: bool) -> list[str]:
    return ["braille"] * count if color else [chr(ord("a") + index % 26) for index in range(count)]
