"""Chat models that are worth a try and that this program runs: where each is, its licence, its architecture.

The architectures are those of the published configurations, so that what a model takes can be told before any of it is
fetched. Importing this costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from models.catalogue import KNOWN
from models.spec import ModelSpec, RopeSpec

Form = Literal["GGUF", "Hugging Face"]
_SOURCE_BYTES = 2
"""Of a weight in a Hugging Face checkpoint: they are all published in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfModel:
    """A model that can be fetched."""

    title: str
    """What people call it."""
    source: str
    """What to ask for: a short name of `models.catalogue`, or `owner/name` on the hub."""
    maker: str
    """Who published it."""
    license: str
    """Its licence, in short."""
    spec: ModelSpec
    """Its architecture."""
    gated: bool = False
    """Whether the hub wants a login that has agreed to the licence."""

    @property
    def form(self) -> Form:
        """What is fetched: one GGUF file, or a folder of safetensors."""
        return "GGUF" if self.source in KNOWN else "Hugging Face"

    @property
    def download_bytes(self) -> int:
        """What is fetched, in bytes; of a folder, its weights."""
        known = KNOWN.get(self.source)
        return known.bytes if known is not None else _SOURCE_BYTES * self.spec.parameters


def _spec(
    family: str, hidden: int, intermediate: int, blocks: int, heads: tuple[int, int, int], **others: Any
) -> ModelSpec:
    """An architecture; `heads` are query heads, key-value heads and the width of one."""
    return ModelSpec(
        family=family,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=blocks,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        norm_eps=1e-5,
        rope=RopeSpec(rotary_dim=heads[2]),
        windows=(None,) * blocks,
        **others,
    )


_SMOLLM2: dict[str, Any] = {"vocab_size": 49152, "max_context": 8192, "tied": True}
_QWEN2: dict[str, Any] = {"max_context": 32768, "qkv_bias": True}
_QWEN3: dict[str, Any] = {"vocab_size": 151936, "max_context": 40960, "qk_norm": True}
_LLAMA3: dict[str, Any] = {"vocab_size": 128256, "max_context": 131072, "tied": True}

SHELF: Sequence[ShelfModel] = (
    ShelfModel(
        title="SmolLM2 135M",
        source="smollm2-135m",
        maker="Hugging Face",
        license="Apache-2.0",
        spec=_spec("llama", 576, 1536, 30, (9, 3, 64), **_SMOLLM2),
    ),
    ShelfModel(
        title="SmolLM2 360M",
        source="HuggingFaceTB/SmolLM2-360M-Instruct",
        maker="Hugging Face",
        license="Apache-2.0",
        spec=_spec("llama", 960, 2560, 32, (15, 5, 64), **_SMOLLM2),
    ),
    ShelfModel(
        title="Qwen2.5 0.5B",
        source="Qwen/Qwen2.5-0.5B-Instruct",
        maker="Qwen",
        license="Apache-2.0",
        spec=_spec("qwen2", 896, 4864, 24, (14, 2, 64), vocab_size=151936, tied=True, **_QWEN2),
    ),
    ShelfModel(
        title="Qwen3 0.6B",
        source="Qwen/Qwen3-0.6B",
        maker="Qwen",
        license="Apache-2.0",
        spec=_spec("qwen3", 1024, 3072, 28, (16, 8, 128), tied=True, **_QWEN3),
    ),
    ShelfModel(
        title="Llama 3.2 1B",
        source="meta-llama/Llama-3.2-1B-Instruct",
        maker="Meta",
        license="Llama 3.2",
        spec=_spec("llama", 2048, 8192, 16, (32, 8, 64), **_LLAMA3),
        gated=True,
    ),
    ShelfModel(
        title="Qwen2.5 1.5B",
        source="Qwen/Qwen2.5-1.5B-Instruct",
        maker="Qwen",
        license="Apache-2.0",
        spec=_spec("qwen2", 1536, 8960, 28, (12, 2, 128), vocab_size=151936, tied=True, **_QWEN2),
    ),
    ShelfModel(
        title="SmolLM2 1.7B",
        source="HuggingFaceTB/SmolLM2-1.7B-Instruct",
        maker="Hugging Face",
        license="Apache-2.0",
        spec=_spec("llama", 2048, 8192, 24, (32, 32, 64), **_SMOLLM2),
    ),
    ShelfModel(
        title="Qwen3 1.7B",
        source="Qwen/Qwen3-1.7B",
        maker="Qwen",
        license="Apache-2.0",
        spec=_spec("qwen3", 2048, 6144, 28, (16, 8, 128), tied=True, **_QWEN3),
    ),
    ShelfModel(
        title="Llama 3.2 3B",
        source="meta-llama/Llama-3.2-3B-Instruct",
        maker="Meta",
        license="Llama 3.2",
        spec=_spec("llama", 3072, 8192, 28, (24, 8, 128), **_LLAMA3),
        gated=True,
    ),
    ShelfModel(
        title="Phi-3.5 mini",
        source="microsoft/Phi-3.5-mini-instruct",
        maker="Microsoft",
        license="MIT",
        spec=_spec("phi3", 3072, 8192, 32, (32, 32, 96), vocab_size=32064, max_context=131072),
    ),
    ShelfModel(
        title="Qwen3 4B",
        source="Qwen/Qwen3-4B",
        maker="Qwen",
        license="Apache-2.0",
        spec=_spec("qwen3", 2560, 9728, 36, (32, 8, 128), tied=True, **_QWEN3),
    ),
    ShelfModel(
        title="Mistral 7B v0.3",
        source="mistralai/Mistral-7B-Instruct-v0.3",
        maker="Mistral AI",
        license="Apache-2.0",
        spec=_spec("mistral", 4096, 14336, 32, (32, 8, 128), vocab_size=32768, max_context=32768),
    ),
    ShelfModel(
        title="Qwen2.5 7B",
        source="Qwen/Qwen2.5-7B-Instruct",
        maker="Qwen",
        license="Apache-2.0",
        spec=_spec("qwen2", 3584, 18944, 28, (28, 4, 128), vocab_size=152064, **_QWEN2),
    ),
    ShelfModel(
        title="Qwen3 8B",
        source="Qwen/Qwen3-8B",
        maker="Qwen",
        license="Apache-2.0",
        spec=_spec("qwen3", 4096, 12288, 36, (32, 8, 128), **_QWEN3),
    ),
)
"""All of them, smallest first. Source: the models' published configurations and licences."""
