"""docs/quality.md: what was measured, what was promised and whether it holds, all from the results file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tests.bench.quality import judge, massive, reasons
from tests.bench.quality.outliers import SHARES
from tests.bench.quality.plots import draw
from tests.bench.quality.points import REFERENCE_K, RESIDUALS
from tests.bench.quality.view import View
from tests.bench.reporting.cases import STRIDE, WINDOW, Case
from tests.bench.reporting.losses import difference
from tests.bench.reporting.markdown import legend, number, table
from tests.bench.reporting.results import Entry
from tests.bench.reporting.verdicts import Claim, Verdict

_ALT = {
    "curves": "Perplexity against k_chunk at 3, 3.5 and 4 bits",
    "selectors": "Perplexity with dynamic, static and random channels",
    "exact": "Approximate against exact selection, and recall",
    "outliers": "Large input channels by position, and how many of them statistics know",
    "bytes": "Perplexity against bytes on the device, beside llama.cpp",
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
        _curves(view, pictures),
        _residuals(view),
        _selection(view, pictures),
        _outliers(view, pictures),
        _massive(file),
        _bytes(view, pictures),
        _quantizing(view),
        _left_out(view),
    ]
    file.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _opening(view: View) -> str:
    about = view.results.about
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    rows = [
        (
            case.name,
            case.about,
            f"{case.evaluated}, {about['texts'][case.name]['tokens']:,} tokens",
            case.calibrated,
            case.group_size,
            number(view.full[case.name]["perplexity"]),
        )
        for case in view.models
    ]
    models = table(("model", "what", "measured on", "calibrated on", "group size", "full precision"), rows)
    return f"""# Quality

What quantizing costs and what dynamic error compensation gives back, on real weights and real text. Written by

    make quality                                 or: python -m tests.bench.quality

on {about["date"]} ({about["cpu"]}, {about["threads"]} threads, {about["variant"]}; {versions}). Everything on this
page, verdicts and pictures included, is computed from [{view.results.path.name}](quality/{view.results.path.name}).

{models}

Every number went the program's own way: checkpoint, `quantize`, store, CPU decoder, perplexity in windows of {WINDOW}
tokens every {STRIDE}, each position compensated by its own activations. The head has 4 bits, residuals 4 bits and the
selection is the approximate one unless something else is said. `k_chunk` counts channels of 1024; a matrix of 256
input channels compensates a quarter of it, rounded up, so on these narrow models small steps of `k_chunk` can be the
same step. "A ± B" is a mean difference in nats a token and its standard error, from the differences of the same text's
{_pieces(view)} consecutive pieces; differences within two standard errors are called noise.

Models this small show orderings and sizes of effects, not what to expect of one with billions of parameters."""


def _pieces(view: View) -> int:
    return max((len(entry["pieces"]) for entry in view.full.values()), default=0)


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
    behind = [
        f"**{claim.text}**\n\n"
        + "\n".join(
            f"- {_where(name)}{finding.verdict.value} {finding.numbers}" for name, finding in claim.findings.items()
        )
        for claim in found
    ]
    wrong = [claim.text for claim in found if claim.verdict is Verdict.NO]
    why = "".join(f"- **{text}**: {reasons.WHY.get(text, 'not understood yet.')}\n" for text in wrong)
    summary = (
        f"{sum(claim.verdict is Verdict.YES for claim in found)} of {len(found)} hold everywhere they can be judged"
    )
    summary += f"; {len(wrong)} do not." if wrong else "."
    return f"""## What was promised, and whether it holds

{legend()} {summary}

{table(head, rows)}

{"Where a promise does not hold, and what we take for the reason:" if wrong else ""}

{why}
<details><summary>The numbers behind each verdict</summary>

{chr(10).join(part + chr(10) for part in behind)}
</details>"""


def _where(name: str) -> str:
    return "" if name == "program" else f"{name}: "


def _curves(view: View, pictures: dict[str, str]) -> str:
    numbers = [number for number in (0, 16, 32, 64, 128) if any(point.k_chunk == number for point in view.points)]
    lead = "The paper's Figure 12. × is the model without compensation, the dashed line full precision."
    parts = [f"## Perplexity against k_chunk\n\n{lead}"]
    for case in view.models:
        rows = []
        for bits in view.bits():
            for method in view.methods():
                entries = [view.get(case, method, bits, number) for number in numbers]
                if entries[0] is None:
                    continue
                loss = difference(entries[0], view.full[case.name])
                rows.append((f"{bits:g}", method, *(_perplexity(entry) for entry in entries), str(loss)))
        head = ("bits", "method", *(f"k_chunk {number}" for number in numbers), "loss at 0, nats")
        parts.append(f"### {case.name}\n\n{_picture(pictures, f'curves-{case.name}')}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def _residuals(view: View) -> str:
    """Table 1."""
    parts = []
    for case in view.models:
        rows = []
        for method in [method for method in case.closer if method in view.methods()]:
            for place, k_chunk in enumerate(RESIDUALS[4]):
                cells = judge.residual_cells(view, case, method, place)
                if len(cells) < 2:
                    continue
                best = min(float(entry["perplexity"]) for entry in cells.values())
                shown = [_cell(cells.get(bits), best, RESIDUALS[bits][place]) for bits in RESIDUALS]
                rows.append((method, k_chunk, f"{cells[4]['fetched_bytes'] / 1024:.0f}", *shown))
        if rows:
            head = ("method", "k_chunk at 4 bits", "KiB a token", *(f"{bits}-bit" for bits in RESIDUALS))
            parts.append(f"### {case.name}\n\n{table(head, rows)}")
    if not parts:
        return ""
    lead = f"""## Bits of the residuals at equal bytes

The paper's Table 1: 3-bit weights; every line fetches the same bytes of residual rows a token (scales not counted), in
fewer channels the more bits a residual has; `k_chunk` in brackets, the best of a line in bold. Cells whose bytes differ
by more than {100 * judge.BYTES_TOLERANCE:.0f} %, because narrow matrices round their share of channels up, are left
empty."""
    return "\n\n".join([lead, *parts])


def _cell(entry: Entry | None, best: float, k_chunk: int) -> str:
    if entry is None:
        return ""
    shown = _perplexity(entry)
    return f"{f'**{shown}**' if float(entry['perplexity']) == best else shown} ({k_chunk})"


def _selection(view: View, pictures: dict[str, str]) -> str:
    if "exact" not in pictures and "selectors" not in pictures:
        return ""
    rows = []
    for case in view.models:
        for method in [method for method in case.closer if method in view.methods()]:
            entries = [
                view.get(case, method, 3, REFERENCE_K, select=select)
                for select in ("approx", "exact", "static", "random")
            ]
            if all(entry is None for entry in entries):
                continue
            approx = entries[0]
            recall = "" if approx is None or approx["recall"] is None else f"{100 * approx['recall']:.0f} %"
            rows.append(
                (case.name, method, *(_perplexity(entry) for entry in entries), recall, *_same(view, case, method))
            )
    head = ("model", "method", "approximate", "exact", "static", "random", "recall", "static needs")
    return f"""## Which channels

Approximate top-k against exact (the paper's Figure 15), and dynamic against static and random channels (Figure 16), all
at 3 bits; in the table at `k_chunk` {REFERENCE_K}. "Static needs" is the smallest measured `k_chunk` at which static
channels reach what dynamic ones have at {REFERENCE_K}.

{_picture(pictures, "exact")}

{_picture(pictures, "selectors")}

{table(head, rows)}"""


def _same(view: View, case: Case, method: str) -> tuple[str]:
    """k_chunk at which static selection is as good as dynamic at the reference."""
    dynamic = view.get(case, method, 3, REFERENCE_K)
    curve = view.curve(case, method, 3, select="static")
    if dynamic is None or not curve:
        return ("",)
    enough = [k_chunk for k_chunk, entry in curve if entry["nats"] <= dynamic["nats"]]
    return (str(enough[0]) if enough else f"more than {curve[-1][0]}",)


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
    return f"""## Outliers move

The paper's Figure 5, in full precision: (a) the input channels of largest magnitude at each of 100 consecutive
positions; (b) and the table: how many of a position's largest channels are among those of the largest mean square on
the calibration text, which is what static selection goes by. Steady rows in (a) are channels that are always large.

{_picture(pictures, "outliers")}

{table(("model", "largest", *kinds), rows)}"""


def _bytes(view: View, pictures: dict[str, str]) -> str:
    if "bytes" not in pictures:
        return ""
    lead = f"""## Bytes on the device

{_picture(pictures, "bytes")}

Bytes of all weights that stay on the device: the blocks, the norms and the output head. The embedding table is read a
row at a time from main memory, here as in llama.cpp, and counts on neither side; where it is tied to the head, the head
counts. Lines of ours: 3, 3.5 and 4 bits, × without compensation. Residuals lie in main memory."""
    if not view.peers:
        return f"{lead}\n\nllama.cpp was not measured: no interpreter with llama-cpp-python and gguf (`--peer-python`)."
    parts = [lead]
    versions = sorted({entry["version"] for entry in view.peers.values()})
    parts.append(
        f"""llama.cpp is that of llama-cpp-python {", ".join(versions)}: the checkpoint was converted to GGUF in
float32, quantized by llama.cpp itself and scored in the same windows of the same tokens, once without and once with an
importance matrix from our calibration text. Its K-quants need rows of a multiple of 256; where a model has narrower
ones it falls back to other types, which "made of" shows, and the model is left out of the picture."""
    )
    for case in [case for case in view.models if case.name in view.peers]:
        rows = []
        for row in view.peers[case.name]["rows"]:
            types = ", ".join(f"{100 * share:.0f} % {name}" for name, share in row["types"].items())
            rows.append(
                (
                    f"llama.cpp {row['kind']}" + (" + matrix" if row["weighted"] else ""),
                    f"{row['gpu_bytes'] / 1e6:.3f}",
                    f"{row['bits_per_weight']:.2f}",
                    _perplexity(row),
                    types,
                )
            )
        rows += _ours(view, case)
        rows.sort(key=lambda row: float(row[1]))
        parts.append(f"### {case.name}\n\n{table(('', 'MB', 'bits a weight', 'perplexity', 'made of'), rows)}")
    return "\n\n".join(parts)


def _ours(view: View, case: Case) -> list[tuple[str, str, str, str, str]]:
    rows = []
    for entry in view.stored.values():
        if entry["model"] != case.name or entry["residual_bits"] != 4:
            continue
        about = (case, entry["method"], entry["bits"])
        points = [view.get(*about, k_chunk, group_size=entry["group_size"]) for k_chunk in (0, REFERENCE_K)]
        if None in points:
            continue
        rows.append(
            (
                f"{entry['method']} {entry['bits']:g} bits, k_chunk 0 → {REFERENCE_K}",
                f"{entry['gpu_bytes'] / 1e6:.3f}",
                f"{entry['bits_per_weight']:.2f}",
                " → ".join(_perplexity(point) for point in points),
                f"groups of {entry['group_size']}" if entry["method"] != "squeezellm" else "a codebook a row",
            )
        )
    return rows


def _quantizing(view: View) -> str:
    rows = [
        (
            entry["method"],
            f"{entry['parameters'] / 1e6:.1f} M",
            f"{entry['seconds']:.0f}",
            f"{entry['parameters'] / entry['seconds'] / 1e6:.2f} M",
            f"{entry['peak_bytes'] / 2**20:.0f}",
            f"{entry['limit_bytes'] / 2**20:.0f}",
            "yes" if entry["same"] else "no",
        )
        for entry in view.results.all("speed")
    ]
    if not rows:
        return ""
    head = ("method", "parameters", "seconds", "parameters a second", "peak MiB", "promised MiB", "twice the same")
    return f"""## Quantizing

3 bits, a model of random weights (hidden 1024, MLP 2816, 2 blocks), torch on one thread, calibration included; the
largest memory of a process of its own, torch itself included. "Twice the same": two runs on the bundled checkpoint gave
the same bytes.

{table(head, rows)}"""


def _massive(file: Path) -> str:
    """What `tests.bench.quality.massive` measured, where it did."""
    found = file.with_suffix("") / "massive.json"
    if not found.is_file():
        return ""
    return massive.section(json.loads(found.read_text(encoding="utf-8")), f"{file.stem}/massive.svg").rstrip()


def _left_out(view: View) -> str:
    skipped = view.results.about["skipped"]
    if not skipped:
        return ""
    return "## Not measured\n\n" + "\n".join(f"- {what}: {why}" for what, why in skipped.items())


def _picture(pictures: dict[str, str], name: str) -> str:
    return f"![{_ALT[name.split('-')[0]]}]({pictures[name]})" if name in pictures else ""


def _perplexity(entry: Entry | None) -> str:
    return "" if entry is None else number(entry["perplexity"])
