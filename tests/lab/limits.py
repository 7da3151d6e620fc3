"""The largest inputs of a model's linear layers in full precision, beside the end of half precision's range.

    python -m tests.lab.limits FOLDER_OR_GGUF [--tokens 512]

Reads the calibration text with the oracle. A GPU limits what is beyond (docs/decisions/gpu.md). Products with a trellis
read inputs that are rotated, whose largest are in a column of their own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from assets import calibration_text
from models import trellis
from models.checkpoint import Checkpoint
from models.oracle import Oracle
from runtime.text.tokenizer import Tokenizer
from tests.lab.store import table

HALF = torch.finfo(torch.float16).max


def main() -> None:
    """Read the text and print a row for each kind of layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    given = parser.parse_args()
    found: dict[str, list[float]] = {}

    def observe(name: str, x: torch.Tensor) -> None:
        row = found.setdefault(name.split(".", 2)[-1], [0.0, 0.0, 0, 0])
        turned = torch.from_numpy(trellis.rotate(x.flatten(0, -2).float().numpy()))
        row[0], row[1] = (max(old, float(new.abs().max())) for old, new in zip(row, (x, turned), strict=False))
        row[2] += int((x.abs() > HALF).sum()) + int((turned.abs() > HALF).sum())
        row[3] += x.numel() + turned.numel()

    tokens = Tokenizer(given.model).encode(calibration_text())[: given.tokens]
    Oracle(Checkpoint.open(given.model), resident=False, observe=observe).logits(torch.tensor([tokens]))
    rows = [(kind, f"{row[0]:,.1f}", f"{row[1]:,.1f}", *map(int, row[2:])) for kind, row in found.items()]
    print(table(("layers", "largest input", "rotated", "beyond half precision", "of"), rows))


if __name__ == "__main__":
    main()
