"""Peak memory of quantizing Qwen3.5 35B-A3B to its end, by what is being done: some of its blocks, random weights.

    python -m tests.lab.quantizing
    python -m tests.lab.quantizing --experts 256 --vocabulary 248320

Sizes are the model's but for blocks, experts and tokens, of which there are as many as asked for. A further block adds
nothing, since blocks come one after the other. What further experts and tokens add is computed: what was packed of them
stays in memory until the block, or the head, ends. Activations don't grow with them, because a token goes to 8 experts
whatever their number, nor do tables, which are read and written by rows. What oneDNN compiles for each number of tokens
that reach an expert does, and isn't counted: for blocks the computed number is the least, and `--experts 256` measures
it. By the default recipe, in a process of its own.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from models.progress import Progress
from models.recipe import Recipe, chosen_method
from models.spec import ModelSpec
from runtime.measure.speed import peak_memory_bytes
from tests.lab.store import ROOT, about_run, columns, parser, write

BUILD = ROOT / "build" / "quantizing"
EXPERTS = 256
SIZES: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
"""Of config.json."""
STAGES = ("beginning", "a block, rounded", "a block, at its end", "the head", "writing it")
_NUMBERS = 1 << 24
"""Random numbers, of which every matrix takes as many as it has, again and again."""


def write_checkpoint(folder: Path, blocks: int, experts: int, vocabulary: int) -> None:
    """A checkpoint in bfloat16 with a tokenizer of single characters.

    Args:
        folder: Where to; exists.
        blocks: Blocks: delta rules, and attention in the last.
        experts: Experts of each.
        vocabulary: Tokens; the model's are 248,320.
    """
    import torch
    import transformers

    from tests.models.conftest import write_tokenizer

    kinds = [*["linear_attention"] * (blocks - 1), "full_attention"]
    sizes = {**SIZES, "vocab_size": vocabulary, "num_hidden_layers": blocks, "num_experts": experts}
    config = transformers.Qwen3_5MoeTextConfig(**sizes, layer_types=kinds)
    config.architectures = ["Qwen3_5MoeForCausalLM"]
    config.save_pretrained(folder)
    write_tokenizer(folder, vocabulary)
    with torch.device("meta"):
        model = transformers.Qwen3_5MoeForCausalLM(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    numbers = torch.randn(_NUMBERS, generator=torch.Generator().manual_seed(0))
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            own, left = numbers * shape[-1] ** -0.5, math.prod(shape)
            piece = own.to(torch.bfloat16).view(torch.uint8).numpy()
            while left > 0:
                file.write(piece[: 2 * left].data)
                left -= _NUMBERS


class Peaks:
    """Receives reports, and keeps the most memory that the process had between them by `STAGES`.

    Args:
        matrices: Linear layers of a block.
    """

    def __init__(self, matrices: int) -> None:
        self.found = dict.fromkeys(STAGES, 0)
        self._last = 1 - 1 / (matrices + 1.5)
        self._stage: str | None = None

    def __call__(self, progress: Progress) -> None:
        if self._stage is not None:
            self.found[self._stage] = max(self.found[self._stage], peak_memory_bytes())
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        self._stage = self._following(progress)

    def _following(self, progress: Progress) -> str | None:
        """What is done between this report and the next."""
        beginning, rounding, end, head, writing = STAGES
        if progress.phase != "quantize":
            return beginning if progress.phase == "tokenizer" else None
        if progress.done == progress.total:
            return writing
        if "head" in progress.message:
            return head
        return end if progress.done % 1 > self._last else rounding


def measured(folder: Path, store: Path) -> dict[str, Any]:
    """Quantize a checkpoint in this process.

    Returns:
        `peaks`, bytes of `STAGES`, and `further`, bytes of the experts and of the head's rows that the model has beyond
        the checkpoint's, packed.
    """
    from assets import calibration_text, evaluation_text
    from models.checkpoint import Checkpoint
    from models.quantize import quantize
    from models.store import Store, layout

    recipe, spec = Recipe(method=chosen_method("auto")), Checkpoint.open(folder).spec
    peaks, own = Peaks(len(spec.block_linears(0))), partial(_bytes, layout.linear_tensors, recipe)
    assert spec.mixture is not None
    expert = sum(own(spec, f"layers.0.experts.0.{kind}") for kind in ("gate_up", "down"))
    head = own(replace(spec, vocab_size=SIZES["vocab_size"]), "head") - own(spec, "head")
    further = {"block": (EXPERTS - spec.mixture.experts) * expert, "head": head}
    texts = {"calibration": calibration_text(), "evaluation": evaluation_text()}
    quantize(folder, Store(store), recipe, name="measured", progress=peaks, **texts)
    return {"peaks": peaks.found, "further": further}


def _bytes(tensors: Callable[..., Mapping[str, Any]], recipe: Recipe, spec: ModelSpec, name: str) -> int:
    """Of a packed linear layer."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in tensors(spec, recipe, name).values())


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Peaks in GiB by stage: what was measured, and what follows for the model's experts and vocabulary."""
    further = dict(zip(STAGES, (0, *[found["further"]["block"]] * 2, *[found["further"]["head"]] * 2), strict=True))
    return [
        {"": stage, "measured": peak / 2**30, "of all experts and tokens": (peak + further[stage]) / 2**30}
        for stage, peak in found["peaks"].items()
    ]


def main() -> None:
    """Measure and print; or be the process that is measured."""
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(measured(*map(Path, sys.argv[2:]))))
        return
    options = parser(__doc__, "quantizing")
    options.add_argument("--blocks", type=int, default=1)
    options.add_argument("--experts", type=int, default=16, help=f"of {EXPERTS} in each block")
    options.add_argument("--vocabulary", type=int, default=31040, help=f"of {SIZES['vocab_size']} tokens")
    given = options.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        folder = Path(scratch) / "checkpoint"
        folder.mkdir()
        write_checkpoint(folder, given.blocks, given.experts, given.vocabulary)
        command = [sys.executable, "-m", "tests.lab.quantizing", "--worker", str(folder), str(Path(scratch) / "store")]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = {"blocks": given.blocks, "experts": given.experts, "vocabulary": given.vocabulary}
    found |= json.loads(done.stdout.splitlines()[-1])
    write(given.out, {**about_run("python -m tests.lab.quantizing"), **found})
    print(columns(rows(found)))


if __name__ == "__main__":
    main()
