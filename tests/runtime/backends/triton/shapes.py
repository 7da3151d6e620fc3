"""Models without data: shapes of real ones, for counting memory and kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from assets import demo_path
from models.catalogue import CATALOGUE
from models.packed import PackedLinear, PackedResidual
from models.recipe import Recipe
from models.spec import MixtureSpec, ModelSpec, RopeSpec
from models.store import StoredModel
from runtime.backends.triton.layout import GpuLinear
from runtime.backends.triton.residual import GpuResidual, LoadedResiduals, row_lines
from runtime.backends.triton.sizes import code_words


def spec_of(**sizes: Any) -> ModelSpec:
    names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    fixed = {"family": "llama", "max_context": 8192, "norm_eps": 1e-5}
    rope = RopeSpec(rotary_dim=sizes["head_dim"])
    return ModelSpec(**fixed, **{name: sizes[name] for name in names}, rope=rope, windows=(None,) * sizes["num_layers"])


LLAMA = spec_of(
    hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128256,
)  # fmt: skip
PHI = spec_of(
    hidden_size=3072, intermediate_size=8192, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=96,
    vocab_size=32064,
)  # fmt: skip
SMOL = spec_of(
    hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49152,
)  # fmt: skip
QWEN3_MOE = replace(
    spec_of(
        hidden_size=2048, intermediate_size=6144, num_layers=48, num_heads=32, num_kv_heads=4, head_dim=128,
        vocab_size=151936,
    ),
    mixture=MixtureSpec(experts=128, chosen=8, width=768, normalized=True),
    qk_norm=True,
)  # fmt: skip
"""Qwen3-30B-A3B."""
_OSS = spec_of(
    hidden_size=2880, intermediate_size=2880, num_layers=24, num_heads=64, num_kv_heads=8, head_dim=64,
    vocab_size=201088,
)  # fmt: skip
GPT_OSS = replace(
    _OSS,
    mixture=MixtureSpec(experts=32, chosen=4, width=2880, normalized=True, bias=True),
    windows=(128, None) * 12,
    sinks=True,
    qkv_bias=True,
    o_bias=True,
    activation="clamped_silu",
    gate_limit=7.0,
)
"""gpt-oss-20b."""
_LISTED = {model.title: model.spec for model in CATALOGUE}
QWEN35, LFM2 = _LISTED["Qwen3.5 4B"], _LISTED["LFM2 1.2B"]
WIDE, SHARING, BESIDE = (_LISTED[f"Gemma 4 {name}"] for name in ("31B", "E2B", "26B-A4B"))
"""Heads of two widths; shared caches and embeddings of the blocks' own besides; experts beside an MLP."""
NEMOTRON, COHERE, FALCON, LAGUNA = (
    _LISTED[name] for name in ("Nemotron 3 Nano 30B-A3B", "Command R7B", "Falcon-H1 0.5B", "Laguna XS.2")
)
"""Blocks without experts, and experts without gates; an MLP, and a state beside attention; heads that differ."""
DEMO = StoredModel.open_folder(demo_path(), "demo")
FLASH = _LISTED["GLM-4.7-Flash"]
MODELS: dict[str, tuple[ModelSpec, Recipe]] = {
    "demo": (DEMO.spec, DEMO.recipe),
    "smollm2-3bit": (SMOL, Recipe(bits=3, group_size=64)),
    "llama-3-8b-3bit": (LLAMA, Recipe(bits=3)),
    "phi-3-4bit": (PHI, Recipe(bits=4)),
    "qwen3-30b-a3b-4bit": (QWEN3_MOE, Recipe(bits=4)),
    "gpt-oss-20b-4bit": (GPT_OSS, Recipe(bits=4)),
    "qwen3.5-4b-4bit": (QWEN35, Recipe(bits=4)),
    "lfm2-1.2b-4bit": (LFM2, Recipe(bits=4)),
    "gemma-4-31b-4bit": (WIDE, Recipe(bits=4)),
    "gemma-4-e2b-4bit": (SHARING, Recipe(bits=4)),
    "gemma-4-26b-a4b-4bit": (BESIDE, Recipe(bits=4)),
    "glm-4.7-flash-4bit": (FLASH, Recipe(bits=4)),
    "nemotron-3-nano-4bit": (NEMOTRON, Recipe(bits=4)),
    "llama-3-8b-trellis": (LLAMA, Recipe(method="trellis", bits=4)),
    "qwen3.5-4b-trellis": (QWEN35, Recipe(method="trellis", bits=3)),
    "laguna-xs-4bit": (LAGUNA, Recipe(bits=4)),
    "falcon-h1-0.5b-4bit": (FALCON, Recipe(bits=4)),
    "command-r7b-trellis": (COHERE, Recipe(method="trellis", bits=3)),
    "gemma-4-e2b-trellis": (SHARING, Recipe(method="trellis", bits=3)),
}


@dataclass(frozen=True)
class Shapes:
    """`Weights` without numbers."""

    spec: ModelSpec
    recipe: Recipe

    def linear(self, name: str) -> PackedLinear:
        N, K = self.spec.linear_shape(name)
        nothing = np.zeros(0, np.int32)
        residual = PackedResidual(bits=self.recipe.residual_bits, codes=nothing, scales=None)
        return PackedLinear(
            name=name, shape=(N, K), bits=self.recipe.layer_bits(name), group_size=self.recipe.group_size,
            codes=nothing, scales=nothing, zeros=nothing, residual=residual,
            bias=np.zeros(N, np.float32) if self.spec.has_bias(name) else None,
            rank_maximum=np.ones(K, np.float32), mean_square=np.ones(K, np.float32), trellis=self.recipe.trellis,
        )  # fmt: skip

    def vector(self, name: str) -> Any:
        layer = None if name == "norm" else int(name.split(".")[1])
        shapes: dict[str, Any] = {} if layer is None else self.spec.block_vectors(layer) | self.spec.routers(layer)
        return np.ones(shapes.get(name, self.spec.hidden_size), np.float32)

    def embedding(self) -> Any:
        return np.zeros((0, self.spec.hidden_size), np.float16)

    def token_table(self) -> Any:
        return np.zeros((0, self.spec.num_layers * self.spec.token_width), np.float16)

    def key_statistics(self, _layer: int) -> None:
        return None

    def expert_tokens(self, _layer: int) -> Any:
        return np.zeros(self.spec.mixture.num_experts if self.spec.mixture else 0, np.int32)


def without_numbers(packed: PackedLinear, device: torch.device) -> GpuLinear:
    """As `repack`, of the bytes that `linear_bytes` counts; that those are the layout's own is tested below."""
    N, K = packed.shape
    words = code_words(packed.shape, packed.bits, trellis=packed.trellis)
    codes = torch.empty(words, dtype=torch.int32, device=device)
    groups = scales = None
    if packed.trellis:
        scales = torch.empty(N, dtype=torch.float16, device=device)
    else:
        groups = torch.empty(-(-K // packed.group_size), N, dtype=torch.int32, device=device)
    bias = None if packed.bias is None else torch.empty(N, device=device)
    return GpuLinear(
        name=packed.name, shape=packed.shape, bits=packed.bits, group_size=packed.group_size, codes=codes,
        groups=groups, codebook=None, bias=bias, scales=scales,
    )  # fmt: skip


def residuals(linears: Any, device: Any, experts: Any) -> LoadedResiduals:
    """As `load_residuals`; the codes are in main memory, so only scales count."""
    layers = {}
    for packed in linears:
        (N, K), count = packed.shape, len(experts.get(packed.name, ()))
        codes = torch.empty(1, dtype=torch.int32).expand(K * max(1, count), row_lines(N, 4) * 32)
        scales = torch.empty((count, N) if count else (N,), dtype=torch.float16, device=device)
        layers[packed.name] = GpuResidual(bits=4, shape=packed.shape, codes=codes, scales=scales)
    return LoadedResiduals(layers=layers, warning=None)
