"""GEAR's corrections of a quantized page: separately stored outliers, and a low-rank approximation of the remainder.

Layouts are those of `runtime.backends.cpu.kernels.cache.page`. The oracle is `runtime.kv.oracle.correction`: with the
same outliers, start and number of iterations, but another order of summation.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
from numba import types

from runtime.backends.cpu.kernels.cache.page import store_halves
from runtime.backends.cpu.machine.emit import (
    I16,
    I32,
    I64,
    WORDS,
    Builder,
    define,
    floats16,
    load,
    pointer,
    splat,
    words16,
)
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    add,
    broadcast,
    fill,
    fma,
    get_float,
    get_half,
    get_int,
    load_floats,
    load_halves,
    mul,
    set_float,
    set_half,
    store_floats,
    store_words,
    sum_lanes,
    zero_floats,
    zero_words,
)
from runtime.kv.low_rank import ITERATIONS

_INFINITY = float("inf")
_LARGEST = 65504.0
"""The largest half-precision number."""


@define(words16, floats16, floats16, words16, types.int64)
def _place_of_less(b: Builder, x: Any, y: Any, places: Any, here: Any) -> Any:
    """Per lane: `here` where x < y, else the place."""
    return b.select(b.fcmp_ordered("<", x, y), splat(b, b.trunc(here, I32), WORDS), places)


@define(floats16, floats16, floats16)
def _less(b: Builder, x: Any, y: Any) -> Any:
    """The smaller of both, y where they are equal."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


@kernel
def choose_outliers(x: int, count: int, step: int, each: int, low: int, high: int, places: int) -> None:
    """Find the `each` least and largest numbers of sixteen vectors.

    Among equals, the first count as the least and the last as the largest.

    Args:
        x: Address of their first numbers, float32.
        count: Numbers of a vector, at least 2 * each.
        step: From number to number, in bytes.
        each: Outliers at either end.
        low: Address of float32 [count, 16]: the numbers are copied there, outliers as infinity.
        high: Likewise, outliers as minus infinity.
        places: Address of int32 [2 * each, 16]: where they are, the least first.
    """
    for i in range(count):
        value = load_floats(x + step * i)
        store_floats(low + 64 * i, value)
        store_floats(high + 64 * i, value)
    for j in range(each):
        least, where = fill(numba.float32(_INFINITY)), zero_words()
        for i in range(count):
            value = load_floats(low + 64 * i)
            where, least = _place_of_less(value, least, where, i), _less(value, least)
        store_words(places + 64 * j, where)
        minus, where = fill(numba.float32(_INFINITY)), zero_words()
        for i in range(count - 1, -1, -1):
            value = mul(load_floats(high + 64 * i), fill(numba.float32(-1.0)))
            where, minus = _place_of_less(value, minus, where, i), _less(value, minus)
        store_words(places + 64 * (2 * each - 1 - j), where)
        for lane in range(16):
            first = numba.int64(get_int(places + 64 * j + 4 * lane))
            last = numba.int64(get_int(places + 64 * (2 * each - 1 - j) + 4 * lane))
            for i in (first, last):
                set_float(low + 64 * i + 4 * lane, numba.float32(_INFINITY))
                set_float(high + 64 * i + 4 * lane, numba.float32(-_INFINITY))


@kernel
def subtract(x: int, low: int, high: int, count: int, step: int, read: int) -> None:
    """Replace dequantized values, sixteen vectors, by the quantization error: x - read, 0 for outliers."""
    for i in range(count):
        for lane in range(0, 64, 4):
            at = read + step * i + lane
            if get_float(low + 64 * i + lane) == get_float(high + 64 * i + lane):
                set_float(at, numba.float32(get_float(x + step * i + lane) - get_float(at)))
            else:
                set_float(at, numba.float32(0.0))


@kernel
def turn(x: int, rows: int, columns: int, step: int, out: int, out_step: int) -> None:
    """Transpose float32 [rows, columns]; steps from row to row in bytes."""
    for i in range(rows):
        for j in range(columns):
            set_float(out + out_step * j + 4 * i, get_float(x + step * i + 4 * j))


@kernel
def _multiply(matrix: int, rows: int, columns: int, step: int, factors: int, rank: int, each: int, out: int) -> None:
    """Out [rank, columns] = factors [rank, each] times the first `rows` rows of a matrix, columns a multiple of 16."""
    for c in range(0, 4 * columns, 64):
        r = 0
        while r + 4 <= rank:
            f = factors + 4 * each * r
            s0, s1, s2, s3 = zero_floats(), zero_floats(), zero_floats(), zero_floats()
            for i in range(rows):
                value = load_floats(matrix + step * i + c)
                s0 = fma(value, broadcast(f + 4 * i), s0)
                s1 = fma(value, broadcast(f + 4 * (each + i)), s1)
                s2 = fma(value, broadcast(f + 4 * (2 * each + i)), s2)
                s3 = fma(value, broadcast(f + 4 * (3 * each + i)), s3)
            to = out + 4 * columns * r + c
            store_floats(to, s0)
            store_floats(to + 4 * columns, s1)
            store_floats(to + 8 * columns, s2)
            store_floats(to + 12 * columns, s3)
            r += 4
        while r < rank:
            s = zero_floats()
            for i in range(rows):
                s = fma(load_floats(matrix + step * i + c), broadcast(factors + 4 * (each * r + i)), s)
            store_floats(out + 4 * columns * r + c, s)
            r += 1


@kernel
def _product(x: int, y: int, count: int) -> Any:
    total = zero_floats()
    for i in range(0, 4 * count, 64):
        total = fma(load_floats(x + i), load_floats(y + i), total)
    return sum_lanes(total)


@kernel
def _add_multiple(x: int, count: int, factor: Any, y: int) -> None:
    for i in range(0, 4 * count, 64):
        store_floats(y + i, fma(load_floats(x + i), fill(numba.float32(factor)), load_floats(y + i)))


@kernel
def orthonormal(a: int, count: int, rank: int, shares: int) -> None:
    """Replace `rank` columns, float32 [rank, count], by the Q of their QR decomposition, by Householder's reflections.

    Args:
        a: Address of the columns, one after the other.
        count: Numbers of a column, a multiple of 16 and at least rank.
        rank: Columns.
        shares: Address of scratch, float32 [rank].
    """
    for k in range(rank):
        own = a + 4 * count * k
        top = get_float(own + 4 * k)
        for i in range(k + 1):
            set_float(own + 4 * i, numba.float32(0.0))
        rest = _product(own, own, count)
        share: Any = numba.float32(0.0)
        if rest > numba.float32(0.0):
            end = numba.float32(-math.copysign(math.sqrt(top * top + rest), top))
            share = numba.float32((end - top) / end)
            for i in range(0, 4 * count, 64):
                store_floats(own + i, mul(load_floats(own + i), fill(numba.float32(numba.float32(1.0) / (top - end)))))
        set_float(own + 4 * k, numba.float32(1.0))
        set_float(shares + 4 * k, share)
        for c in range(k + 1, rank):
            other = a + 4 * count * c
            _add_multiple(own, count, numba.float32(-share * _product(own, other, count)), other)
    for k in range(rank - 1, -1, -1):
        own, share = a + 4 * count * k, get_float(shares + 4 * k)
        for c in range(k + 1, rank):
            other = a + 4 * count * c
            _add_multiple(own, count, numba.float32(-share * _product(own, other, count)), other)
        for i in range(0, 4 * count, 64):
            store_floats(own + i, mul(load_floats(own + i), fill(numba.float32(-share))))
        set_float(own + 4 * k, numba.float32(numba.float32(1.0) - share))


class LowRank(NamedTuple):
    """The factors of a page's matrix [T, D], and where they go."""

    tokens: int
    """T."""
    dim: int
    """D."""
    padded: int
    """D padded to 16 at least."""
    rank: int
    """r."""
    a: int
    """Address of float32 [r, T]; the columns of a are orthonormal."""
    b: int
    """Address of float32 [r, D padded]."""
    shares: int
    """Address of scratch, float32 [r]."""
    alike: int
    """Extra weight of an error that all channels share."""


@kernel
def _weigh(b: int, dim: int, padded: int, rank: int, alike: int) -> None:
    """Add a multiple of its mean to each factor, float32 [rank, D padded]."""
    for r in range(rank):
        total = numba.float32(0.0)
        for i in range(dim):
            total += get_float(b + 4 * (padded * r + i))
        more = numba.float32(numba.float32(alike) * total / numba.float32(dim))
        for i in range(dim):
            at = b + 4 * (padded * r + i)
            set_float(at, get_float(at) + more)


@kernel
def low_rank(by_token: int, by_channel: int, start: int, to: LowRank) -> None:
    """Factors of the nearest low-rank matrix, approximately.

    Args:
        by_token: Address of the matrix float32 [T, D padded].
        by_channel: Address of its transpose float32 [D padded, T].
        start: Address of what b begins with, float32 [r, D padded].
        to: The factors, written.

    Source: GEAR Algorithm 2.
    """
    tokens, padded, rank, a, b = to.tokens, to.padded, to.rank, to.a, to.b
    for i in range(0, 4 * rank * padded, 64):
        store_floats(b + i, load_floats(start + i))
    for _ in range(ITERATIONS):
        if to.alike != 0:
            _weigh(b, to.dim, padded, rank, to.alike)
        _multiply(by_channel, to.dim, tokens, 4 * tokens, b, rank, padded, a)
        orthonormal(a, tokens, rank, to.shares)
        _multiply(by_token, tokens, padded, 4 * padded, a, rank, tokens, b)


@kernel
def store_rounded(x: int, count: int, halves: int) -> None:
    """Round float32 numbers, a multiple of 16, to half precision: store them, and update them in place."""
    for i in range(0, count, 16):
        store_halves(halves + 2 * i, load_floats(x + 4 * i))
        store_floats(x + 4 * i, load_halves(halves + 2 * i))


@kernel
def add_low_rank(x: int, rows: int, columns: int, step: int, left: int, right: int, rank: int, each: int) -> None:
    """X [rows, columns] += left^T right, for left half precision [rank, each] and right [rank, columns]."""
    for i in range(rows):
        for c in range(0, columns, 16):
            total = zero_floats()
            for r in range(rank):
                value = fill(get_half(left + 2 * (each * r + i)))
                total = fma(load_halves(right + 2 * (columns * r + c)), value, total)
            at = x + step * i + 4 * c
            store_floats(at, add(load_floats(at), total))


@kernel
def keep_outliers(x: int, read: int, step: int, places: int, each: int, lanes: int, indices: int, kept: int) -> None:
    """Store the quantization error at the outliers of sixteen vectors: x - read.

    Args:
        x: Address of the vectors' first numbers, float32.
        read: Likewise of what codes and low rank read back as.
        step: From number to number, in bytes.
        places: As `choose_outliers` wrote them.
        each: Outliers at either end.
        lanes: Vectors that there are, at most 16.
        indices: Address of int16 [lanes, 2 * each].
        kept: Address of float16 [lanes, 2 * each].
    """
    for lane in range(lanes):
        for j in range(2 * each):
            i, at = numba.int64(get_int(places + 64 * j + 4 * lane)), 2 * (2 * each * lane + j)
            missing = get_float(x + step * i + 4 * lane) - get_float(read + step * i + 4 * lane)
            missing = max(numba.float32(-_LARGEST), min(numba.float32(_LARGEST), missing))
            set_half(kept + at, numba.float32(missing))
            _set_short(indices + at, i)


@define(types.int64, types.int64)
def _get_short(b: Builder, address: Any) -> Any:
    """The signed 16-bit integer at the address."""
    return b.sext(load(b, I16, address, 2), I64)


@define(types.void, types.int64, types.int64)
def _set_short(b: Builder, address: Any, value: Any) -> None:
    """Store a 16-bit integer."""
    b.store(b.trunc(value, I16), pointer(b, address), align=2)


@kernel
def add_outliers(x: int, step: int, count: int, vectors: int, indices: int, kept: int) -> None:
    """Add `count` kept outliers to each vector of x; steps from number to number in bytes."""
    for r in range(vectors):
        for j in range(count * r, count * (r + 1)):
            at = x + step * _get_short(indices + 2 * j) + 4 * r
            set_float(at, numba.float32(get_float(at) + get_half(kept + 2 * j)))
