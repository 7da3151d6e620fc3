"""The KV cache of the CPU backend, in the layout that its attention reads.

Per layer, slot and key-value head: keys [context / 16, D, 16] (16 tokens side by side), values [context, D padded to
16]; half precision, or INT8 with a half-precision scale for each token and head.
"""

from __future__ import annotations

import numpy as np

from models.spec import ModelSpec
from runtime.cpu.emit import LANES
from runtime.cpu.layout import aligned_zeros, padded
from runtime.decoder import DecoderOptions
from runtime.kernels.attention.cpu import SPAN


class CpuCache:
    """Keys and values of all slots.

    Args:
        spec: The model.
        options: `kv`, `slots` and `context` count.
        threads: Threads that attention is split over.
    """

    def __init__(self, spec: ModelSpec, options: DecoderOptions, threads: int) -> None:
        self.context = padded(options.context, SPAN)
        """Tokens that each head has room for: the context, up to whole spans."""
        self.max_splits = max(1, min(8, 2 * threads))
        """Most pieces that one head's context is cut into."""
        dtype = np.float16 if options.kv == "fp16" else np.int8
        heads = (spec.num_layers, options.slots, spec.num_kv_heads)
        self._keys = aligned_zeros((*heads, self.context // LANES, spec.head_dim, LANES), dtype)
        self._values = aligned_zeros((*heads, self.context, padded(spec.head_dim, LANES)), dtype)
        scaled = options.kv == "int8"
        self._key_scales = aligned_zeros((*heads, self.context if scaled else 0), np.float16)
        self._value_scales = aligned_zeros((*heads, self.context if scaled else 0), np.float16)
        self._scaled = scaled

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(a.nbytes for a in (self._keys, self._values, self._key_scales, self._value_scales))

    def addresses(self, layer: int) -> tuple[int, int, int, int]:
        """Addresses of a layer's keys, values and their scales (0 where there are none)."""
        keys, values = int(self._keys[layer].ctypes.data), int(self._values[layer].ctypes.data)
        if not self._scaled:
            return keys, values, 0, 0
        return keys, values, int(self._key_scales[layer].ctypes.data), int(self._value_scales[layer].ctypes.data)
