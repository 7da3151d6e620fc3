"""The report's pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.quality import massive
from tests.bench.quality.points import REAL, REFERENCE_K
from tests.bench.quality.view import View
from tests.bench.reporting.cases import Case
from tests.bench.reporting.page import Picture
from tests.bench.reporting.results import Entry
from tests.bench.reporting.style import COLORS, figure, label_ends, level, steps

CHAT = "as a chat"
_DASHED = (4.0, 3.0)
_PICTURED = 160
"""Channels of the picture of outliers; more would be too small to see."""


def drawn(view: View) -> dict[str, Picture]:
    """What draws each picture, by its name."""
    pictures: dict[str, Callable[[View, Path], bool]] = {
        "outliers": _outliers,
        "massive": _massive,
        "bytes": _bytes,
    }
    pictures |= {f"curves-{case.name}": _curves_of(case) for case in view.models}
    return {name: partial(make, view) for name, make in pictures.items()}


def _curves_of(case: Case) -> Callable[[View, Path], bool]:
    def make(view: View, file: Path) -> bool:
        return _curves(view, case, file)

    return make


def _curves(view: View, case: Case, file: Path) -> bool:
    """Perplexity against k_chunk, a panel for each number of bits (QDEC Fig. 12); as a chat where that was measured."""
    full, curve, way = chat_or_plain(view, case)
    found = {bits: {method: curve(case, method, bits) for method in view.methods()} for bits in view.bits()}
    found = {bits: {m: c for m, c in curves.items() if c} for bits, curves in found.items()}
    found = {bits: curves for bits, curves in found.items() if curves}
    numbers = view.numbers()
    if not found:
        return False
    with figure(file, len(found), 1, 3.3 * len(found) + 0.6, 3.4) as panels:
        for axes, (bits, curves) in zip(panels[0], found.items(), strict=True):
            places = steps(axes, numbers)
            level(axes, full, COLORS["full"], _DASHED)
            for method, curve_ in curves.items():
                xs = [places[k_chunk] for k_chunk, _ in curve_]
                ys = [float(entry["perplexity"]) for _, entry in curve_]
                axes.plot(xs, ys, color=COLORS[method], zorder=3)
                axes.plot(xs[1:], ys[1:], color=COLORS[method], marker="o", ls="", mfc="white", zorder=4)
                axes.plot(xs[:1], ys[:1], color=COLORS[method], marker="x", markersize=6, zorder=4)
            axes.set_title(f"{bits:g} bits, {way}")
            axes.set_xlabel("k_chunk")
        panels[0][0].set_ylabel("perplexity")
        panels[0][0].figure.draw_without_rendering()  # so that sizes are known where labels are placed
        for axes, curves in zip(panels[0], found.values(), strict=True):
            ends = [(method, float(curve_[-1][1]["perplexity"]), COLORS[method]) for method, curve_ in curves.items()]
            label_ends(axes, [*ends, ("full", full, COLORS["full"])], len(numbers) - 1)
    return True


@contextmanager
def _grid(file: Path, count: int, width: float, height: float) -> Iterator[list[Any]]:
    """So many axes, two beside each other."""
    columns = min(2, count)
    rows = -(-count // columns)
    with figure(file, columns, rows, width * columns, height * rows) as panels:
        flat = [axes for line in panels for axes in line]
        for axes in flat[count:]:
            axes.set_visible(False)
        yield flat[:count]


def _outliers(view: View, file: Path) -> bool:
    """Which channels are large at each step, and how many of them statistics know (QDEC Fig. 5)."""
    if not view.outliers:
        return False
    from matplotlib.colors import ListedColormap

    cases = [case for case in view.models if case.name in view.outliers]
    case = cases[0]
    entry = view.outliers[case.name]
    with figure(file, 2, 1, 9.6, 3.5, width_ratios=[1.75, 1]) as panels:
        raster, bars = panels[0]
        rows = min(_PICTURED, int(entry["width"]))
        marks = np.zeros((rows, len(entry["channels"])))
        for step, channels in enumerate(entry["channels"]):
            marks[[channel for channel in channels if channel < rows], step] = 1
        fine = np.kron(marks, np.ones((6, 8)))  # large pixels stay sharp in viewers that smooth
        tint = ListedColormap(["white", COLORS["gptq"]])
        raster.imshow(
            fine, cmap=tint, aspect="auto", origin="lower", interpolation="none", extent=(0, marks.shape[1], 0, rows)
        )
        raster.set(xlabel="position", ylabel=f"input channel, first {rows} of {entry['width']}")
        raster.set_title(f"(a) largest 5 % of {entry['layer']}'s inputs, {case.name}")
        raster.grid(visible=False)
        kinds = list(entry["recall"])
        tints = ("#9ecae1", "#4292c6", "#2171b5", "#08306b")
        for number, case in enumerate(cases):
            heights = [100 * view.outliers[case.name]["recall"][kind]["0.05"] for kind in kinds]
            width = 0.8 / len(cases)
            xs = [place + (number - (len(cases) - 1) / 2) * width for place in range(len(kinds))]
            bars.bar(xs, heights, width=0.92 * width, color=tints[number % len(tints)], label=case.name, zorder=2)
        bars.set_xticks(range(len(kinds)), kinds)
        bars.set(ylim=(0, 100), ylabel="recall, %")
        bars.set_title("(b) of those, known from statistics")
        bars.legend(
            loc="upper right", fontsize=8, ncols=2 if len(cases) > 2 else 1, columnspacing=1.0, handlelength=1.0
        )
    return True


def _massive(view: View, file: Path) -> bool:
    """The real model's first token (`tests.bench.quality.massive`)."""
    entry = view.massive.get(REAL)
    if entry is not None:
        massive.draw(entry, file)
    return entry is not None


def _bytes(view: View, file: Path) -> bool:
    """Perplexity against the bytes that stay on the device, beside llama.cpp."""
    cases = view.models
    if not any(view.curve(case, method, 3) for case in cases for method in view.methods()):
        return False
    with _grid(file, len(cases), 4.8, 3.7) as panels:
        for axes, case in zip(panels, cases, strict=False):
            _bytes_of(view, case, axes)
        panels[0].legend(loc="upper right", fontsize=8, handlelength=1.6)
    return True


def _bytes_of(view: View, case: Case, axes: Any) -> None:
    full, curve, way = chat_or_plain(view, case)
    axes.axhline(full, color=COLORS["full"], linewidth=1.1, linestyle=(0, _DASHED))
    for method in view.methods():
        found = [
            (held / 1e6, own[0], own[REFERENCE_K])
            for bits in view.bits()
            if (held := view.gpu_bytes(case, method, bits)) is not None
            and {0, REFERENCE_K} <= (own := dict(curve(case, method, bits))).keys()
        ]
        if not found:
            continue
        xs = [held for held, _, _ in found]
        plain, better = ([float(pair[place]["perplexity"]) for pair in found] for place in (1, 2))
        axes.plot(xs, plain, color=COLORS[method], marker="x", linewidth=0.9, alpha=0.65, zorder=3)
        axes.plot(xs, better, color=COLORS[method], marker="o", label=f"{method}, k_chunk {REFERENCE_K}", zorder=4)
    rows = [row for row in view.peers.get(case.name, {}).get("rows", []) if row["kind"] != "F32"]
    for row in rows:
        x, y = row["gpu_bytes"] / 1e6, float((row["chat"] if way == CHAT else row)["perplexity"])
        axes.plot([x], [y], marker="D", color=COLORS["llama.cpp"], ls="", markersize=4, zorder=5)
        place = {"xytext": (-1, 5), "textcoords": "offset points", "va": "bottom", "ha": "left"}
        axes.annotate(row["kind"], (x, y), rotation=50, fontsize=8, **place)
    if rows:
        label = "llama.cpp, importance matrix"
        axes.plot([], [], marker="D", color=COLORS["llama.cpp"], ls="", markersize=4, label=label)
    axes.margins(x=0.1, y=0.15)
    axes.set_title(f"{case.name}, {way}")
    axes.set(xlabel="MB on the device", ylabel="perplexity")
    axes.annotate(
        "full precision",
        (1, full),
        (0, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )


Curve = Callable[[Case, str, float], list[tuple[int, Entry]]]


def chat_or_plain(view: View, case: Case) -> tuple[float, Curve, str]:
    """Full precision's perplexity, what gives a curve, and the way in words: as a chat where that was measured."""
    chat = view.chat_full.get(case.name)
    if chat is None:
        return float(view.full[case.name]["perplexity"]), view.curve, "plain"
    return float(chat["perplexity"]), view.chat_curve, CHAT
