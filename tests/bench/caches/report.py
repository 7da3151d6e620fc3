"""docs/kv.md: measurements of the caches, claims and verdicts, all from the results file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from runtime.kv.kinds import KINDS, LOW_RANK, PARTS, SINKS
from tests.bench.caches import judge, reasons, summary, timing, windows
from tests.bench.caches.corrected import RANKS, SHARES, SPARSITIES
from tests.bench.caches.drift import WAYS as CONTINUATIONS
from tests.bench.caches.extent import DRIFT_PROMPT, ORDER
from tests.bench.caches.gear import STEPS
from tests.bench.caches.laboratory import BITS, K_CHUNK
from tests.bench.caches.perplexity import FULL, LOW, WAYS
from tests.bench.caches.plots import drawn
from tests.bench.caches.size import HEAD_DIMS, LENGTHS
from tests.bench.caches.smooth import FACTOR, KINDS_TRIED, PAIRS, PLANTED
from tests.bench.caches.view import View, way_name
from tests.bench.reporting.losses import difference
from tests.bench.reporting.markdown import legend, table
from tests.bench.reporting.page import Pictures, write_page
from tests.bench.reporting.results import Entry
from tests.bench.reporting.verdicts import Claim, Verdict

_ALT = {
    "loss": "Cost in perplexity against the bytes of a page, by model",
    "gear": "Relative errors of keys and values at each step of GEAR",
    "drift": "Deviation of the logits over a generation",
    "speed": "Decoded tokens a second by tokens in the cache",
    "attention": "Time and bytes of attention relative to fp16",
}
_LATEST = (
    f"By the share of the prompt's tokens, the latest ones, whose pages have a low-rank matrix of rank {LOW_RANK} "
    "(pages after the prompt always have one):"
)


def write(view: View, file: Path) -> None:
    """Draw the pictures and write the report.

    Args:
        view: The results.
        file: The report; pictures go into a folder of its name beside it.
    """
    pictures, found = Pictures(file, drawn(view), _ALT), judge.claims(view)
    parts = [
        _opening(view),
        summary.section(view),
        summary.measured(view),
        _promises(view, found),
        _perplexity(view, pictures),
        _gear(view, pictures),
        _corrected(view),
        _sizes(view),
        windows.section(),
        _memory(view),
        _drift(view, pictures),
        _smooth(view),
        timing.section(view, pictures),
        view.left_out(),
    ]
    write_page(file, parts)


def _opening(view: View) -> str:
    about = view.results.about
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    minutes = ", ".join(f"{part} {spent:g}" for part, spent in about.get("minutes", {}).items())
    return f"""# KV caches

A model remembers a conversation in its *KV cache*. `--kv KIND` (or F3) stores it in fewer bits. This page shows what
that costs in quality and what it saves in memory and time. Run

    make kv                                      or: python -m tests.bench.caches

to measure and write it; it was last run on {about["date"]} ({about["cpu"]}, {about["threads"]} threads,
{about["variant"]}; {versions}). The whole page, verdicts and pictures included, is computed from
[{view.results.path.name}](kv/{view.results.path.name}). Minutes per part: {minutes}.
`--only speed,attention --again` times again what depends on the machine.

The kinds are

- `fp16`, half precision;
- `int8` and `int4`, with a scale and a zero for each token and head (QServe);
- `hierarchical`, two planes of 4 bits (QuantSpec);
- `kcvt4` and `kivi2`, with keys quantized by channel and values by token;
- `gear-l4` and `gear-l2`, which add a low-rank matrix to these two, and `gear4` and `gear2`, which add outliers as well
  (GEAR).

Kinds of 4 and 2 bits keep a sequence's first {SINKS} tokens in half precision and turn keys before rounding them
([why](decisions.md#2026-11-22--a-cache-of-4-bits-on-real-keys-turned-with-exact-means-sinks-and-a-window))."""


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
    why = "\n".join(f"- **{text}**: {reasons.WHY.get(text, 'not understood.')}" for text in wrong)
    holds = sum(claim.verdict is Verdict.YES for claim in found)
    told = f"{holds} of {len(found)} hold wherever they could be judged" + (
        f"; {len(wrong)} {'does' if len(wrong) == 1 else 'do'} not." if wrong else "."
    )
    return f"""## Claims and verdicts

{legend()} {told}

{table(("promise", *names, "all"), rows)}

{"Claims that do not hold, and the likely reason:" if wrong else ""}

{why}

<details><summary>The numbers behind each verdict</summary>

{chr(10).join(part + chr(10) for part in behind)}
</details>"""


def _perplexity(view: View, pictures: Pictures) -> str:
    if not view.losses:
        return ""
    parts = [
        f"""## Perplexity

Every number is what `lowbit-chat eval --kv KIND` computes, in windows that start with an empty cache. A window is read
in steps of at most 128 tokens that end where the next page is compressed, so every position reads from the cache
exactly what decoding would read there; a test compares such steps with steps of one token. "Read compressed" is the
share of what the scored positions read that is no longer in half precision. The first half of every window but the
first is not scored.

"Full weights" are the checkpoint's, in float32 on the reference backend, so the whole cost is the cache's. "{LOW}
weights" are `quantize --bits {BITS}` with `--k-chunk {K_CHUNK}`, on the reference backend and on the CPU backend, whose
attention multiplies integers. Costs are relative to an fp16 cache with the same weights on the same backend.

{pictures("loss")}

Filled marks: full weights. Hollow marks: {LOW}. Bars are standard errors; a triangle marks a cost too small to draw."""
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
    return "\n\n".join([*parts, view.origin("perplexity")])


def _cell(view: View, model: str, weights: str, backend: str, kind: str) -> str:
    entry, base = (view.loss(model, weights, backend, name) for name in (kind, "fp16"))
    if entry is None:
        return ""
    shown = view.shown(entry)
    return shown if base is None or kind == "fp16" else f"{shown} ({judge.percent(difference(entry, base))})"


def _gear(view: View, pictures: Pictures) -> str:
    if not view.gear:
        return ""
    names = [case.name for case in view.models if case.name in view.gear]
    titles = [f"{name}{view.mark(view.gear[name])}" for name in names]
    rows = [
        (kind, *(f"{100 * view.gear[name]['errors'][kind][part]:.2f}" for name in names for part in ("keys", "values")))
        for kind in ORDER
        if kind in view.gear[names[0]]["errors"]
    ]
    head = ("cache", *(f"{title} {part}" for title in titles for part in ("keys", "values")))
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

Relative error of the full-precision models' keys (rotated) and values, page by page over all layers and heads
({tokens} tokens): root mean square of the error over that of the original, in percent. D̂ is the backbone `kcvt4` or
`kivi2`, D̂ + L is `gear-l4` or `gear-l2`, D̂ + L + S is `gear4` or `gear2`.

{pictures("gear")}

{table(head, rows)}

`gear4` and `gear2` set outliers aside and therefore use narrower scales, so D̂ alone clips. The same pages read as D̂ →
D̂ + L → D̂ + L + S, in percent:

{table(("", *titles), parts)}

{_as_paper(view)}

The low-rank matrix comes from power iteration. Its error above that of the best matrix of rank 4 (by SVD), on average
over heads and pages, and on the worst page:

{table(("", *titles), iteration)}

{view.origin("gear")}"""


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
    return f"""GEAR corrects a whole prompt with rank 4, and what follows with rank 2 for each buffer of 20 tokens (4
bits) or 64 tokens (2 bits). Here every page of {KINDS["gear2"].page} tokens has rank {KINDS["gear2"].rank}. This is
the error of {name}'s keys and values for these lengths and ranks, and the size of the result. Outliers are 2 % of each
vector, but at least one at each end, which makes short buffers large:

{table(head, rows)}"""


def _corrected(view: View) -> str:
    """Figure 4a and 4b of GEAR."""
    base = next((entry for entry in view.corrected if entry["rank"] is None), None)
    if base is None:
        return ""
    usual = {"rank": LOW_RANK, "sparsity": 0.0, "share": 1.0}
    parts = []
    for what, values, head, shown, caption in (
        ("rank", RANKS, "rank", "{:d}", "By the rank of the low-rank matrix, without outliers:"),
        ("sparsity", SPARSITIES, "outliers", "{:.0%}", f"By the share of outliers, with rank {LOW_RANK}:"),
        ("share", SHARES, "corrected tokens of the prompt", "{:.0%}", _LATEST),
    ):
        others = {name: value for name, value in usual.items() if name != what}
        found = [entry for entry in view.corrected if all(entry[name] == value for name, value in others.items())]
        if {entry[what] for entry in found} != {*values}:
            continue  # half a table says nothing
        sized = what != "share"
        rows = [
            (
                shown.format(entry[what]).replace("%", " %"),
                *([f"{entry['bytes']:.1f}"] if sized else []),
                f"{entry['perplexity']:.3f}{view.mark(entry)}",
                judge.percent(difference(entry, base)),
            )
            for entry in sorted(found, key=lambda entry: float(entry[what]))
        ]
        found_table = table((head, *(["bytes, % of fp16"] if sized else []), "perplexity", "over fp16"), rows)
        parts.append(f"{caption}\n\n{found_table}")
    if not parts:
        return ""
    return f"""## How much correction is needed

As in GEAR's Figure 4, at 2 bits: {base["model"]} in full precision over a cache of 2 bits, in windows of
{base["window"]:,} tokens. The first half of a window is a prompt, the second half is decoded and scored
({base["tokens"]:,} tokens; over the fp16 cache {base["perplexity"]:.3f}).

{(chr(10) * 2).join(parts)}

{view.origin("corrected")}"""


def _memory(view: View) -> str:
    """Peak memory by context."""
    if not view.memory:
        return ""
    parts = []
    for model in dict.fromkeys(entry["model"] for entry in view.memory):
        own = {(entry["kind"], entry["context"]): entry for entry in view.memory if entry["model"] == model}
        contexts = sorted({context for _, context in own})
        rows = []
        for kind in [kind for kind in ORDER if (kind, contexts[0]) in own]:
            found = [own.get((kind, context)) for context in contexts]
            cells = [("", "") if one is None else _held(view, one) for one in found]
            rows.append((kind, *(cell for pair in cells for cell in pair)))
        heads = [f"{context:,}, {what}" for context in contexts for what in ("cache", "peak")]
        weights = own[rows[0][0], contexts[0]]["weight_bytes"]
        parts.append(f"### {model}, {weights / 1e6:.0f} MB of weights\n\n{table(('cache', *heads), rows)}")
    return f"""## Peak memory

MB by tokens of context: the buffers of a cache for one sequence of that length, windows included, and the most memory
that the process held while it decoded at the end of a full context, with Python, the machine code and all weights.
What only loading needs is left out. The contexts are synthetic, as below.

{(chr(10) * 2).join(parts)}

{view.origin("memory")}"""


def _held(view: View, entry: Entry) -> tuple[str, str]:
    return f"{entry['kv_bytes'] / 1e6:.0f}", f"{entry['peak_bytes'] / 1e6:.0f}{view.mark(entry)}"


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
            rows.append((f"{kind}{view.mark(entry)}", *cells))
        lengths = [f"{tokens // 1024}k, {name}" for tokens in LENGTHS for name in ("reference and GPU", "CPU")]
        head = ("cache", "accounted", "page, reference and GPU", "page, CPU", *lengths)
        parts.append(f"### Heads of {D} channels\n\n{table(head, rows)}")
    keep, page = KINDS["hierarchical"].keep, KINDS["kivi2"].page
    return f"""## Size

Percent of the bytes of fp16, taken from the buffers of a cache that holds that many tokens, including the window of
recent tokens in half precision. "Accounted" is what the papers count for a page: codes, scales and zeros of 16 bits;
for GEAR also 16 r (T + D) bits of factors for T = {page} tokens, and 32 bits for each outlier, half of which is its
place. The GPU stores the same bytes as the reference. The CPU pads channels to vectors of 32 and records to 64 bytes,
so small heads take more there.

At 1k tokens the window matters: {SINKS} first tokens and up to {page} recent ones for kinds of 4 and 2 bits (64 for
int4), {keep} to {keep + page} for hierarchical. The table shows the moment before a page is compressed, the worst case.
At 32k the window no longer shows.

{chr(10).join(part + chr(10) for part in parts)}
{view.origin("size")}

How this compares with the papers: QServe's KV4 is `int4`, 4 bits and two halves for each token and head. QuantSpec
keeps 8 bits in two planes and 2 G tokens in half precision, which is `hierarchical` with G = {page}. GEAR counts rank
4 for a prompt and rank 2 for every {KINDS["kivi2"].keys.group} generated tokens, with buffers of 20 (KCVT) or 64
tokens (KIVI). Here every page of {page} tokens has rank 4, so L takes 16 · 4 · ({page} + D) / ({page} D) bits per
number: more than a long prompt's shared factors, less than rank 2 for 64 tokens. Only GEAR's accounting is compared:
the text available to us lacks the numbers of its tables."""


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _drift(view: View, pictures: Pictures) -> str:
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
                        f"{100 * entry['mean']:.3f}{view.mark(entry)}",
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
        parts.append(f"### {name}\n\n{pictures(f'drift-{name}')}\n\n{table(head, rows)}")
    steps = max(entry["steps"] for entry in view.drift.values()) - 1
    return f"""## Logits over a long generation

As in GEAR's Figure 1b. The full-precision model continues a prompt of {DRIFT_PROMPT} tokens by {steps:,} tokens over
an fp16 cache, once greedily and once sampled (temperature 1), because greedy text of models this small falls into
loops; "repeats" is the share of positions whose last 8 tokens had occurred before. The text is then fixed and run
through every kind of cache. Deviation is |logits − exact| / |exact| in percent (2-norms), where "exact" is float32
without a cache; so fp16 deviates too. "Other choices" are steps whose likeliest token changes. The pictures show
running means over 50 tokens. Kinds with a window are exact until their first page is compressed.

{chr(10).join(part + chr(10) for part in parts)}
{view.origin("drift")}"""


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

QServe reports key channels ten times larger than most. The table shows the largest magnitude of a key channel over that
of the median channel, layer by layer, for the most uneven head and for the median head. To have a model with such
outliers, `{PLANTED}` multiplies {PAIRS} pairs of channels of every key head by {FACTOR} and divides the queries'
channels by the same, which changes no logit.

{table(("model", "most uneven head, by layer", "median head"), channels)}

{view.origin("channels")}

What a cache costs over fp16 with low-bit weights ({LOW}, reference backend), quantized without and with
`--smooth-attention`:

{table(("model", "cache", "without", "with"), losses)}

{view.origin("perplexity")}

Effect of `--smooth-attention` on the weights alone, over fp16: {itself}."""
