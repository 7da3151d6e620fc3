"""Sizes and positions of activation outliers in a real model: `python -m tests.bench.quality.massive FOLDER`.

FOLDER holds a Hugging Face checkpoint. The bundled calibration text passes through it in full precision; numbers,
picture and the section "The first token" of docs/quality.md are written anew.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from assets import calibration_text
from models.checkpoint import Checkpoint
from models.oracle import Oracle
from models.spec import LAYER_TYPES
from runtime.tokenizer import Tokenizer
from tests.bench.reporting.markdown import table
from tests.bench.reporting.style import COLORS, QUIET, figure

SEQUENCES, LENGTH = 8, 256
TITLE = "## The first token"
_DOCS = Path(__file__).parents[3] / "docs" / "quality.md"
_LARGE = 100.0
"""Times the typical magnitude from which a layer is listed."""


def measure(folder: Path) -> dict[str, Any]:
    """Outliers of a checkpoint on the calibration text.

    Returns:
        JSON object: `model` and, by block in `blocks`: `stream`, the root mean square of the residual stream behind it
        at the first position and the median over the others; `attention`, the share of all attention that the first
        position receives; and for each layer type of its inputs the largest magnitude at the first position (`first`,
        with its `channel`), that at any other (`other`), and the root mean square of all (`typical`).
    """
    checkpoint = Checkpoint.open(folder)
    tokens = np.asarray(Tokenizer(folder).encode(calibration_text()), np.int64)
    starts = np.arange(SEQUENCES) * (len(tokens) - LENGTH) // SEQUENCES
    x = Oracle(checkpoint).embed(torch.from_numpy(np.stack([tokens[start : start + LENGTH] for start in starts])))
    blocks = []
    for layer in range(checkpoint.spec.num_layers):
        inputs: dict[str, torch.Tensor] = {}
        received: list[torch.Tensor] = []
        oracle = Oracle(
            checkpoint,
            resident=False,
            observe=inputs.__setitem__,
            observe_attention=lambda _, attention, received=received: received.append(attention),
        )
        x = oracle.block(layer, x)
        stream = x.square().mean(-1).sqrt()
        found: dict[str, Any] = {
            "stream": [float(stream[:, 0].mean()), float(stream[:, 1:].median())],
            "attention": float(received[0][:, 0].mean()) / LENGTH,
        }
        for kind in LAYER_TYPES:
            sizes = inputs[f"layers.{layer}.{kind}"].abs()
            first = sizes[:, 0].amax(0)
            found[kind] = {
                "first": float(first.max()),
                "channel": int(first.argmax()),
                "other": float(sizes[:, 1:].max()),
                "typical": float(sizes[:, 1:].square().mean().sqrt()),
            }
        blocks.append(found)
    return {"model": checkpoint.spec.family, "folder": folder.name, "blocks": blocks}


def draw(found: dict[str, Any], file: Path) -> None:
    """The picture: inputs of `down`, the residual stream, and attention, by block."""
    blocks = found["blocks"]
    numbers = np.arange(len(blocks))
    with figure(file, 3, 1, 11.0, 3.3) as panels:
        inputs, stream, attention = panels[0]
        for kind, tint in zip(LAYER_TYPES, ("#9ecae1", "#74a9cf", "#3182bd", COLORS["gptq"]), strict=True):
            inputs.plot(numbers, [block[kind]["first"] for block in blocks], color=tint, label=f"{kind}, first")
        inputs.plot(numbers, [block["down"]["other"] for block in blocks], color=QUIET, ls="--", label="down, others")
        inputs.set_yscale("log")
        inputs.set(xlabel="block", ylabel="largest magnitude")
        inputs.set_title("(a) inputs of linear layers")
        inputs.legend(fontsize=7)
        for index, label in enumerate(("first position", "median of others")):
            tint = COLORS["gptq"] if index == 0 else QUIET
            stream.plot(numbers, [block["stream"][index] for block in blocks], color=tint, label=label)
        stream.set_yscale("log")
        stream.set(xlabel="block", ylabel="root mean square")
        stream.set_title("(b) residual stream behind the block")
        stream.legend(fontsize=7)
        attention.bar(numbers, [100 * block["attention"] for block in blocks], color=COLORS["gptq"])
        attention.set(xlabel="block", ylabel="%", ylim=(0, 100))
        attention.set_title("(c) attention that goes to the first position")


def section(found: dict[str, Any], picture: str) -> str:
    """The section of docs/quality.md."""
    rows = [
        (
            str(number),
            kind,
            str(block[kind]["channel"]),
            f"{block[kind]['first']:,.0f}",
            f"{block[kind]['other']:,.1f}",
            f"{block[kind]['typical']:.2f}",
        )
        for number, block in enumerate(found["blocks"])
        for kind in LAYER_TYPES
        if block[kind]["first"] > _LARGE * block[kind]["typical"]
    ]
    head = ("block", "inputs of", "channel", "first position", "largest elsewhere", "root mean square elsewhere")
    shares = [block["attention"] for block in found["blocks"]]
    return f"""{TITLE}

Activations of SmolLM2-135M-Instruct in full precision, {SEQUENCES} sequences of {LENGTH} tokens of the bundled
calibration text (`python -m tests.bench.quality.massive FOLDER`). Whatever the first token is, a few blocks give it
activations hundreds or thousands of times the usual ones in always the same channels, and from then on it receives
{100 * np.median(shares):.0f} % of all attention (median over blocks, {100 * max(shares):.0f} % at most): an attention
sink. Its inputs to `qkv` are small then. A quantizer that averages over tokens sees nothing but the massive ones in
`down`, and the sink not at all in `qkv`; what follows from that is in [decisions.md](decisions.md).

![Largest activations, residual stream and attention by block]({picture})

{table(head, rows)}
"""


def main() -> None:
    """Measure, draw, and write the section anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a Hugging Face checkpoint")
    found = measure(parser.parse_args().folder)
    folder = _DOCS.with_suffix("")
    folder.joinpath("massive.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found, folder / "massive.svg")
    text = _DOCS.read_text(encoding="utf-8")
    begin = text.find(TITLE)
    begin = begin if begin >= 0 else text.index("## Bytes on the device")
    end = text.index("\n## ", begin + 1) + 1 if text.startswith(TITLE, begin) else begin
    _DOCS.write_text(text[:begin] + section(found, "quality/massive.svg") + "\n" + text[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
