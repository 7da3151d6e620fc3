"""The pictures of the report on caches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from runtime.kv.kinds import KINDS
from tests.bench.caches.drift import WAYS
from tests.bench.caches.extent import ORDER
from tests.bench.caches.gear import STEPS
from tests.bench.caches.perplexity import FULL, LOW
from tests.bench.caches.size import accounted
from tests.bench.caches.view import View
from tests.bench.reporting.cases import Case
from tests.bench.reporting.losses import difference
from tests.bench.reporting.page import Picture
from tests.bench.reporting.style import QUIET, figure, label_ends

COLORS = {
    "fp16": "#1b1b1b",
    "int8": "#0072b2",
    "hierarchical": "#4aa3d8",
    "int4": "#e07b00",
    "kcvt4": "#b8a000",
    "gear-l4": "#6fae3c",
    "gear4": "#00712f",
    "kivi2": "#7a7a7a",
    "gear-l2": "#b5478c",
    "gear2": "#6a1b9a",
    "llama.cpp f16": "#1b1b1b",
    "llama.cpp q4_0": "#e07b00",
}
"""By kind."""
LEAST = 0.003
"""Percent of perplexity below which a cost is drawn at the edge."""


def drawn(view: View) -> dict[str, Picture]:
    """What draws each picture, by its name."""
    pictures: dict[str, Callable[[View, Path], bool]] = {
        "loss": _loss,
        "gear": _gear,
        "speed": _speed,
        "attention": _attention,
    }
    pictures |= {f"drift-{case.name}": _drift_of(case) for case in view.models}
    return {name: partial(make, view) for name, make in pictures.items()}


def _loss(view: View, file: Path) -> bool:
    """What each kind costs against the bytes it takes, a panel for each model."""
    cases = [case for case in view.models if view.loss(case.name, FULL, "reference", "fp16")]
    if not cases:
        return False
    columns = min(2, len(cases))
    lines = -(-len(cases) // columns)
    with figure(file, columns, lines, 4.7 * columns, 3.0 * lines) as panels:
        flat = [axes for line in panels for axes in line]
        for axes in flat[len(cases) :]:
            axes.set_visible(False)
        for axes, case in zip(flat, cases, strict=False):
            D = view.gear[case.name]["head_dim"] if case.name in view.gear else 64
            for kind in view.kinds():
                if kind != "fp16":
                    _point(axes, view, case.name, kind, accounted(KINDS[kind], D))  # type: ignore[index]
            axes.set_yscale("log")
            axes.set(xlabel="bytes of a page, % of fp16", ylabel="cost in perplexity, %", xlim=(8, 72))
            axes.set_ylim(LEAST / 1.3, None)
            axes.set_title(f"{case.name}, heads of {D} channels")
    return True


def _point(axes: Any, view: View, model: str, kind: str, size: float) -> None:
    """One kind: filled with full-precision weights, hollow with low-bit ones."""
    for weights, filled in ((LOW, False), (FULL, True)):
        one, base = (view.loss(model, weights, "reference", name) for name in (kind, "fp16"))
        if one is None or base is None or one["quantized"] == 0:
            continue
        apart = difference(one, base)
        cost, error = 100 * math.expm1(apart.nats), 100 * apart.error
        height = max(cost, LEAST)
        axes.errorbar(
            [size],
            [height],
            yerr=[[min(error, height - LEAST / 1.2)], [error]],
            color=COLORS[kind],
            marker="o" if cost >= LEAST else "v",
            markerfacecolor=COLORS[kind] if filled else "white",
            linewidth=1,
            zorder=3,
        )
        if filled:
            axes.annotate(
                kind, (size, height), (6, 3), textcoords="offset points", color=COLORS[kind], fontsize=8, va="bottom"
            )


def _gear(view: View, file: Path) -> bool:
    """Relative errors of keys and values at each step of GEAR."""
    if not view.gear:
        return False
    names = [case.name for case in view.models if case.name in view.gear]
    tints = dict(zip(names, ("#0072b2", "#e07b00", "#00916e", "#b5478c"), strict=False))
    with figure(file, 4, 1, 10.4, 2.9) as panels:
        plan = [(bits, part) for bits in STEPS for part in ("keys", "values")]
        for axes, (bits, part) in zip(panels[0], plan, strict=True):
            for name in names:
                steps = [100 * view.gear[name]["errors"][kind][part] for kind in STEPS[bits]]
                axes.plot(range(3), steps, color=tints[name], marker="o", markerfacecolor="white", zorder=3)
            axes.set_xticks(range(3), ["D̂", "+ L", "+ S"])
            axes.set_xlim(-0.2, 2.2)
            axes.set_ylim(0, None)
            axes.set_title(f"{part}, {bits} bits")
        panels[0][0].set_ylabel("relative error, %")
        panels[0][0].figure.draw_without_rendering()
        last = panels[0][3]
        ends = [(name, 100 * view.gear[name]["errors"][STEPS[2][2]]["values"], tints[name]) for name in names]
        label_ends(last, ends, 2)
    return True


def _drift_of(case: Case) -> Callable[[View, Path], bool]:
    def make(view: View, file: Path) -> bool:
        return _drift(view, case, file)

    return make


def _drift(view: View, case: Case, file: Path) -> bool:
    """Deviation of the logits by step (GEAR Fig. 1b), a panel for each way to continue."""
    ways = [way for way in WAYS if (case.name, way, "fp16") in view.drift]
    if not ways:
        return False
    with figure(file, len(ways), 1, 4.9 * len(ways) + 0.4, 3.5, sharey=True) as panels:
        for axes, way in zip(panels[0], ways, strict=True):
            for kind in ORDER:
                entry = view.drift.get((case.name, way, kind))
                if entry is not None:
                    xs, ys = _smoothed(entry)
                    axes.plot(xs, ys, color=COLORS[kind], linewidth=1.4, zorder=3)
            axes.set_yscale("log")
            axes.set_title(f"{case.name}, {way} continuation")
            axes.set(xlabel="generated token", xlim=(0, None))
        panels[0][0].set_ylabel("deviation of the logits, %")
        panels[0][0].figure.draw_without_rendering()
        there = [
            (kind, view.drift[case.name, ways[-1], kind]) for kind in ORDER if (case.name, ways[-1], kind) in view.drift
        ]
        ends = [(kind, _smoothed(entry)[1][-1], COLORS[kind]) for kind, entry in there]
        _ends(panels[0][-1], ends, panels[0][-1].get_xlim()[1])
    return True


def _smoothed(entry: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Running means over five bins of the deviation."""
    bins, width = entry["deviation"], entry["steps"] / len(entry["deviation"])
    ys = [sum(part) / len(part) for i in range(len(bins)) if (part := bins[max(0, i - 2) : i + 3])]
    return [width * (i + 0.5) for i in range(len(bins))], [100 * y for y in ys]


def _speed(view: View, file: Path) -> bool:
    """Decoded tokens a second by tokens in the cache."""
    lengths = sorted(view.speed)
    if not lengths:
        return False
    kinds = list(dict.fromkeys(row["kind"] for tokens in lengths for row in view.speed[tokens]["rows"]))
    with figure(file, 1, 1, 6.6, 4.2) as panels:
        axes = panels[0][0]
        ends = []
        for kind in kinds:
            points = [(i, row) for i, tokens in enumerate(lengths) if (row := view.speed_row(tokens, kind))]
            xs, ys = [i for i, _ in points], [1 / row["p50"] for _, row in points]
            peer = kind.startswith("llama")
            axes.plot(
                xs, ys, color=COLORS[kind], ls=(0, (4, 2)) if peer else "-", marker="s" if peer else "o", zorder=3
            )
            ends.append((kind, ys[-1], COLORS[kind]))
        axes.set_xticks(range(len(lengths)), [f"{tokens:,}" for tokens in lengths])
        axes.set(xlabel="tokens in the cache", ylabel="decoded tokens a second", yscale="log")
        axes.figure.draw_without_rendering()
        _ends(axes, ends, len(lengths) - 1)
    return True


def _ends(axes: Any, ends: list[tuple[str, float, str]], x: float) -> None:
    """Labels at the ends of lines whose heights are drawn as logarithms."""
    low, high = (math.log10(limit) for limit in axes.get_ylim())
    least = 10.5 * (high - low) / (axes.get_position().height * axes.figure.get_size_inches()[1] * 72)
    place = -math.inf
    for name, y, color in sorted(ends, key=lambda end: end[1]):
        place = max(math.log10(y), place + least)
        axes.annotate(
            name,
            xy=(x, 10**place),
            xytext=(8, 0),
            textcoords="offset points",
            color=color,
            fontsize=8.5,
            va="center",
            annotation_clip=False,
        )


def _attention(view: View, file: Path) -> bool:
    """Time of attention over fp16's, beside the bytes over fp16's."""
    lengths = sorted(view.attention)
    if not lengths:
        return False
    tokens = lengths[-1]
    rows = view.attention[tokens]["rows"]
    base = next((row for row in rows if row["kind"] == "fp16"), rows[0])
    with figure(file, 1, 1, 6.6, 0.32 * len(rows) + 1.0) as panels:
        axes = panels[0][0]
        for place, row in enumerate(rows):
            kind = row["kind"].split()[0]
            share = row["p50"] / base["p50"]
            axes.barh([place], [share], height=0.62, color=COLORS[kind], alpha=0.85, zorder=2)
            bytes_share = row["bytes_per_token"] / base["bytes_per_token"]
            if "draft" not in row["kind"]:
                axes.plot(
                    [bytes_share], [place], marker="|", markersize=13, markeredgewidth=2, color="#000000", zorder=4
                )
            axes.annotate(f"{share:.2f}", (share, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_yticks(range(len(rows)), [row["kind"] for row in rows])
        axes.invert_yaxis()
        axes.axvline(0.4, color=QUIET, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        axes.grid(visible=False)
        axes.set_xlabel(f"attention over {tokens:,} tokens, time over fp16's; the mark is bytes over fp16's")
    return True
