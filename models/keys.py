"""Statistics of a block's rotated keys and queries, for a KV cache of few bits.

Gathered over the calibration text while a model is quantized, and stored with it. Imports neither torch nor a backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.spec import ModelSpec

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class KeyStatistics:
    """Of one block."""

    mean: Float32Array
    """float32 [H_kv, D]: the mean key of each head."""
    axis: Float32Array
    """float32 [H_kv, D], of length 1: the direction that the queries of a key-value head have most in common, the first
    eigenvector of their second moments."""


def tensor_names(layer: int) -> tuple[str, str]:
    """Names of both tensors of a block, mean and axis."""
    return f"layers.{layer}.key_mean", f"layers.{layer}.query_axis"


def tensor_shape(spec: ModelSpec, layer: int) -> tuple[int, int]:
    """Shape of both: [H_kv, D]."""
    heads = spec.heads_of(layer)
    return heads.kv_heads, heads.dim
