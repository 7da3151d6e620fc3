"""Bytes on the device beside llama.cpp's: a section of docs/quality.md."""

from __future__ import annotations

from tests.bench.quality.points import REFERENCE_K
from tests.bench.quality.view import View
from tests.bench.reporting.cases import Case
from tests.bench.reporting.markdown import number, table


def section(view: View, picture: str | None) -> str:
    """The section of docs/quality.md.

    Args:
        view: The results.
        picture: Of perplexity against bytes, as the report links it; None where there is nothing to compare.
    """
    if picture is None:
        return ""
    lead = f"""## Bytes on the device

![Perplexity against bytes on the device, beside llama.cpp]({picture})

MB counts all weights that stay on the device: codes, scales and zero-points or codebooks of the blocks and the output
head, the norms, and the scales of the residuals. The embedding table is read a row at a time from main memory, as in
llama.cpp, and counts on neither side; where it is tied to the head, the head counts. Residuals take the main memory
listed under "residuals". "CPU" and "GPU" add up the real buffers of the linear layers in the two backends' layouts; the
GPU's pads rows to multiples of 32 channels."""
    if not view.peers:
        return f"{lead}\n\nllama.cpp was not measured: no interpreter with llama-cpp-python and gguf (`--peer-python`)."
    versions = sorted({entry["version"] for entry in view.peers.values()})
    parts = [
        lead,
        f"""llama.cpp comes from llama-cpp-python {", ".join(versions)}. The same fp16 weights were converted to GGUF in
float32, quantized by llama.cpp itself with an importance matrix from our calibration text, and scored in the same
windows of the same tokens; "as a chat" scores the same positions as ours. llama.cpp has no compensation. Its K- and
I-quants need rows that are a multiple of 256 wide; for other rows it falls back to other types, listed under "made
of".""",
    ]
    for case in [case for case in view.models if case.name in view.peers]:
        rows = sorted([*_theirs(view, case), *_ours(view, case)], key=lambda row: float(row[1]))
        head = ["", "MB", "bits a weight", "plain", "as a chat", "CPU", "GPU", "residuals", "made of"]
        parts.append(f"### {case.name}\n\n{table(head, rows)}")
    return "\n\n".join([*parts, view.origin("stored", "points", "peers")])


def _theirs(view: View, case: Case) -> list[tuple[str, ...]]:
    peers = view.peers[case.name]
    old = view.mark(peers)
    return [
        (
            f"llama.cpp {row['kind']}" + (" + matrix" if row["weighted"] else ""),
            f"{row['gpu_bytes'] / 1e6:.2f}",
            f"{row['bits_per_weight']:.2f}",
            number(row["perplexity"]) + old,
            number(row["chat"]["perplexity"]) + old,
            "",
            "",
            "",
            ", ".join(f"{100 * share:.0f} % {name}" for name, share in row["types"].items()),
        )
        for row in peers["rows"]
    ]


def _ours(view: View, case: Case) -> list[tuple[str, ...]]:
    rows = []
    for entry in view.stored.values():
        if entry["model"] != case.name or entry["residual_bits"] != 4:
            continue
        method, bits = entry["method"], entry["bits"]
        plain = [view.get(case, method, bits, k_chunk) for k_chunk in (0, REFERENCE_K)]
        own = [view.chat(case, method, bits, k_chunk) for k_chunk in (0, REFERENCE_K)]
        if None in plain:
            continue
        rows.append(
            (
                f"{method} {bits:g} bits, k_chunk 0 → {REFERENCE_K}",
                f"{entry['gpu_bytes'] / 1e6:.2f}",
                f"{entry['bits_per_weight']:.2f}",
                " → ".join(view.shown(point) for point in plain),
                "" if None in own else " → ".join(view.shown(point) for point in own),
                *(f"{entry[kind] / 1e6:.2f}" for kind in ("cpu_buffers", "gpu_buffers", "residual_bytes")),
                f"groups of {entry['group_size']}" if method != "squeezellm" else "a codebook per row",
            )
        )
    return rows
