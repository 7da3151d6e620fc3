"""The numbers most readers want: the first table of docs/quality.md, and the answers that the README shows."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from models.recipe import DEFAULT_METHOD
from tests.bench.quality import answers
from tests.bench.quality.points import BUDGETS, REAL, REFERENCE_K
from tests.bench.quality.view import View
from tests.bench.reporting.cases import Case
from tests.bench.reporting.markdown import between, number, table

_TITLES = {"rtn": "plain rounding", DEFAULT_METHOD: f"{DEFAULT_METHOD.upper()}, the default"}
_METHODS = (DEFAULT_METHOD, "rtn")
"""Methods of the table; the report has all."""
SHOWN = (16, REFERENCE_K)
"""k_chunk of the table."""
_WIDTH = 130
"""Characters of a line."""


def write_answers(view: View, file: Path) -> None:
    """Put the answers of the real model between a file's markers; without any, the file stays as it is.

    Args:
        view: The results.
        file: Holds `<!-- answers: begin -->` and `<!-- answers: end -->`.

    Raises:
        ValueError: a marker is missing.
    """
    found = next((entry for entry in view.results.all("answers") if entry["model"] == REAL), None)
    if found is not None:
        content = f"{answers.as_table(found, answers.SHORT)}\n\n{view.origin('answers')}"
        file.write_text(between(file.read_text(encoding="utf-8"), "answers", content), encoding="utf-8")


def section(view: View) -> str:
    """The first section of docs/quality.md; empty where the real model was not measured."""
    case = view.real
    if case is None or case.name not in view.chat_full:
        return ""
    full = view.chat_full[case.name]["perplexity"]
    alone, both = (f"{what} {{}}".format for what in ("decoding alone,", "both,"))
    head = ("SmolLM2-135M-Instruct", "MB", "nothing", "prompts alone", *map(alone, SHOWN), *map(both, SHOWN), "× full")
    rows = [*_ours(view, case, full), *_theirs(view, case, full)]
    body = table((*head, f"within {BUDGETS[0]:g} %"), rows)
    words = (textwrap.fill(part, _WIDTH, break_on_hyphens=False) for part in _sentences(view, case))
    return "\n\n".join(["## In short", body, view.origin("points", "full", "peers", "budgets"), *words])


def _ours(view: View, case: Case, full: float) -> Iterator[tuple[str, ...]]:
    for bits in view.bits():
        for method in _METHODS:
            both = [view.chat(case, method, bits, k_chunk) for k_chunk in (0, *SHOWN)]
            held = view.gpu_bytes(case, method, bits)
            if held is None or both[-1] is None:
                continue
            alone = [view.one_sided(case, method, bits, k_chunk) for k_chunk in (0, *SHOWN)]
            bought = view.budgets.get((case.name, bits, BUDGETS[0])) if method == DEFAULT_METHOD else None
            cells = map(view.shown, (both[0], *alone, *both[1:]))
            ratio = f"{both[-1]['perplexity'] / full:.3f}"
            yield f"{bits:g}-bit, {_TITLES[method]}", f"{held / 1e6:.1f}", *cells, ratio, view.shown(bought)


def _theirs(view: View, case: Case, full: float) -> Iterator[tuple[str, ...]]:
    peers = view.peers.get(case.name)
    for row in sorted(peers["rows"], key=lambda row: row["gpu_bytes"]) if peers else ():
        if row["kind"] != "F32":
            value = row["chat"]["perplexity"]
            cells = (number(value) + view.mark(peers), *[""] * (1 + 2 * len(SHOWN)))
            yield f"llama.cpp {row['kind']}", f"{row['gpu_bytes'] / 1e6:.1f}", *cells, f"{value / full:.3f}", ""


def _sentences(view: View, case: Case) -> Iterator[str]:
    """What to know beside the table, in words that follow from the numbers."""
    full = view.chat_full[case.name]["perplexity"]
    yield (
        f"Perplexity as a chat gets it (lower is better; full precision has {number(full)}). What is compensated: "
        f"nothing; prompts alone, by all residuals; decoding alone, by so many of 1024 channels; or both. '× full' is "
        f"the perplexity of both at {SHOWN[-1]} channels over that of full precision. The last column is what a budget "
        f"of {BUDGETS[0]:g} % buys on this processor. llama.cpp's types were made with an importance "
        "matrix. This model's width is not a multiple of 256, so they fall back to larger types than their names say."
    )
    for bits in (3, 4):
        ours, held = view.chat(case, DEFAULT_METHOD, bits, REFERENCE_K), view.gpu_bytes(case, DEFAULT_METHOD, bits)
        rows = [row for row in view.peers.get(case.name, {}).get("rows", []) if row["kind"] != "F32"]
        if ours is None or held is None or not rows:
            continue
        better = [row for row in rows if row["chat"]["perplexity"] < ours["perplexity"]]
        names = ", ".join(f"{row['kind']} ({row['gpu_bytes'] / held:.2f} × its bytes)" for row in better)
        what = f"At k_chunk {REFERENCE_K}, our {bits} bits are"
        yield f"{what} behind {names}." if better else f"{what} ahead of all of these."
    budgets = [
        f"{entry['perplexity'] / full:.3f} × full precision at {bits:g} bits within {percent:g} %"
        for (_, bits, percent), entry in sorted(view.budgets.items())
    ]
    if budgets:
        yield f"What a slowdown budget bought on this processor: {', '.join(budgets)}."
    stored = view.stored.get((case.name, DEFAULT_METHOD, 3, case.group_size, 4))
    if stored is not None:
        wider = stored["gpu_buffers"] > 1.1 * stored["gpu_bytes"]
        there = f" In the GPU's layout this model's 3 bits take {stored['gpu_buffers'] / 1e6:.1f} MB." if wider else ""
        held = f"Residuals take {stored['residual_bytes'] / 1e6:.1f} MB of main memory"
        yield f"MB is device memory.{there} {held}."
