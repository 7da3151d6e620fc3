"""Rounding to nearest with the clipping that changes the layer's output least.

As in `models.quantizers.rtn` the range of every group is shrunk by each ratio of a grid, and errors are those of the
fp16 scale and whole zero-point that will be stored. Here the ratio wins whose rounding errors e move the output least:
the smallest e H eᵀ, H being the second moments of the group's input channels. What errors in different groups do
together is left out, so every group is found by itself.

Source: Lin et al. 2024 (AWQ), whose code clips by the error of the output, channel by channel and group by group.
"""

from __future__ import annotations

import numpy as np

from models.quantizers.groups import (
    FloatArray,
    GroupCodes,
    check_range,
    group_slices,
    round_to_codes,
    shrunk,
    split_groups,
)
from models.quantizers.rows import each_chunk
from models.quantizers.rtn import RATIOS

DAMPING = np.float32(0.01)
"""Added to the diagonal of H, in units of its mean in the group."""


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
    rows, width = weight.shape
    result = GroupCodes.empty((rows, width), group_size)
    parts = [
        (columns, groups, _blocks(hessian, columns, groups)) for columns, groups in group_slices(width, group_size)
    ]

    def work(chunk: slice) -> None:
        for columns, groups, blocks in parts:
            values = np.ascontiguousarray(split_groups(weight[chunk, columns], groups).transpose(1, 0, 2))
            scales, zeros = search(values, blocks, bits)
            codes = round_to_codes(values, scales, zeros, bits, np.empty_like(values))
            codes += zeros
            result.codes[chunk, columns] = codes.transpose(1, 0, 2).reshape(values.shape[1], -1)
            result.scales[chunk, groups] = scales[..., 0].T
            result.zeros[chunk, groups] = zeros[..., 0].T

    each_chunk(rows, width, work)
    return result


def search(values: FloatArray, blocks: FloatArray, bits: int) -> tuple[FloatArray, FloatArray]:
    """Find scale and zero-point of every group.

    Args:
        values: float32 [G, n, g], n rows of each group.
        blocks: float32 [G, g, g], second moments of each group's inputs.
        bits: Width of a code.

    Returns:
        Scales and zero-points, float32 [G, n, 1]: scales are fp16 numbers, zero-points whole numbers in [0, 2^bits).

    Raises:
        QuantizationError: a weight is NaN or infinite, or a scale would leave fp16's range.
    """
    low = np.minimum(values.min(2, keepdims=True), 0)
    high = np.maximum(values.max(2, keepdims=True), 0)
    check_range(low, high, bits)
    best_scale, best_zero = np.empty_like(low), np.empty_like(low)
    best_error = np.full_like(low, np.inf)
    trial = np.empty_like(values)
    for ratio in RATIOS:
        scale, zero = shrunk(low, high, ratio, bits)
        round_to_codes(values, scale, zero, bits, trial)
        trial *= scale
        trial -= values
        moved = trial @ blocks
        moved *= trial
        error = moved.sum(2, keepdims=True)
        better = error < best_error
        best_error[better] = error[better]
        best_scale[better] = scale[better]
        best_zero[better] = zero[better]
    return best_scale, best_zero


def _blocks(hessian: FloatArray, columns: slice, groups: slice) -> FloatArray:
    """Second moments inside each group of a part, damped, in units of their mean. float32 [G, g, g]."""
    length = (columns.stop - columns.start) // (groups.stop - groups.start)
    ranges = [slice(start, start + length) for start in range(columns.start, columns.stop, length)]
    blocks = np.stack([hessian[channels, channels] for channels in ranges])
    mean = np.einsum("gii->g", blocks) / length
    blocks /= np.where(mean > 0, mean, 1)[:, None, None]
    blocks += DAMPING * np.eye(length, dtype=np.float32)
    return blocks
