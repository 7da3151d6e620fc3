"""Inner loops of the quantizers, compiled by numba: each handles a range of rows, and lets other threads run meanwhile.

Scales are rounded to the fp16 numbers they will be stored as inside the loops, so that errors are those of what is
stored. Sums may be taken in any order (`_FAST`); nothing here sees NaN, callers have looked.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from models.trellis import STATE_BITS

FloatArray = npt.NDArray[np.float32]

_FAST = {"reassoc", "contract", "nsz", "nnan"}
_STRIP = 64
"""Rows that are rounded together: a block of their channels stays in the processor's cache."""
_SMALLEST = np.float32(2.0**-24)
_SMALLEST_NORMAL = np.float32(2.0**-14)
_INFINITE = np.float32(np.inf)


@numba.njit(nogil=True)
def _half(value: Any) -> Any:
    """A positive float32 rounded to fp16, ties to even and none below the smallest, as float32."""
    if value < _SMALLEST_NORMAL:
        return max(np.rint(value / _SMALLEST) * _SMALLEST, _SMALLEST)
    word = np.float32(value).view(np.int32)  # 13 bits of the fraction go
    return np.int32((word + np.int32(0xFFF) + ((word >> 13) & 1)) & np.int32(-0x2000)).view(np.float32)


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
def restore_groups(codes: Any, size: int, scales: Any, zeros: Any, weight: FloatArray) -> None:
    """Weights float32 [n, K] of codes uint8 [n, K], by their groups' scales float32 and zero-points uint8 [n, G]."""
    rows, width = codes.shape
    for n in range(rows):
        for group in range(scales.shape[1]):
            scale, zero = scales[n, group], np.int32(zeros[n, group])
            for k in range(group * size, min((group + 1) * size, width)):
                weight[n, k] = np.float32(np.int32(codes[n, k]) - zero) * scale


@numba.njit(nogil=True, fastmath=_FAST)
def feed_back(left: FloatArray, groups: Any, factor: FloatArray, top: Any, grids: tuple[Any, Any], found: Any) -> None:
    """Round a block's channels one after the other, and hand each one's error on to those of the block that follow.

    Rows of the matrix lie beside each other, so that many are rounded in one instruction. A strip of them is copied:
    channels of a whole matrix are so far apart that they displace each other in the processor's cache.

    Args:
        left: float32 [B, n], the weights of n rows with channels in the order of rounding.
        groups: intp [B], the group of each of these channels.
        factor: float32 [B, B]: what an error of channel j takes off channel k > j stands at [j, k].
        top: float32, the largest code.
        grids: Scales and zero-points of the groups, float32 [G, n] each.
        found: Codes uint8 and errors float32, [B, n] each, to be filled.
    """
    scales, zeros = grids
    codes, errors = found
    channels, rows = left.shape
    own = np.empty((channels, _STRIP), np.float32)
    for begin in range(0, rows, _STRIP):
        count = min(_STRIP, rows - begin)
        for j in range(channels):
            for n in range(count):
                own[j, n] = left[j, begin + n]
        for j in range(channels):
            group = groups[j]
            for n in range(count):
                scale, zero = scales[group, begin + n], zeros[group, begin + n]
                code = min(max(np.rint(own[j, n] / scale) + zero, np.float32(0)), top)
                codes[j, begin + n] = np.uint8(code)
                own[j, n] -= (code - zero) * scale  # its error, from here on
            for k in range(j + 1, channels):
                share = factor[j, k]
                for n in range(count):
                    own[k, n] -= own[j, n] * share
        for j in range(channels):
            for n in range(count):
                errors[j, begin + n] = own[j, n]


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


_LANES = 16
"""Rows whose paths are searched together, one in each lane of a vector."""
_STATES = 1 << STATE_BITS


def _trellis_step(bits: int) -> Any:
    """One channel of `search_trellis`: from the costs before it, those behind it and the best state before each."""
    branches, groups = 1 << bits, _STATES >> bits

    @numba.njit(nogil=True, fastmath=_FAST)
    def step(before: Any, cost: Any, back: Any, x: Any, count: Any, levels: Any) -> None:
        for group in range(groups):
            for n in range(_LANES):
                least, chosen = before[group * _LANES + n], np.float32(0)
                for branch in range(1, branches):
                    other = before[(branch * groups + group) * _LANES + n]
                    chosen = np.float32(branch) if other < least else chosen
                    least = other if other < least else least
                back[group * _LANES + n] = np.uint8(chosen)
                for branch in range(branches):
                    off = x[n] - levels[group * branches + branch]
                    cost[(group * branches + branch) * _LANES + n] = least + count * off * off

    return step


@numba.njit(nogil=True, fastmath=_FAST)
def _cheapest(cost: Any, states: Any) -> None:
    """The state of least cost in every lane, as float32."""
    for n in range(_LANES):
        least, state = cost[n], np.float32(0)
        for other in range(1, _STATES):
            value = cost[other * _LANES + n]
            state = np.float32(other) if value < least else state
            least = value if value < least else least
        states[n] = state


def _trellis_search(bits: int) -> Any:
    step, branches, groups = _trellis_step(bits), 1 << bits, _STATES >> bits

    @numba.njit(nogil=True, fastmath=_FAST)
    def search(
        left: FloatArray, factor: FloatArray, counts: FloatArray, levels: FloatArray, sizes: Any, ends: Any, found: Any
    ) -> None:
        codes, errors = found
        block, ahead = sizes
        reach, rows = left.shape
        channels = len(codes)
        cost, before = np.empty(_STATES * _LANES, np.float32), np.empty(_STATES * _LANES, np.float32)
        back = np.empty((block + ahead, groups * _LANES), np.uint8)
        own = np.zeros((reach, _LANES), np.float32)  # the strip's channels; behind the search, their errors
        states, ends_here = np.zeros(_LANES, np.int64), np.zeros(_LANES, np.float32)
        for begin in range(0, rows, _LANES):
            count = min(_LANES, rows - begin)
            for k in range(reach):
                for n in range(count):
                    own[k, n] = left[k, begin + n]
            for n in range(count):
                states[n] = ends[begin + n]
            for first in range(0, channels, block):
                stop, seen = min(first + block, channels), min(first + block + ahead, reach)
                cost[:] = np.float32(1e30)
                for n in range(_LANES):
                    cost[states[n] * _LANES + n] = 0
                for k in range(first, seen):
                    before, cost = cost, before
                    step(before, cost, back[k - first], own[k], counts[k], levels)
                _cheapest(cost, ends_here)
                for n in range(count):
                    state = np.int64(ends_here[n])
                    for k in range(seen - 1, first - 1, -1):
                        if k < stop:
                            codes[k, begin + n] = np.uint8(state & (branches - 1))
                            own[k, n] -= levels[state]
                        if k == stop - 1:
                            states[n] = state
                        group = state >> bits
                        state = np.int64(back[k - first, group * _LANES + n]) * groups + group
                for k in range(first, stop):
                    for later in range(k + 1, reach):
                        share = factor[k, later]
                        for n in range(_LANES):
                            own[later, n] -= own[k, n] * share
            for n in range(count):
                ends[begin + n] = np.uint8(states[n])
                for k in range(channels):
                    errors[k, begin + n] = own[k, n]

    return search


search_trellis = {bits: _trellis_search(bits) for bits in (2, 3, 4)}
"""By the bits of a code: Viterbi's search for the path of least weighted squared error, of many rows side by side, a
block of channels after the other, each of whose errors is handed on to those that follow.

Within a block, a channel's error is what is left of it once the channels before it have handed theirs on.

Args: left float32 [A, n], what each of n rows is to reach, channel after channel; factor float32 [B, A], what an error
of channel j takes off channel k > j at [j, k]; counts float32 [A], what a squared error of each channel counts; levels
float32 [256] of the states, of which each is the one before shifted left, and the code; sizes: the channels of a block,
and those that the search looks at further; ends uint8 [n], the states before the first channel, replaced by those
behind the last one found; and, to be filled, codes uint8 and errors float32, [B, n] each, of the first B <= A channels.
"""
