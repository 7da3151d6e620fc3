"""Round-to-nearest with clipping that minimizes the layer's output error.

As in `models.quantizers.rtn` the range of every group is shrunk by each ratio of a grid. Here a weight's squared error
counts by the second moment of its input channel, so the ratio wins whose errors move the output least, as far as errors
are independent of each other.

Source: Lin et al. 2024 (AWQ), whose code clips by the error of the output, channel by channel and group by group.
"""

from __future__ import annotations

import numpy as np

from models.quantizers.groups import FloatArray, GroupCodes, round_to_grid, search

FLOOR = np.float32(0.01)
"""Added to every channel's second moment, in units of their mean, since silent ones may be active elsewhere."""


def quantize(weight: FloatArray, bits: int, group_size: int, hessian: FloatArray) -> GroupCodes:
    """Quantize a matrix in groups along its input channels.

    Args:
        weight: float32 [N, K].
        bits: Width of a code, 2 to 8.
        group_size: Input channels that share a scale.
        hessian: float32 [K, K], second moments of the inputs; any positive multiple gives the same.

    Raises:
        QuantizationError: a weight is NaN or infinite, or a scale would leave fp16's range.
    """
    moments = np.diagonal(hessian)
    mean = moments.mean(dtype=np.float64) or 1.0
    importance = (moments / np.float32(mean) + FLOOR)[None]
    scales, zeros = search(weight, importance, bits, group_size)
    return round_to_grid(weight, scales, zeros, bits, group_size)
