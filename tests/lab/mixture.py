"""Experts of real weights by uniform codes and by a trellis: SmolLM2 with each MLP cut into experts.

    python -m tests.lab.mixture --smollm2 FOLDER

FOLDER holds SmolLM2-135M-Instruct as a Hugging Face checkpoint in fp16. Every token goes to all four experts of a
block, a quarter of each, so that in full precision the mixture is the model that it was cut from.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from assets import calibration_text, evaluation_text
from models.quantize import quantize
from models.recipe import Recipe
from models.store import Store, StoredModel
from models.store.certificate import Certificate
from runtime.load.certificate import certify
from tests.lab.models import SMOLLM2
from tests.lab.store import about_run, columns, parser, write

EXPERTS = 4
MATRICES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""Mixtral's names by Llama's."""


def cut(source: Path, folder: Path) -> None:
    """Write a Llama checkpoint as a Mixtral one."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        block, mlp, kind = name.removesuffix(".weight").partition(".mlp.")
        if not mlp:
            tensors[name] = tensor
            continue
        prefix, down = f"{block}.block_sparse_moe", kind == "down_proj"
        tensors[f"{prefix}.gate.weight"] = torch.zeros(EXPERTS, tensor.shape[0 if down else 1], dtype=tensor.dtype)
        for expert, part in enumerate(tensor.chunk(EXPERTS, int(down))):
            own = part * EXPERTS if down else part.clone()
            tensors[f"{prefix}.experts.{expert}.{MATRICES[kind]}.weight"] = own.contiguous()
    save_file(tensors, folder / "model.safetensors")
    for path in source.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS}
    config["intermediate_size"] //= EXPERTS
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def main() -> None:
    """Cut, quantize, print and store."""
    options = parser(__doc__, "mixture")
    options.add_argument("--smollm2", type=Path, default=SMOLLM2)
    options.add_argument("--bits", type=float, nargs="+", default=[3, 4])
    given, rows = options.parse_args(), []
    with tempfile.TemporaryDirectory() as work:
        cut(given.smollm2, Path(work))
        for bits in given.bits:
            for method in ("gptq", "trellis"):
                recipe = Recipe(method=method, bits=bits)
                texts = {"calibration": calibration_text(), "evaluation": evaluation_text()}
                info = quantize(Path(work), Store(Path(work) / "store"), recipe, **texts)
                stored = StoredModel.open_folder(info.path)
                certify(stored, backend="cpu")
                certificate = Certificate.read(info.path)
                assert certificate is not None
                for way in certificate.ways:
                    row = {"bits": bits, "method": method, "mb": round(info.summary.gpu_bytes / 1e6, 1)}
                    rows.append(row | {name: getattr(way, name) for name in ("k_chunk", "kl", "same_percent")})
                print(columns(rows[-len(certificate.ways) :]), flush=True)
    write(given.out, {**about_run("python -m tests.lab.mixture"), "rows": rows})


if __name__ == "__main__":
    main()
