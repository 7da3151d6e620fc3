"""KV caches of the reference backend: torch buffers that keep exactly what the cache kind can store."""

from __future__ import annotations

from typing import Protocol

import torch

from models.spec import ModelSpec
from runtime.decoder import DecoderOptions
from runtime.kernels.cache.reference import dequantize_int8, quantize_int8


class LayerCache(Protocol):
    """Keys or values of one layer, [slots, context, H_kv, D]."""

    nbytes: int
    """Bytes of the buffers."""

    def write(self, slots: torch.Tensor, positions: torch.Tensor, x: torch.Tensor) -> None:
        """Store rows. slots and positions int64 [M], x float32 [M, H_kv, D]."""
        ...

    def read(self, slot: int, length: int) -> torch.Tensor:
        """What positions 0 .. length - 1 of a slot hold. Returns float32 [length, H_kv, D]."""
        ...


class HalfCache:
    """Half precision."""

    def __init__(self, slots: int, context: int, heads: int, dim: int) -> None:
        self._values = torch.zeros(slots, context, heads, dim, dtype=torch.float16)
        self.nbytes = self._values.nbytes

    def write(self, slots: torch.Tensor, positions: torch.Tensor, x: torch.Tensor) -> None:
        """Round to half precision and store."""
        self._values[slots, positions] = x.to(torch.float16)

    def read(self, slot: int, length: int) -> torch.Tensor:
        """The stored halves as float32."""
        return self._values[slot, :length].float()


class Int8Cache:
    """INT8 with one half-precision scale for each token and head."""

    def __init__(self, slots: int, context: int, heads: int, dim: int) -> None:
        self._codes = torch.zeros(slots, context, heads, dim, dtype=torch.int8)
        self._scales = torch.zeros(slots, context, heads, dtype=torch.float16)
        self.nbytes = self._codes.nbytes + self._scales.nbytes

    def write(self, slots: torch.Tensor, positions: torch.Tensor, x: torch.Tensor) -> None:
        """Quantize every token and head on its own and store."""
        self._codes[slots, positions], self._scales[slots, positions] = quantize_int8(x)

    def read(self, slot: int, length: int) -> torch.Tensor:
        """The dequantized values."""
        return dequantize_int8(self._codes[slot, :length], self._scales[slot, :length])


def build(spec: ModelSpec, options: DecoderOptions) -> list[tuple[LayerCache, LayerCache]]:
    """Key and value cache of every layer."""
    kind: type[HalfCache] | type[Int8Cache] = HalfCache if options.kv == "fp16" else Int8Cache
    size = (options.slots, options.context, spec.num_kv_heads, spec.head_dim)
    return [(kind(*size), kind(*size)) for _ in range(spec.num_layers)]
