"""Speed of quantizing: SmolLM2 as a whole, and the rate for a shape of 1.1 billion parameters.

    python -m tests.bench.rates --smollm2 FOLDER --write         docs/speed.md's table, and the results file beside it
    python -m tests.bench.rates --methods rtn --shape-blocks 1 2

Each time is of a process of its own, as `lowbit-chat quantize` does it. The large shape has random weights, which take
as long as real ones, and is quantized with a few blocks; another block costs what the longer run takes more, and the
whole is put together from that.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from assets import calibration_text, demo_checkpoint_path
from models.plain_tokenizer import PLAIN_FILES
from models.recipe import WEIGHT_ONLY_METHODS as METHODS
from models.recipe import Recipe
from models.spec import ModelSpec
from models.store import Store
from tests.bench.quality.making import make
from tests.bench.reporting.cases import ROOT
from tests.bench.reporting.run import about_run
from tests.peers.shape import llama_1b

RESULTS = ROOT / "tests" / "bench" / "results" / "rates.json"
DOCUMENT = ROOT / "docs" / "speed.md"
SHAPE = "1.1 billion, random weights"
"""What the table calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What quantizing a model takes. Times are in seconds."""

    model: str
    """Which."""
    method: str
    """By which method."""
    bits: float
    """To how many bits."""
    seconds: float
    """From the start of the process to the finished model; of the shape as computed from its blocks."""
    others_seconds: float
    """Processor time that other programs took meanwhile."""
    weights: int
    """Weights of the linear layers."""
    peak_bytes: int
    """Most memory of the process; of the shape, of the longer run."""

    @property
    def per_second(self) -> float:
        """Weights a second."""
        return self.weights / self.seconds


def whole(name: str, folder: Path, spec: ModelSpec, method: str, bits: float, scratch: Path) -> Rate:
    """Quantize a checkpoint.

    Raises:
        MakingError: the process failed.
    """
    recipe = Recipe(method=method, bits=bits)
    made = make(folder, Store(scratch / "store"), recipe, name="timed", calibration=calibration_text())
    return Rate(
        model=name,
        method=method,
        bits=bits,
        seconds=made["seconds"],
        others_seconds=made["others_seconds"],
        weights=weights_of(spec),
        peak_bytes=made["peak_bytes"],
    )


def of_shape(spec: ModelSpec, method: str, bits: float, blocks: tuple[int, int], scratch: Path) -> Rate:
    """The time of a shape, from checkpoints of fewer and of more of its blocks.

    Raises:
        MakingError: a process failed.
    """
    fewer, more = sorted(blocks)
    found = []
    for count in (fewer, more):
        own = replace(spec, num_layers=count, windows=(None,) * count)
        folder = write_random(own, scratch / f"shape-{count}")
        found.append(whole(SHAPE, folder, own, method, bits, scratch))
    block = (found[1].seconds - found[0].seconds) / (more - fewer)
    seconds = found[1].seconds + (spec.num_layers - more) * block
    return replace(found[1], seconds=round(seconds, 1), weights=weights_of(spec))


def weights_of(spec: ModelSpec) -> int:
    """Weights of all linear layers."""
    shapes = [spec.linear_shape(name) for name in spec.linear_names()]
    return sum(rows * width for rows, width in shapes)


def write_random(spec: ModelSpec, folder: Path) -> Path:
    """A Llama checkpoint of a shape with random weights in half precision and the bundled model's tokenizer."""
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)

    def weight(rows: int, width: int) -> torch.Tensor:
        return (torch.randn(rows, width, generator=generator) / width**0.5).to(torch.float16)

    C, I, D = spec.hidden_size, spec.intermediate_size, spec.head_dim
    tensors = {
        "model.embed_tokens.weight": weight(spec.vocab_size, C),
        "lm_head.weight": weight(spec.vocab_size, C),
        "model.norm.weight": torch.ones(C, dtype=torch.float16),
    }
    for layer in range(spec.num_layers):
        for name, rows, width in (
            ("self_attn.q_proj", spec.num_heads * D, C),
            ("self_attn.k_proj", spec.num_kv_heads * D, C),
            ("self_attn.v_proj", spec.num_kv_heads * D, C),
            ("self_attn.o_proj", C, spec.num_heads * D),
            ("mlp.gate_proj", I, C),
            ("mlp.up_proj", I, C),
            ("mlp.down_proj", C, I),
        ):
            tensors[f"model.layers.{layer}.{name}.weight"] = weight(rows, width)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(C, dtype=torch.float16)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": C,
        "intermediate_size": I,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": D,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    for name in PLAIN_FILES:
        if (demo_checkpoint_path() / name).is_file():
            (folder / name).write_bytes((demo_checkpoint_path() / name).read_bytes())
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def table(rates: Sequence[Rate]) -> str:
    """The rates in Markdown."""
    lines = ["| | method | bits | s | million weights/s | peak memory, MiB |", "|---|---|---:|---:|---:|---:|"]
    lines += [
        f"| {rate.model} | {rate.method} | {rate.bits:g} | {rate.seconds:.0f} | {rate.per_second / 1e6:.1f} "
        f"| {rate.peak_bytes / 2**20:.0f} |"
        for rate in rates
    ]
    return "\n".join(lines)


def stored_table(found: Mapping[str, Any]) -> str:
    """The same of a results file."""
    return table([Rate(**rate) for rate in found["rates"]])


def main() -> None:
    """Measure, print, and write the table down where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, help="Hugging Face folder of SmolLM2-135M-Instruct")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, help="of SmolLM2")
    parser.add_argument("--shape-methods", nargs="*", default=["gptq", "rtn"], choices=METHODS, help="of the shape")
    parser.add_argument("--shape-blocks", nargs=2, type=int, default=(1, 3), help="blocks of the two checkpoints")
    parser.add_argument("--bits", type=float, default=3)
    parser.add_argument("--write", action="store_true", help="write docs/speed.md and the results file")
    asked = parser.parse_args()
    rates: list[Rate] = []
    with tempfile.TemporaryDirectory() as scratch:
        if asked.smollm2:
            from models.checkpoint import Checkpoint

            spec = Checkpoint.open(asked.smollm2).spec
            for method in asked.methods:
                rates.append(whole("SmolLM2-135M", asked.smollm2, spec, method, asked.bits, Path(scratch)))
                print(table(rates[-1:]).splitlines()[-1], flush=True)
        for method in asked.shape_methods:
            rates.append(of_shape(llama_1b(), method, asked.bits, tuple(asked.shape_blocks), Path(scratch)))
            print(table(rates[-1:]).splitlines()[-1], flush=True)
    if asked.write:
        report = {"about": about_run("python -m tests.bench.rates"), "rates": [asdict(rate) for rate in rates]}
        RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        from tests.bench import pages

        pages.write("rates")


if __name__ == "__main__":
    main()
