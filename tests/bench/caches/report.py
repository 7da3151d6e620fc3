"""docs/kv.md: what was measured of the caches, what was promised and whether it holds, all from the results file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from models.checkpoint import Checkpoint
from runtime.kv.kinds import KINDS, PARTS, SINKS
from tests.bench.caches import judge, reasons, timing
from tests.bench.caches.drift import WAYS as CONTINUATIONS
from tests.bench.caches.extent import DRIFT_PROMPT, ORDER
from tests.bench.caches.gear import STEPS
from tests.bench.caches.laboratory import BITS, K_CHUNK
from tests.bench.caches.perplexity import FULL, LOW, WAYS
from tests.bench.caches.plots import draw
from tests.bench.caches.size import HEAD_DIMS, LENGTHS
from tests.bench.caches.smooth import FACTOR, KINDS_TRIED, PAIRS, PLANTED
from tests.bench.caches.view import View, way_name
from tests.bench.reporting.cases import Case
from tests.bench.reporting.losses import difference
from tests.bench.reporting.markdown import legend, number, table
from tests.bench.reporting.verdicts import Claim, Verdict

_ALT = {
    "loss": "Cost in perplexity against the bytes of a page, by model",
    "gear": "Relative errors of keys and values at each step of GEAR",
    "drift": "Deviation of the logits over a generation",
}


def write(view: View, file: Path) -> None:
    """Draw the pictures and write the report.

    Args:
        view: The results.
        file: The report; pictures go into a folder of its name beside it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    pictures = {name: os.path.relpath(path, file.parent) for name, path in draw(view, file.with_suffix("")).items()}
    found = judge.claims(view)
    parts = [
        _opening(view),
        _promises(view, found),
        _perplexity(view, pictures),
        _gear(view, pictures),
        _sizes(view),
        _drift(view, pictures),
        _smooth(view),
        timing.section(view, pictures),
        _left_out(view),
    ]
    file.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _head_dim(view: View, case: Case) -> int | str:
    """Channels of a model's head; nothing where neither a measurement nor the model, if it is here, says so."""
    if case.name in view.gear:
        return int(view.gear[case.name]["head_dim"])
    return Checkpoint.open(case.folder).spec.head_dim if case.there() else ""


def _opening(view: View) -> str:
    about = view.results.about
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    rows = []
    for case in view.models:
        exact = view.exact(case.name)
        some = exact or next((entry for (model, *_), entry in view.losses.items() if model == case.name), None)
        length = "" if some is None else f"{some['window']} every {some['window'] // 2}"
        heads = _head_dim(view, case)
        full = "" if exact is None else number(exact["perplexity"])
        tokens = "" if some is None else f", {some['tokens']:,} tokens"
        rows.append((case.name, case.about, heads, f"{case.evaluated}{tokens}", length, full))
    models = table(("model", "what", "channels of a head", "measured on", "windows", "without a cache"), rows)
    minutes = ", ".join(f"{part} {spent:g}" for part, spent in about.get("minutes", {}).items())
    return f"""# KV caches

What a compressed KV cache costs, and what it gives. Written by

    make kv                                      or: python -m tests.bench.caches

on {about["date"]} ({about["cpu"]}, {about["threads"]} threads, {about["variant"]}; {versions}). Everything on this
page, verdicts and pictures included, is computed from [{view.results.path.name}](kv/{view.results.path.name}).
Minutes that each part took when something of it was measured last: {minutes}. `--only speed,attention --again` times
again what depends on the machine.

{models}

The kinds are `fp16`; `int8` and `int4` with a scale and a zero for each token and head (QServe); `hierarchical`, two
planes of 4 bits (QuantSpec); `kcvt4` and `kivi2`, keys by channel and values by token; and GEAR over these two, with
a low-rank matrix (`gear-l4`, `gear-l2`) and with outliers too (`gear4`, `gear2`). Those of 4 and 2 bits keep a
sequence's first {SINKS} tokens in half precision and turn keys before they round them ([why](decisions.md)). "A ± B"
is a mean difference and its standard error, from the differences of the same text's consecutive pieces; differences
within two standard errors are called noise. SmolLM2 is a real chat model and decides; the others show orderings. It is
measured as a person runs it, with {LOW} weights on the CPU backend."""


def _promises(view: View, found: Sequence[Claim]) -> str:
    names = [*(case.name for case in view.models), *([PLANTED] if PLANTED in view.smoothed else [])]
    rows = []
    for claim in found:
        marks = [claim.findings[name].verdict.value if name in claim.findings else "" for name in names]
        rows.append((claim.text, *marks, f"**{claim.verdict.value}**"))
    behind = [
        f"**{claim.text}**\n\n"
        + "\n".join(
            f"- {'' if name == 'program' else f'{name}: '}{finding.verdict.value} {finding.numbers}"
            for name, finding in claim.findings.items()
        )
        for claim in found
    ]
    wrong = [claim.text for claim in found if claim.verdict is Verdict.NO]
    why = "\n".join(f"- **{text}**: {reasons.WHY.get(text, 'not understood yet.')}" for text in wrong)
    holds = sum(claim.verdict is Verdict.YES for claim in found)
    summary = f"{holds} of {len(found)} hold everywhere they can be judged" + (
        f"; {len(wrong)} do not." if wrong else "."
    )
    return f"""## What was promised, and whether it holds

{legend()} {summary}

{table(("promise", *names, "all"), rows)}

{"Where a promise does not hold, and what we take for the reason:" if wrong else ""}

{why}

<details><summary>The numbers behind each verdict</summary>

{chr(10).join(part + chr(10) for part in behind)}
</details>"""


def _perplexity(view: View, pictures: dict[str, str]) -> str:
    if not view.losses:
        return ""
    parts = [
        f"""## Perplexity

Every number is `runtime.evaluate.perplexity`, which `lowbit-chat eval --kv KIND` runs, in windows that begin with an
empty cache. It steps through a window up to where the next page is cut off, 128 tokens at most. So no row reads its
window of half precision where decoding would read a page: int8 writes a token before it is read, itself included, and
of the other kinds a page is compressed at the token at which decoding would compress it, never later. A test
holds such steps against steps of one token. "Read compressed" is how much of what the scored positions read is no
longer in half precision, on average; the first half of every window but the first is not scored.

"Full weights" are the checkpoint's, in float32, on the reference backend: what remains is the cache's. "{LOW}
weights" are `quantize --bits {BITS}` with `--k-chunk {K_CHUNK}`, once on the reference backend and once on the CPU
backend, whose attention multiplies integers. Costs are against the same weights and backend over fp16.

{_picture(pictures, "loss")}

Filled: full weights, hollow: {LOW}; bars are standard errors; a triangle is a cost below what can be drawn."""
    ]
    for case in view.models:
        rows = []
        for kind in view.kinds():
            cells = [_cell(view, case.name, weights, backend, kind) for weights, backend in WAYS]
            entry = view.loss(case.name, FULL, "reference", kind)
            share = "" if entry is None else f"{100 * entry['quantized']:.0f} %" if kind != "fp16" else "0 %"
            rows.append((kind, share, *cells))
        head = ("cache", "read compressed", *(way_name(*way) for way in WAYS))
        parts.append(f"### {case.name}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def _cell(view: View, model: str, weights: str, backend: str, kind: str) -> str:
    entry, base = (view.loss(model, weights, backend, name) for name in (kind, "fp16"))
    if entry is None:
        return ""
    if base is None or kind == "fp16":
        return number(entry["perplexity"])
    return f"{number(entry['perplexity'])} ({judge.percent(difference(entry, base))})"


def _gear(view: View, pictures: dict[str, str]) -> str:
    if not view.gear:
        return ""
    names = [case.name for case in view.models if case.name in view.gear]
    rows = [
        (kind, *(f"{100 * view.gear[name]['errors'][kind][part]:.2f}" for name in names for part in ("keys", "values")))
        for kind in ORDER
        if kind in view.gear[names[0]]["errors"]
    ]
    head = ("cache", *(f"{name} {part}" for name in names for part in ("keys", "values")))
    parts = [
        (
            f"{STEPS[int(bits)][2]}, {part}",
            *(" → ".join(f"{100 * e:.1f}" for e in view.gear[n]["parts"][bits][part]) for n in names),
        )
        for bits in ("4", "2")
        for part in ("keys", "values")
    ]
    iteration = [
        (
            f"{STEPS[int(bits)][1]}, {part}",
            *(_above(view.gear[name]["iteration"][bits][part]) for name in names),
        )
        for bits in ("4", "2")
        for part in ("keys", "values")
    ]
    tokens = ", ".join(f"{name} {view.gear[name]['tokens']:,}" for name in names)
    return f"""## GEAR's corrections on real keys and values

Keys (rotated) and values of the full-precision models, page by page ({tokens} tokens, all layers and heads): root
mean square of what is lost over that of what was there, in percent. D̂ is the backbone `kcvt4` or `kivi2`, D̂ + L
`gear-l4` or `gear-l2`, D̂ + L + S `gear4` or `gear2`.

{_picture(pictures, "gear")}

{table(head, rows)}

With outliers set aside the scales are narrower, so the parts of one page of `gear4` or `gear2` read differently: D̂
alone clips them. The same pages read as D̂ → D̂ + L → D̂ + L + S, in percent:

{table(("", *names), parts)}

{_as_paper(view)}

The low-rank matrix comes from power iteration. What it leaves over what the best matrix of rank 4 (by SVD) would leave:
on average over heads and pages, and the worst page.

{table(("", *names), iteration)}"""


def _as_paper(view: View) -> str:
    """Ours beside the paper's numbers of tokens and ranks, on the first model that was looked at."""
    name = next(case.name for case in view.models if case.name in view.gear)
    if "paper" not in view.gear[name]:
        return ""
    rows = [
        (STEPS[int(bits)][2], f"{one['tokens']:,}", one["rank"], *(f"{100 * one[p]:.1f}" for p in PARTS), one["bytes"])
        for bits, each in view.gear[name]["paper"].items()
        for one in each
    ]
    head = ("", "tokens together", "rank", "keys, %", "values, %", "bytes, % of fp16")
    return f"""GEAR corrects a prompt as a whole, by rank 4, and what comes after it by rank 2 a buffer at a time, of 20
tokens at 4 bits and 64 at 2. Here every page of {KINDS["gear2"].page} tokens has rank {KINDS["gear2"].rank}. Errors of
{name}'s keys and values with these numbers of tokens and ranks, and what a page of them takes (outliers are 2 % of each
vector, one at each end at least, which weighs on short buffers):

{table(head, rows)}"""


def _above(ratio: dict[str, float]) -> str:
    return f"{100 * (ratio['mean'] - 1):+.2f} %, worst {100 * (ratio['worst'] - 1):+.2f} %"


def _sizes(view: View) -> str:
    if not view.size:
        return ""
    parts = []
    for D in HEAD_DIMS:
        rows = []
        for kind in [kind for kind in ORDER if (kind, D) in view.size]:
            entry = view.size[kind, D]
            cells = [_share(entry.get(name)) for name in ("accounted", "reference page", "cpu page")]
            cells += [
                _share(entry.get(f"{backend} {tokens}")) for tokens in LENGTHS for backend in ("reference", "cpu")
            ]
            rows.append((kind, *cells))
        lengths = [f"{tokens // 1024}k, {name}" for tokens in LENGTHS for name in ("reference and GPU", "CPU")]
        head = ("cache", "accounted", "page, reference and GPU", "page, CPU", *lengths)
        parts.append(f"### Heads of {D} channels\n\n{table(head, rows)}")
    keep, page = KINDS["hierarchical"].keep, KINDS["kivi2"].page
    return f"""## Size

Percent of the bytes of fp16, from the buffers of a cache that holds so many tokens, windows of recent tokens in half
precision included. "Accounted" is what the papers count for a page: codes, scales and zeros of 16 bits, and with GEAR
16 r (T + D) bits of factors for T = {page} tokens and 32 bits for each outlier, half of which is its place. The GPU
keeps the bytes of the reference. The CPU pads channels to whole vectors of 32 and records to 64 bytes, so small heads
take more there.

At 1k tokens the window counts: {SINKS} first tokens and up to {page} recent ones of the kinds of 4 and 2 bits (64
of int4), {keep} to {keep + page} of hierarchical (the table shows the moment before a page is cut off, the worst
there is). At 32k it is gone in the noise.

{chr(10).join(part + chr(10) for part in parts)} The papers: QServe's KV4 is `int4`, 4 bits and two halves for each
token and head. QuantSpec keeps 8 bits in two planes and 2 G tokens in half precision, which is `hierarchical` with G
= {page}; groups and window are its own. GEAR counts rank 4 for a prompt and rank 2 for every
{KINDS["kivi2"].keys.group} tokens generated, and buffers of 20 (KCVT) or 64 tokens (KIVI); here every page of {page}
tokens has rank 4, whether it came from a prompt or not, so L takes 16 · 4 · ({page} + D) / ({page} D) bits a number,
more than a long prompt's shared factors, less than rank 2 for 64 tokens. The text of GEAR that we have leaves out the
numbers of its tables, so only its accounting is set beside ours."""


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _drift(view: View, pictures: dict[str, str]) -> str:
    shown = [case.name for case in view.models if any(model == case.name for model, *_ in view.drift)]
    if not shown:
        return ""
    parts = []
    for name in shown:
        rows = []
        for kind in ORDER:
            cells: list[str] = []
            for way in CONTINUATIONS:
                entry = view.drift.get((name, way, kind))
                cells += (
                    ["", "", ""]
                    if entry is None
                    else [
                        f"{100 * entry['mean']:.3f}",
                        f"{100 * entry['first']:.3f} → {100 * entry['last']:.3f}",
                        f"{100 * entry['different'] / entry['steps']:.1f}",
                    ]
                )
            if any(cells):
                rows.append((kind, *cells))
        head = ["cache"]
        for way in CONTINUATIONS:
            entry = view.drift.get((name, way, "fp16"))
            repeats = "" if entry is None else f" ({100 * entry['repeats']:.0f} % repeats)"
            head += [f"{way}{repeats}: mean", "first → last tenth", "other choices, %"]
        parts.append(f"### {name}\n\n{_picture(pictures, f'drift-{name}')}\n\n{table(head, rows)}")
    steps = max(entry["steps"] for entry in view.drift.values()) - 1
    return f"""## Logits over a long generation

GEAR's Figure 1b. The full-precision model continues a prompt of {DRIFT_PROMPT} tokens by {steps:,}, over the fp16
cache: once by the likeliest token ("greedy") and once by drawing (temperature 1, "sampled"), because greedy text of
models this small falls into loops: "repeats" is the share of places at which the last 8 tokens had stood together
before. The fixed text then goes through every kind of cache. Deviation is |logits − exact| / |exact| in percent,
2-norms, where "exact" is float32 without any cache; so fp16 has a deviation too. "Other choices" are steps whose
likeliest token changes. The pictures show running means over 50 tokens. Windowed kinds are exact until their first
page is compressed. Models whose context is shorter than the generation are left out.

{chr(10).join(part + chr(10) for part in parts)}"""


def _smooth(view: View) -> str:
    names = view.smoothed
    if not names:
        return ""
    channels = [
        (name, *(" ".join(f"{ratio:.1f}" for ratio in view.channels[name][key]) for key in ("ratio", "median")))
        for name in names
    ]
    losses = []
    for name in names:
        for kind in [kind for kind in KINDS_TRIED if kind != "fp16"]:
            cells = []
            for smooth in (False, True):
                one, base = (view.loss(name, LOW, "reference", k, smooth=smooth) for k in (kind, "fp16"))
                shown = one is not None and base is not None
                cells.append(judge.percent(difference(one, base)) if shown else "")  # type: ignore[arg-type]
            losses.append((name, kind, *cells))
    plain = [view.loss(name, LOW, "reference", "fp16", smooth=smooth) for name in names for smooth in (False, True)]
    itself = "; ".join(
        f"{name} {100 * math.expm1(difference(on, off).nats):+.2f} %"
        for name, off, on in zip(names, plain[::2], plain[1::2], strict=True)
        if on is not None and off is not None
    )
    return f"""## SmoothAttention

Which keys have outlier channels: the largest magnitude of a key channel over that of the median channel, layer by
layer, of the most uneven head and of the median head. QServe speaks of outliers ten times larger than most; none of
these models has them. So `{PLANTED}` has them put in: {PAIRS} pairs of channels of every key head are multiplied by
{FACTOR}, the queries' divided, which changes no logit.

{table(("model", "most uneven head, by layer", "median head"), channels)}

What a cache costs over fp16 with low-bit weights ({LOW}, reference backend), made without and with
`quantize --smooth-attention`:

{table(("model", "cache", "without", "with"), losses)}

What evening out alone does to the weights, over fp16: {itself}."""


def _left_out(view: View) -> str:
    skipped = view.results.about.get("skipped", {})
    if not skipped:
        return ""
    return "## Not measured\n\n" + "\n".join(f"- {what}: {why}" for what, why in skipped.items())


def _picture(pictures: dict[str, str], name: str) -> str:
    return f"![{_ALT[name.split('-')[0]]}]({pictures[name]})" if name in pictures else ""
