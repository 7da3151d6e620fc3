"""The section on W4A8 of docs/quality.md, and its picture, from the results file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from models.recipe import Recipe
from tests.bench.reporting.cases import CASES
from tests.bench.reporting.losses import difference
from tests.bench.reporting.markdown import number, table
from tests.bench.reporting.page import Measured
from tests.bench.reporting.results import Entry, Results
from tests.bench.reporting.style import figure
from tests.bench.w4a8.models import ROUNDED, Step, Variant, ablation, alone, code_of, compared, group_of

REAL = "smollm2"
"""The model that decides."""
_GROUP = 128
_FEW_STEPS = 4
"""Steps of the ablation that make a table."""
PROMISED = (
    ("W4A16 AWQ, groups", "W4A8 QoQ, groups"),
    ("W4A8 QoQ, groups", "W4A8 AWQ, groups"),
    ("W4A8 AWQ, groups", "W4A8 RTN, groups"),
    ("W4A8 QoQ, groups", "W4A8 QoQ, per channel"),
    ("W4A8 QoQ, per channel", "W4A8 RTN, per channel"),
)
"""Pairs of Table 2, the one expected to be no worse first."""
ROTATED_STEP = "+ rotated block inputs"
"""The step of the ablation that is only one with rotation."""


def section(results: Results, folder: Path) -> str:
    """The section in Markdown; its picture is drawn into a folder beside the report."""
    measured = _View(results)
    parts = [_opening(results), _methods(measured), _order(results), _steps(measured), _alone(measured)]
    parts += [_folding(measured), _small(measured)]
    if draw(results, folder / "qoq.svg"):
        parts.insert(4, "![Perplexity after each step of QoQ](quality/qoq.svg)")
    return "\n\n".join(part for part in parts if part)


class _View(Measured):
    """The results, and which of them are older than the code."""

    def is_old(self, section: str, entry: Entry) -> bool:
        """See `Measured`."""
        return bool(entry["code"] != code_of(section, entry.get("backend", "")))


def find(
    results: Results, model: str, recipe: Recipe, kv: str, *, as_chat: bool, rounded: bool = False
) -> Entry | None:
    """What was measured of a model, last; `rounded`: with the input of its products rounded to 8 bits."""
    found = [
        entry
        for entry in results.all("points")
        if (entry["model"], entry["recipe"], entry["kv"], entry["as_chat"], entry["backend"] == ROUNDED)
        == (model, recipe.to_json(), kv, as_chat, rounded)
    ]
    return max(found, key=lambda entry: str(entry.get("date", "")), default=None)


def _of(results: Results, model: str, variant: Variant, kv: str, *, as_chat: bool) -> Entry | None:
    return find(results, model, variant.recipe, kv, as_chat=as_chat, rounded=variant.backend == ROUNDED)


def _full(results: Results, model: str, *, as_chat: bool) -> Entry | None:
    found = (entry for entry in results.all("full") if (entry["model"], entry["as_chat"]) == (model, as_chat))
    return next(found, None)


def _opening(results: Results) -> str:
    about = results.about
    return f"""## W4A8KV4

QServe's precision: 4-bit weights, 8-bit activations and a 4-bit KV cache (`quantize --method qoq`, `--kv int4`), beside
4-bit weights alone (AWQ on the reference backend, activations unquantized) and AWQ's weights with the input of every
product rounded to 8 bits per token, as in QServe's Table 2. {_calibration(results)} There are no residuals and no
compensation. Groups have {_GROUP} channels. RTN is QoQ with every step off; rotation is off unless requested (`--with
rotate`). This section is written by `python -m tests.bench.w4a8 --smollm2 FOLDER`, last run on
{about.get("date", "?")} ({about.get("cpu", "?")}, {about.get("threads", "?")} threads, {about.get("variant", "?")});
[decisions.md](decisions.md#quantizing) explains the numbers."""


def _calibration(results: Results) -> str:
    """With how much of the calibration text the compared models were made."""
    found = [_of(results, REAL, variant, "int4", as_chat=True) for variant in compared(_GROUP)]
    sizes = {entry.get("calibration") for entry in found if entry is not None}
    if len(sizes) == 1 and None not in sizes:
        return f"All models are made with the same {sizes.pop():,} characters of the calibration text."
    return "RTN's models were made with a tenth of the others' calibration text, which only the 4-bit cache notices."


def _methods(measured: _View) -> str:
    """Table 2's comparison on the real model."""
    results, cell = measured.results, measured.shown
    head = ("SmolLM2-135M-Instruct", "bits a weight", "plain", "plain, KV4", "as a chat", "as a chat, KV4")
    ways = [(as_chat, kv) for as_chat in (False, True) for kv in ("fp16", "int4")]
    rows = [
        ("full precision", "16", *(cell(_full(results, REAL, as_chat=c)) if kv == "fp16" else "" for c, kv in ways))
    ]
    for variant in compared(_GROUP):
        found = [_of(results, REAL, variant, kv, as_chat=as_chat) for as_chat, kv in ways]
        if not any(found):
            rows.append((f"{variant.name} (not measured yet)", *[""] * 5))
            continue
        bits = next((f"{entry['bits_per_weight']:.2f}" for entry in found if entry), "")
        rows.append((variant.name, bits, *map(cell, found)))
    return f"{table(head, rows)}\n\n{measured.origin('full', 'points')}"


def _pairs(results: Results, model: str, group: int) -> Iterator[tuple[str, str, str, str, str]]:
    """Neighbours of the promised order: model, the first, the second, their difference with KV4, the verdict."""
    variants = compared(group)
    named = {variant.name: variant for variant in variants}
    for pair_of in PROMISED:
        better, worse = (named[name] for name in pair_of)
        pair = [_of(results, model, variant, "int4", as_chat=True) for variant in (better, worse)]
        if pair[0] is None or pair[1] is None:
            continue
        apart = difference(pair[1], pair[0])
        verdict = "holds" if apart.worse else "**broken**" if apart.better else "within noise"
        yield model, better.name, worse.name, str(apart), verdict


def _order(results: Results) -> str:
    """The promised order, for every model that was measured."""
    groups = {REAL: _GROUP, **_small_models(results)}
    rows = [row for model, group in groups.items() for row in _pairs(results, model, group)]
    if not rows:
        return ""
    loss = "extra loss of the second, nats per token (as a chat, KV4)"
    return table(("model", "expected no worse", "than", loss, "the order"), rows)


def _pairs_of_steps(results: Results, *, as_chat: bool) -> Iterator[tuple[Step, tuple[Entry | None, Entry | None]]]:
    """Each step of Fig. 12, and what was measured without rotation and with it."""
    for plain, rotated in zip(ablation(_GROUP, rotated=False), ablation(_GROUP, rotated=True), strict=True):
        found = [find(results, REAL, step.recipe, step.kv, as_chat=as_chat) for step in (plain, rotated)]
        yield plain, (None if plain.name == ROTATED_STEP else found[0], found[1])


def _steps(measured: _View) -> str:
    """Fig. 12's ablation."""
    results = measured.results
    ways = [list(_pairs_of_steps(results, as_chat=as_chat)) for as_chat in (False, True)]
    rows = [
        (step.name, step.kv, *(measured.shown(entry) for _, pair in (plain, chat) for entry in pair))
        for (step, _), plain, chat in zip(ways[0], *ways, strict=True)
    ]
    if sum(any(row[2:]) for row in rows) < _FEW_STEPS:
        return ""
    head = ("step", "cache", "plain", "plain, rotated", "as a chat", "as a chat, rotated")
    return (
        "Steps in the order of QServe's Fig. 12, each on top of those above it, without and with rotation:\n\n"
        f"{table(head, rows)}\n\n{measured.origin('points')}"
    )


def _alone(measured: _View) -> str:
    """Single changes of the whole."""
    results = measured.results
    whole = [find(results, REAL, Recipe.usual("qoq", group_size=_GROUP), "int4", as_chat=c) for c in (False, True)]
    rows = []
    for name, recipe in alone(_GROUP).items():
        found = [find(results, REAL, recipe, "int4", as_chat=as_chat) for as_chat in (False, True)]
        if found[0] and whole[0]:
            apart = str(difference(found[1], whole[1])) if found[1] and whole[1] else ""
            rows.append((name, *map(measured.shown, found), apart))
    if not rows:
        return ""
    head = ("QoQ with groups, KV4", "plain", "as a chat", "extra loss, nats per token, as a chat")
    all_rows = [("all steps but rotation", *map(measured.shown, whole), ""), *rows]
    return f"{table(head, all_rows)}\n\n{measured.origin('points')}"


def _small_models(results: Results) -> dict[str, int]:
    """Group size by name of the small models that were measured."""
    measured = {entry["model"] for entry in results.all("points")}
    return {case.name: group_of(case) for case in CASES if case.name in measured}


def _folding(measured: _View) -> str:
    """Why rotation costs."""
    kinds = {entry["kind"]: entry for entry in measured.results.all("folding")}
    if not kinds:
        return ""
    ways = next(iter(kinds.values()))["errors"]
    rows = [(way, *(f"{100 * entry['errors'][way]:.2f} %" for entry in kinds.values())) for way in ways]
    facts = "; ".join(
        f"`{kind}` {entry['correlation']:.2f}, {100 * entry['stream']:.0f} % and {100 * entry['behind']:.0f} %"
        for kind, entry in kinds.items()
    )
    return (
        "Squared error, relative to the layer's outputs, of rounding to 4 bits in groups of 128 in the layers after "
        "norms (means of five blocks):\n\n"
        + table(("how the layer is prepared", *(f"`{kind}`" for kind in kinds)), rows)
        + f"\n\n{measured.origin('folding')}\n\n"
        "Correlation between the logarithms of a norm's weights and of the energy of the stream's channels, and the "
        f"share of energy in the four largest channels before and after the norm's weights: {facts}. "
        "[Why rotation costs](decisions.md#2026-11-23--why-rotation-costs-smollm2-the-folded-norm)."
    )


def _small(measured: _View) -> str:
    """The comparison on small models, which decides nothing."""
    results = measured.results
    models = _small_models(results)
    if not models:
        return ""
    names = [variant.name for variant in compared(_GROUP)]
    rows = []
    for (model, group), as_chat in itertools.product(models.items(), (False, True)):
        found = [_of(results, model, each, "int4", as_chat=as_chat) for each in compared(group)]
        cells = map(measured.shown, [_full(results, model, as_chat=as_chat), *found])
        rows.append((f"{model}, {'as a chat' if as_chat else 'plain'}", *cells))
    shown = "Small models with KV4; they decide nothing:\n\n" + table(("model", "full precision", *names), rows)
    return "\n\n".join((shown, *_small_alone(measured, models), measured.origin("full", "points")))


def _small_alone(measured: _View, models: Mapping[str, int]) -> Iterator[str]:
    """Single changes of the whole on small models: what is behind an order that is broken."""
    rows = []
    for model, group in models.items():
        recipes = (Recipe.usual("qoq", group_size=group), *alone(group).values())
        found = [find(measured.results, model, recipe, "int4", as_chat=True) for recipe in recipes]
        if all(found):
            rows.append((model, *map(measured.shown, found)))
    if rows:
        yield "QoQ with groups on small models, as a chat, with one step changed:\n\n" + table(
            ("model", "all steps but rotation", *alone(_GROUP)), rows
        )


def draw(results: Results, file: Path) -> bool:
    """The ablation as a picture; whether there was anything to show."""
    steps = list(_pairs_of_steps(results, as_chat=True))
    full = _full(results, REAL, as_chat=True)
    shown = [
        (entry["perplexity"], index + side * 0.36, side)
        for index, (_, pair) in enumerate(steps)
        for side, entry in enumerate(pair)
        if entry is not None
    ]
    if len({int(place) for _, place, _ in shown}) < _FEW_STEPS:
        return False
    most = 1.25 * max((value for value, _, side in shown if not side), default=shown[0][0])
    with figure(file, 1, 1, 7.5, 4.6) as axes:
        own = axes[0][0]
        for side, (color, name) in enumerate((("#0072b2", "not rotated"), ("#d55e00", "rotated"))):
            bars = [(value, place) for value, place, which in shown if which == side]
            own.barh([at for _, at in bars], [min(v, most) for v, _ in bars], color=color, height=0.34, label=name)
        for value, place, _ in shown:
            to = (min(value, most), place)
            own.annotate(number(value), to, xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
        own.set_yticks([index + 0.18 for index in range(len(steps))], [step.name for step, _ in steps])
        own.invert_yaxis()
        own.grid(visible=False)
        own.legend(loc="lower right", frameon=False, bbox_to_anchor=(1.0, 1.0), ncols=2)
        if full is not None:
            own.axvline(full["perplexity"], color="#1b1b1b", linewidth=1, linestyle="--")
            own.annotate(" full precision", (full["perplexity"], -0.75), annotation_clip=False, fontsize=8)
        own.set_xlim(0, 1.12 * most)
        own.set_xlabel("perplexity, WikiText-2, as a chat; longer bars are cut")
    return True
