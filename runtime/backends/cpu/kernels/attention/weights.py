"""Softmax weights as INT8, and their integer products with a page's values."""

from __future__ import annotations

import math
from typing import Any

import numba

from runtime.backends.cpu.kernels.attention.queries import BESIDES, CHANGE, LARGEST, STEP, TOTAL, Factors, step_of
from runtime.backends.cpu.machine.codes import exp2, larger, largest_lane, store_bytes, truncated
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    add,
    fill,
    fma,
    get_float,
    load_floats,
    mul,
    rounded,
    set_float,
    store_floats,
    sum_lanes,
    zero_floats,
)

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
    factor, shift = fill(numba.float32(_LOG2E)), fill(numba.float32(-top * numba.float32(_LOG2E)))
    for tile in range(0, 4 * tokens, 64):
        weight = exp2(fma(load_floats(scores + tile), factor, shift))
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
            store_bytes(codes + tile, code)
        else:
            code = rounded(mul(weight, factor))
            high = rounded(mul(code, fill(numba.float32(1 / 128))))
            store_bytes(codes + tokens + tile, fma(high, fill(numba.float32(-128.0)), code))
            store_bytes(codes + tile, high)
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
