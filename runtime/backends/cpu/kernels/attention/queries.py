"""Runs of attention: queries and their softmax weights as INT8, and the integer products with a page's keys and values.

A run is the query heads of a few rows of one sequence that share a key-value head.
A *partial result* is unnormalized attention over part of the context: float32 [D padded to 16], then the largest score
and the sum of the weights, in units of e^(score - largest).

Beside its codes, each query has a block of `NOTED` bytes: floats at the indices below, then sums of sixteen lanes each,
which are only reduced at the end.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba

from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    absolute,
    add,
    exp2,
    fill,
    fma,
    get_float,
    keep_lanes,
    larger,
    largest_lane,
    load_floats,
    load_halves,
    mul,
    rounded,
    set_float,
    store_floats,
    store_truncated,
    sub,
    sum_lanes,
    truncated,
    zero_floats,
)
from runtime.backends.cpu.scratch import NOTED

LOWEST = -1e30
"""Initial largest score of a query that has seen nothing."""


class Queries(NamedTuple):
    """The query heads of a run."""

    at: int  # address of the first row's first head, float32 [heads, D], rotated and divided by sqrt(D)
    stride: int  # bytes from row to row
    rows: int  # rows, at consecutive positions
    heads: int  # query heads of a row
    dim: int  # D
    position: int  # position of the first row
    window: int  # visible tokens, including the query's own; 0 = all
    cap: float  # soft cap of the scores; 0 = none


class Sums(NamedTuple):
    """Partial results of a run."""

    at: int  # address of the first row's first head
    row: int  # bytes from row to row
    head: int  # bytes from head to head


@kernel
def padded_channels(dim: int) -> int:
    """D padded to 16."""
    return (dim + 15) // 16 * 16


@kernel
def part_bytes(dim: int) -> int:
    """Bytes of a partial result."""
    return 4 * (padded_channels(dim) + 16)


@kernel
def seen_by(queries: Queries, row: int, start: int, count: int) -> tuple[int, int]:
    """The range of the `count` tokens from position `start` on that a row sees: first, end."""
    behind = queries.position - start + row + 1
    return (0 if queries.window == 0 else max(0, behind - queries.window)), min(behind, count)


@kernel
def clear_sums(queries: Queries, sums: Sums) -> None:
    """Clear the partial results of a run."""
    padded = padded_channels(queries.dim)
    for row in range(queries.rows):
        for head in range(queries.heads):
            to = sums.at + row * sums.row + head * sums.head
            for d in range(0, padded, 16):
                store_floats(to + 4 * d, zero_floats())
            set_float(to + 4 * padded, numba.float32(LOWEST))
            set_float(to + 4 * padded + 4, numba.float32(0.0))


SCALE, OFFSET, SUM, LARGEST, STEP, CHANGE = 0, 4, 8, 12, 16, 20
"""Scale of the query's codes; what all its scores get; its sum; its largest score in the page; scale of its weights'
codes; what its sums were multiplied by when its maximum rose."""
TOTAL, BESIDES, APART = 64, 128, 192
"""Sums of weights; of what every channel gets; of what the channels of a group get where there are several groups."""
_SMALLEST = 1.1754944e-38


class Factors(NamedTuple):
    """Scales and zeros in float32: one of each for a token, or for a channel."""

    scales: int  # address; 0 where there are none
    zeros: int  # address


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
            store_truncated(codes + padded + d, fma(high, fill(numba.float32(-128.0)), code))
            code = high
        store_truncated(codes + d, code)
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


_LOG2E = math.log2(math.e)


@kernel
def raise_maximum(noted: int, sums: int, padded: int) -> Any:
    """Update a query's running maximum, and rescale its earlier sums. Returns the maximum."""
    state = sums + 4 * padded
    before, top = get_float(state), get_float(noted + LARGEST)
    if top <= before:
        return before
    change = numba.float32(math.exp(before - top))
    set_float(noted + CHANGE, change)
    set_float(state, top)
    set_float(state + 4, numba.float32(get_float(state + 4) * change))
    for at in (noted + TOTAL, noted + BESIDES):
        store_floats(at, mul(load_floats(at), fill(change)))
    for d in range(0, padded, 16):
        store_floats(sums + 4 * d, mul(load_floats(sums + 4 * d), fill(change)))
    return top


@kernel
def exponentials(
    scores: int, tokens: int, top: float, keep: bool, values: Factors, weighed: int, noted: int, besides: int
) -> None:
    """Turn one query's scores into weights, e^(score - top), and these into factors of the values' codes.

    Args:
        scores: Address of float32 [tokens]; overwritten by the weights if they are to be kept.
        tokens: A multiple of 16.
        top: The query's maximum.
        keep: Whether the weights are needed once more.
        values: Scales and zeros of the tokens.
        weighed: Address of float32 [tokens], weights times scales; may be `scores` where those are not kept.
        noted: Address of what is noted of the query; the sum of weights is added to, the largest of `weighed` written.
        besides: Address of float32 [16], whose sum every channel gets besides: weights times zeros are added.
    """
    total, both, largest = load_floats(noted + TOTAL), load_floats(besides), zero_floats()
    factor, most = fill(numba.float32(_LOG2E)), fill(numba.float32(top))
    for tile in range(0, 4 * tokens, 64):
        weight = exp2(mul(sub(load_floats(scores + tile), most), factor))
        total = add(total, weight)
        both = fma(weight, load_floats(values.zeros + tile), both)
        if keep:
            store_floats(scores + tile, weight)
        weight = mul(weight, load_floats(values.scales + tile))
        largest = larger(weight, largest)
        store_floats(weighed + tile, weight)
    store_floats(noted + TOTAL, total)
    store_floats(besides, both)
    set_float(noted + LARGEST, largest_lane(largest))


@kernel
def weigh_again(weights: int, tokens: int, values: Factors, weighed: int, noted: int, besides: int) -> None:
    """Multiply stored weights by the scales of another group of channels; arguments as in `exponentials`."""
    both, largest = load_floats(besides), zero_floats()
    for tile in range(0, 4 * tokens, 64):
        weight = load_floats(weights + tile)
        both = fma(weight, load_floats(values.zeros + tile), both)
        weight = mul(weight, load_floats(values.scales + tile))
        largest = larger(weight, largest)
        store_floats(weighed + tile, weight)
    store_floats(besides, both)
    set_float(noted + LARGEST, largest_lane(largest))


@kernel
def quantize_weights(
    weighed: int, tokens: int, planes: int, centre: float, dither: int, codes: int, noted: int, besides: int
) -> None:
    """Round weights, times the values' scales, to INT8.

    Args:
        weighed: Address of float32 [tokens].
        tokens: A multiple of 16.
        planes: 1 or 2.
        centre: Middle of the values' codes.
        dither: Address of float32 [tokens] in [0, 1): what is added before cutting off, one plane only.
        codes: Address of int8 [planes, tokens].
        noted: Address of what is noted of the query, with the largest of `weighed`; the codes' scale is written.
        besides: Address of float32 [16]; the mean's correction is added.
    """
    step, inverse = step_of(get_float(noted + LARGEST), planes)
    factor, total, rounded_sum = fill(inverse), zero_floats(), zero_floats()
    for tile in range(0, tokens, 16):
        weight = load_floats(weighed + 4 * tile)
        total = add(total, weight)
        if planes == 1:
            code = truncated(fma(weight, factor, load_floats(dither + 4 * tile)))
            store_truncated(codes + tile, code)
        else:
            code = rounded(mul(weight, factor))
            high = rounded(mul(code, fill(numba.float32(1 / 128))))
            store_truncated(codes + tokens + tile, fma(high, fill(numba.float32(-128.0)), code))
            store_truncated(codes + tile, high)
        rounded_sum = add(rounded_sum, code)
    lost = fma(rounded_sum, fill(numba.float32(-step)), total)
    store_floats(besides, fma(lost, fill(numba.float32(centre)), load_floats(besides)))
    set_float(noted + STEP, step)


@kernel
def add_products(products: int, step: int, planes: int, channels: int, noted: int, sums: int) -> None:
    """Add integer products of weights and values, times their scale, to a query's sums."""
    scale = fill(get_float(noted + STEP))
    for d in range(0, 4 * channels, 64):
        value = load_floats(products + d)
        if planes == 2:
            value = fma(value, fill(numba.float32(128.0)), load_floats(products + step + d))
        store_floats(sums + d, fma(value, scale, load_floats(sums + d)))


@kernel
def add_to_all(sums: int, channels: int, value: float) -> None:
    """Add a number to some of a query's sums."""
    for d in range(0, 4 * channels, 64):
        store_floats(sums + d, add(load_floats(sums + d), fill(value)))


@kernel
def settle(noted: int, sums: int, channels: int) -> None:
    """Reduce a query's block: the sum of its weights, and the amount added to all its channels."""
    state = sums + 4 * channels
    set_float(state + 4, numba.float32(get_float(state + 4) + sum_lanes(load_floats(noted + TOTAL))))
    add_to_all(sums, channels, sum_lanes(load_floats(noted + BESIDES)))
