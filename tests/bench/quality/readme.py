"""The README's tables of quality, written between markers from the results, so that they can't go stale by hand."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from models.recipe import DEFAULT_METHOD
from tests.bench.quality import answers
from tests.bench.quality.points import REAL, REFERENCE_K
from tests.bench.quality.view import OLD, View
from tests.bench.reporting.cases import Case
from tests.bench.reporting.markdown import between, number, table

_TITLES = {"rtn": "plain rounding", DEFAULT_METHOD: f"{DEFAULT_METHOD.upper()}, the default"}
_METHODS = (DEFAULT_METHOD, "rtn")
"""Methods of the table; the report has all."""
_WIDTH = 130
"""Characters of a line."""
_OLD = f"{OLD} of an older version of the code."


def write(view: View, file: Path) -> None:
    """Put what was measured of the real model between the file's markers; what was not leaves them as they are.

    Args:
        view: The results.
        file: Holds `<!-- quality: begin -->` and `<!-- quality: end -->`, and the same of `answers`.

    Raises:
        ValueError: a marker is missing.
    """
    text = file.read_text(encoding="utf-8")
    if view.real is not None and view.real.name in view.chat_full:
        text = between(text, "quality", _quality(view, view.real))
    found = next((entry for entry in view.results.all("answers") if entry["model"] == REAL), None)
    if found is not None:
        parts = [answers.as_table(found, answers.SHORT), *([_OLD] if view.mark(found) else [])]
        text = between(text, "answers", "\n\n".join(parts))
    file.write_text(text, encoding="utf-8")


def _quality(view: View, case: Case) -> str:
    numbers = view.numbers() or [0]
    full = view.chat_full[case.name]["perplexity"]
    head = ("SmolLM2-135M-Instruct", "MB", *(f"k_chunk {count}" for count in numbers), "× full precision")
    rows = [*_ours(view, case, numbers, full), *_theirs(view, case, numbers, full)]
    body = table(head, rows)
    parts = [*_sentences(view, case), *([_OLD] if OLD in body else [])]
    return "\n\n".join([body, *(textwrap.fill(part, _WIDTH, break_on_hyphens=False) for part in parts)])


def _ours(view: View, case: Case, numbers: list[int], full: float) -> Iterator[tuple[str, ...]]:
    for bits in view.bits():
        for method in _METHODS:
            entries = [view.chat(case, method, bits, k_chunk) for k_chunk in numbers]
            held = view.gpu_bytes(case, method, bits)
            if held is None or entries[-1] is None:
                continue
            cells = (view.shown(entry) for entry in entries)
            ratio = f"{entries[-1]['perplexity'] / full:.3f}"
            yield f"{bits:g}-bit, {_TITLES[method]}", f"{held / 1e6:.1f}", *cells, ratio


def _theirs(view: View, case: Case, numbers: list[int], full: float) -> Iterator[tuple[str, ...]]:
    peers = view.peers.get(case.name)
    for row in sorted(peers["rows"], key=lambda row: row["gpu_bytes"]) if peers else ():
        if row["kind"] != "F32":
            value = row["chat"]["perplexity"]
            cells = (number(value) + view.mark(peers), *("" for _ in numbers[1:]))
            yield f"llama.cpp {row['kind']}", f"{row['gpu_bytes'] / 1e6:.1f}", *cells, f"{value / full:.3f}"


def _sentences(view: View, case: Case) -> Iterator[str]:
    """What a reader should know beside the table, in words that follow from the numbers."""
    full = view.chat_full[case.name]["perplexity"]
    yield (
        f"Full precision has {number(full)}; the last column is of the largest k_chunk. llama.cpp's types were made "
        "with an importance matrix; this model's width is no multiple of 256, so they fall back to larger types than "
        "their names say."
    )
    for bits in (3, 4):
        ours, held = view.chat(case, DEFAULT_METHOD, bits, REFERENCE_K), view.gpu_bytes(case, DEFAULT_METHOD, bits)
        rows = [row for row in view.peers.get(case.name, {}).get("rows", []) if row["kind"] != "F32"]
        if ours is None or held is None or not rows:
            continue
        better = [row for row in rows if row["chat"]["perplexity"] < ours["perplexity"]]
        names = ", ".join(f"{row['kind']} ({row['gpu_bytes'] / held:.2f} × its bytes)" for row in better)
        what = f"At k_chunk {REFERENCE_K} our {bits} bits are"
        yield f"{what} behind {names}." if better else f"{what} ahead of all of these."
    budgets = [
        f"{entry['perplexity'] / full:.3f} × full precision at {bits:g} bits with {percent:g} %"
        for (_, bits, percent), entry in sorted(view.budgets.items())
    ]
    if budgets:
        yield f"What a slowdown budget buys on the processor of the measurement: {', '.join(budgets)}."
    stored = view.stored.get((case.name, DEFAULT_METHOD, 3, case.group_size, 4))
    if stored is not None:
        wider = stored["gpu_buffers"] > 1.1 * stored["gpu_bytes"]
        there = f" In the GPU's layout this model's 3 bits take {stored['gpu_buffers'] / 1e6:.1f} MB." if wider else ""
        held = f"Residuals take {stored['residual_bytes'] / 1e6:.1f} MB of main memory"
        yield f"MB count what has to lie on the device.{there} {held}."
