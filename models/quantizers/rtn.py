"""Round-to-nearest with clip search: the plainest base quantizer.

For every group the range [min(w, 0), max(w, 0)] is shrunk by each ratio of a grid; the ratio with the smallest squared
error wins. Errors are measured with the scale as it will be stored, rounded to fp16, and with an integer zero-point.
The squared error of a weight counts 4 m + w² times, m being the mean of w² in its group: without that, clipping large
weights costs small models more than the rounding it saves (at 4 bits the loss was above that of plain rounding).
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

RATIOS = tuple(1.0 - 0.025 * step for step in range(24))
"""Shrink ratios tried, 1 down to 0.425."""
BASE_IMPORTANCE = np.float32(4)
"""What an error at a weight of zero counts, in units of the group's mean square."""


def quantize(weight: FloatArray, bits: int, group_size: int, ratios: tuple[float, ...] = RATIOS) -> GroupCodes:
    """Quantize a matrix in groups along its input channels.

    Args:
        weight: float32 [N, K].
        bits: width of a code, 2 to 8.
        group_size: input channels that share a scale.
        ratios: Shrink ratios to try.

    Raises:
        QuantizationError: a weight is NaN or infinite, or a scale would leave fp16's range.
    """
    rows, width = weight.shape
    result = GroupCodes.empty(weight.shape, group_size)

    def work(chunk: slice) -> None:
        for columns, groups in group_slices(width, group_size):
            # Groups as columns: every operation then runs over long contiguous rows.
            values = split_groups(weight[chunk, columns], groups)
            shape = values.shape
            part = np.ascontiguousarray(values.reshape(-1, shape[2]).T)
            scales, zeros = search(part, bits, ratios)
            codes = round_to_codes(part, scales, zeros, bits, np.empty_like(part))
            codes += zeros
            result.codes[chunk, columns] = codes.T.reshape(shape[0], -1)
            result.scales[chunk, groups] = scales.reshape(shape[:2])
            result.zeros[chunk, groups] = zeros.reshape(shape[:2])

    each_chunk(rows, width, work)
    return result


def search(groups: FloatArray, bits: int, ratios: tuple[float, ...] = RATIOS) -> tuple[FloatArray, FloatArray]:
    """Find scale and zero-point of every group.

    Args:
        groups: float32 [g, n], a group in each column.
        bits: width of a code.
        ratios: Shrink ratios to try.

    Returns:
        Scales and zero-points, float32 [n]: scales are fp16 numbers, zero-points whole numbers in [0, 2^bits).

    Raises:
        QuantizationError: a weight is NaN or infinite, or a scale would leave fp16's range.
    """
    low, high = np.minimum(groups.min(0), 0), np.maximum(groups.max(0), 0)
    check_range(low, high, bits)
    best_scale, best_zero = np.empty_like(low), np.empty_like(low)
    best_error = np.full_like(low, np.inf)
    trial = np.empty_like(groups)
    importance = groups * groups
    importance += BASE_IMPORTANCE * importance.mean(0)
    for ratio in ratios:
        scale, zero = shrunk(low, high, ratio, bits)
        round_to_codes(groups, scale, zero, bits, trial)
        trial *= scale
        trial -= groups
        trial *= trial
        trial *= importance
        error = trial.sum(0)
        better = error < best_error
        best_error[better] = error[better]
        best_scale[better] = scale[better]
        best_zero[better] = zero[better]
    return best_scale, best_zero
