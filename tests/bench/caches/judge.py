"""Verdicts on the claims about caches, for each model or for the program, with the numbers behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

from tests.bench.caches import smooth
from tests.bench.caches.drift import WAYS as CONTINUATIONS
from tests.bench.caches.gear import STEPS
from tests.bench.caches.perplexity import FULL, LOW
from tests.bench.caches.view import View
from tests.bench.reporting.losses import SURE, Difference, difference, piece_losses
from tests.bench.reporting.verdicts import NOTHING, Claim, Finding, Verdict

NEAR, INT4_NEAR, GEAR4_NEAR, GEAR2_NEAR, CPU_NEAR = 0.1, 2.0, 0.5, 5.0, 0.2
"""Percent of perplexity within which kinds count as equal; that int4, gear4, gear2 may cost; by which backends may
differ."""
SVD_NEAR = 5.0
"""Percent by which the power iteration's error may exceed the SVD's."""
OUTLIERS = 10.0
"""From so many times the median channel on, the largest one counts as an outlier (QServe §4.2: ten times)."""
ATTENTION_SHARE = 0.4
"""Of fp16's attention time, that int4's may take."""
LONG = 32768
"""Tokens at which speeds are judged."""
SIZE_NEAR = 1.0
"""Percent of a page's bytes by which it may differ from what is accounted."""


def claims(view: View) -> list[Claim]:
    """All claims with what was found."""
    by_model: list[tuple[str, Callable[[View, str], Finding]]] = [
        (f"int8 is within {NEAR} % of fp16", _within("int8", "fp16", NEAR)),
        (f"hierarchical is within {NEAR} % of int8", _within("hierarchical", "int8", NEAR)),
        (f"int4 is within {INT4_NEAR:g} % of fp16", _within("int4", "fp16", INT4_NEAR)),
        (f"gear4 is within {GEAR4_NEAR:g} % of fp16", _within("gear4", "fp16", GEAR4_NEAR)),
        (f"gear2 is within {GEAR2_NEAR:g} % of fp16", _within("gear2", "fp16", GEAR2_NEAR)),
        ("gear4 is better than its backbone kcvt4", _better("gear4", "kcvt4")),
        ("gear2 is better than its backbone kivi2", _better("gear2", "kivi2")),
        (f"On the CPU no kind costs over {CPU_NEAR} % more or less than in the reference", _backends),
        ("The error of keys and of values falls from D̂ to D̂ + L to D̂ + L + S, at 4 and at 2 bits", _falling),
        (f"Power iteration is within {SVD_NEAR:g} % of the SVD's error", _iteration),
        ("Over the generation logits drift less with gear2 than gear-l2, and less than kivi2", _drifting),
        ("SmoothAttention lowers int4's loss where keys have outlier channels", _smoothing),
    ]
    names = [case.name for case in view.models]
    found = []
    for text, judge in by_model:
        there = view.smoothed if judge is _smoothing else names
        found.append(Claim(text, {name: judge(view, name) for name in there}))
    return [
        *found,
        Claim("Pages take the bytes that are accounted for", {"program": _sizes(view)}),
        Claim(
            f"At {LONG:,} tokens int4's attention takes at most {ATTENTION_SHARE} × fp16's time",
            {"program": _attention(view)},
        ),
        Claim(f"At {LONG:,} tokens decoding with int4 is faster than llama.cpp with q4_0", {"program": _beside(view)}),
    ]


def percent(apart: Difference) -> str:
    """A difference of losses as one of perplexities, with its error where several pieces tell it."""
    error = f" ± {100 * apart.error:.2f}" if math.isfinite(apart.error) else ""
    return f"{100 * math.expm1(apart.nats):+.2f}{error} %"


def _within(kind: str, other: str, limit: float) -> Callable[[View, str], Finding]:
    def judge(view: View, model: str) -> Finding:
        entry = view.loss(model, FULL, "reference", kind) or view.loss(model, LOW, "reference", kind)
        if entry is not None and entry["quantized"] == 0:
            return Finding(
                Verdict.NONE, f"no token of a window of {entry['window']} leaves {kind}'s full-precision part"
            )
        costs = view.costs(model, kind, other)
        return _all({way: _near(apart, limit) for way, apart in costs.items()}, costs)

    return judge


def _near(apart: Difference, limit: float) -> Verdict:
    """Whether a difference is within so many percent of perplexity; unsure where noise may have brought it there."""
    room = math.log1p(limit / 100)
    if abs(apart.nats) <= room:
        return Verdict.YES
    return Verdict.NO if abs(apart.nats) - SURE * apart.error > room else Verdict.UNSURE


def _better(kind: str, other: str) -> Callable[[View, str], Finding]:
    def judge(view: View, model: str) -> Finding:
        costs = view.costs(model, kind, other)
        return _all({way: _lower(apart) for way, apart in costs.items()}, costs)

    return judge


def _lower(apart: Difference) -> Verdict:
    return Verdict.NO if apart.worse else Verdict.YES if apart.better else Verdict.UNSURE


def _all(verdicts: dict[str, Verdict], costs: dict[str, Difference]) -> Finding:
    """No if any says no, yes if all say yes."""
    if not verdicts:
        return NOTHING
    there = set(verdicts.values())
    verdict = Verdict.NO if Verdict.NO in there else Verdict.YES if there == {Verdict.YES} else Verdict.UNSURE
    return Finding(verdict, "; ".join(f"{way} {percent(apart)}" for way, apart in costs.items()))


def _backends(view: View, model: str) -> Finding:
    apart = dict(_backend_differences(view, model))
    if not apart:
        return NOTHING
    verdicts = {kind: _near(one, CPU_NEAR) for kind, one in apart.items()}
    worst = max(apart, key=lambda kind: abs(apart[kind].nats))
    finding = _all(verdicts, {worst: apart[worst]})
    return Finding(finding.verdict, f"worst of {len(apart)} kinds: {finding.numbers}")


def _backend_differences(view: View, model: str) -> Iterator[tuple[str, Difference]]:
    """What a kind costs over fp16 on the CPU, less what it costs in the reference."""
    for kind in view.kinds():
        four = [view.loss(model, LOW, backend, name) for backend in ("cpu", "reference") for name in (kind, "fp16")]
        if kind == "fp16" or any(entry is None for entry in four):
            continue
        cpu, cpu_base, reference, base = (piece_losses(entry) for entry in four if entry is not None)
        one = {"pieces": list(cpu - cpu_base), "tokens": four[0]["tokens"]}  # type: ignore[index]
        other = {"pieces": list(reference - base), "tokens": one["tokens"]}
        yield kind, difference(one, other)


def _falling(view: View, model: str) -> Finding:
    if model not in view.gear:
        return NOTHING
    errors = view.gear[model]["errors"]
    behind, falls = [], True
    for bits, kinds in STEPS.items():
        for part in ("keys", "values"):
            steps = [errors[kind][part] for kind in kinds]
            falls = falls and all(one > other for one, other in pairwise(steps))
            behind.append(f"{part} at {bits} bits " + " → ".join(f"{100 * step:.1f}" for step in steps) + " %")
    return Finding(Verdict.YES if falls else Verdict.NO, "; ".join(behind))


def _iteration(view: View, model: str) -> Finding:
    if model not in view.gear:
        return NOTHING
    ratios = [ratio for parts in view.gear[model]["iteration"].values() for ratio in parts.values()]
    worst, mean = max(ratio["worst"] for ratio in ratios), max(ratio["mean"] for ratio in ratios)
    numbers = f"worst page {100 * (worst - 1):.2f} % above, on average {100 * (mean - 1):.2f} %"
    return Finding(Verdict.YES if worst <= 1 + SVD_NEAR / 100 else Verdict.NO, numbers)


def _drifting(view: View, model: str) -> Finding:
    behind, verdicts = [], []
    for way in CONTINUATIONS:
        entries = [view.drift.get((model, way, kind)) for kind in reversed(STEPS[2])]
        if any(entry is None for entry in entries):
            continue
        means = [float(entry["mean"]) for entry in entries if entry is not None]
        verdicts.append(means[0] < means[1] and means[0] < means[2])
        behind.append(f"{way}: " + ", ".join(f"{k} {100 * m:.2f} %" for k, m in zip(reversed(STEPS[2]), means)))  # noqa: B905
    if not behind:
        return NOTHING
    return Finding(Verdict.YES if all(verdicts) else Verdict.NO, "; ".join(behind))


def _smoothing(view: View, model: str) -> Finding:
    pair = [view.loss(model, LOW, "reference", "int4", smooth=smooth) for smooth in (True, False)]
    base = [view.loss(model, LOW, "reference", "fp16", smooth=smooth) for smooth in (True, False)]
    if any(entry is None for entry in (*pair, *base)):
        return NOTHING
    losses = [piece_losses(one) - piece_losses(other) for one, other in zip(pair, base, strict=True) if one and other]
    tokens = pair[0]["tokens"]  # type: ignore[index]
    apart = difference({"pieces": list(losses[0]), "tokens": tokens}, {"pieces": list(losses[1]), "tokens": tokens})
    ratio = max(view.channels[model]["ratio"])
    costs = [100 * math.expm1(float(loss.sum()) / tokens) for loss in losses]
    numbers = f"int4 costs {costs[1]:+.2f} % without, {costs[0]:+.2f} % with; largest channel {ratio:.1f} × the median"
    if ratio < OUTLIERS and model != smooth.PLANTED:
        return Finding(Verdict.NONE, f"no outlier channels: {numbers}")
    return Finding(_lower(apart), numbers)


def _sizes(view: View) -> Finding:
    if not view.size:
        return NOTHING
    apart = {
        f"{kind}, D = {dim}": 100 * (entry["reference page"] / entry["accounted"] - 1)
        for (kind, dim), entry in view.size.items()
    }
    worst = max(apart, key=lambda name: abs(apart[name]))
    verdict = Verdict.YES if abs(apart[worst]) <= SIZE_NEAR else Verdict.NO
    return Finding(verdict, f"worst {apart[worst]:+.2f} % ({worst}); the CPU's vectors add what the table shows")


def _attention(view: View) -> Finding:
    int4, fp16 = view.attention_row(LONG, "int4"), view.attention_row(LONG, "fp16")
    if int4 is None or fp16 is None:
        return NOTHING
    share = int4["p50"] / fp16["p50"]
    numbers = f"{1e3 * int4['p50']:.1f} ms of {1e3 * fp16['p50']:.1f} ms, {share:.2f} × (bytes {_bytes(view):.2f} ×)"
    return Finding(Verdict.YES if share <= ATTENTION_SHARE else Verdict.NO, numbers)


def _bytes(view: View) -> float:
    int4, fp16 = view.attention_row(LONG, "int4"), view.attention_row(LONG, "fp16")
    assert int4 is not None
    assert fp16 is not None
    return float(int4["bytes_per_token"] / fp16["bytes_per_token"])


def _beside(view: View) -> Finding:
    ours, theirs = view.speed_row(LONG, "int4"), view.speed_row(LONG, "llama.cpp q4_0")
    if ours is None or theirs is None:
        return NOTHING
    numbers = f"{1 / ours['p50']:.1f} tokens/s, llama.cpp {1 / theirs['p50']:.1f} tokens/s"
    return Finding(Verdict.YES if ours["p50"] < theirs["p50"] else Verdict.NO, numbers)
