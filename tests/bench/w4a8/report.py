"""The section on W4A8 of docs/quality.md, and its picture, from the results file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from models.recipe import Recipe
from tests.bench.reporting.losses import difference
from tests.bench.reporting.markdown import number, table
from tests.bench.reporting.results import Entry, Results
from tests.bench.reporting.style import figure
from tests.bench.w4a8.models import ablation, alone, compared

REAL = "smollm2"
"""The model that decides."""
_GROUP = 128


def section(results: Results, folder: Path) -> str:
    """The section in Markdown; its picture is drawn into a folder beside the report."""
    parts = [_opening(results), _methods(results), _order(results), _steps(results), _alone(results)]
    if draw(results, folder / "qoq.svg"):
        parts.insert(4, "![Perplexity after each step of QoQ](quality/qoq.svg)")
    return "\n\n".join(part for part in parts if part)


def find(results: Results, model: str, recipe: Recipe, kv: str, *, as_chat: bool) -> Entry | None:
    """What was measured of a model."""
    return next(
        (
            entry
            for entry in results.all("points")
            if (entry["model"], entry["recipe"], entry["kv"], entry["as_chat"])
            == (model, recipe.to_json(), kv, as_chat)
        ),
        None,
    )


def _full(results: Results, model: str, *, as_chat: bool) -> Entry | None:
    found = (entry for entry in results.all("full") if (entry["model"], entry["as_chat"]) == (model, as_chat))
    return next(found, None)


def _opening(results: Results) -> str:
    about = results.about
    return f"""## W4A8KV4

Weights of 4 bits, activations of 8, a KV cache of 4 (`quantize --method qoq`, `--kv int4`), beside weights of 4 bits
alone (AWQ, run by the reference backend with activations as they are). No residuals, nothing compensated. Groups are of
{_GROUP}. Written by `python -m tests.bench.w4a8 --smollm2 FOLDER` on {about.get("date", "?")} ({about.get("cpu", "?")},
{about.get("threads", "?")} threads, {about.get("variant", "?")}). RTN is QoQ with
every step off. `docs/decisions.md` has what stands behind the numbers."""


def _cell(entry: Entry | None) -> str:
    return "" if entry is None else number(entry["perplexity"])


def _methods(results: Results) -> str:
    """Table 2's comparison on the real model."""
    head = ("SmolLM2-135M-Instruct", "bits a weight", "plain", "plain, KV4", "as a chat", "as a chat, KV4")
    ways = [(as_chat, kv) for as_chat in (False, True) for kv in ("fp16", "int4")]
    rows = [
        ("full precision", "16", *(_cell(_full(results, REAL, as_chat=c)) if kv == "fp16" else "" for c, kv in ways))
    ]
    for variant in compared(_GROUP):
        found = [find(results, REAL, variant.recipe, kv, as_chat=as_chat) for as_chat, kv in ways]
        if not any(found):
            rows.append((f"{variant.name} (not measured yet)", *[""] * 5))
            continue
        bits = next((f"{entry['bits_per_weight']:.2f}" for entry in found if entry), "")
        rows.append((variant.name, bits, *map(_cell, found)))
    return table(head, rows)


def _pairs(results: Results) -> Iterator[tuple[str, str, str, str]]:
    """Neighbours of the promised order: the first, the second, their difference with KV4, the verdict."""
    variants = compared(_GROUP)
    order = [variants[0], variants[1], variants[2], variants[4]]
    for better, worse in itertools.pairwise(order):
        pair = [find(results, REAL, variant.recipe, "int4", as_chat=True) for variant in (better, worse)]
        if pair[0] is None or pair[1] is None:
            continue
        apart = difference(pair[1], pair[0])
        verdict = "holds" if apart.worse else "**broken**" if apart.better else "within noise"
        yield better.name, worse.name, str(apart), verdict


def _order(results: Results) -> str:
    rows = list(_pairs(results))
    if not rows:
        return ""
    head = ("should be no worse", "than", "nats a token that the second loses more (as a chat, KV4)", "the order")
    return table(head, rows)


def _steps(results: Results) -> str:
    """Fig. 12's ablation."""
    rows = [
        (step.name, step.kv, *(_cell(find(results, REAL, step.recipe, step.kv, as_chat=c)) for c in (False, True)))
        for step in ablation(_GROUP)
    ]
    if sum(bool(row[2]) for row in rows) < 2:
        return ""
    return "Steps in the order of QServe's Fig. 12, each with those above it:\n\n" + table(
        ("step", "cache", "plain", "as a chat"), rows
    )


def _alone(results: Results) -> str:
    """Each step left out of the whole."""
    whole = find(results, REAL, Recipe.usual("qoq", group_size=_GROUP), "int4", as_chat=False)
    found = {name: find(results, REAL, recipe, "int4", as_chat=False) for name, recipe in alone(_GROUP).items()}
    rows = [(name, _cell(entry), str(difference(entry, whole))) for name, entry in found.items() if entry and whole]
    if not rows or whole is None:
        return ""
    head = ("QoQ with groups, KV4, plain", "perplexity", "nats a token more than the whole")
    return table(head, [("all steps", _cell(whole), ""), *rows])


def draw(results: Results, file: Path) -> bool:
    """The ablation as a picture; whether there was anything to show."""
    found = [
        (step, find(results, REAL, step.recipe, step.kv, as_chat=False), index)
        for index, step in enumerate(ablation(_GROUP))
    ]
    shown = [(step.name, entry["perplexity"], index) for step, entry, index in found if entry is not None]
    full = _full(results, REAL, as_chat=False)
    if len(shown) < 2:
        return False
    with figure(file, 1, 1, 7.5, 3.4) as axes:
        own = axes[0][0]
        own.barh([index for *_, index in shown], [value for _, value, _ in shown], color="#0072b2", height=0.62)
        for _, value, index in shown:
            own.annotate(number(value), (value, index), xytext=(4, 0), textcoords="offset points", va="center")
        own.set_yticks([index for *_, index in shown], [name for name, *_ in shown])
        own.invert_yaxis()
        own.grid(visible=False)
        if full is not None:
            own.axvline(full["perplexity"], color="#1b1b1b", linewidth=1, linestyle="--")
            own.annotate(" full precision", (full["perplexity"], -0.75), annotation_clip=False, fontsize=8)
        own.set_xlim(0, 1.12 * max(value for _, value, _ in shown))
        own.set_xlabel("perplexity, WikiText-2, plain")
    return True
