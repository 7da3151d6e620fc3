"""The model shape that the comparison runs on, and a stand-in for a stored model with random weights of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from models.packed import PackedLinear, PackedResidual
from models.packing import packed_width
from models.spec import ModelSpec, RopeSpec

GROUP_SIZE = 128
HEAD_BITS = 4
RESIDUAL_BITS = 4


def llama_1b() -> ModelSpec:
    """A Llama shape of 1.1 billion parameters: hidden 2048, 22 layers, 32 query and 4 key-value heads, MLP 5632."""
    return ModelSpec(
        family="llama",
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=22,
        num_heads=32,
        num_kv_heads=4,
        head_dim=64,
        vocab_size=32000,
        max_context=2048,
        norm_eps=1e-5,
        rope=RopeSpec(rotary_dim=64),
        windows=(None,) * 22,
    )


def vector_of(spec: ModelSpec, name: str) -> npt.NDArray[np.float32]:
    """A vector of ones, but what is left of a state decays; or a router, which chooses all experts about equally often.

    Always the same for a name.
    """
    if name == "norm":
        return np.ones(spec.hidden_size, np.float32)
    layer = int(name.split(".")[1])
    if name in (routers := spec.routers(layer)):
        return np.random.default_rng(layer).standard_normal(routers[name], np.float32) / spec.hidden_size**0.5
    return np.full(spec.block_vectors(layer)[name], -1.0 if name.endswith("decay") else 1.0, np.float32)


class RandomModel:
    """Random low-bit weights of a shape, made matrix by matrix when asked for; says nothing about quality.

    Args:
        spec: The shape.
        bits: 3 or 4 for all layers but the head, which has 4.
        residuals: Whether there are residuals to compensate with.
    """

    def __init__(self, spec: ModelSpec, bits: int, *, residuals: bool) -> None:
        self.spec = spec
        self._bits, self._residuals = bits, residuals
        self._rng = np.random.default_rng(0)

    def linear(self, name: str) -> PackedLinear:
        """A matrix of random codes with scales that keep activations of the order of one."""
        kind = name.rsplit(".", 1)[-1]
        N, K = self.spec.linear_shape(name)
        bits = HEAD_BITS if kind == "head" else self._bits
        G = -(-K // GROUP_SIZE)
        step = np.float16(2.0 / (2**bits * np.sqrt(K)))
        residual = None
        if self._residuals:
            codes = self._words(K, packed_width(N, RESIDUAL_BITS))
            residual = PackedResidual(bits=RESIDUAL_BITS, codes=codes, scales=np.full(N, step / 16, np.float16))
        magnitudes = np.sort(np.abs(self._rng.standard_normal(K)))[::-1].astype(np.float32)
        return PackedLinear(
            name=name,
            shape=(N, K),
            bits=bits,
            group_size=GROUP_SIZE,
            codes=self._words(N, packed_width(K, bits)),
            scales=np.full((N, G), step, np.float16),
            zeros=np.full((N, G), 2 ** (bits - 1), np.uint8),
            bias=None,
            residual=residual,
            rank_maximum=magnitudes * 1.5 if self._residuals else None,
            mean_square=np.ones(K, np.float32) if self._residuals else None,
        )

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A norm's weight or another vector, or a router."""
        return vector_of(self.spec, name)

    def key_statistics(self, _layer: int) -> None:
        """Nothing is known of the keys of random weights."""

    def embedding(self) -> npt.NDArray[np.float16]:
        """The embedding table."""
        return self._rng.standard_normal((self.spec.vocab_size, self.spec.hidden_size)).astype(np.float16)

    def token_table(self) -> npt.NDArray[np.float16]:
        """Embeddings of the blocks' own."""
        shape = (self.spec.vocab_size, self.spec.num_layers * self.spec.token_width)
        return self._rng.standard_normal(shape).astype(np.float16)

    def expert_tokens(self, _layer: int) -> npt.NDArray[np.int32]:
        """Nothing is known of where tokens go."""
        return np.zeros(self.spec.mixture.held if self.spec.mixture else 0, np.int32)

    def release(self) -> None:
        """Nothing here can be read again."""

    def _words(self, rows: int, columns: int) -> npt.NDArray[np.int32]:
        return np.frombuffer(self._rng.bytes(4 * rows * columns), np.int32).reshape(rows, columns)
