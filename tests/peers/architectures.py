"""Small random models of each GGUF architecture, as llama.cpp reads them and as this program does.

    python -m tests.peers.architectures --peer-python PYTHON [CASE ...]

The files are those of `tests/models/gguf/test_gguf_checkpoint.py`, in float32. llama.cpp (in its own interpreter, see
README.md) and the full-precision decoder read the same 23 tokens of each, and their logits are compared.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.checkpoint import Checkpoint
from models.oracle import Oracle
from tests.models.gguf.making import SIZES, random_model, write_gguf
from tests.models.gguf.test_gguf_checkpoint import CASES
from tests.peers.exported import differences

AS_WIDE = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
CHANGES: dict[str, dict[str, Any]] = {
    "gpt-oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
    "qwen3.5": AS_WIDE,
    "qwen3.5-even": AS_WIDE,
    "qwen3.5-moe": AS_WIDE,
}
"""What llama.cpp does otherwise: it cuts YaRN's borders, and takes a delta rule's keys and values for equally wide."""


def beside(case: str, peer_python: str) -> str:
    """How far llama.cpp's logits are from ours, or how it refused the file."""
    family, changes = CASES[case]
    changes = {**changes, **CHANGES.get(case, {})}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_gguf(folder / "model.gguf", random_model(family, **changes))
        tokens = torch.randint(0, SIZES["vocab_size"], (1, 23), generator=torch.Generator().manual_seed(0))
        np.save(folder / "tokens.npy", tokens[0].numpy())
        command = [peer_python, "-m", "tests.peers.exported", str(file), "--peer", name]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        if ended.returncode:
            lines = [line for line in ended.stderr.splitlines() if "error" in line.lower()] or [ended.stderr[-200:]]
            return f"llama.cpp refuses it ({ended.returncode}): {lines[0].strip()}"
        ours = Oracle(Checkpoint.open(file)).logits(tokens)[0].numpy()
        return differences(np.load(folder / "logits.npy"), ours)


def main() -> None:
    """Compare all, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="some of them; all unless given")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    asked = parser.parse_args()
    for case in asked.cases or CASES:
        print(f"{case:24}{beside(case, asked.peer_python)}", flush=True)


if __name__ == "__main__":
    main()
