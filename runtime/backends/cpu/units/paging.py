"""Units that flush a page from a window, quantizing it, and that restore a page into a window; GEAR's corrections.

GEAR stores outliers separately, and a low-rank approximation of the remainder: as the oracle
`runtime.backends.operations.pages`, with the same outliers, start and number of iterations, but another order of
summation. Each layer's key-value heads are independent, as are keys and values, so the threads share them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
from numba import types

from runtime.backends.cpu.data.instructions import Page
from runtime.backends.cpu.data.pages import TWO_PLANES, Cache
from runtime.backends.cpu.kernels.attention.queries import padded_channels
from runtime.backends.cpu.kernels.pages import (
    Coded,
    Extremes,
    Vectors,
    clear_codes,
    decode_lanes,
    encode_lanes,
    join_keys,
    join_values,
    load_keys,
    load_keys_by_channel,
    load_values,
    move_bytes,
    split_keys,
    split_values,
    store_halves,
    turn_codes,
    write_keys,
    write_values,
)
from runtime.backends.cpu.kernels.views import cache_at, flush_at, restore_at, share_of
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
from runtime.backends.cpu.machine.kernel import kernel, routine
from runtime.backends.cpu.machine.unit import compiled_unit
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
from runtime.backends.cpu.scratch import PagingAreas, lay_out_paging
from runtime.kv.basis import ITERATIONS

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

    tokens: int  # T
    dim: int  # D
    padded: int  # D padded to 16 at least
    rank: int  # r
    a: int  # address of float32 [r, T]; the columns of a are orthonormal
    b: int  # address of float32 [r, D padded]
    shares: int  # address of scratch, float32 [r]
    alike: int  # extra weight of an error that all channels share


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


_LANES = 16


_compiled_lay_out = kernel(lay_out_paging)


@kernel
def _areas(cache: Cache, scratch: int) -> PagingAreas:
    outliers = max(cache.keys.kept, cache.values.kept)
    return _compiled_lay_out(cache.tokens, cache.padded, cache.rank, outliers, scratch)


@kernel
def _part(cache: Cache, key: bool) -> Any:
    """The description's part on keys or values."""
    return cache.keys if key else cache.values


@kernel
def _vectors(cache: Cache, key: bool) -> Vectors:
    """The vectors of the keys, or the values."""
    bits, exact_mean = 4 if cache.form == TWO_PLANES else cache.form, _part(cache, key).exact_mean != 0
    if not key:
        return Vectors(cache.tokens, cache.dim, cache.tokens, cache.values.group, bits, exact_mean)
    if cache.keys.tokenwise != 0:
        return Vectors(cache.tokens, cache.dim, cache.tokens, cache.dim, bits, exact_mean)
    return Vectors(cache.dim, cache.tokens, cache.padded, cache.keys.group, bits, exact_mean)


@kernel
def _coded(cache: Cache, record: int, key: bool, areas: PagingAreas, r: int) -> Coded:
    """Destinations of the vectors from the r-th on, with codes in the scratch."""
    part = _part(cache, key)
    lower = areas.lower + r if cache.form == TWO_PLANES else 0
    return Coded(record + part.scales + 2 * r, record + part.zeros + 2 * r, areas.codes + r, lower)


@kernel
def _write_codes(cache: Cache, record: int, key: bool, areas: PagingAreas) -> None:
    """Join the codes of both planes into the record's vectors."""
    tokens, dim, padded, part = cache.tokens, cache.dim, cache.padded, _part(cache, key)
    bits = _vectors(cache, key).bits
    for plane in range(2 if cache.form == TWO_PLANES else 1):
        own = areas.lower if plane == 1 else areas.codes
        at = record + (part.lower if plane == 1 else part.codes)
        if key:
            if part.tokenwise != 0:
                turn_codes(own, dim, tokens, tokens, areas.lower, padded)
                own = areas.lower
            clear_codes(own, tokens, dim, padded, padded)
            join_keys(own, tokens, padded, part.vectors, bits, at)
        else:
            clear_codes(own + dim * tokens, padded - dim, 0, tokens, tokens)
            join_values(own, tokens, padded, part.block, bits, at)


@kernel
def _read_codes(cache: Cache, record: int, key: bool, areas: PagingAreas) -> None:
    """The reverse of `_write_codes`."""
    tokens, padded, part, bits = cache.tokens, cache.padded, _part(cache, key), _vectors(cache, key).bits
    for plane in range(2 if cache.form == TWO_PLANES else 1):
        to = areas.lower if plane == 1 else areas.codes
        at = record + (part.lower if plane == 1 else part.codes)
        if key and part.tokenwise != 0:
            split_keys(at, tokens, padded, part.vectors, bits, areas.lower)
            turn_codes(areas.lower, tokens, cache.dim, padded, to, tokens)
        elif key:
            split_keys(at, tokens, padded, part.vectors, bits, to)
        else:
            split_values(at, tokens, padded, part.block, bits, to)


@routine
def _plain(cache: Cache, record: int, key: bool, scratch: int, _start: int) -> None:
    """Quantize the numbers in the scratch."""
    vectors, areas = _vectors(cache, key), _areas(cache, scratch)
    for r in range(0, vectors.lanes, _LANES):
        at = areas.x + 4 * r
        encode_lanes(at, vectors, Extremes(at, at, 4 * vectors.lanes), _coded(cache, record, key, areas, r))
    _write_codes(cache, record, key, areas)


@routine
def _corrected(cache: Cache, record: int, key: bool, scratch: int, start: int) -> None:
    """Quantize the numbers in the scratch and store GEAR's corrections."""
    vectors, areas, part = _vectors(cache, key), _areas(cache, scratch), _part(cache, key)
    count, step, each = vectors.count, 4 * vectors.lanes, part.kept // 2
    for r in range(0, vectors.lanes, _LANES):
        at, coded = areas.x + 4 * r, _coded(cache, record, key, areas, r)
        choose_outliers(at, count, step, each, areas.low, areas.high, areas.places + 8 * each * r)
        encode_lanes(at, vectors, Extremes(areas.low, areas.high, 64), coded)
        decode_lanes(coded, vectors, areas.lost + 4 * r)
        subtract(at, areas.low, areas.high, count, step, areas.lost + 4 * r)
    _write_codes(cache, record, key, areas)
    _store_low_rank(cache, record, key, areas, start)
    if each == 0:
        return
    for r in range(0, vectors.lanes, _LANES):
        decode_lanes(_coded(cache, record, key, areas, r), vectors, areas.lost + 4 * r)
    _add_low_rank(cache, record, key, areas.lost)
    for r in range(0, vectors.number, _LANES):
        x, lost, here, places = areas.x + 4 * r, areas.lost + 4 * r, 4 * each * r, areas.places + 8 * each * r
        indices, kept = record + part.indices + here, record + part.outliers + here
        keep_outliers(x, lost, step, places, each, min(_LANES, vectors.number - r), indices, kept)


@kernel
def _store_low_rank(cache: Cache, record: int, key: bool, areas: PagingAreas, start: int) -> None:
    """Store the factors of what codes lost."""
    tokens, dim, padded, rank, part = cache.tokens, cache.dim, cache.padded, cache.rank, _part(cache, key)
    lost, turned = areas.lost, areas.turned
    to = LowRank(tokens, dim, padded, rank, areas.a, areas.b, areas.shares, part.alike)
    if key:
        turn(lost, tokens, padded, 4 * padded, turned, 4 * tokens)
        low_rank(lost, turned, start, to)
    else:
        for i in range(0, 4 * tokens * padded, 4):
            set_float(turned + i, numba.float32(0.0))
        turn(lost, dim, tokens, 4 * tokens, turned, 4 * padded)
        low_rank(turned, lost, start, to)
    store_rounded(areas.a, rank * tokens, record + part.a)
    store_rounded(areas.b, rank * padded, record + part.b)


@kernel
def _add_low_rank(cache: Cache, record: int, key: bool, x: int) -> None:
    """Add what the stored factors give."""
    count, lanes, part, rank = _vectors(cache, key).count, _vectors(cache, key).lanes, _part(cache, key), cache.rank
    a, b = record + part.a, record + part.b
    if key:
        add_low_rank(x, count, lanes, 4 * lanes, a, b, rank, cache.tokens)
    else:
        add_low_rank(x, count, lanes, 4 * lanes, b, a, rank, cache.padded)


class _Head(NamedTuple):
    """The keys, or the values, of one layer's key-value head."""

    key: bool  # whether these are the keys
    record: int  # address of what the page keeps
    window: int  # address of the window behind its sinks


@kernel
def _head_of(of: Page, item: int) -> _Head:
    """One of 2 * layers * heads items."""
    cache = cache_at(of.cache)
    layer, head, key = item // (2 * of.heads), item // 2 % of.heads, item % 2 == 0
    record = of.pages.at + layer * of.pages.stride + (of.number * of.layers * of.heads + head) * cache.record
    windows = of.keys.at + layer * of.keys.stride if key else of.values.at + layer * of.values.stride
    width = cache.dim if key else padded_channels(cache.dim)
    return _Head(
        key, record, windows + 2 * width * (cache.window * (of.slot * of.layers * of.heads + head) + cache.sinks)
    )


@kernel
def _flush(quantize: Any, i: int, part: int, parts: int, scratch: int) -> None:
    """Cut a page off a slot's window: a part of the layers' heads."""
    flush = flush_at(i)
    cache, rest = cache_at(flush.page.cache), flush.rest
    tokens, dim, width = cache.tokens, cache.dim, padded_channels(cache.dim)
    first, last = share_of(2 * flush.page.layers * flush.page.heads, part, parts)
    for item in range(first, last):
        head = _head_of(flush.page, item)
        at = head.window
        if head.key:
            if cache.keys.tokenwise != 0:
                load_keys_by_channel(at, tokens, dim, scratch)
            else:
                load_keys(at, tokens, dim, cache.padded, scratch)
            quantize(cache, head.record, True, scratch, flush.start)
            move_bytes(at, at + 2 * dim * tokens, 2 * dim * ((rest + 15) // 16 * 16))
        else:
            load_values(at, tokens, dim, scratch)
            quantize(cache, head.record, False, scratch, flush.start)
            move_bytes(at, at + 2 * width * tokens, 2 * width * rest)


@compiled_unit
def flush(i: int, _control: int, part: int, parts: int, scratch: int) -> None:
    """Run the FLUSH instruction at address i: codes alone."""
    _flush(_plain, i, part, parts, scratch)


@compiled_unit
def flush_corrected(i: int, _control: int, part: int, parts: int, scratch: int) -> None:
    """Run the FLUSH instruction at address i: codes and GEAR's corrections."""
    _flush(_corrected, i, part, parts, scratch)


@compiled_unit
def restore(i: int, _control: int, part: int, parts: int, scratch: int) -> None:
    """Run the RESTORE instruction at address i: the first tokens of a page, dequantized, go behind a window's sinks."""
    restore = restore_at(i)
    cache, wanted = cache_at(restore.page.cache), restore.tokens
    areas = _areas(cache, scratch)
    first, last = share_of(2 * restore.page.layers * restore.page.heads, part, parts)
    for item in range(first, last):
        head = _head_of(restore.page, item)
        key, record, vectors = head.key, head.record, _vectors(cache, head.key)
        _read_codes(cache, record, key, areas)
        for r in range(0, vectors.lanes, _LANES):
            decode_lanes(_coded(cache, record, key, areas, r), vectors, areas.x + 4 * r)
        if cache.rank != 0:
            _add_low_rank(cache, record, key, areas.x)
        kept = _part(cache, key)
        if kept.kept != 0:
            indices, outliers = record + kept.indices, record + kept.outliers
            add_outliers(areas.x, 4 * vectors.lanes, kept.kept, vectors.number, indices, outliers)
        if key:
            by_token, by_channel = (4, 4 * cache.tokens) if cache.keys.tokenwise != 0 else (4 * cache.padded, 4)
            write_keys(areas.x, cache.dim, by_token, by_channel, wanted, head.window)
        else:
            write_values(areas.x, cache.tokens, cache.dim, wanted, head.window)
