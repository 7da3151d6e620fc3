"""Uniform group quantization, the result of every asymmetric base method, and the search for its scales.

The range of every group is shrunk by each ratio of a grid. In `rtn` the ratio wins whose squared errors, weighted by
the size of the weights (`by_size`), are the least. In `clipped` a weight's squared error counts by the second moment of
its input channel, so the ratio wins whose errors move the output least, as far as errors are independent of each other.

Weights that are NaN or infinite, or that no scale of half precision spans, are refused by a QuantizationError.

Source: Lin et al. 2024 (AWQ), whose code clips by the error of the output, channel by channel and group by group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.errors import QuantizationError
from models.threads import each_chunk

FloatArray = npt.NDArray[np.float32]

RATIOS = tuple(1.0 - 0.025 * step for step in range(24))
"""Shrink ratios of a group's range that are tried, 1 down to 0.425."""
SMALLEST_SCALE = np.float32(2.0**-24)
"""The smallest positive fp16 number: the scale of a group that is all zeros, so that nothing divides by zero."""
LARGEST_SCALE = float(np.finfo(np.float16).max)
"""The largest fp16 number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCodes:
    """Ŵ[n, k] = (codes[n, k] - zeros[n, g]) * scales[n, g] with g = k // group_size; the last group may be shorter."""

    codes: npt.NDArray[np.uint8]
    """uint8 [N, K], each below 2^bits."""
    scales: npt.NDArray[np.float16]
    """float16 [N, G], positive."""
    zeros: npt.NDArray[np.uint8]
    """uint8 [N, G], integer zero-points below 2^bits."""
    group_size: int
    """Input channels that share a scale."""

    def dequantize(self) -> FloatArray:
        """Ŵ as float32 [N, K]."""
        from models.quantizers.compiled import restore_groups

        weight = np.empty(self.codes.shape, np.float32)
        restore_groups(self.codes, self.group_size, self.scales.astype(np.float32), self.zeros, weight)
        return weight


def search(
    weight: FloatArray, importance: FloatArray | None, bits: int, group_size: int, ratios: tuple[float, ...] = RATIOS
) -> tuple[FloatArray, FloatArray]:
    """Find scale and zero-point of every group: those of the shrink ratio with the least weighted squared error.

    The range of a group is that of its weights and 0. Errors are those of the scale as it will be stored, rounded to
    fp16, and of a whole zero-point.

    Args:
        weight: float32 [N, K].
        importance: float32 [N, K], or [1, K] for all rows: what a squared error of each weight counts; None: `by_size`.
        bits: Width of a code, 2 to 8.
        group_size: Input channels that share a scale.
        ratios: Shrink ratios to try; the first of equals wins.

    Returns:
        Scales and zero-points, float32 [N, G]: scales are fp16 numbers, zero-points whole numbers in [0, 2^bits).
    """
    from models.quantizers.compiled import search_groups

    rows, width = weight.shape
    scales = np.ones((rows, -(-width // group_size)), np.float32)
    zeros = np.zeros_like(scales)
    tried, top = np.array(ratios, np.float32), np.float32(2**bits - 1)

    def work(chunk: slice) -> None:
        part = np.ascontiguousarray(weight[chunk])
        check_range(part, bits)
        if importance is None:
            counts = by_size(part, group_size)
        else:
            counts = importance if len(importance) == 1 else importance[chunk]
        search_groups(part, np.ascontiguousarray(counts), group_size, tried, top, (scales[chunk], zeros[chunk]))

    each_chunk(rows, width, work)
    return scales, zeros


def round_to_grid(weight: FloatArray, scales: FloatArray, zeros: FloatArray, bits: int, group_size: int) -> GroupCodes:
    """The nearest codes of weights float32 [N, K], by what `search` found for their groups."""
    from models.quantizers.compiled import round_groups

    codes = np.empty(weight.shape, np.uint8)

    def work(chunk: slice) -> None:
        top = np.float32(2**bits - 1)
        round_groups(np.ascontiguousarray(weight[chunk]), group_size, top, scales[chunk], zeros[chunk], codes[chunk])

    each_chunk(weight.shape[0], weight.shape[1], work)
    return stored(codes, scales, zeros, group_size)


def stored(codes: npt.NDArray[np.uint8], scales: FloatArray, zeros: FloatArray, group_size: int) -> GroupCodes:
    """Codes with the scales and zero-points that `search` found, as they are kept."""
    return GroupCodes(
        codes=codes, scales=scales.astype(np.float16), zeros=zeros.astype(np.uint8), group_size=group_size
    )


def by_size(weight: FloatArray, group_size: int) -> FloatArray:
    """Importance of weights float32 [N, K] by their size: 4 m + w², m being the mean of w² in the group.

    Without that, clipping large weights costs small models more than the rounding it saves (at 4 bits the loss was
    above that of plain rounding).
    """
    importance = np.square(weight)
    for start in range(0, weight.shape[1], group_size):
        part = importance[:, start : start + group_size]
        part += BASE_IMPORTANCE * part.mean(1, keepdims=True)
    return importance


BASE_IMPORTANCE = np.float32(4)
"""Importance of an error at a weight of zero, in units of the group's mean square."""


def to_fp16_scale(scale: FloatArray) -> FloatArray:
    """Round scales to the fp16 numbers they are stored as, none below the smallest; still float32."""
    return np.maximum(scale.astype(np.float16).astype(np.float32), SMALLEST_SCALE)


def check_range(weight: FloatArray, bits: int) -> None:
    """Refuse what fp16 scales cannot span."""
    span = float(weight.max(initial=0.0)) - float(weight.min(initial=0.0))
    if not np.isfinite(span):
        raise QuantizationError("the weights hold NaN or infinity; the checkpoint is damaged")
    if span / (2**bits - 1) > LARGEST_SCALE:
        raise QuantizationError(f"weights spread over {span:.3g}, too far for fp16 scales")


def rtn(weight: FloatArray, bits: int, group_size: int, ratios: tuple[float, ...] = RATIOS) -> GroupCodes:
    """Quantize a matrix in groups along its input channels.

    Args:
        weight: float32 [N, K].
        bits: Width of a code, 2 to 8.
        group_size: Input channels that share a scale.
        ratios: Shrink ratios to try.
    """
    scales, zeros = search(weight, None, bits, group_size, ratios)
    return round_to_grid(weight, scales, zeros, bits, group_size)


FLOOR = np.float32(0.01)
"""Added to every channel's second moment, in units of their mean, since silent ones may be active elsewhere."""


def clipped(weight: FloatArray, bits: int, group_size: int, hessian: FloatArray) -> GroupCodes:
    """Quantize a matrix in groups along its input channels.

    Args:
        weight: float32 [N, K].
        bits: Width of a code, 2 to 8.
        group_size: Input channels that share a scale.
        hessian: float32 [K, K], second moments of the inputs; any positive multiple gives the same.
    """
    moments = np.diagonal(hessian)
    mean = moments.mean(dtype=np.float64) or 1.0
    importance = (moments / np.float32(mean) + FLOOR)[None]
    scales, zeros = search(weight, importance, bits, group_size)
    return round_to_grid(weight, scales, zeros, bits, group_size)
