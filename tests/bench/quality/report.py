"""docs/quality.md: measurements, claims and verdicts, all from the results file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from models.recipe import DEFAULT_METHOD
from tests.bench.quality import answers, judge, massive, promises, sizes, summary
from tests.bench.quality.outliers import SHARES
from tests.bench.quality.plots import draw
from tests.bench.quality.points import ALL_RESIDUALS, REAL, RESIDUALS, SELECTORS
from tests.bench.quality.view import View
from tests.bench.reporting.losses import difference
from tests.bench.reporting.markdown import legend, table
from tests.bench.reporting.origin import OLD
from tests.bench.reporting.results import Entry
from tests.bench.reporting.verdicts import Claim, Verdict

_ALT = {
    "curves": "Perplexity against k_chunk at 3, 3.5 and 4 bits",
    "outliers": "Large input channels by position, and how many of them calibration finds",
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
        summary.section(view),
        _measured(view),
        _promises(view, found),
        _answers(view),
        _curves(view, pictures),
        _budgets(view),
        sizes.section(view, pictures.get("bytes")),
        _quantizing(view),
        _massive(view, pictures),
        _outliers(view, pictures),
        _selection(view),
        _residuals(view),
        _left_out(view),
    ]
    w4a8 = _w4a8(file)
    file.write_text("\n\n".join(part for part in (*parts, w4a8) if part) + "\n", encoding="utf-8")


def _w4a8(file: Path) -> str:
    """The section between the markers of `tests.bench.w4a8`, as it is; empty where there is none."""
    begin, end = "<!-- w4a8: begin -->", "<!-- w4a8: end -->"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return text[text.index(begin) : text.index(end) + len(end)] if begin in text and end in text else ""


def _opening(view: View) -> str:
    about = view.results.about
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    missing = "" if view.real else f"\n\n**{about['skipped'].get(REAL, 'The real model was not measured')}.**"
    return f"""# Quality

How much quality a model loses when it is quantized, and how much dynamic error compensation restores, measured on a
real chat model. Run

    make quality SMOLLM2=FOLDER PEER_PYTHON=PYTHON   or: python -m tests.bench.quality --smollm2 FOLDER

to measure and write this page; it was last run on {about["date"]} ({about["cpu"]}, {about["threads"]} threads,
{about["variant"]}; {versions}). The whole page, verdicts and pictures included, is computed from
[{view.results.path.name}](quality/{view.results.path.name}). {_versions(view)}{missing}"""


def _versions(view: View) -> str:
    old, count = view.old(), view.count()
    if not old:
        return f"All {count} entries were measured by the code that wrote this page."
    if old == count:
        return f"All {count} entries are older than the code that wrote this page."
    return f"**{old} of {count} entries are older than the code** that wrote this page; they are marked {OLD}."


def _measured(view: View) -> str:
    """The models, the texts and the two ways to measure."""
    about = view.results.about
    rows = [
        (
            case.name,
            case.about,
            f"{case.evaluated}, {about['texts'][case.name]['tokens']:,} tokens",
            f"{case.window} every {case.stride}",
            case.calibrated,
            view.shown(view.full[case.name]),
            view.shown(view.chat_full.get(case.name)),
        )
        for case in view.models
    ]
    head = ("model", "what", "measured on", "windows", "calibrated on", "full precision", "the same, as a chat")
    return f"""## How it was measured

{table(head, rows)}

{view.origin("full")}

Every model takes the program's own path: checkpoint, `quantize`, store, CPU decoder, perplexity. There are two ways to
measure:

- **Plain**, like `eval`: every position of a window is computed as a decoded token, and every token is scored.
- **As a chat**, like `eval --as-chat`: the first half of each window is prefilled as the engine prefills a prompt; the
  second half is decoded and scored token by token.

Where decoding is compensated, prompts are compensated by {ALL_RESIDUALS} of 1024 channels; at k_chunk 0 nothing is.
Unless stated otherwise, groups have {view.models[0].group_size if view.models else 64} channels, the head and the
residuals have 4 bits, and channels are selected approximately. `k_chunk` counts channels of 1024; a narrower matrix
compensates its share, rounded up.

"A ± B" is a mean difference in nats per token and its standard error, estimated from {_pieces(view)} consecutive pieces
of the same text. Differences within two standard errors count as noise."""


def _pieces(view: View) -> str:
    counts = sorted({len(entry["pieces"]) for entry in view.full.values()})
    return " or ".join(map(str, counts))


def _promises(view: View, found: Sequence[Claim]) -> str:
    names = [case.name for case in view.models]
    head = ("promise", *names, "all")
    rows = []
    for claim in found:
        if "program" in claim.findings:
            marks = [""] * len(names)
        else:
            marks = [claim.findings[name].verdict.value for name in names]
        rows.append((claim.text, *marks, f"**{claim.verdict.value}**"))
    wrong = [claim for claim in found if claim.verdict is Verdict.NO]
    summary = (
        f"{sum(claim.verdict is Verdict.YES for claim in found)} of {len(found)} hold wherever they could be judged"
    )
    summary += f"; {len(wrong)} {'does' if len(wrong) == 1 else 'do'} not." if wrong else "."
    failed = f"Claims that do not hold:\n\n{_behind(wrong, Verdict.NO)}\n\n" if wrong else ""
    return f"""## Claims and verdicts

{legend()} {summary}

{table(head, rows)}

{failed}<details><summary>The numbers behind each verdict</summary>

{_behind(found)}

</details>"""


def _behind(found: Sequence[Claim], only: Verdict | None = None) -> str:
    """What verdicts rest on, by claim."""
    parts = []
    for claim in found:
        lines = [
            f"- {'' if name == 'program' else f'{name}: '}{finding.verdict.value} {finding.numbers}"
            for name, finding in claim.findings.items()
            if only is None or finding.verdict is only
        ]
        parts.append("\n".join([f"**{claim.text}**\n", *lines]))
    return "\n\n".join(parts)


def _answers(view: View) -> str:
    entry = next((entry for entry in view.results.all("answers") if entry["model"] == REAL), None)
    if entry is None:
        return ""
    return f"""## Answers

Five questions, answered greedily with at most {answers.TOKENS} tokens; the model was quantized by the default method.

{answers.as_table(entry)}

{view.origin("answers")}"""


def _curves(view: View, pictures: dict[str, str]) -> str:
    lead = "As in QDEC's Figure 12. × marks the model without compensation; the dashed line is full precision."
    parts = [f"## Perplexity against k_chunk\n\n{lead}"]
    numbers = view.numbers()
    for case in view.models:
        rows = []
        for bits in view.bits():
            for method in view.methods():
                plain = [view.get(case, method, bits, number) for number in numbers]
                if not any(plain):
                    continue
                own = [view.chat(case, method, bits, number) for number in numbers] if case.name == REAL else []
                loss = "" if plain[0] is None else str(difference(plain[0], view.full[case.name]))
                rows.append((f"{bits:g}", method, *(view.shown(entry) for entry in (*own, *plain)), loss))
        if not rows:
            continue
        head: list[str] = ["bits", "method"]
        head += [f"chat, {number}" for number in numbers] if case.name == REAL else []
        head += [f"plain, {number}" for number in numbers] + ["plain, loss at 0, nats"]
        parts.append(f"### {case.name}\n\n{_picture(pictures, f'curves-{case.name}')}\n\n{table(head, rows)}")
    return "\n\n".join([*parts, view.origin("points", "full")])


def _budgets(view: View) -> str:
    """What budgets buy, and what prompts' compensation gives."""
    if view.real is None or not view.budgets:
        return ""
    case, full = view.real, view.chat_full.get(REAL)
    rows = [
        (
            f"{bits:g}",
            f"{percent:g} %",
            view.shown(entry),
            "" if full is None else f"{entry['perplexity'] / full['perplexity']:.3f} ×",
            promises.bought(entry),
        )
        for (_, bits, percent), entry in sorted(view.budgets.items())
    ]
    prompts = [
        (
            f"{bits:g}",
            k_chunk,
            view.shown(plain),
            view.shown(compensated),
            str(difference(compensated, plain)),
        )
        for bits in view.bits()
        for k_chunk, plain in view.curve(case, DEFAULT_METHOD, bits, as_chat=True)
        if k_chunk and (compensated := view.chat(case, DEFAULT_METHOD, bits, k_chunk)) is not None
    ]
    head = ("bits", "budget", "perplexity as a chat", "of full precision", "bought")
    return f"""## Budgets

{REAL} by the default recipe ({DEFAULT_METHOD}), tuned on this processor as `run` does it, with the default budget for
prompts. These numbers depend on the device and on what else it was doing.

{table(head, rows)}

{view.origin("budgets")}

What compensating the prompt adds, as a chat:

{table(("bits", "k_chunk", "prompts plain", "prompts compensated", "difference, nats"), prompts)}

{view.origin("points")}"""


def _quantizing(view: View) -> str:
    rows = [
        (
            f"{bits:g}",
            method,
            f"{entry['seconds']:.1f}{view.mark(entry)}",
            f"{entry['processor_seconds']:.1f}",
            promises.others(entry),
            f"{entry['parameters'] / entry['seconds'] / 1e6:.1f} M",
            f"{entry['peak_bytes'] / 2**20:.0f}",
            f"{entry['limit_bytes'] / 2**20:.0f}",
        )
        for bits in view.bits()
        for method, entry in promises.made(view, bits).items()
    ]
    if not rows:
        return ""
    head = (
        "bits",
        "method",
        "seconds",
        "processor seconds",
        "others'",
        "parameters a second",
        "peak MiB",
        "promised MiB",
    )
    return f"""## Quantizing

{REAL}, each time in its own process, as `lowbit-chat quantize` does it, including process start, calibration and
judging. "Others'" is the processor time that other processes used meanwhile; on a busy machine, seconds grow. Peak
memory is that of the process, torch included.

{table(head, rows)}

{view.origin("stored")}"""


def _massive(view: View, pictures: dict[str, str]) -> str:
    entry = view.massive.get(REAL)
    if entry is None or "massive" not in pictures:
        return ""
    return f"{massive.section(entry, pictures['massive'])}\n\n{view.origin('massive')}"


def _outliers(view: View, pictures: dict[str, str]) -> str:
    if "outliers" not in pictures:
        return ""
    kinds = list(next(iter(view.outliers.values()))["recall"])
    rows = [
        (
            case.name,
            f"{100 * share:.0f} %",
            *(f"{100 * view.outliers[case.name]['recall'][kind][f'{share:g}']:.0f} %" for kind in kinds),
        )
        for case in view.models
        if case.name in view.outliers
        for share in SHARES
    ]
    return f"""## Which channels are large

As in QDEC's Figure 5, in full precision. (a) shows the input channels of largest magnitude at each of 100 consecutive
positions; steady rows are channels that are always large. (b) and the table show how many of a position's largest
channels are also among those with the largest mean square on the calibration text, which is what static selection uses.

{_picture(pictures, "outliers")}

{table(("model", "largest", *kinds), rows)}

{view.origin("outliers")}"""


def _selection(view: View) -> str:
    rows = []
    for case in view.models:
        for method in case.closer:
            for k_chunk, _ in view.curve(case, method, 3, select="random"):
                entries = [view.get(case, method, 3, k_chunk, select=select) for select in SELECTORS]
                approx = entries[0]
                recall = "" if approx is None or approx["recall"] is None else f"{100 * approx['recall']:.0f} %"
                rows.append((case.name, method, k_chunk, *(view.shown(entry) for entry in entries), recall))
    if not rows:
        return ""
    head = ("model", "method", "k_chunk", "approximate", "exact", "static", "random", "recall")
    return f"""## How channels are chosen

Approximate against exact top-k (QDEC's Figure 15), and dynamic against static and random channels (Figure 16), at 3
bits, plain.

{table(head, rows)}

{view.origin("points")}"""


def _residuals(view: View) -> str:
    """Table 1."""
    rows = []
    for case in view.models:
        for method, place, cells in judge.residual_lines(view, case):
            best = min(float(entry["perplexity"]) for entry in cells.values())
            line = [_cell(view, cells.get(bits), best, RESIDUALS[bits][place]) for bits in RESIDUALS]
            rows.append((case.name, method, f"{cells[4]['fetched_bytes'] / 1024:.0f}", *line))
    if not rows:
        return ""
    head = ("model", "method", "KiB a token", *(f"{bits}-bit" for bits in RESIDUALS))
    return f"""## Bits of the residuals at equal bytes

As in QDEC's Table 1: 3-bit weights, plain. Every line fetches the same number of bytes of residual rows per token
(scales not counted): the more bits a residual has, the fewer channels. `k_chunk` is in brackets, the best of a line in
bold. Narrow matrices round their share of channels up; cells whose bytes therefore differ by more than
{100 * judge.BYTES_TOLERANCE:.0f} % are left empty.

{table(head, rows)}

{view.origin("points")}"""


def _cell(view: View, entry: Entry | None, best: float, k_chunk: int) -> str:
    if entry is None:
        return ""
    text = view.shown(entry)
    return f"{f'**{text}**' if float(entry['perplexity']) == best else text} ({k_chunk})"


def _left_out(view: View) -> str:
    skipped = view.results.about["skipped"]
    if not skipped:
        return ""
    return "## Not measured\n\n" + "\n".join(f"- {what}: {why}" for what, why in skipped.items())


def _picture(pictures: dict[str, str], name: str) -> str:
    return f"![{_ALT[name.split('-')[0]]}]({pictures[name]})" if name in pictures else ""
