"""Uniform group quantization: what every asymmetric base method produces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from models.errors import QuantizationError

FloatArray = npt.NDArray[np.float32]

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

    @classmethod
    def empty(cls, shape: tuple[int, int], group_size: int) -> GroupCodes:
        """Room for the codes of a matrix (N, K), to be filled."""
        rows, groups = shape[0], -(-shape[1] // group_size)
        return cls(
            codes=np.empty(shape, np.uint8),
            scales=np.empty((rows, groups), np.float16),
            zeros=np.empty((rows, groups), np.uint8),
            group_size=group_size,
        )

    def dequantize(self) -> FloatArray:
        """Ŵ as float32 [N, K]."""
        weight = self.codes.astype(np.float32)
        for columns, groups in group_slices(weight.shape[1], self.group_size):
            part = split_groups(weight[:, columns], groups)
            part -= self.zeros[:, groups, None]
            part *= self.scales[:, groups, None].astype(np.float32)
        return weight


def group_slices(width: int, group_size: int) -> Iterator[tuple[slice, slice]]:
    """Cut K channels into a part of whole groups and the shorter last group.

    Yields:
        (channels, groups) of each part; the groups of a part are all equally long.
    """
    whole = width // group_size
    if whole:
        yield slice(0, whole * group_size), slice(0, whole)
    if width % group_size:
        yield slice(whole * group_size, width), slice(whole, whole + 1)


def split_groups(part: FloatArray, groups: slice) -> FloatArray:
    """View the channels of a part, [N, groups * g], as [N, groups, g].

    The view shares memory with `part`, also where that is a range of columns.
    """
    count = groups.stop - groups.start
    length = part.shape[1] // count
    row, item = part.strides
    return np.lib.stride_tricks.as_strided(part, (part.shape[0], count, length), (row, length * item, item))


def to_fp16_scale(scale: FloatArray) -> FloatArray:
    """Round scales to the fp16 numbers they are stored as, none below the smallest; still float32."""
    return np.maximum(scale.astype(np.float16).astype(np.float32), SMALLEST_SCALE)


def round_to_codes(values: FloatArray, scale: FloatArray, zero: FloatArray, bits: int, out: FloatArray) -> FloatArray:
    """Codes minus zero-points of `values`, into `out`; scales and zero-points are broadcast."""
    np.multiply(values, 1 / scale, out=out)
    np.rint(out, out=out)
    np.maximum(out, -zero, out=out)
    np.minimum(out, 2**bits - 1 - zero, out=out)
    return out


def shrunk(low: FloatArray, high: FloatArray, ratio: float, bits: int) -> tuple[FloatArray, FloatArray]:
    """Scales (fp16 numbers) and zero-points (whole numbers) of the range [low, high] times `ratio`, float32."""
    top = 2**bits - 1
    scale = to_fp16_scale((high - low) * np.float32(ratio / top))
    return scale, np.clip(np.rint(low * np.float32(-ratio) / scale), 0, top)


def check_range(low: FloatArray, high: FloatArray, bits: int) -> None:
    """Refuse what fp16 scales cannot span.

    Raises:
        QuantizationError: a weight is NaN or infinite, or a scale would leave fp16's range.
    """
    span = (high.astype(np.float64) - low).max(initial=0.0)
    if not np.isfinite(span):
        raise QuantizationError("the weights hold NaN or infinity; the checkpoint is damaged")
    if span / (2**bits - 1) > LARGEST_SCALE:
        raise QuantizationError(f"weights spread over {span:.3g}, too far for fp16 scales")
