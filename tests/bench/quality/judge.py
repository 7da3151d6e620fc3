"""What the report claims, computed: each claim has a verdict for each model, with the number it rests on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

from models.recipe import METHODS
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


def claims(view: View) -> list[Claim]:
    """All claims with what was found."""
    made: list[tuple[str, Callable[[View, Case], Finding]]] = [
        ("At 3, 3.5 and 4 bits, without compensation, awq is better than rtn", _better("awq")),
        ("The same for squeezellm", _better("squeezellm")),
        (f"Perplexity falls, or stays within {SURE:g} standard errors, at every step of k_chunk", _monotone),
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
            _closed("rtn"),
        ),
        ("Likewise with every method", _closed(*METHODS)),
        (f"llama.cpp in float32 and our full precision agree to {SAME_TOLERANCE} %", _same),
        ("In no more GPU bytes than llama.cpp's Q3_K_M, 3 bits with compensation are better", _peer("Q3_K_M")),
    ]
    found = [Claim(text, {case.name: judge(view, case) for case in view.models}) for text, judge in made]
    return [*found, *_program(view)]


def _better(method: str) -> Callable[[View, Case], Finding]:
    def judge(view: View, case: Case) -> Finding:
        pairs = [(bits, view.get(case, method, bits, 0), view.get(case, "rtn", bits, 0)) for bits in view.bits()]
        apart = {bits: difference(one, other) for bits, one, other in pairs if one is not None and other is not None}
        if not apart:
            return NOTHING
        numbers = "; ".join(f"{bits:g} bits {apart[bits]}" for bits in apart)
        return Finding(_lower(list(apart.values())), f"{numbers} nats")

    return judge


def _lower(apart: list[Difference]) -> Verdict:
    """Whether all are below zero; unsure where one that is not may be so by chance."""
    if any(one.worse for one in apart):
        return Verdict.NO
    return Verdict.YES if all(one.better for one in apart) else Verdict.UNSURE


def _monotone(view: View, case: Case) -> Finding:
    steps = []
    for method in view.methods():
        for bits in view.bits():
            curve = view.curve(case, method, bits)
            for (_, one), (k_chunk, other) in pairwise(curve):
                steps.append((difference(other, one), f"{method} {bits:g} bits at {k_chunk}"))
    return _worst(steps, "step")


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
    """No difference may be above zero beyond noise; the one furthest above is named."""
    if not apart:
        return NOTHING
    wrong = [name for one, name in apart if one.worse]
    one, name = max(apart, key=lambda pair: pair[0].nats - SURE * pair[0].error)
    several = unit if len(apart) == 1 else f"{unit}s"
    numbers = f"{len(apart) - len(wrong)} of {len(apart)} {several}; worst {one} nats ({name})"
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


def _residuals(view: View, case: Case) -> Finding:
    behind = []
    sure = False
    for method in case.closer:
        for place, k_chunk in enumerate(RESIDUALS[4]):
            cells = residual_cells(view, case, method, place)
            if len(cells) > 1:
                best = min(cells.values(), key=lambda entry: float(entry["perplexity"]))
                behind.append((percent(cells[4], best), f"{method} at {k_chunk}"))
                sure = sure or _beyond(cells[4], best, RESIDUAL_TOLERANCE)
    if not behind:
        return NOTHING
    worst, name = max(behind)
    near = sum(percent_behind <= RESIDUAL_TOLERANCE for percent_behind, _ in behind)
    numbers = f"{near} of {len(behind)} lines; worst {worst:.2f} % behind the best ({name})"
    verdict = Verdict.NO if sure else Verdict.YES if near == len(behind) else Verdict.UNSURE
    return Finding(verdict, numbers)


def _closed(*methods: str) -> Callable[[View, Case], Finding]:
    return lambda view, case: _closed_by([method for method in view.methods() if method in methods], view, case)


def _closed_by(methods: list[str], view: View, case: Case) -> Finding:
    shares, small = [], []
    for method in methods:
        none, some = view.get(case, method, 3, 0), view.get(case, method, 3, REFERENCE_K)
        if none is None or some is None:
            continue
        gap = difference(none, view.full[case.name])
        if not gap.nats > 2 * SURE * gap.error:
            small.append(f"{method}: gap {gap} nats")
            continue
        part = closed(none, some, view.full[case.name])
        shares.append((part.share, part.error, method))
    if not shares:
        return Finding(Verdict.UNSURE, f"too small a gap: {'; '.join(small)}") if small else NOTHING
    numbers = "; ".join(f"{method} {100 * share:.0f} ± {100 * error:.0f} %" for share, error, method in shares)
    if min(shares)[0] >= LEAST_CLOSED:
        verdict = Verdict.YES
    elif any(share < LEAST_CLOSED - SURE * error for share, error, _ in shares):
        verdict = Verdict.NO
    else:
        verdict = Verdict.UNSURE
    return Finding(verdict, "; ".join([numbers, *small]))


def contenders(view: View, case: Case, limit: int, bits: float = 3) -> Iterator[tuple[str, int, int, Entry]]:
    """Our compensated models within so many GPU bytes: method with group size, bytes, k_chunk, numbers."""
    for point, entry in view.points.items():
        plain = point.residual_bits == 4 and point.select == "approx" and 0 < point.k_chunk <= 128
        if point.model == case.name and point.bits == bits and plain:
            held = view.gpu_bytes(case, point.method, bits, point.group_size)
            if held is not None and held <= limit:
                yield f"{point.method} g{point.group_size}", held, point.k_chunk, entry


def _peer(kind: str) -> Callable[[View, Case], Finding]:
    def judge(view: View, case: Case) -> Finding:
        rows = [row for row in view.peers.get(case.name, {}).get("rows", []) if row["kind"] == kind]
        if not rows:
            return NOTHING
        family = kind.split("_")[0]
        if not any(name.startswith(family) and share > 0 for row in rows for name, share in row["types"].items()):
            used = ", ".join(f"{100 * share:.0f} % {name}" for name, share in rows[0]["types"].items())
            return Finding(Verdict.NONE, f"its rows are too narrow for {family}; llama.cpp used {used}")
        best = min(rows, key=lambda row: float(row["perplexity"]))
        held = list(contenders(view, case, best["gpu_bytes"]))
        if not held:
            return Finding(Verdict.NO, f"none of ours is within {best['gpu_bytes'] / 1e6:.2f} MB")
        better = [one for one in held if difference(one[3], best).better]
        name, size, k_chunk, entry = min(
            better or held, key=lambda one: (one[2], one[3]["nats"]) if better else one[3]["nats"]
        )
        apart = difference(entry, best)
        numbers = (
            f"{name}, k_chunk {k_chunk}: {entry['perplexity']:.3f} in {size / 1e6:.2f} MB; {kind} "
            f"{best['perplexity']:.3f} in {best['gpu_bytes'] / 1e6:.2f} MB ({apart} nats)"
        )
        return Finding(Verdict.YES if apart.better else Verdict.NO if apart.worse else Verdict.UNSURE, numbers)

    return judge


def _same(view: View, case: Case) -> Finding:
    rows = [row for row in view.peers.get(case.name, {}).get("rows", []) if row["kind"] == "F32"]
    if not rows:
        return NOTHING
    apart = percent(rows[0], view.full[case.name])
    return Finding(Verdict.YES if abs(apart) <= SAME_TOLERANCE else Verdict.NO, f"{apart:+.4f} %")


def _program(view: View) -> list[Claim]:
    """Claims about quantizing itself."""
    rows = [row for row in view.results.all("speed") if "error" not in row]
    if not rows:
        return []
    same = [row["method"] for row in rows if row["same"]]
    peak = max(rows, key=lambda row: row["peak_bytes"] / row["limit_bytes"])
    inside = peak["peak_bytes"] <= peak["limit_bytes"]
    memory = f"largest {peak['peak_bytes'] / 2**20:.0f} MiB of {peak['limit_bytes'] / 2**20:.0f} MiB ({peak['method']})"
    speeds = "; ".join(f"{row['method']} {row['parameters'] / row['seconds'] / 1e6:.2f} M/s" for row in rows)
    return [
        Claim(
            "Quantizing twice gives the same bytes",
            {"program": Finding(Verdict.YES if len(same) == len(rows) else Verdict.NO, ", ".join(same) or "none")},
        ),
        Claim(
            "Quantizing stays within the memory it promises",
            {"program": Finding(Verdict.YES if inside else Verdict.NO, memory)},
        ),
        Claim("Quantizing speed is reported", {"program": Finding(Verdict.YES, speeds)}),
    ]
