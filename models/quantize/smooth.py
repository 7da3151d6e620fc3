"""SmoothAttention: smoothed key channels, which lose less in a low-bit KV cache.

Keys tend to have a few channels much larger than the rest, always the same ones. Where a token's key shares one scale
over its channels, these take the range and the others are rounded away. So every channel of the keys is divided by
the root of its largest magnitude and the queries' channel, which is not quantized, multiplied by it: their product
stays the same.

Source: QServe §3.2, equations 3 to 5.
"""

from __future__ import annotations

import numpy as np

from models.errors import QuantizationError
from models.quantize.working import WorkingBlock
from models.quantizers.groups import FloatArray
from models.spec import ModelSpec

ALPHA = 0.5
"""Power of a channel's magnitude that its keys are divided by."""
SMALLEST_SHARE = 1e-3
"""Minimum of a channel's magnitude in units of its head's largest, since a channel that is silent in the calibration
text may not be silent in others."""


def smooth_attention(working: WorkingBlock, magnitude: FloatArray) -> None:
    """Smooth the keys of a block.

    Args:
        working: The block; changed in place.
        magnitude: float32 [H_kv, D], the largest magnitude of each channel of the rotated keys in the calibration text.

    Raises:
        QuantizationError: a magnitude is NaN or infinite.
    """
    if not np.isfinite(magnitude).all():
        raise QuantizationError(
            f"the full-precision model computes NaN or infinity in the keys of layers.{working.layer}; the checkpoint "
            "is damaged, or its numbers leave the range of its format"
        )
    working.scale_keys(smoothing(working.spec, magnitude))


def smoothing(spec: ModelSpec, magnitude: FloatArray) -> FloatArray:
    """Divisors of the key channels.

    Channels that rotate together get the same, so that scaling and rotation can change places; so do heads, where all
    share the weight of a norm. The largest times the smallest of a head is 1: the largest magnitude
    of keys does not grow, that of queries by less than 6 times.

    Args:
        spec: The architecture.
        magnitude: float32 [H_kv, D], finite, not negative.

    Returns:
        float32 [H_kv, D], positive; ones in a head whose keys are all zero.
    """
    paired = magnitude.astype(np.float64)
    for half in {rope.rotary_dim // 2 for rope in spec.ropes}:
        paired[:, :half] = paired[:, half : 2 * half] = np.maximum(paired[:, :half], paired[:, half : 2 * half])
    if spec.qk_norm and spec.qk_norm_form != "all":
        paired[:] = paired.max(0)
    largest = paired.max(1, keepdims=True)
    share = np.maximum(paired / np.where(largest > 0, largest, 1), SMALLEST_SHARE)  # at most 1
    scales = share**ALPHA
    scales /= np.sqrt(scales.max(1, keepdims=True) * scales.min(1, keepdims=True))
    return scales.astype(np.float32)
