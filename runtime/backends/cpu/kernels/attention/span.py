"""Attention over cached keys and values in half precision, each read once for all query heads that share them.

Keys of 16 tokens stand together channel by channel ([T / 16, D, 16]), so 16 scores are one vector and nothing is summed
across lanes; values stand token by token ([T, D padded to 16]). Quantized pages are
`runtime.backends.cpu.kernels.attention.page`'s business. One work item is a run of query rows of a sequence, one
key-value head and one split of the context; its softmax is kept unnormalized with its maximum, and `merge_splits` joins
the splits (flash-decoding).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numba

from runtime.backends.cpu.kernels.attention.run import (
    LOWEST,
    Queries,
    Sums,
    padded_channels,
    part_bytes,
    seen_by,
)
from runtime.backends.cpu.machine.vector import (
    add,
    broadcast,
    div,
    exp,
    fill,
    fma,
    get_float,
    keep_lanes,
    load_floats,
    load_halves,
    max_lanes,
    maximum,
    mul,
    set_float,
    store_floats,
    sub,
    sum_lanes,
    zero_floats,
)

SPAN = 64
"""Tokens handled between two updates of the softmax."""
_TILE = 16


class Span(NamedTuple):
    """SPAN tokens of one key-value head."""

    keys: int
    """Address of float16 [SPAN / 16, D, 16]."""
    values: int
    """Address of float16 [SPAN, D padded to 16]."""
    start: int
    """Position of the first."""


def span_scratch(heads: int) -> int:
    """Bytes of scratch for the scores of so many query heads of a row."""
    return 4 * SPAN * heads


@numba.njit(nogil=True)
def _scores(q: int, q_stride: int, queries: int, keys: int, dim: int, out: int) -> None:
    """Scores of `queries` query vectors with SPAN cached keys."""
    n = 0
    while n + 4 <= queries:
        q0 = q + n * q_stride
        q1, q2, q3 = q0 + q_stride, q0 + 2 * q_stride, q0 + 3 * q_stride
        for tile in range(SPAN // _TILE):
            at = keys + tile * dim * (2 * _TILE)
            s0, s1, s2, s3 = zero_floats(), zero_floats(), zero_floats(), zero_floats()
            for d in range(dim):
                key = load_halves(at + d * (2 * _TILE))
                s0 = fma(key, broadcast(q0 + 4 * d), s0)
                s1 = fma(key, broadcast(q1 + 4 * d), s1)
                s2 = fma(key, broadcast(q2 + 4 * d), s2)
                s3 = fma(key, broadcast(q3 + 4 * d), s3)
            to = out + 4 * (n * SPAN + tile * _TILE)
            store_floats(to, s0)
            store_floats(to + 4 * SPAN, s1)
            store_floats(to + 8 * SPAN, s2)
            store_floats(to + 12 * SPAN, s3)
        n += 4
    while n < queries:
        qn = q + n * q_stride
        k0, k1 = keys, keys + dim * (2 * _TILE)
        k2, k3 = keys + 2 * dim * (2 * _TILE), keys + 3 * dim * (2 * _TILE)
        s0, s1, s2, s3 = zero_floats(), zero_floats(), zero_floats(), zero_floats()
        for d in range(dim):
            value = broadcast(qn + 4 * d)
            s0 = fma(load_halves(k0 + d * (2 * _TILE)), value, s0)
            s1 = fma(load_halves(k1 + d * (2 * _TILE)), value, s1)
            s2 = fma(load_halves(k2 + d * (2 * _TILE)), value, s2)
            s3 = fma(load_halves(k3 + d * (2 * _TILE)), value, s3)
        to = out + 4 * n * SPAN
        store_floats(to, s0)
        store_floats(to + 64, s1)
        store_floats(to + 128, s2)
        store_floats(to + 192, s3)
        n += 1


@numba.njit(nogil=True)
def _weigh(weights: int, queries: int, values: int, count: int, padded: int, sums: int, sums_stride: int) -> None:
    """Add the weighted values of `count` tokens to the sums of `queries` heads."""
    row = 2 * padded
    n = 0
    while n + 4 <= queries:
        w0 = weights + 4 * n * SPAN
        for d in range(0, padded, 16):
            to = sums + n * sums_stride + 4 * d
            a0, a1 = load_floats(to), load_floats(to + sums_stride)
            a2, a3 = load_floats(to + 2 * sums_stride), load_floats(to + 3 * sums_stride)
            for t in range(count):
                value = load_halves(values + t * row + 2 * d)
                a0 = fma(value, broadcast(w0 + 4 * t), a0)
                a1 = fma(value, broadcast(w0 + 4 * (SPAN + t)), a1)
                a2 = fma(value, broadcast(w0 + 4 * (2 * SPAN + t)), a2)
                a3 = fma(value, broadcast(w0 + 4 * (3 * SPAN + t)), a3)
            store_floats(to, a0)
            store_floats(to + sums_stride, a1)
            store_floats(to + 2 * sums_stride, a2)
            store_floats(to + 3 * sums_stride, a3)
        n += 4
    while n < queries:
        wn = weights + 4 * n * SPAN
        for d in range(0, padded, 16):
            to = sums + n * sums_stride + 4 * d
            at = values + 2 * d
            a0, a1, a2, a3 = load_floats(to), zero_floats(), zero_floats(), zero_floats()
            t = 0
            while t + 4 <= count:
                a0 = fma(load_halves(at + t * row), broadcast(wn + 4 * t), a0)
                a1 = fma(load_halves(at + (t + 1) * row), broadcast(wn + 4 * t + 4), a1)
                a2 = fma(load_halves(at + (t + 2) * row), broadcast(wn + 4 * t + 8), a2)
                a3 = fma(load_halves(at + (t + 3) * row), broadcast(wn + 4 * t + 12), a3)
                t += 4
            while t < count:
                a0 = fma(load_halves(at + t * row), broadcast(wn + 4 * t), a0)
                t += 1
            store_floats(to, add(add(a0, a1), add(a2, a3)))
        n += 1


@numba.njit(nogil=True)
def _softmax_span(scores: int, first: int, end: int, sums: int, padded: int) -> None:
    """Turn one query's SPAN scores into weights and bring its running maximum and sum up to date.

    Args:
        scores: Address of float32 [SPAN], the scores; overwritten by the weights.
        first: First token of the span that the query sees.
        end: One past the last token that it sees.
        sums: Address of the query's partial result; rescaled when the maximum grows.
        padded: D padded to 16.
    """
    state = sums + 4 * padded
    largest = fill(numba.float32(LOWEST))
    for tile in range(0, SPAN, _TILE):
        s = load_floats(scores + 4 * tile)
        if tile < first or tile + _TILE > end:
            s = keep_lanes(s, first - tile, end - tile)
        store_floats(scores + 4 * tile, s)
        largest = maximum(largest, s)
    before = get_float(state)
    top = max(before, max_lanes(largest))
    total = zero_floats()
    tops = fill(numba.float32(top))
    for tile in range(0, SPAN, _TILE):
        weight = exp(sub(load_floats(scores + 4 * tile), tops))
        total = add(total, weight)
        store_floats(scores + 4 * tile, weight)
    if top > before:
        factor = numba.float32(math.exp(before - top))
        set_float(state, numba.float32(top))
        set_float(state + 4, numba.float32(get_float(state + 4) * factor))
        factors = fill(factor)
        for d in range(0, padded, 16):
            store_floats(sums + 4 * d, mul(load_floats(sums + 4 * d), factors))
    set_float(state + 4, numba.float32(get_float(state + 4) + sum_lanes(total)))


@numba.njit(nogil=True)
def attend_span(queries: Queries, span: Span, sums: Sums, scores: int) -> None:
    """Add what a run gets from a span. `scores` is the address of scratch, `span_scratch` bytes."""
    dim, heads = queries.dim, queries.heads
    padded = padded_channels(dim)
    for row in range(queries.rows):
        first, end = seen_by(queries, row, span.start, SPAN)
        if first >= end:
            continue
        to = sums.at + row * sums.row
        _scores(queries.at + row * queries.stride, 4 * dim, heads, span.keys, dim, scores)
        for head in range(heads):
            out = to + head * sums.head
            _softmax_span(scores + 4 * SPAN * head, first, end, out, padded)
        _weigh(scores, heads, span.values, end, padded, to, sums.head)


@numba.njit(nogil=True)
def merge_splits(sums: int, splits: int, dim: int, out: int) -> None:
    """Join the partial results of one row and query head and normalize: float32 [D] at `out`.

    Args:
        sums: Address of the first split's partial result, the others behind it.
        splits: Number of splits.
        dim: D.
        out: Address of float32 [D].
    """
    padded, split_step = padded_channels(dim), part_bytes(dim)
    top = numba.float32(LOWEST)
    for split in range(splits):
        top = max(top, get_float(sums + split * split_step + 4 * padded))
    total = numba.float32(0.0)
    for split in range(splits):
        state = sums + split * split_step + 4 * padded
        total += numba.float32(math.exp(get_float(state) - top)) * get_float(state + 4)
    for d in range(0, padded, 16):
        value = zero_floats()
        for split in range(splits):
            at = sums + split * split_step
            value = fma(load_floats(at + 4 * d), fill(numba.float32(math.exp(get_float(at + 4 * padded) - top))), value)
        value = div(value, fill(total))
        if d + 16 <= dim:
            store_floats(out + 4 * d, value)
        else:
            store_floats(sums + 4 * d, value)
            for i in range(d, dim):
                set_float(out + 4 * i, get_float(sums + 4 * i))
