"""How fast a checkpoint is quantized, in how much memory, and whether twice the same comes out.

    python -m tests.bench.quality.speed METHOD BITS        one JSON object on stdout

Speed and memory are of random weights of a wider model (its numbers mean nothing else), sameness is of the bundled one.
A process of its own for each method, because a process's largest memory never shrinks.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from assets import calibration_text, demo_checkpoint_path
from models.recipe import Recipe
from models.store import Store
from models.store.manifest import Manifest

HIDDEN, INTERMEDIATE, LAYERS = 1024, 2816, 2
_HEADS, _KV_HEADS = 16, 4


def measure(method: str, bits: float) -> dict[str, Any]:
    """Numbers of one method, from a process of its own.

    Args:
        method: Base quantizer.
        bits: Of the blocks' weights.

    Returns:
        `parameters`, `seconds`, `peak_bytes`, `limit_bytes`, `same`; or `error`.
    """
    command = [sys.executable, "-m", "tests.bench.quality.speed", method, f"{bits:g}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    about = {"method": method, "bits": bits}
    if done.returncode:
        return {**about, "error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**about, **found}


def write_wide(folder: Path) -> None:
    """A checkpoint of random bfloat16 weights with the bundled model's tokenizer."""
    import torch
    from safetensors.torch import save_file

    source = demo_checkpoint_path()
    folder.mkdir(parents=True)
    for file in source.glob("*.json"):
        shutil.copy(file, folder / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS}
    config |= {"num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS, "head_dim": HIDDEN // _HEADS}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    kv = HIDDEN // _HEADS * _KV_HEADS

    def weight(rows: int, width: int) -> torch.Tensor:
        return (torch.randn((rows, width), generator=generator) / math.sqrt(width)).to(torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": weight(config["vocab_size"], HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    shapes = {"q": (HIDDEN, HIDDEN), "k": (kv, HIDDEN), "v": (kv, HIDDEN), "o": (HIDDEN, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, shape in shapes.items():
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = weight(*shape)
        for name, shape in {
            "gate": (INTERMEDIATE, HIDDEN),
            "up": (INTERMEDIATE, HIDDEN),
            "down": (HIDDEN, INTERMEDIATE),
        }.items():
            tensors[f"{prefix}.mlp.{name}_proj.weight"] = weight(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")


def _same(store: Store, recipe: Recipe) -> bool:
    """Whether quantizing the bundled checkpoint twice gives the same bytes."""
    from models.quantize import quantize

    manifests = []
    for name in ("one", "two"):
        quantize(demo_checkpoint_path(), store, recipe, name=name, calibration=calibration_text())
        manifests.append(Manifest.read(store.path(name)).files)
    return manifests[0] == manifests[1]


def main() -> None:
    """Measure the method and bits of the command line."""
    import torch

    from models.quantize import quantize

    torch.set_num_threads(1)
    recipe = Recipe(method=sys.argv[1], bits=float(sys.argv[2]))
    with tempfile.TemporaryDirectory() as scratch:
        folder, store = Path(scratch) / "wide", Store(Path(scratch) / "store")
        write_wide(folder)
        begin = time.perf_counter()
        info = quantize(folder, store, recipe, name="wide", calibration=calibration_text())
        seconds = time.perf_counter() - begin
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        block = 4 * (2 * HIDDEN * (HIDDEN + HIDDEN // _HEADS * _KV_HEADS) + 3 * HIDDEN * INTERMEDIATE)
        shard = (folder / "model.safetensors").stat().st_size
        same = _same(store, recipe)
    found = {
        "parameters": info.summary.parameters,
        "seconds": round(seconds, 2),
        "peak_bytes": peak,
        "limit_bytes": block + shard + (3 << 29),
        "same": same,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
