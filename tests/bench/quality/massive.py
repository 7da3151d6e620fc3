"""Sizes and positions of activation outliers in a real model: the section "The first token" of docs/quality.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.checkpoint import Checkpoint
from models.oracle import Oracle
from models.spec import LAYER_TYPES
from tests.bench.reporting.markdown import table
from tests.bench.reporting.results import Entry
from tests.bench.reporting.style import COLORS, QUIET, figure

SEQUENCES, LENGTH = 8, 256
TITLE = "## The first token"
LARGE, ALONE = 100.0, 3.0
"""Times the root mean square, and times the largest magnitude, of all other positions from which a layer is listed."""
_TINTS = (COLORS["awq"], COLORS["awq-gptq"], COLORS["squeezellm"], COLORS["gptq"])


def measure(checkpoint: Checkpoint, text: list[int]) -> dict[str, Any]:
    """Outliers of a checkpoint on sequences from all over a text, each of which begins with another token.

    Args:
        checkpoint: The model.
        text: Tokens, `LENGTH` at least.

    Returns:
        JSON object with a list `blocks`, in each of which are: `stream`, the root mean square of the residual stream
        behind the block at the first position (mean) and at the others (median); `attention`, the share of all
        attention that the first position receives; and for each layer type of its inputs the largest magnitude at the
        first position (`first`, with its `channel`, and `same`, the sequences in which that channel is the largest),
        that at any other (`other`), and the root mean squares at the first (`first_rms`) and at the others (`rms`).
    """
    tokens = np.asarray(text, np.int64)
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
            found[kind] = _sizes(inputs[f"layers.{layer}.{kind}"].abs())
        blocks.append(found)
    return {"blocks": blocks}


def _sizes(sizes: torch.Tensor) -> dict[str, float | int]:
    """What `measure` says of magnitudes [B, S, K]."""
    first, others = sizes[:, 0], sizes[:, 1:]
    channel = int(first.amax(0).argmax())
    return {
        "first": float(first.max()),
        "channel": channel,
        "same": int((first.argmax(-1) == channel).sum()),
        "other": float(others.max()),
        "first_rms": float(first.square().mean().sqrt()),
        "rms": float(others.square().mean().sqrt()),
    }


def draw(entry: Entry, file: Path) -> None:
    """The picture: inputs of linear layers, the residual stream, and attention, by block."""
    blocks = entry["blocks"]
    numbers = np.arange(len(blocks))
    with figure(file, 3, 1, 11.0, 3.3) as panels:
        inputs, stream, attention = panels[0]
        for kind, tint in zip(LAYER_TYPES, _TINTS, strict=True):
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
        attention.bar(numbers, [100 * block["attention"] for block in blocks], color=COLORS["gptq"], zorder=2)
        attention.set(xlabel="block", ylabel="%", ylim=(0, 100))
        attention.set_title("(c) attention to the first position")


def section(entry: Entry, picture: str) -> str:
    """The section of docs/quality.md.

    Args:
        entry: Result of `measure`, with the model's name.
        picture: The file that `draw` made, as the report links it.
    """
    blocks = entry["blocks"]
    rows = [
        (
            str(number),
            kind,
            str(block[kind]["channel"]),
            f"{block[kind]['same']} of {SEQUENCES}",
            f"{block[kind]['first']:,.0f}",
            f"{block[kind]['other']:,.1f}",
            f"{block[kind]['rms']:.2f}",
        )
        for number, block in enumerate(blocks)
        for kind in LAYER_TYPES
        if block[kind]["first"] > max(LARGE * block[kind]["rms"], ALONE * block[kind]["other"])
    ]
    head = ("block", "inputs of", "channel", "largest in", "first position", "largest elsewhere", "rms elsewhere")
    shares = [100 * block["attention"] for block in blocks]
    streams = [block["stream"][0] / block["stream"][1] for block in blocks]
    highest = int(np.argmax(streams))
    qkv = [block["qkv"]["first_rms"] / block["qkv"]["rms"] for block in blocks[highest + 1 :]] or [1.0]
    return f"""{TITLE}

Activations of {entry["model"]} in full precision on {SEQUENCES} sequences of {LENGTH} tokens, each taken from a
different place in the bundled calibration text, so that each starts with a different token. In the layers listed below,
the first position has an activation more than {LARGE:.0f} times the root mean square of all other positions and
{ALONE:.0f} times the largest of them. Its residual stream grows to {max(streams):.0f} times theirs (after block
{highest}). From there on, its normed inputs to `qkv` are {np.median(qkv):.2f} times the others' (median over blocks),
and it receives {np.median(shares[highest + 1 :] or shares):.0f} % of all attention (median; at most
{max(shares):.0f} %): it is an attention sink. In those channels of `down`, a mean over tokens sees little else; in
`qkv` it hardly sees this token at all.
[What follows for quantizers](decisions.md#2026-11-22--one-token-broke-every-clever-quantizer).

![Largest activations, residual stream and attention by block]({picture})

{table(head, rows)}"""
