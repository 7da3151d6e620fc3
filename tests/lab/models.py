"""The measured models: real ones with their texts, and shapes with random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from assets import calibration_text, demo_checkpoint_path
from models.mtp import mtp_spec
from models.packed import PackedLinear, PackedResidual
from models.packing import packed_width
from models.recipe import DEFAULT_GROUP_SIZE
from models.spec import JOIN, ModelSpec, RopeSpec
from models.store import StoredModel
from models.trellis import levels, padded_width
from runtime.text.tokenizer import Tokenizer
from tests.lab.store import ROOT
from tests.runtime.conftest import pack_linear

DATA = ROOT.parent / "shared" / "data"
"""Real models and texts beside the repository."""
SMOLLM2 = ROOT / "build" / "smollm2"
"""Hugging Face folder of SmolLM2-135M-Instruct, unless `--smollm2` names another."""
REAL = "smollm2"
GROUP_SIZE, RESIDUAL_BITS, HEAD_BITS = 128, 4, 4
"""Of random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its texts."""

    name: str
    folder: Path
    """Its checkpoint, or a GGUF file."""
    tokens: int
    """Tokens of the evaluation text."""
    window: int
    """Tokens of a window."""
    stride: int
    """Tokens from one window's start to the next."""
    encode: Callable[[Tokenizer, int], list[int]]
    """The evaluation text's first so many tokens, or more."""
    calibration: Callable[[], str]
    group_size: int = DEFAULT_GROUP_SIZE

    def text(self, limit: int | None = None) -> list[int]:
        """The evaluation text as tokens, `limit` of them at most."""
        count = min(self.tokens, limit or self.tokens)
        return self.encode(Tokenizer(self.folder), count)[:count]


def text_of(name: str) -> str:
    """A text beside the repository."""
    return (DATA / "text" / name).read_text(encoding="utf-8")


def wikitext(tokenizer: Tokenizer, count: int) -> list[int]:
    """The beginning of WikiText-2's test text."""
    return tokenizer.encode(text_of("wikitext2-test.txt")[: 16 * count])


def book(tokenizer: Tokenizer, count: int) -> list[int]:
    """Moby-Dick from its 60,000th character on."""
    return tokenizer.encode(text_of("moby-dick.md")[60000 : 60000 + 16 * count])


def smollm2(folder: Path = SMOLLM2) -> Case:
    """SmolLM2-135M-Instruct on WikiText-2: Llama, hidden 576, 30 blocks, vocabulary 49,152."""
    return Case(
        name=REAL,
        folder=folder,
        tokens=2000,
        window=512,
        stride=256,
        encode=wikitext,
        calibration=calibration_text,
    )


def gemma(file: Path) -> Case:
    """Gemma 3 270M, a base model, on WikiText-2: hidden 640, 18 blocks, vocabulary 262,144."""
    return replace(smollm2(file), name="gemma3-270m", tokens=768)


def _held_out(tokenizer: Tokenizer, count: int) -> list[int]:
    from assets.demo_model.pack import dialogues

    return tokenizer.encode(dialogues("held_out", 40 + count // 60))


def _taught() -> str:
    from assets.demo_model.pack import dialogues

    return dialogues("train", 400)


def demo() -> Case:
    """The bundled model on dialogues that it was not taught: Llama, hidden 256, 4 blocks, vocabulary 2048."""
    return Case(
        name="demo",
        folder=demo_checkpoint_path(),
        group_size=128,
        tokens=12000,
        window=256,
        stride=128,
        encode=_held_out,
        calibration=_taught,
    )


def llama(
    *, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int = 8192
) -> ModelSpec:
    """A Llama 3 of some size."""
    return ModelSpec(
        family="llama",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_context=context,
        norm_eps=1e-5,
        rope=RopeSpec(theta=500000.0, rotary_dim=hidden // heads),
        windows=(None,) * layers,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def llama_1b(context: int = 2048) -> ModelSpec:
    """A Llama of 1.1 billion parameters."""
    shape = {"hidden": 2048, "intermediate": 5632, "layers": 22, "heads": 32, "kv_heads": 4, "vocab": 32000}
    return llama(**shape, context=context)


def vector_of(spec: ModelSpec, name: str) -> npt.NDArray[np.float32]:
    """Ones, but what is left of a state decays; or a router, which chooses all experts about equally often."""
    if name == "norm":
        return np.ones(spec.hidden_size, np.float32)
    layer = int(name.split(".")[1])
    if name in (routers := spec.routers(layer)):
        return np.random.default_rng(layer).standard_normal(routers[name], np.float32) / spec.hidden_size**0.5
    return np.full(spec.block_vectors(layer)[name], -1.0 if name.endswith("decay") else 1.0, np.float32)


def random_linear(name: str, shape: tuple[int, int], bits: int, *, residual: bool = True) -> PackedLinear:
    """A matrix of random codes whose product with activations of variance 1 has about variance 1.

    Zeros are on both sides of the codes' middle: otherwise all outputs would share a multiple of the activations' sum,
    which shifts all logits and says nothing.
    """
    N, K = shape
    rng = np.random.default_rng([N, K, bits])
    groups = -(-K // GROUP_SIZE)
    spread = ((1 << 2 * bits) - 1) ** 0.5 / 12**0.5
    magnitudes = -np.sort(-np.abs(rng.standard_normal((16, K), np.float32)), axis=1)
    made = PackedResidual(
        bits=RESIDUAL_BITS,
        codes=_words(rng, K, packed_width(N, RESIDUAL_BITS)),
        scales=np.full(N, 0.1 / (spread * K**0.5), np.float16),
    )
    return PackedLinear(
        name=name,
        shape=shape,
        bits=bits,
        group_size=GROUP_SIZE,
        codes=_words(rng, N, packed_width(K, bits)),
        scales=np.full((N, groups), 1 / (spread * K**0.5), np.float16),
        zeros=rng.integers((1 << (bits - 1)) - 1, (1 << (bits - 1)) + 1, (N, groups), dtype=np.uint8),
        bias=None,
        residual=made if residual else None,
        rank_maximum=magnitudes.max(axis=0) if residual else None,
        mean_square=np.ones(K, np.float32) if residual else None,
    )


def _streams(packed: PackedLinear) -> PackedLinear:
    """A random matrix with streams of a trellis instead of its codes."""
    (N, K), bits = packed.shape, packed.bits
    codes = _words(np.random.default_rng([N, K, bits]), N, padded_width(K) * bits // 32)
    scales = np.full((N, 1), 1 / (levels(bits).std() * K**0.5), np.float16)
    return replace(packed, codes=codes.view(np.int32), scales=scales, zeros=None, trellis=True)


def random_w4a8(name: str, shape: tuple[int, int], group_size: int = GROUP_SIZE) -> PackedLinear:
    """A random W4A8 matrix, likewise; group_size 0: none."""
    (N, K), rng = shape, np.random.default_rng([*shape, group_size])
    groups = -(-K // group_size) if group_size else 1
    return PackedLinear(
        name=name,
        shape=shape,
        bits=4,
        group_size=group_size or K,
        codes=_words(rng, N, packed_width(K, 4)),
        scales=np.full((N, 1), 1 / ((60 if group_size else 5) * K**0.5), np.float16),
        zeros=rng.integers(6, 10, (N, groups), dtype=np.uint8),
        bias=None,
        residual=None,
        rank_maximum=None,
        mean_square=None,
        group_scales=rng.integers(8, 17, (N, groups), dtype=np.uint8) if group_size else None,
        per_token=True,
    )


@dataclass(slots=False)
class RandomModel:
    """`models.packed.Weights` of random matrices: one of each shape, under all the names of that shape.

    Args:
        spec: The architecture.
        bits: Of all matrices but the head's, which have 4.
        residuals: Whether blocks have residuals.
        head_residuals: Whether the head has, too.
        w4a8: Whether the matrices are W4A8.
        trellis: Whether their codes are streams of a trellis.
    """

    spec: ModelSpec
    bits: int
    residuals: bool = True
    head_residuals: bool = True
    w4a8: bool = False
    trellis: bool = False

    @cached_property
    def _made(self) -> dict[tuple[tuple[int, int], bool], PackedLinear]:
        return {}

    def linear(self, name: str) -> PackedLinear:
        """The matrix of this layer's shape."""
        key = self.spec.linear_shape(name), name == "head"
        if key not in self._made:
            residual = self.residuals and (self.head_residuals or name != "head")
            bits = HEAD_BITS if name == "head" else self.bits
            made = random_w4a8(name, key[0]) if self.w4a8 else random_linear(name, key[0], bits, residual=residual)
            self._made[key] = _streams(made) if self.trellis else made
        return replace(self._made[key], name=name)

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A norm's weight or another vector, or a router."""
        return vector_of(self.spec, name)

    mtp = None

    def key_statistics(self, _layer: int) -> None:
        """Nothing is known of the keys of random weights."""

    def embedding(self) -> npt.NDArray[np.float16]:
        """The embedding table: 1024 random rows, again and again."""
        return self._table(self.spec.hidden_size)

    def token_table(self) -> npt.NDArray[np.float16]:
        """Embeddings of the blocks' own, likewise."""
        return self._table(self.spec.num_layers * self.spec.token_width)

    def _table(self, width: int) -> npt.NDArray[np.float16]:
        rows = np.random.default_rng(0).standard_normal((1024, width), np.float32).astype(np.float16)
        return np.resize(rows, (self.spec.vocab_size, width))

    def expert_tokens(self, _layer: int) -> npt.NDArray[np.int32]:
        """Nothing is known of where tokens go."""
        return np.zeros(self.spec.mixture.num_experts if self.spec.mixture else 0, np.int32)

    def release(self) -> None:
        """Nothing here can be read again."""


class Foreseeing(RandomModel):
    """A model whose next token mostly follows from the last one, and a block that knows that.

    Args:
        spec: The architecture.
        share: How much of a block's random output stays: the more, the less often the block is right.
    """

    def __init__(self, spec: ModelSpec, share: float) -> None:
        super().__init__(spec, 4, residuals=False)
        self._share = share
        self.mtp = None if spec.joins else Foreseeing(mtp_spec(spec), 0.02)

    @cached_property
    def _after(self) -> PackedLinear:
        """A head with which each token follows another one."""
        table = self.embedding().astype(np.float32)
        followers = np.random.default_rng(1).permutation(len(table))
        return pack_linear(table[followers] / self.spec.hidden_size**0.5, name="head", residual_bits=0)

    @cached_property
    def _all(self) -> npt.NDArray[np.float16]:
        shape = self.spec.vocab_size, self.spec.hidden_size
        return np.random.default_rng(0).standard_normal(shape, np.float32).astype(np.float16)

    def embedding(self) -> npt.NDArray[np.float16]:
        return self._all

    def linear(self, name: str) -> PackedLinear:
        if name == "head":
            return self._after
        if name.endswith(JOIN):
            join = np.eye(*self.spec.linear_shape(name), dtype=np.float32)
            return pack_linear(join, name=name, residual_bits=0)
        made = super().linear(name)
        return replace(made, scales=made.scales * np.float16(self._share if name.endswith((".o", "down")) else 1))


def opened(named: Sequence[str]) -> list[tuple[str, StoredModel]]:
    """Stored models, of arguments NAME=FOLDER."""
    pairs = (text.partition("=") for text in named)
    return [(name, StoredModel.open_folder(Path(folder), name)) for name, _, folder in pairs]


def _words(rng: np.random.Generator, rows: int, width: int) -> npt.NDArray[np.int32]:
    return np.frombuffer(rng.bytes(4 * rows * width), np.int32).reshape(rows, width)
