"""Random low-bit matrices in the stored form, and copies of them on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from models.packed import PackedLinear, PackedResidual
from models.packing import packed_width
from models.spec import ModelSpec
from runtime.backends.triton.layout import GpuLinear, dequantize, repack
from tests.bench.gpu.report import Row
from tests.peers.shape import vector_of

GROUP_SIZE = 128
RESIDUAL_BITS = 4
TOLERANCE = 5e-3
"""Largest error of a product, relative to its largest output: dequantized weights are rounded to half precision."""
_LARGEST_OF = 16
"""Random activations whose largest make up the thresholds of the selection."""


def random_linear(name: str, shape: tuple[int, int], bits: int, *, residual: bool = True) -> PackedLinear:
    """A matrix of random codes whose product with activations of variance 1 has about variance 1.

    Zeros are on both sides of the codes' middle: otherwise all outputs would share a multiple of the activations' sum,
    which shifts all logits and says nothing.
    """
    N, K = shape
    rng = np.random.default_rng([N, K, bits])
    groups = -(-K // GROUP_SIZE)
    spread = ((1 << 2 * bits) - 1) ** 0.5 / 12**0.5
    magnitudes = -np.sort(-np.abs(rng.standard_normal((_LARGEST_OF, K), np.float32)), axis=1)
    return PackedLinear(
        name=name,
        shape=shape,
        bits=bits,
        group_size=GROUP_SIZE,
        codes=_words(rng, N, packed_width(K, bits)),
        scales=np.full((N, groups), 1 / (spread * K**0.5), np.float16),
        zeros=rng.integers((1 << (bits - 1)) - 1, (1 << (bits - 1)) + 1, (N, groups), dtype=np.uint8),
        bias=None,
        residual=PackedResidual(
            bits=RESIDUAL_BITS,
            codes=_words(rng, K, packed_width(N, RESIDUAL_BITS)),
            scales=np.full(N, 0.1 / (spread * K**0.5), np.float16),
        )
        if residual
        else None,
        rank_maximum=magnitudes.max(axis=0) if residual else None,
        mean_square=np.ones(K, np.float32) if residual else None,
    )


@cache
def random_weight(shape: tuple[int, int], bits: int, device: torch.device) -> GpuLinear:
    """Such a matrix on the device, without residuals; repacking takes long, so each is made once."""
    return repack(random_linear("random", shape, bits, residual=False), device)


def copies(weight: GpuLinear, count: int) -> list[GpuLinear]:
    """`weight` and count - 1 more of it elsewhere in memory, in all its parts: a scale in the cache costs nothing."""
    return [weight, *(copied(weight) for _ in range(count - 1))]


def copied(weight: GpuLinear) -> GpuLinear:
    """The same numbers in other places."""
    parts = {name: getattr(weight, name) for name in ("codes", "groups", "codebook", "bias")}
    return replace(weight, **{name: None if part is None else part.clone() for name, part in parts.items()})


def check_row(weight: GpuLinear, x: torch.Tensor, out: torch.Tensor) -> Row:
    """Whether `out` is the product of the weights and x [M, K]: the speed of wrong numbers means nothing."""
    expected = x.float() @ dequantize(weight).to(x.device).T
    error = float((out - expected).abs().max() / expected.abs().max())
    row: Row = {"what": "check", "bits": weight.bits, "M": x.shape[0], "N": weight.shape[0], "K": weight.shape[1]}
    return row | {"largest_error": float(f"{error:.2g}"), "correct": error < TOLERANCE}


def activations(rows: int, K: int, device: torch.device) -> torch.Tensor:
    """float16 [rows, K], normally distributed."""
    return torch.randn(rows, K, device=device).to(torch.float16)


@dataclass(frozen=True, slots=True)
class RandomModel:
    """`models.weights.Weights` of random matrices: one of each shape, under all the names of that shape."""

    spec: ModelSpec
    """The architecture."""
    made: dict[tuple[int, int], PackedLinear]
    """The matrices of blocks by their shapes."""
    head: PackedLinear
    """That of the head."""

    @classmethod
    def of(cls, spec: ModelSpec, bits: int) -> RandomModel:
        """A model whose block matrices have so many bits; its head 4, and no residuals there."""
        made = {shape: random_linear("block", shape, bits) for shape in block_shapes(spec)}
        return cls(spec, made, random_linear("head", spec.linear_shape("head"), 4, residual=False))

    def linear(self, name: str) -> PackedLinear:
        """The matrix of this layer's shape."""
        return replace(self.head if name == "head" else self.made[self.spec.linear_shape(name)], name=name)

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A norm's weight or another vector, or a router."""
        return vector_of(self.spec, name)

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
        return np.zeros(self.spec.mixture.held if self.spec.mixture else 0, np.int32)

    def release(self) -> None:
        """Nothing here can be read again."""


def block_shapes(spec: ModelSpec) -> set[tuple[int, int]]:
    """[N, K] of all linear layers of its blocks."""
    return {spec.linear_shape(name) for name in spec.linear_names() if name != "head"}


def _words(rng: np.random.Generator, rows: int, width: int) -> npt.NDArray[np.int32]:
    return np.frombuffer(rng.bytes(4 * rows * width), np.int32).reshape(rows, width)
