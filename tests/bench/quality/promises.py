"""Claims with limits: perplexity as a chat, distance to llama.cpp, duration of quantizing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from models.recipe import DEFAULT_METHOD
from models.recipe import WEIGHT_ONLY_METHODS as METHODS
from tests.bench.quality.points import BUDGET, REAL, REFERENCE_K
from tests.bench.quality.view import View
from tests.bench.reporting.cases import Case
from tests.bench.reporting.losses import difference
from tests.bench.reporting.results import Entry
from tests.bench.reporting.verdicts import NOTHING, Claim, Finding, Verdict

CHAT_LIMITS = {3: 1.12, 4: 1.04}
"""Times full precision's perplexity that a chat may have at `REFERENCE_K`, by bits."""
BUDGET_LIMIT = 1.15
"""The same at 3 bits, with what the budget buys on this processor."""
FAST_S, DEFAULT_S, SLOWEST_S = 15, 60, 180
"""Seconds that quantizing the real model to 3 bits may take: plain rounding, the default recipe, any method."""
BUSY = 0.1
"""Share of the processors' time from which on other processes are what a time may come from."""
BUFFER_TOLERANCE = 0.02
"""Share by which buffers may be larger than what a model is said to take on the device."""


def of_chats() -> list[tuple[str, Callable[[View, Case], Finding]]]:
    """Claims about what a chat with the real model gets of the default recipe."""
    near = [
        (
            f"As a chat, {bits} bits by the default recipe at k_chunk {REFERENCE_K} reach {limit} × full precision",
            partial(_near, bits=bits, limit=limit),
        )
        for bits, limit in CHAT_LIMITS.items()
    ]
    budget = f"As a chat, 3 bits with a budget of {BUDGET:g} % on this processor reach {BUDGET_LIMIT} ×"
    peers = [
        (
            f"{bits} bits at k_chunk {REFERENCE_K} beat every llama.cpp type that is no larger, or its smallest",
            partial(_peer, bits=bits),
        )
        for bits in CHAT_LIMITS
    ]
    return [*near, (budget, _budget), *peers]


def _near(view: View, case: Case, *, bits: float, limit: float) -> Finding:
    entry, full = view.chat(case, DEFAULT_METHOD, bits, REFERENCE_K), view.chat_full.get(case.name)
    return NOTHING if entry is None or full is None else _times(entry, full, limit)


def _times(entry: Entry, full: Entry, limit: float) -> Finding:
    ratio = entry["perplexity"] / full["perplexity"]
    numbers = f"{entry['perplexity']:.2f} of {full['perplexity']:.2f}: {ratio:.3f} ×"
    return Finding(Verdict.YES if ratio <= limit else Verdict.NO, numbers)


def _budget(view: View, case: Case) -> Finding:
    entry, full = view.budgets.get((case.name, 3, BUDGET)), view.chat_full.get(case.name)
    if entry is None or full is None:
        return NOTHING
    found = _times(entry, full, BUDGET_LIMIT)
    return Finding(found.verdict, f"{found.numbers}, with {bought(entry)}")


def bought(entry: Entry) -> str:
    """What a budget bought, in words."""
    k_chunk = ", ".join(f"{kind} {number}" for kind, number in entry["k_chunk"].items())
    slower, prompts = entry["slowdown_percent"], entry["prompt_slowdown_percent"]
    return (
        f"k_chunk {k_chunk} ({slower:.1f} % slower), prompts {entry['prompt_k_chunk']} of 1024 ({prompts:.1f} % slower)"
    )


def _peer(view: View, case: Case, *, bits: float) -> Finding:
    """As a chat where that was measured, else plain."""
    chat = case.name in view.chat_full
    ours = (view.chat if chat else view.get)(case, DEFAULT_METHOD, bits, REFERENCE_K)
    held = view.gpu_bytes(case, DEFAULT_METHOD, bits)
    rows = [row for row in view.peers.get(case.name, {}).get("rows", []) if row["kind"] != "F32"]
    if ours is None or held is None or not rows:
        return NOTHING

    def loss(row: Entry) -> Entry:
        return row["chat"] if chat else row

    smaller = [row for row in rows if row["gpu_bytes"] <= held]
    best = min(smaller or [min(rows, key=lambda row: row["gpu_bytes"])], key=lambda row: loss(row)["perplexity"])
    apart = difference(ours, loss(best))
    numbers = (
        f"{ours['perplexity']:.2f} in {held / 1e6:.2f} MB; {best['kind']} {loss(best)['perplexity']:.2f} in "
        f"{best['gpu_bytes'] / 1e6:.2f} MB ({apart} nats)"
    )
    if apart.better:
        return Finding(Verdict.YES, numbers)
    if not smaller:
        return Finding(Verdict.NONE, f"{numbers}: llama.cpp's smallest type here, none has so few bytes")
    return Finding(Verdict.NO if apart.worse else Verdict.UNSURE, numbers)


def of_program(view: View) -> list[Claim]:
    """Claims about quantizing the real model, about its bytes, and about quantizing twice."""
    found = {
        f"The real model is quantized to 3 bits by rtn within {FAST_S} s": _within(view, ("rtn",), FAST_S),
        f"By the default recipe within {DEFAULT_S} s": _within(view, (DEFAULT_METHOD,), DEFAULT_S),
        f"By the slowest method within {SLOWEST_S} s": _within(view, METHODS, SLOWEST_S),
        "Quantizing stays within the memory it promises": _memory(view),
        "Quantizing twice gives the same bytes": _twice(view),
        f"The CPU's buffers are at most {100 * BUFFER_TOLERANCE:g} % above the bytes a model is said to take": (
            _buffers(view, "cpu_buffers")
        ),
        f"The GPU's buffers are at most {100 * BUFFER_TOLERANCE:g} % above the bytes a model is said to take": (
            _buffers(view, "gpu_buffers")
        ),
    }
    return [Claim(text, {"program": finding}) for text, finding in found.items()]


def made(view: View, bits: float = 3) -> dict[str, Entry]:
    """How the real model was quantized with 4-bit residuals, by method."""
    return {
        method: entry
        for method in view.methods()
        for key, entry in view.stored.items()
        if key[:3] == (REAL, method, bits) and key[4] == 4
    }


def _within(view: View, methods: tuple[str, ...], limit: float) -> Finding:
    """Too slow on a machine that had much else to do is no verdict; nor is fast enough by some of the methods."""
    found = {method: entry for method, entry in made(view).items() if method in methods}
    if not found:
        return NOTHING
    numbers = "; ".join(
        f"{method} {entry['seconds']:.1f}{view.mark(entry)} s ({entry['processor_seconds']:.1f} s of processor time, "
        f"others {others(entry)})"
        for method, entry in found.items()
    )
    slow = [entry for entry in found.values() if entry["seconds"] > limit]
    if not all(_busy(entry) for entry in slow):
        return Finding(Verdict.NO, numbers)
    if slow or len(found) < len(methods):
        return Finding(Verdict.UNSURE if slow else Verdict.NONE, numbers)
    return Finding(Verdict.YES, numbers)


def _busy(entry: Entry) -> bool:
    """Whether other processes had so much of the processors, or it is not known, that a time says little."""
    taken = entry["others_seconds"]
    return taken is None or taken > BUSY * entry["seconds"] * entry["cores"]


def others(entry: Entry) -> str:
    """Processor seconds that other processes took while a model was made."""
    return "not known" if entry["others_seconds"] is None else f"{entry['others_seconds']:.1f}"


def _memory(view: View) -> Finding:
    rows = list(view.stored.values())
    if not rows:
        return NOTHING
    peak = max(rows, key=lambda row: row["peak_bytes"] / row["limit_bytes"])
    numbers = (
        f"largest {peak['peak_bytes'] / 2**20:.0f} MiB of {peak['limit_bytes'] / 2**20:.0f} MiB "
        f"({peak['model']}, {peak['method']})"
    )
    return Finding(Verdict.YES if peak["peak_bytes"] <= peak["limit_bytes"] else Verdict.NO, numbers)


def _twice(view: View) -> Finding:
    rows = view.results.all("same")
    if not rows:
        return NOTHING
    other = [row["method"] for row in rows if not row["same"]]
    numbers = f"{', '.join(row['method'] for row in rows)} on the bundled model"
    return Finding(Verdict.NO, f"not {', '.join(other)}") if other else Finding(Verdict.YES, numbers)


def _buffers(view: View, kind: str) -> Finding:
    rows = list(view.stored.values())
    if not rows:
        return NOTHING
    worst = max(rows, key=lambda row: row[kind] / row["gpu_bytes"])
    ratio = worst[kind] / worst["gpu_bytes"]
    numbers = (
        f"most {ratio:.2f} ×: {worst[kind] / 1e6:.1f} of {worst['gpu_bytes'] / 1e6:.1f} MB ({worst['model']}, "
        f"{worst['method']} {worst['bits']:g} bits)"
    )
    return Finding(Verdict.YES if ratio <= 1 + BUFFER_TOLERANCE else Verdict.NO, numbers)
