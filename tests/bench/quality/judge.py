"""Verdicts on the report's claims, for each model, with the numbers behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

from models.recipe import DEFAULT_METHOD
from tests.bench.quality import promises
from tests.bench.quality.points import REFERENCE_K, RESIDUALS
from tests.bench.quality.view import View, closed
from tests.bench.reporting.cases import Case
from tests.bench.reporting.losses import SURE, Difference, difference, percent
from tests.bench.reporting.results import Entry
from tests.bench.reporting.verdicts import NOTHING, Claim, Finding, Verdict

EXACT_TOLERANCE = 0.5
"""Percent of perplexity that approximate selection may cost."""
LEAST_RECALL = 75
"""Percent, of approximate selection against exact."""
RESIDUAL_TOLERANCE = 0.5
"""Percent of perplexity within which 4-bit residuals count as near the best."""
BYTES_TOLERANCE = 0.1
"""Share by which fetched bytes may differ and count as equal."""
SAME_TOLERANCE = 0.1
"""Percent of perplexity by which llama.cpp's float32 and ours may differ: the proof that the conversion is right."""
LEAST_CLOSED = 0.45
"""Of the loss between 3 bits and full precision, at k_chunk 64."""
WAYS: tuple[tuple[str, Callable[[View, Case, str, float], list[tuple[int, Entry]]]], ...] = (
    ("plain", lambda view, case, method, bits: view.curve(case, method, bits)),
    ("as a chat", lambda view, case, method, bits: view.chat_curve(case, method, bits)),
)
"""Both ways to evaluate, with the numbers by k_chunk."""


def claims(view: View) -> list[Claim]:
    """All claims with what was found."""
    made: list[tuple[str, Callable[[View, Case], Finding]]] = [
        *promises.of_chats(),
        (f"No method is behind rtn of the same bits at any k_chunk, to {SURE:g} standard errors", _not_behind),
        (f"Perplexity falls, or stays within {SURE:g} standard errors, at every step of k_chunk", _monotone),
        (f"Compensated prompts make {DEFAULT_METHOD} better as a chat gets it", _prompts),
        (
            f"Dynamic selection is at least as good as static, to {SURE:g} standard errors",
            _selectors("approx", "static"),
        ),
        (
            f"Static selection is at least as good as random, to {SURE:g} standard errors",
            _selectors("static", "random"),
        ),
        (
            f"Approximate selection is within {EXACT_TOLERANCE} % of exact, recall is {LEAST_RECALL} % or more",
            _exact,
        ),
        (f"At equal fetched bytes 4-bit residuals are the best or within {RESIDUAL_TOLERANCE} % of it", _residuals),
        (
            f"At 3 bits k_chunk {REFERENCE_K} closes {100 * LEAST_CLOSED:.0f} % of rtn's gap to full precision or more",
            _closed,
        ),
        (f"llama.cpp in float32 and our full precision agree to {SAME_TOLERANCE} %", _same),
    ]
    found = [Claim(text, {case.name: judge(view, case) for case in view.models}) for text, judge in made]
    return [*found, *promises.of_program(view)]


def _not_behind(view: View, case: Case) -> Finding:
    apart = []
    for way, curve in WAYS:
        for bits in view.bits():
            plain = dict(curve(view, case, "rtn", bits))
            for method in [method for method in view.methods() if method != "rtn"]:
                for k_chunk, entry in curve(view, case, method, bits):
                    if k_chunk in plain:
                        name = f"{method} {bits:g} bits at {k_chunk}, {way}"
                        apart.append((difference(entry, plain[k_chunk]), name))
    return _worst(apart, "comparison")


def _monotone(view: View, case: Case) -> Finding:
    steps = []
    for way, curve in WAYS:
        for method in view.methods():
            for bits in view.bits():
                for (_, one), (k_chunk, other) in pairwise(curve(view, case, method, bits)):
                    steps.append((difference(other, one), f"{method} {bits:g} bits at {k_chunk}, {way}"))
    return _worst(steps, "step")


def _prompts(view: View, case: Case) -> Finding:
    """Compensated and plain prompts at the same k_chunk."""
    apart = []
    for bits in view.bits():
        for k_chunk, plain in view.curve(case, DEFAULT_METHOD, bits, as_chat=True):
            compensated = view.chat(case, DEFAULT_METHOD, bits, k_chunk) if k_chunk else None
            if compensated is not None:
                apart.append((difference(compensated, plain), f"{bits:g} bits at {k_chunk}"))
    if not apart:
        return NOTHING
    numbers = "; ".join(f"{name} {one}" for one, name in apart)
    if any(one.worse for one, _ in apart):
        return Finding(Verdict.NO, f"{numbers} nats")
    return Finding(Verdict.YES if all(one.better for one, _ in apart) else Verdict.UNSURE, f"{numbers} nats")


def _selectors(good: str, bad: str) -> Callable[[View, Case], Finding]:
    def judge(view: View, case: Case) -> Finding:
        apart = []
        for method in case.closer:
            for k_chunk, other in view.curve(case, method, 3, select=bad):
                one = view.get(case, method, 3, k_chunk, select=good)
                if one is not None:
                    apart.append((difference(one, other), f"{method} at {k_chunk}"))
        return _worst(apart, "comparison")

    return judge


def _worst(apart: list[tuple[Difference, str]], unit: str) -> Finding:
    """No difference may be above zero beyond noise; all that are, are named, and else the one furthest above."""
    if not apart:
        return NOTHING
    wrong = sorted((pair for pair in apart if pair[0].worse), key=lambda pair: -pair[0].nats)
    several = unit if len(apart) == 1 else f"{unit}s"
    shown = wrong or [max(apart, key=lambda pair: pair[0].nats - SURE * pair[0].error)]
    named = "; ".join(f"{one} nats ({name})" for one, name in shown)
    numbers = f"{len(apart) - len(wrong)} of {len(apart)} {several}; {'wrong' if wrong else 'worst'}: {named}"
    return Finding(Verdict.NO if wrong else Verdict.YES, numbers)


def _exact(view: View, case: Case) -> Finding:
    apart: list[tuple[float, str]] = []
    recalls: list[tuple[float, str]] = []
    sure = False
    for method in case.closer:
        for k_chunk, exact in view.curve(case, method, 3, select="exact"):
            approx = view.get(case, method, 3, k_chunk)
            if approx is not None:
                apart.append((percent(approx, exact), f"{method} at {k_chunk}"))
                sure = sure or _beyond(approx, exact, EXACT_TOLERANCE)
                recalls.append((float(approx["recall"]), f"{method} at {k_chunk}"))
    if not apart:
        return NOTHING
    worst, least = max(apart), min(recalls)
    if 100 * least[0] < LEAST_RECALL or sure:
        verdict = Verdict.NO
    else:
        verdict = Verdict.YES if worst[0] <= EXACT_TOLERANCE else Verdict.UNSURE
    numbers = f"worst {worst[0]:+.2f} % ({worst[1]}); least recall {100 * least[0]:.0f} % ({least[1]})"
    return Finding(verdict, numbers)


def _beyond(one: Entry, other: Entry, tolerance: float) -> bool:
    """Whether one perplexity is larger than another by more than so many percent and the noise."""
    apart = difference(one, other)
    return apart.nats - SURE * apart.error > math.log(1 + tolerance / 100)


def residual_cells(view: View, case: Case, method: str, place: int) -> dict[int, Entry]:
    """The entries of one line of Table 1 that fetch the same bytes as the 4-bit one, by bits of the residuals."""
    found = {}
    for bits, numbers in RESIDUALS.items():
        entry = view.get(case, method, 3, numbers[place], residual_bits=bits)
        if entry is not None:
            found[bits] = entry
    if 4 not in found:
        return {}
    bytes_4 = found[4]["fetched_bytes"]
    return {
        bits: entry for bits, entry in found.items() if abs(entry["fetched_bytes"] / bytes_4 - 1) <= BYTES_TOLERANCE
    }


def residual_lines(view: View, case: Case) -> Iterator[tuple[str, int, dict[int, Entry]]]:
    """The lines of Table 1: method, place in `RESIDUALS`, and `residual_cells` of two widths at least."""
    for method in [method for method in case.closer if method in view.methods()]:
        for place in range(len(RESIDUALS[4])):
            cells = residual_cells(view, case, method, place)
            if len(cells) > 1:
                yield method, place, cells


def _residuals(view: View, case: Case) -> Finding:
    behind = []
    sure = False
    for method, place, cells in residual_lines(view, case):
        best = min(cells.values(), key=lambda entry: float(entry["perplexity"]))
        behind.append((percent(cells[4], best), f"{method} at {RESIDUALS[4][place]}"))
        sure = sure or _beyond(cells[4], best, RESIDUAL_TOLERANCE)
    if not behind:
        return NOTHING
    worst, name = max(behind)
    near = sum(percent_behind <= RESIDUAL_TOLERANCE for percent_behind, _ in behind)
    numbers = f"{near} of {len(behind)} lines; worst {worst:.2f} % behind the best ({name})"
    verdict = Verdict.NO if sure else Verdict.YES if near == len(behind) else Verdict.UNSURE
    return Finding(verdict, numbers)


def _closed(view: View, case: Case) -> Finding:
    none, some, full = view.get(case, "rtn", 3, 0), view.get(case, "rtn", 3, REFERENCE_K), view.full[case.name]
    if none is None or some is None:
        return NOTHING
    gap = difference(none, full)
    if not gap.nats > 2 * SURE * gap.error:
        return Finding(Verdict.UNSURE, f"too small a gap: {gap} nats")
    part = closed(none, some, full)
    numbers = f"{100 * part.share:.0f} ± {100 * part.error:.0f} %"
    if part.share >= LEAST_CLOSED:
        return Finding(Verdict.YES, numbers)
    return Finding(Verdict.NO if part.share < LEAST_CLOSED - SURE * part.error else Verdict.UNSURE, numbers)


def _same(view: View, case: Case) -> Finding:
    rows = [row for row in view.peers.get(case.name, {}).get("rows", []) if row["kind"] == "F32"]
    if not rows:
        return NOTHING
    apart = percent(rows[0], view.full[case.name])
    return Finding(Verdict.YES if abs(apart) <= SAME_TOLERANCE else Verdict.NO, f"{apart:+.4f} %")
