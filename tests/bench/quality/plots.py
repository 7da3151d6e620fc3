"""The report's pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.quality.points import REFERENCE_K
from tests.bench.quality.view import View
from tests.bench.reporting.cases import Case
from tests.bench.reporting.results import Entry
from tests.bench.reporting.style import COLORS, QUIET, SELECTORS, draw_all, figure, label_ends, level, steps

_DASHED, _DOTTED = (4.0, 3.0), (1.0, 2.0)
_PICTURED = 160
"""Channels of the picture of outliers; more would be too small to see."""


def draw(view: View, folder: Path) -> dict[str, Path]:
    """Draw every picture for which there are numbers.

    Args:
        view: The results.
        folder: Where the SVG files go.

    Returns:
        The files by name, without those that had nothing to show.
    """
    pictures: dict[str, Callable[[View, Path], bool]] = {
        "selectors": _selectors,
        "exact": _exact,
        "outliers": _outliers,
        "bytes": _bytes,
    }
    pictures |= {f"curves-{case.name}": _curves_of(case) for case in view.models}
    return draw_all({name: partial(make, view) for name, make in pictures.items()}, folder)


def _curves_of(case: Case) -> Callable[[View, Path], bool]:
    def make(view: View, file: Path) -> bool:
        return _curves(view, case, file)

    return make


def _curves(view: View, case: Case, file: Path) -> bool:
    """Perplexity against k_chunk, a panel for each number of bits (QDEC Fig. 12)."""
    found = {bits: {method: view.curve(case, method, bits) for method in view.methods()} for bits in view.bits()}
    found = {
        bits: {m: [one for one in c if one[0] <= 128] for m, c in curves.items() if c} for bits, curves in found.items()
    }
    found = {bits: curves for bits, curves in found.items() if curves}
    if not found:
        return False
    numbers = sorted({k_chunk for curves in found.values() for curve in curves.values() for k_chunk, _ in curve})
    full = float(view.full[case.name]["perplexity"])
    with figure(file, len(found), 1, 3.3 * len(found) + 0.6, 3.1, sharey=True) as panels:
        for axes, (bits, curves) in zip(panels[0], found.items(), strict=True):
            places = steps(axes, numbers)
            level(axes, full, COLORS["full"], _DASHED)
            for method, curve in curves.items():
                xs = [places[k_chunk] for k_chunk, _ in curve]
                ys = [float(entry["perplexity"]) for _, entry in curve]
                axes.plot(xs, ys, color=COLORS[method], zorder=3)
                axes.plot(xs[1:], ys[1:], color=COLORS[method], marker="o", ls="", mfc="white", zorder=4)
                axes.plot(xs[:1], ys[:1], color=COLORS[method], marker="x", markersize=6, zorder=4)
            axes.set_title(f"{bits:g} bits")
            axes.set_xlabel("k_chunk")
        panels[0][0].set_ylabel("perplexity")
        _settle(panels)
        for axes, curves in zip(panels[0], found.values(), strict=True):
            ends = [(method, float(curve[-1][1]["perplexity"]), COLORS[method]) for method, curve in curves.items()]
            label_ends(axes, [*ends, ("full", full, COLORS["full"])], len(numbers) - 1)
    return True


def _settle(panels: Any) -> None:
    """Lay the axes out once, so that sizes are known where labels are placed."""
    panels[0][0].figure.draw_without_rendering()


def _selectors(view: View, file: Path) -> bool:
    """Dynamic, static and random channels at 3 bits (QDEC Fig. 16)."""
    found: list[tuple[Case, str, dict[str, list[tuple[int, Entry]]]]] = []
    for case in view.models:
        method = _method(view, case)
        curves = {select: view.curve(case, method, 3, select=select) for select in ("approx", "static", "random")}
        numbers = {k_chunk for k_chunk, _ in curves["random"]}
        curves = {select: [one for one in curve if one[0] in numbers] for select, curve in curves.items()}
        if numbers:
            found.append((case, method, curves))
    if not found:
        return False
    with _grid(file, len(found), 4.6, 2.7) as panels:
        for axes, (case, method, curves) in zip(panels, found, strict=False):
            places = steps(axes, [k_chunk for k_chunk, _ in curves["random"]])
            level(axes, float(view.full[case.name]["perplexity"]), COLORS["full"], _DASHED)
            none = view.get(case, method, 3, 0)
            if none is not None:
                level(axes, float(none["perplexity"]), QUIET, _DOTTED)
            for select, curve in curves.items():
                xs, ys = zip(*((places[k_chunk], float(entry["perplexity"])) for k_chunk, entry in curve), strict=True)
                axes.plot(xs, ys, color=SELECTORS[select], marker="o", markerfacecolor="white", zorder=3)
            axes.set_title(f"{case.name}, {method}, 3 bits")
            axes.set(xlabel="k_chunk", ylabel="perplexity")
        panels[0].figure.draw_without_rendering()
        for axes, (case, method, curves) in zip(panels, found, strict=False):
            ends = [
                ("dynamic" if select == "approx" else select, float(curve[-1][1]["perplexity"]), SELECTORS[select])
                for select, curve in curves.items()
            ]
            ends.append(("full", float(view.full[case.name]["perplexity"]), COLORS["full"]))
            none = view.get(case, method, 3, 0)
            if none is not None:
                ends.append(("none", float(none["perplexity"]), QUIET))
            label_ends(axes, ends, len(curves["random"]) - 1)
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


def _method(view: View, case: Case) -> str:
    """The method that is shown where only one is: the paper's first, or what there is."""
    wanted = ("awq", "rtn", *case.closer)
    return next((method for method in wanted if view.curve(case, method, 3, select="random")), "rtn")


def _exact(view: View, file: Path) -> bool:
    """Approximate against exact top-k at 3 bits, and the recall (QDEC Fig. 15)."""
    found = []
    for case in view.models:
        method = _method(view, case)
        pairs = [
            (k_chunk, exact, approx)
            for k_chunk, exact in view.curve(case, method, 3, select="exact")
            if (approx := view.get(case, method, 3, k_chunk)) is not None
        ]
        if pairs:
            found.append((case, method, pairs))
    if not found:
        return False
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    with figure(file, columns, 2 * rows, 4.6 * columns, 3.4 * rows, height_ratios=[2, 1] * rows) as panels:
        for axes in [axes for line in panels for axes in line]:
            axes.set_visible(False)
        for number, (case, method, pairs) in enumerate(found):
            upper, lower = (panels[2 * (number // columns) + row][number % columns] for row in (0, 1))
            _exact_of(upper, lower, pairs)
            upper.set_title(f"{case.name}, {method}, 3 bits")
        panels[0][0].legend(loc="upper right", handlelength=2.4)
    return True


def _exact_of(upper: Any, lower: Any, pairs: list[tuple[int, Entry, Entry]]) -> None:
    """Perplexity above, recall below."""
    for axes in (upper, lower):
        axes.set_visible(True)
        places = steps(axes, [k_chunk for k_chunk, _, _ in pairs], 0.5)
    xs = [places[k_chunk] for k_chunk, _, _ in pairs]
    for select, name, place, marker in (("approx", "approximate", 2, "o"), ("exact", "exact", 1, "s")):
        ys = [float(pair[place]["perplexity"]) for pair in pairs]
        style = "-" if select == "approx" else (0, (2, 1.5))
        upper.plot(xs, ys, color=SELECTORS[select], marker=marker, ls=style, mfc="white", label=name, zorder=3)
    recalls = [100 * float(approx["recall"]) for _, _, approx in pairs]
    lower.bar(xs, recalls, width=0.55, color="#f3cfa1", zorder=2)
    lower.axhline(75, color=QUIET, linewidth=1.0, linestyle=(0, _DOTTED), zorder=3)
    for x, recall in zip(xs, recalls, strict=True):
        lower.annotate(f"{recall:.0f}", (x, recall), (0, 2), textcoords="offset points", ha="center", fontsize=7.5)
    lower.set(ylim=(0, 119), yticks=[0, 50, 75, 100], xlabel="k_chunk", ylabel="recall, %")
    upper.set(ylabel="perplexity")


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


def _bytes(view: View, file: Path) -> bool:
    """Perplexity against the bytes that stay on the device, beside llama.cpp."""
    cases = [case for case in view.models if _compared(view, case)] or view.models
    if not any(view.curve(case, method, 3) for case in cases for method in view.methods()):
        return False
    with _grid(file, len(cases), 4.8, 3.7) as panels:
        for axes, case in zip(panels, cases, strict=False):
            _bytes_of(view, case, axes)
        panels[0].legend(loc="upper right", fontsize=8, handlelength=1.6)
    return True


def _compared(view: View, case: Case) -> bool:
    """Whether llama.cpp could hold the model in three bits."""
    rows = view.peers.get(case.name, {}).get("rows", [])
    return any(name.startswith(("Q3", "IQ3")) for row in rows for name in row["types"])


def _bytes_of(view: View, case: Case, axes: Any) -> None:
    full = float(view.full[case.name]["perplexity"])
    axes.axhline(full, color=COLORS["full"], linewidth=1.1, linestyle=(0, _DASHED))
    for method in view.methods():
        found = [
            (held / 1e6, none, some)
            for bits in view.bits()
            if (held := view.gpu_bytes(case, method, bits)) is not None
            and (none := view.get(case, method, bits, 0)) is not None
            and (some := view.get(case, method, bits, REFERENCE_K)) is not None
        ]
        if not found:
            continue
        xs = [held for held, _, _ in found]
        plain, better = ([float(pair[place]["perplexity"]) for pair in found] for place in (1, 2))
        axes.plot(xs, plain, color=COLORS[method], marker="x", linewidth=0.9, alpha=0.65, zorder=3)
        axes.plot(xs, better, color=COLORS[method], marker="o", label=f"{method}, k_chunk {REFERENCE_K}", zorder=4)
    rows = [row for row in view.peers.get(case.name, {}).get("rows", []) if row["kind"] != "F32"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        both = {row["weighted"]: row for row in rows if row["kind"] == kind}
        x = next(iter(both.values()))["gpu_bytes"] / 1e6
        heights = [float(row["perplexity"]) for row in both.values()]
        axes.plot([x] * len(heights), heights, color=COLORS["llama.cpp"], linewidth=0.8, zorder=4)
        for y, weighted in zip(heights, both, strict=True):
            face = COLORS["llama.cpp"] if weighted else "white"
            axes.plot([x], [y], marker="D", color=COLORS["llama.cpp"], mfc=face, ls="", markersize=4, zorder=5)
        place = {"xytext": (-1, 5), "textcoords": "offset points", "va": "bottom", "ha": "left"}
        axes.annotate(kind, (x, max(heights)), rotation=50, fontsize=8, **place)
    if rows:
        label = "llama.cpp (filled: with importance matrix)"
        axes.plot([], [], marker="D", color=COLORS["llama.cpp"], ls="", markersize=4, label=label)
    axes.set_title(case.name)
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
