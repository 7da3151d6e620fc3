"""Attention over keys and values in half precision, each read once for all query heads that share them.

Keys of 16 tokens are stored together, channel by channel ([T / 16, D, 16]), so 16 scores are one vector and nothing is
summed across lanes; values are stored token by token ([T, D padded to 16]). For quantized pages see
`runtime.backends.cpu.kernels.attention.page`. One work item is a run of query rows of a sequence, one key-value head
and one split of the context; its softmax is kept unnormalized with its maximum, and `merge_splits` joins the splits
(flash-decoding).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from runtime.backends.cpu.data.records import SPAN
from runtime.backends.cpu.kernels.attention.queries import (
    LOWEST,
    Queries,
    Sums,
    padded_channels,
    part_bytes,
    seen_by,
)
from runtime.backends.cpu.kernels.rows import cap_floats
from runtime.backends.cpu.machine.emit import (
    FLOAT,
    FLOATS,
    HALVES,
    I64,
    Builder,
    constant,
    define,
    emit_fma,
    load,
    offset,
    pointer,
    splat,
)
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    add,
    div,
    exp,
    fill,
    fma,
    get_float,
    keep_lanes,
    load_floats,
    max_lanes,
    maximum,
    mul,
    set_float,
    store_floats,
    sub,
    sum_lanes,
    zero_floats,
)

_TILE = 16
_CHAINS = 4
"""Independent sums per head of the weighted values."""


class Span(NamedTuple):
    """SPAN tokens of one key-value head."""

    keys: int  # address of float16 [SPAN / 16, D, 16]
    values: int  # address of float16 [SPAN, D padded to 16]
    start: int  # position of the first


def _times(b: Builder, value: Any, count: int) -> Any:
    return b.mul(value, ir.Constant(I64, count))


def _halves(b: Builder, address: Any) -> Any:
    """Sixteen half-precision numbers as floats."""
    return b.fpext(load(b, HALVES, address, 2), FLOATS)


def _score_block(queries: int) -> Any:
    """Intrinsic: scores of some query vectors with SPAN cached keys, each of which is converted once for all."""
    together = 4 if queries <= 2 else 2  # tiles, so that eight sums at most are on their way

    def emit(b: Builder, q: Any, q_stride: Any, keys: Any, dim: Any, out: Any) -> None:
        rows = [b.add(q, _times(b, q_stride, n)) for n in range(queries)]
        for first in range(0, SPAN // _TILE, together):
            tiles = [b.add(keys, _times(b, dim, 2 * _TILE * (first + j))) for j in range(together)]
            sums = {(n, j): cgutils.alloca_once(b, FLOATS) for n in range(queries) for j in range(together)}
            for total in sums.values():
                b.store(constant(FLOATS, 0.0), total)
            with cgutils.for_range(b, dim) as loop:
                values = [splat(b, load(b, FLOAT, b.add(row, _times(b, loop.index, 4)), 4), FLOATS) for row in rows]
                for j, tile in enumerate(tiles):
                    key = _halves(b, b.add(tile, _times(b, loop.index, 2 * _TILE)))
                    for n, value in enumerate(values):
                        b.store(emit_fma(b, key, value, b.load(sums[n, j], typ=FLOATS)), sums[n, j])
            for (n, j), total in sums.items():
                to = offset(b, out, 4 * (n * SPAN + (first + j) * _TILE))
                b.store(b.load(total, typ=FLOATS), pointer(b, to), align=4)

    emit.__name__, emit.__doc__ = f"scores_{queries}", f"Scores of {queries} query vectors with SPAN keys."
    return define(types.void, *[types.int64] * 5)(emit)


def _weigh_block(queries: int) -> Any:
    """Intrinsic: add the weighted values of some tokens to the sums of some heads, with four sums for each."""

    def emit(b: Builder, weights: Any, values: Any, count: Any, padded: Any, sums: Any, stride: Any) -> None:
        row = _times(b, padded, 2)
        totals = {(n, i): cgutils.alloca_once(b, FLOATS) for n in range(queries) for i in range(_CHAINS)}

        def add_token(at: Any, token: Any, chain: int) -> None:
            value = _halves(b, b.add(at, b.mul(row, token)))
            for n in range(queries):
                place = b.add(offset(b, weights, 4 * SPAN * n), _times(b, token, 4))
                weight, total = splat(b, load(b, FLOAT, place, 4), FLOATS), totals[n, chain]
                b.store(emit_fma(b, value, weight, b.load(total, typ=FLOATS)), total)

        with cgutils.for_range(b, b.udiv(padded, ir.Constant(I64, _TILE))) as columns:
            at = b.add(values, _times(b, columns.index, 2 * _TILE))
            outs = [
                b.add(b.add(sums, _times(b, stride, n)), _times(b, columns.index, 4 * _TILE)) for n in range(queries)
            ]
            for (n, chain), total in totals.items():
                b.store(load(b, FLOATS, outs[n], 4) if chain == 0 else constant(FLOATS, 0.0), total)
            fours = b.udiv(count, ir.Constant(I64, _CHAINS))
            with cgutils.for_range(b, fours) as loop:
                for chain in range(_CHAINS):
                    add_token(at, b.add(_times(b, loop.index, _CHAINS), ir.Constant(I64, chain)), chain)
            done = _times(b, fours, _CHAINS)
            with cgutils.for_range(b, b.sub(count, done)) as loop:
                add_token(at, b.add(done, loop.index), 0)
            for n, out in enumerate(outs):
                parts = [b.load(totals[n, chain], typ=FLOATS) for chain in range(_CHAINS)]
                b.store(b.fadd(b.fadd(*parts[:2]), b.fadd(*parts[2:])), pointer(b, out), align=4)

    emit.__name__, emit.__doc__ = f"weigh_{queries}", f"Add weighted values to the sums of {queries} heads."
    return define(types.void, *[types.int64] * 6)(emit)


_scores_4, _scores_3, _scores_2, _scores_1 = map(_score_block, (4, 3, 2, 1))
_weigh_4, _weigh_3, _weigh_2, _weigh_1 = map(_weigh_block, (4, 3, 2, 1))


@kernel
def _scores(q: int, q_stride: int, queries: int, keys: int, dim: int, out: int) -> None:
    """Scores of `queries` query vectors with SPAN cached keys."""
    n = 0
    while n + 4 <= queries:
        _scores_4(q + n * q_stride, q_stride, keys, dim, out + 4 * SPAN * n)
        n += 4
    if n + 3 == queries:
        _scores_3(q + n * q_stride, q_stride, keys, dim, out + 4 * SPAN * n)
    elif n + 2 == queries:
        _scores_2(q + n * q_stride, q_stride, keys, dim, out + 4 * SPAN * n)
    elif n < queries:
        _scores_1(q + n * q_stride, q_stride, keys, dim, out + 4 * SPAN * n)


@kernel
def _weigh(weights: int, queries: int, values: int, count: int, padded: int, sums: int, stride: int) -> None:
    """Add the weighted values of `count` tokens to the sums of `queries` heads."""
    n = 0
    while n + 4 <= queries:
        _weigh_4(weights + 4 * SPAN * n, values, count, padded, sums + n * stride, stride)
        n += 4
    if n + 3 == queries:
        _weigh_3(weights + 4 * SPAN * n, values, count, padded, sums + n * stride, stride)
    elif n + 2 == queries:
        _weigh_2(weights + 4 * SPAN * n, values, count, padded, sums + n * stride, stride)
    elif n < queries:
        _weigh_1(weights + 4 * SPAN * n, values, count, padded, sums + n * stride, stride)


@kernel
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


@kernel
def attend_span(queries: Queries, span: Span, sums: Sums, scores: int) -> None:
    """Add a span to the partial results of a run. `scores` is the address of scratch, `span_scratch` bytes."""
    dim, heads = queries.dim, queries.heads
    padded = padded_channels(dim)
    for row in range(queries.rows):
        first, end = seen_by(queries, row, span.start, SPAN)
        if first >= end:
            continue
        to = sums.at + row * sums.row
        _scores(queries.at + row * queries.stride, 4 * dim, heads, span.keys, dim, scores)
        if queries.cap != 0.0:
            cap_floats(scores, SPAN * heads, queries.cap)
        for head in range(heads):
            out = to + head * sums.head
            _softmax_span(scores + 4 * SPAN * head, first, end, out, padded)
        _weigh(scores, heads, span.values, end, padded, to, sums.head)


@kernel
def merge_splits(sums: int, splits: int, dim: int, given: int, sink: float, out: int) -> None:
    """Join the partial results of one row and query head and normalize: float32 [given] at `out`.

    Args:
        sums: Address of the first split's partial result, the others behind it.
        splits: Number of splits.
        dim: D.
        given: The first channels, which are written.
        sink: A score that takes a share and adds nothing; LOWEST = none.
        out: Address of float32 [given].
    """
    padded, split_step = padded_channels(dim), part_bytes(dim)
    top = numba.float32(sink)
    for split in range(splits):
        top = max(top, get_float(sums + split * split_step + 4 * padded))
    total = numba.float32(math.exp(sink - top)) if sink > LOWEST else numba.float32(0.0)
    for split in range(splits):
        state = sums + split * split_step + 4 * padded
        total += numba.float32(math.exp(get_float(state) - top)) * get_float(state + 4)
    for d in range(0, given, 16):
        value = zero_floats()
        for split in range(splits):
            at = sums + split * split_step
            value = fma(load_floats(at + 4 * d), fill(numba.float32(math.exp(get_float(at + 4 * padded) - top))), value)
        value = div(value, fill(total))
        if d + 16 <= given:
            store_floats(out + 4 * d, value)
        else:
            store_floats(sums + 4 * d, value)
            for i in range(d, given):
                set_float(out + 4 * i, get_float(sums + 4 * i))
