"""Inner loops of the quantizers, compiled by numba: each handles a range of rows, and lets other threads run meanwhile.

Scales are rounded to the fp16 numbers they will be stored as inside the loops, so that errors are those of what is
stored. Sums may be taken in any order (`_FAST`); nothing here sees NaN, callers have looked.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]

_FAST = {"reassoc", "contract", "nsz"}
_BLOCK = 64
"""Channels whose errors are handed on to all that follow at once; a multiple of 8."""
_TILE = 256
"""Channels that receive them together: their part of the factor stays in the processor's cache."""
_SMALLEST = np.float32(2.0**-24)
_SMALLEST_NORMAL = np.float32(2.0**-14)
_INFINITE = np.float32(np.inf)


@numba.njit(nogil=True, fastmath=_FAST, inline="always")
def _half(value: Any) -> Any:
    """A positive number rounded to fp16, none below the smallest, as float32."""
    unit = _SMALLEST
    if value >= _SMALLEST_NORMAL:
        unit = np.float32(2.0) ** (np.floor(np.log2(value)) - np.float32(10))
    return max(np.rint(value / unit) * unit, _SMALLEST)


@numba.njit(nogil=True, fastmath=_FAST)
def search_groups(
    weight: FloatArray, importance: FloatArray, size: int, ratios: FloatArray, top: Any, found: tuple[Any, Any]
) -> None:
    """For every group the shrink ratio of its range whose rounding has the least weighted squared error.

    Args:
        weight: float32 [n, K], finite.
        importance: float32 [n, K], or [1, K] for all rows: what a squared error of each weight counts.
        size: Input channels that share a scale; the last group may be shorter.
        ratios: float32 [R], tried in this order; the first of equals wins.
        top: float32, the largest code.
        found: Scales (fp16 numbers) and zero-points (whole numbers), float32 [n, G] each, to be filled.
    """
    scales, zeros = found
    rows, width = weight.shape
    for n in range(rows):
        counts = importance[n if len(importance) == rows else 0]
        for group in range(scales.shape[1]):
            begin, end = group * size, min((group + 1) * size, width)
            low = high = np.float32(0)
            for k in range(begin, end):
                low, high = min(low, weight[n, k]), max(high, weight[n, k])
            least = _INFINITE
            for ratio in ratios:
                scale = _half((high - low) * (ratio / top))
                zero = min(max(np.rint(-low * ratio / scale), np.float32(0)), top)
                inverse, error = np.float32(1) / scale, np.float32(0)
                for k in range(begin, end):
                    code = min(max(np.rint(weight[n, k] * inverse), -zero), top - zero)
                    off = code * scale - weight[n, k]
                    error += off * off * counts[k]
                if error < least:
                    least, scales[n, group], zeros[n, group] = error, scale, zero


@numba.njit(nogil=True, fastmath=_FAST)
def round_groups(weight: FloatArray, size: int, top: Any, scales: FloatArray, zeros: FloatArray, codes: Any) -> None:
    """Codes uint8 [n, K] of weights float32 [n, K] by the scales and zero-points float32 [n, G] of their groups."""
    rows, width = weight.shape
    for n in range(rows):
        for group in range(scales.shape[1]):
            inverse, zero = np.float32(1) / scales[n, group], zeros[n, group]
            for k in range(group * size, min((group + 1) * size, width)):
                codes[n, k] = np.uint8(min(max(np.rint(weight[n, k] * inverse) + zero, np.float32(0)), top))


@numba.njit(nogil=True, fastmath=_FAST)
def feed_back(
    left: FloatArray, groups: Any, factor: FloatArray, top: Any, grids: tuple[FloatArray, FloatArray], codes: Any
) -> None:
    """Round channel after channel, and hand each one's error on to those that follow.

    Args:
        left: float32 [n, K], the weights with channels in the order of rounding; used up.
        groups: intp [K], the group of each of these channels.
        factor: float32 [K, K]: what an error of channel j takes off channel k > j stands at [j, k].
        top: float32, the largest code.
        grids: Scales and zero-points of the groups, float32 [n, G] each.
        codes: uint8 [n, K], to be filled, in the same order.
    """
    scales, zeros = grids
    rows, width = left.shape
    errors = np.empty((rows, _BLOCK), np.float32)
    for first in range(0, width, _BLOCK):
        last = min(first + _BLOCK, width)
        for n in range(rows):
            for j in range(first, last):
                scale, zero = scales[n, groups[j]], zeros[n, groups[j]]
                code = min(max(np.rint(left[n, j] / scale) + zero, np.float32(0)), top)
                codes[n, j] = np.uint8(code)
                error = left[n, j] - (code - zero) * scale
                errors[n, j - first] = error
                for k in range(j + 1, last):
                    left[n, k] -= error * factor[j, k]
        for begin in range(last, width, _TILE):  # where anything follows, the block is whole
            end = min(begin + _TILE, width)
            for n in range(rows):
                _hand_on(left[n, begin:end], errors[n], factor[first:last, begin:end])


@numba.njit(nogil=True, fastmath=_FAST)
def _hand_on(left: FloatArray, errors: FloatArray, factor: FloatArray) -> None:
    """Take float32 [m] = errors [_BLOCK] times factor [_BLOCK, m] off `left`, eight channels at a time."""
    for j in range(0, _BLOCK, 8):
        a, b, c, d = errors[j], errors[j + 1], errors[j + 2], errors[j + 3]
        e, f, g, h = errors[j + 4], errors[j + 5], errors[j + 6], errors[j + 7]
        for k in range(len(left)):
            low = a * factor[j, k] + b * factor[j + 1, k] + c * factor[j + 2, k] + d * factor[j + 3, k]
            high = e * factor[j + 4, k] + f * factor[j + 5, k] + g * factor[j + 6, k] + h * factor[j + 7, k]
            left[k] -= low + high


@numba.njit(nogil=True, fastmath=_FAST)
def search_rows(
    residual: FloatArray, importance: FloatArray, top: Any, grid: int, scales: FloatArray, codes: Any
) -> None:
    """For every row the symmetric scale whose rounding has the least weighted squared error, and the codes by it.

    Args:
        residual: float32 [n, K], finite.
        importance: float32 [K], what a squared error of each column counts.
        top: float32, the largest code of a sign; codes are stored with top + 1 added.
        grid: Scales tried: so many shares of the row's largest magnitude, the largest first, which wins ties.
        scales: float32 [n], fp16 numbers, to be filled.
        codes: uint8 [n, K], to be filled.
    """
    rows, width = residual.shape
    for n in range(rows):
        largest = np.float32(0)
        for k in range(width):
            largest = max(largest, abs(residual[n, k]))
        least = _INFINITE
        for point in range(grid, 0, -1):
            scale = _half(largest * np.float32(point / grid) / top)
            inverse, error = np.float32(1) / scale, np.float32(0)
            for k in range(width):
                off = min(max(np.rint(residual[n, k] * inverse), -top), top) * scale - residual[n, k]
                error += off * off * importance[k]
            if error < least:
                least, scales[n] = error, scale
        inverse = np.float32(1) / scales[n]
        for k in range(width):
            codes[n, k] = np.uint8(min(max(np.rint(residual[n, k] * inverse), -top), top) + top + np.float32(1))
