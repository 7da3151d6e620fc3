"""Progressive group quantization: 8 bits for each output channel, then 4 bits for each group of those whole numbers.

First an output channel is rounded to whole numbers within ±119 by a scale in half precision. Groups of these whole
numbers are then rounded to 4 bits with a whole scale s (1 to 16) and a whole zero-point z (0 to 15). What the codes
stand for, (code - z) · s, is a whole number again and never leaves INT8: it is at most half a scale, 8, further from
zero than what it stands for. So products with INT8 activations can be summed in whole numbers; and since code · s is at
most 240, a kernel may multiply first and subtract z · s after that, several bytes in one register.

Where a group is a whole output channel there is one level alone: 4 bits, a scale in half precision and a zero-point.

Source: QServe §3.1, equations 1 and 2, Fig. 6 (protective range); §4.2.2 (subtraction after multiplication); App. B.2.4
for the grid search of clipping by the error of a layer's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from models.quantizers.groups import FloatArray, GroupCodes, check_range, to_fp16_scale

PROTECTIVE = 119
"""Largest magnitude of the first level: half of the largest scale, 8, less than INT8 has."""
TOP = 15
"""Largest code."""
LARGEST_GROUP_SCALE = 16
"""The largest scale of the second level: that of a group which spans -119 to 119."""
CLIPS = tuple(1.0 - 0.05 * step for step in range(11))
"""Shares of a group's range that are tried, 1 down to 0.5."""
_WEIGHTS = 1 << 21
"""Weights whose rounding errors are looked at together."""
_FLOOR = np.float32(0.01)
"""Added to the second moments' diagonal, in units of its mean: silent in the calibration text is not silent."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressiveCodes:
    """Ŵ[n, k] = (codes[n, k] - zeros[n, g]) * group_scales[n, g] * scales[n, 0] with g = k // group_size."""

    codes: Bytes
    """uint8 [N, K], each below 16."""
    scales: npt.NDArray[np.float16]
    """float16 [N, 1], positive."""
    group_scales: Bytes
    """uint8 [N, G], from 1 to 16."""
    zeros: Bytes
    """uint8 [N, G], each below 16."""
    group_size: int
    """Input channels that share a group scale; the last group may be shorter."""

    def integers(self) -> npt.NDArray[np.int32]:
        """The integers between the levels, int32 [N, K]."""
        width = self.codes.shape[1]
        scales, zeros = (
            np.repeat(values.astype(np.int32), self.group_size, axis=1)[:, :width]
            for values in (self.group_scales, self.zeros)
        )
        return (self.codes.astype(np.int32) - zeros) * scales

    def dequantize(self) -> FloatArray:
        """Ŵ as float32 [N, K]."""
        return self.integers().astype(np.float32) * self.scales.astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The settings of the rounding."""

    two_levels: bool = True
    """Whether there are groups; else one scale in half precision and one zero-point for each output channel."""
    clip: bool = True
    """Whether ranges are clipped so that the output's error, each group taken alone, is least."""
    clips: FloatArray | None = None
    """float32 [N], the share of its range that each row keeps; NaN where `clip` decides. None: it does everywhere."""

    def part(self, rows: slice) -> Rounding:
        return self if self.clips is None else replace(self, clips=self.clips[rows])


def quantize(
    weight: FloatArray, group_size: int, hessian: FloatArray | None, rounding: Rounding
) -> ProgressiveCodes | GroupCodes:
    """Quantize a matrix.

    Args:
        weight: float32 [N, K].
        group_size: Input channels that share a group scale; K or more where there is one level.
        hessian: float32 [K, K], second moments of the inputs, by which the output's error is judged; None: by the
            errors of weights.
        rounding: Levels and clipping.

    Returns:
        Two levels, or one.

    Raises:
        QuantizationError: a weight is NaN or infinite, or out of range.
        ValueError: one level, and groups narrower than the matrix.
    """
    if not rounding.two_levels and group_size < weight.shape[1]:
        raise ValueError(f"one level needs groups of {weight.shape[1]} or more channels, not {group_size}")
    check_range(weight, 4)
    rows, width = weight.shape
    step = max(1, _WEIGHTS // max(1, width))
    parts = [slice(start, min(start + step, rows)) for start in range(0, rows, step)] or [slice(0, 0)]
    moments = None if hessian is None or not rounding.clip else _damped(hessian)
    found = [_rows(weight[part], group_size, moments, rounding.part(part)) for part in parts]
    codes, scales, zeros, tops = (np.concatenate(columns) for columns in zip(*found, strict=True))
    if not rounding.two_levels:
        return GroupCodes(codes=codes, scales=tops.astype(np.float16), zeros=zeros, group_size=group_size)
    return ProgressiveCodes(
        codes=codes, scales=tops.astype(np.float16), group_scales=scales, zeros=zeros, group_size=group_size
    )


def _damped(hessian: FloatArray) -> FloatArray:
    moments = hessian.copy()
    moments[np.diag_indices_from(moments)] += _FLOOR * (np.diagonal(hessian).mean(dtype=np.float64) or 1.0)
    return moments


def _rows(
    weight: FloatArray, group_size: int, hessian: FloatArray | None, rounding: Rounding
) -> tuple[Bytes, Bytes, Bytes, FloatArray]:
    """Codes [n, K], group scales and zeros [n, G], and the first level's scales float32 [n, 1], of some rows."""
    rows, width = weight.shape
    two, clips = rounding.two_levels, rounding.clips
    tops, values = _first_level(weight) if two else (np.ones((rows, 1), np.float32), weight)
    groups = -(-width // group_size)
    codes, scales, zeros = (np.zeros(shape, np.uint8) for shape in ((rows, width), (rows, groups), (rows, groups)))
    for g in range(groups):
        own = slice(g * group_size, min((g + 1) * group_size, width))
        part = values[:, own]
        target = weight[:, own] / tops
        moments = None if hessian is None else hessian[own, own]
        least = np.full(rows, np.inf, np.float32)
        for ratio in _ratios(rounding, rows):
            scale, zero = _grid(part, ratio, whole=two)
            code = np.clip(np.rint(part / scale) + zero, 0, TOP)
            error = (code - zero) * scale - target
            loss = np.einsum("nk,nk->n", error, error) if moments is None else _loss(error, moments)
            better = loss < least
            if clips is not None:  # what a row is told comes first, and nothing is better
                better &= np.isnan(clips) | np.isinf(least)
            least[better] = loss[better]
            codes[better, own] = code[better].astype(np.uint8)
            zeros[better, g] = zero[better, 0].astype(np.uint8)
            if two:
                scales[better, g] = scale[better, 0].astype(np.uint8)
            else:
                tops[better] = scale[better]
    return codes, scales, zeros, tops


def _ratios(rounding: Rounding, rows: int) -> Iterator[FloatArray]:
    """Shares of the range to try, float32 [n, 1] each; what a row is told to keep first."""
    if rounding.clips is not None:
        yield np.where(np.isnan(rounding.clips), np.float32(1), rounding.clips)[:, None].astype(np.float32)
    for ratio in CLIPS if rounding.clip else CLIPS[:1]:
        yield np.full((rows, 1), ratio, np.float32)


def _loss(error: FloatArray, moments: FloatArray) -> FloatArray:
    """eᵀ H e of each row."""
    import torch

    rows = torch.from_numpy(np.ascontiguousarray(error))
    loss: FloatArray = torch.einsum("nk,nk->n", rows @ torch.from_numpy(np.ascontiguousarray(moments)), rows).numpy()
    return loss


def _first_level(weight: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Scales float32 [n, 1] that fp16 holds, and whole numbers float32 [n, K] within `PROTECTIVE`."""
    scale = to_fp16_scale(np.abs(weight).max(1, initial=0.0, keepdims=True) / np.float32(PROTECTIVE))
    return scale, np.clip(np.rint(weight / scale), -PROTECTIVE, PROTECTIVE)


def _grid(part: FloatArray, ratio: FloatArray, *, whole: bool) -> tuple[FloatArray, FloatArray]:
    """Scale and zero-point float32 [n, 1] of a group [n, g] whose range, with 0 in it, is cut to a share."""
    low = np.minimum(part.min(1, initial=0.0, keepdims=True), 0) * ratio
    high = np.maximum(part.max(1, initial=0.0, keepdims=True), 0) * ratio
    scale = (high - low) / np.float32(TOP)
    scale = np.maximum(np.rint(scale), np.float32(1)) if whole else to_fp16_scale(scale)
    return scale, np.clip(np.rint(-low / scale), 0, TOP)
