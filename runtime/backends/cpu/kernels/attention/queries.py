"""Queries as INT8, and scores from their integer products with a page's keys.

Beside its codes, each query has a block of `NOTED` bytes: floats at the indices below, then sums of sixteen lanes each,
which are only reduced at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba

from runtime.backends.cpu.kernels.attention.run import LOWEST, Queries
from runtime.backends.cpu.machine.codes import larger, largest_lane, store_bytes
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    absolute,
    add,
    fill,
    fma,
    get_float,
    keep_lanes,
    load_floats,
    load_halves,
    mul,
    rounded,
    set_float,
    store_floats,
    sum_lanes,
    zero_floats,
)
from runtime.backends.cpu.scratch import NOTED

SCALE, OFFSET, SUM, LARGEST, STEP, CHANGE = 0, 4, 8, 12, 16, 20
"""Scale of the query's codes; what all its scores get; its sum; its largest score in the page; scale of its weights'
codes; what its sums were multiplied by when its maximum rose."""
TOTAL, BESIDES, APART = 64, 128, 192
"""Sums of weights; of what every channel gets; of what the channels of a group get where there are several groups."""
_SMALLEST = 1.1754944e-38


class Factors(NamedTuple):
    """Scales and zeros in float32: one of each for a token, or for a channel."""

    scales: int
    """Address; 0 where there are none."""
    zeros: int
    """Address."""


@kernel
def step_of(top: float, planes: int) -> Any:
    """Scale, and its inverse, of codes in `planes` planes whose largest magnitude is `top`."""
    step = numba.float32(top / numba.float32(127.0 if planes == 1 else 16256.0))
    inverse = numba.float32(0.0)
    if step > numba.float32(_SMALLEST):
        inverse = numba.float32(numba.float32(1.0) / step)
    return step, inverse


@kernel
def copy_queries(queries: Queries, padded: int, out: int, noted: int) -> None:
    """Copy the query heads of a run to float32 [rows * heads, padded], zero-padded, with cleared blocks."""
    dim, heads = queries.dim, queries.heads
    for n in range(queries.rows * heads):
        source, to = queries.at + n // heads * queries.stride + 4 * dim * (n % heads), out + 4 * padded * n
        d = 0
        while d + 16 <= dim:
            store_floats(to + 4 * d, load_floats(source + 4 * d))
            d += 16
        for i in range(d, dim):
            set_float(to + 4 * i, get_float(source + 4 * i))
        for i in range(dim, padded):
            set_float(to + 4 * i, numba.float32(0.0))
        store_floats(noted + NOTED * n + TOTAL, zero_floats())
        store_floats(noted + NOTED * n + BESIDES, zero_floats())


@kernel
def widen(halves: int, count: int, valid: int, factor: float, out: int) -> None:
    """Convert halves to floats, times a factor; 0 after the first `valid`."""
    for t in range(0, count, 16):
        store_floats(out + 4 * t, mul(load_halves(halves + 2 * t), fill(numba.float32(factor))))
    for t in range(valid, count):
        set_float(out + 4 * t, numba.float32(0.0))


@kernel
def widen_shifted(halves: int, scales: int, count: int, valid: int, shift: float, out: int) -> None:
    """Convert zeros to floats, plus the scales times a number; 0 after the first `valid`."""
    for t in range(0, count, 16):
        scale = load_halves(scales + 2 * t)
        store_floats(out + 4 * t, fma(scale, fill(numba.float32(shift)), load_halves(halves + 2 * t)))
    for t in range(valid, count):
        set_float(out + 4 * t, numba.float32(0.0))


@kernel
def quantize_query(
    q: int, padded: int, channels: Factors, planes: int, centre: float, codes: int, noted: int, folded: int
) -> None:
    """Round a query to INT8, times the scales of the channels where there are any.

    Args:
        q: Address of float32 [padded].
        padded: D padded to 32.
        channels: Scales and zeros of the channels, if they have any.
        planes: 1 or 2.
        centre: Middle of the codes that the query will meet.
        codes: Address of int8 [planes, padded].
        noted: Address of what is noted of the query: scale, offset (correction of the mean, with the product with the
            zeros where there are any) and sum are written.
        folded: Address of scratch, float32 [padded].
    """
    largest, total, with_zeros = zero_floats(), zero_floats(), zero_floats()
    for d in range(0, 4 * padded, 64):
        value = load_floats(q + d)
        if channels.scales != 0:
            with_zeros = fma(value, load_floats(channels.zeros + d), with_zeros)
            value = mul(value, load_floats(channels.scales + d))
        total = add(total, value)
        largest = larger(absolute(value), largest)
        store_floats(folded + d, value)
    step, inverse = step_of(largest_lane(largest), planes)
    rounded_sum = zero_floats()
    for d in range(0, padded, 16):
        code = rounded(mul(load_floats(folded + 4 * d), fill(inverse)))
        rounded_sum = add(rounded_sum, code)
        if planes == 2:
            high = rounded(mul(code, fill(numba.float32(1 / 128))))
            store_bytes(codes + padded + d, fma(high, fill(numba.float32(-128.0)), code))
            code = high
        store_bytes(codes + d, code)
    set_float(noted + SCALE, step)
    lost = fma(rounded_sum, fill(numba.float32(-step)), total)
    set_float(noted + OFFSET, sum_lanes(fma(lost, fill(numba.float32(centre)), with_zeros)))
    if channels.scales == 0:
        set_float(noted + SUM, sum_lanes(total))


@kernel
def finish_scores(scores: int, step: int, planes: int, tokens: int, noted: int, keys: Factors) -> None:
    """Turn integer products into scores, in the first plane's row, and note the largest.

    Args:
        scores: Address of float32 [planes, tokens].
        step: Bytes from plane to plane.
        planes: 1 or 2.
        tokens: A multiple of 16.
        noted: As `quantize_query` wrote it.
        keys: Scales and zeros of the tokens, unless those were the channels'.
    """
    scale, offset, total = fill(get_float(noted + SCALE)), fill(get_float(noted + OFFSET)), fill(get_float(noted + SUM))
    largest = fill(get_float(noted + LARGEST))
    for tile in range(0, 4 * tokens, 64):
        value = load_floats(scores + tile)
        if planes == 2:
            value = fma(value, fill(numba.float32(128.0)), load_floats(scores + step + tile))
        value = fma(value, scale, offset)
        if keys.scales != 0:
            value = fma(value, load_floats(keys.scales + tile), mul(total, load_floats(keys.zeros + tile)))
        store_floats(scores + tile, value)
        largest = larger(value, largest)
    set_float(noted + LARGEST, largest_lane(largest))


@kernel
def mask_scores(scores: int, tokens: int, first: int, end: int, noted: int) -> None:
    """Mask the scores of tokens outside first .. end - 1, and record the largest of the others."""
    largest = fill(numba.float32(LOWEST))
    for tile in range(0, tokens, 16):
        value = load_floats(scores + 4 * tile)
        if tile < first or tile + 16 > end:
            value = keep_lanes(value, first - tile, end - tile)
            store_floats(scores + 4 * tile, value)
        largest = larger(value, largest)
    set_float(noted + LARGEST, largest_lane(largest))
