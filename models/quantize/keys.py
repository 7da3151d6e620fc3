"""Statistics of a block's keys and queries, gathered for a KV cache of few bits."""

from __future__ import annotations

import numpy as np
import torch

from models.errors import QuantizationError
from models.keys import KeyStatistics, tensor_names
from models.quantizers.groups import FloatArray
from models.spec import ModelSpec


class KeyMoments:
    """First moments of a block's keys and second moments of its queries, over the calibration text.

    Args:
        spec: The architecture.
        layer: Which block.
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        self.layer = layer
        self._count = 0
        heads = spec.heads_of(layer)
        self._keys = torch.zeros(heads.kv_heads, heads.dim, dtype=torch.float64)
        self._queries = torch.zeros(heads.kv_heads, heads.dim, heads.dim, dtype=torch.float64)

    def observe(self, _layer: int, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Count a batch: float32 [B, H, S, D] and [B, H_kv, S, D], rotated. See `models.oracle.KeyObserver`."""
        H_kv, D = self._keys.shape
        shared = queries.transpose(0, 1).reshape(H_kv, -1, D)  # all that meet the keys of a head
        self._queries += (shared.mT @ shared).to(torch.float64)
        self._keys += keys.sum((0, 2), dtype=torch.float64)
        self._count += keys.shape[0] * keys.shape[2]

    def statistics(self) -> KeyStatistics:
        """What was found; one batch at least was counted.

        Raises:
            QuantizationError: a key or a query is NaN or infinite.
        """
        if not (torch.isfinite(self._keys).all() and torch.isfinite(self._queries).all()):
            raise QuantizationError(
                f"the full-precision model computes NaN or infinity in the keys or queries of layers.{self.layer}; the "
                "checkpoint is damaged, or its numbers leave the range of its format"
            )
        axis = torch.linalg.eigh(self._queries).eigenvectors[..., -1]
        return KeyStatistics(_float32(self._keys / self._count), _float32(axis))

    def tensors(self) -> dict[str, FloatArray]:
        """The tensors to be stored; none without calibration text."""
        if not self._count:
            return {}
        found = self.statistics()
        return dict(zip(tensor_names(self.layer), (found.mean, found.axis), strict=True))


def _float32(x: torch.Tensor) -> FloatArray:
    return np.ascontiguousarray(x.to(torch.float32).numpy())
