"""GEAR's corrections of a page: scores += (q B) A^T, output += (p A) B^T, and single outliers.

An outlier meets every query at one place, so queries stand side by side for them, eight in a vector (a *block*): what
outliers of the keys add to scores is summed up by token, [T, 8], and turned into rows of tokens; what outliers of the
values add to the output is summed up by channel, [D, 8], over all pages, and turned when the last has been read. The
sums of the lesser and the greater outlier of a value stand apart, for neighbouring tokens often have theirs in the same
channels, and an addition would wait for the one before.

Source: GEAR §3.
"""

from __future__ import annotations

import itertools
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from runtime.backends.cpu.data import pages as page
from runtime.backends.cpu.data.operands import word
from runtime.backends.cpu.kernels.attention.queries import CHANGE, NOTED, widen
from runtime.backends.cpu.machine.emit import (
    FLOAT,
    FLOATS,
    I16,
    I32,
    I64,
    LANES,
    Builder,
    call,
    constant,
    define,
    emit_fma,
    load,
    offset,
    pointer,
    splat,
)
from runtime.backends.cpu.machine.vector import (
    add,
    get_float,
    load_floats,
    mul,
    set_float,
    store_floats,
    zero_floats,
)
from runtime.kv.kinds import LOW_RANK

BLOCK = 8
"""Queries side by side."""
_VECTOR = 4 * BLOCK
"""Bytes of a block's vector."""
_EIGHT = ir.VectorType(FLOAT, BLOCK)


@define(types.void, types.int64, types.int64, types.int64, types.int64)
def turn(b: Builder, source: Any, source_step: Any, target: Any, target_step: Any) -> None:
    """Transpose eight rows of eight floats: addresses, and bytes from row to row."""
    rows = []
    for _ in range(BLOCK):
        rows.append(load(b, _EIGHT, source, 4))
        source = b.add(source, source_step)
    for distance in (1, 2, 4):
        low = [lane if not lane & distance else BLOCK + lane - distance for lane in range(BLOCK)]
        high = [lane + distance if not lane & distance else BLOCK + lane for lane in range(BLOCK)]
        masks = [ir.Constant(ir.VectorType(I32, BLOCK), mask) for mask in (low, high)]
        for i in range(BLOCK):
            if not i & distance:
                pair = rows[i], rows[i + distance]
                rows[i], rows[i + distance] = (b.shuffle_vector(*pair, mask) for mask in masks)
    for row in rows:
        b.store(row, pointer(b, target), align=4)
        target = b.add(target, target_step)


@define(types.void, *[types.int64] * 7)
def _spread(
    b: Builder, source: Any, kept: Any, indices: Any, number: Any, half: Any, lesser: Any, greater: Any
) -> None:
    """Add what the outliers of some vectors give to a block's sums.

    Args (addresses): what the vectors are multiplied by, float32 [number, 8]; outliers as floats, [number, 2, half];
    where they stand in their vectors, int16 likewise; number of vectors; half of a vector's outliers; sums of the
    first halves and of the second, float32 [.., 8], which may be the same.
    """
    with cgutils.for_range(b, number) as outer:
        value = load(b, _EIGHT, b.add(source, b.mul(outer.index, ir.Constant(I64, _VECTOR))), 4)
        first = b.mul(b.mul(outer.index, half), ir.Constant(I64, 2))
        with cgutils.for_range(b, half) as inner:
            near = b.add(first, inner.index)
            for i, sums in ((near, lesser), (b.add(near, half), greater)):
                place = b.sext(load(b, I16, b.add(indices, b.shl(i, ir.Constant(I64, 1))), 2), I64)
                at = b.add(sums, b.mul(place, ir.Constant(I64, _VECTOR)))
                factor = splat(b, load(b, FLOAT, b.add(kept, b.shl(i, ir.Constant(I64, 2))), 4), _EIGHT)
                total = call(b, f"llvm.fma.v{BLOCK}f32", _EIGHT, value, factor, load(b, _EIGHT, at, 4))
                b.store(total, pointer(b, at), align=4)


def _project_rows(queries: int) -> Any:
    """Intrinsic: products of some vectors with the four rows of a factor [r, length]: each float32 [16], four alike."""

    def emit(b: Builder, x: Any, x_step: Any, matrix: Any, length: Any, out: Any) -> None:
        sums: dict[tuple[int, int], Any] = {}
        for key in itertools.product(range(queries), range(LOW_RANK)):
            sums[key] = cgutils.alloca_once(b, FLOATS)
            b.store(constant(FLOATS, 0.0), sums[key])
        starts = [b.add(x, b.mul(x_step, ir.Constant(I64, n))) for n in range(queries)]
        with cgutils.for_range(b, b.lshr(length, ir.Constant(I64, 4))) as loop:
            at = b.mul(loop.index, ir.Constant(I64, 64))
            values = [load(b, FLOATS, b.add(start, at), 4) for start in starts]
            rows = [b.add(b.add(matrix, at), b.mul(length, ir.Constant(I64, 4 * r))) for r in range(LOW_RANK)]
            parts = [load(b, FLOATS, row, 4) for row in rows]
            for (n, r), total in sums.items():
                b.store(emit_fma(b, values[n], parts[r], b.load(total, typ=FLOATS)), total)
        for n in range(queries):
            total = _sums_of_four(b, [b.load(sums[n, r], typ=FLOATS) for r in range(LOW_RANK)])
            b.store(total, pointer(b, offset(b, out, 64 * n)), align=4)

    emit.__name__, emit.__doc__ = f"project_{queries}", f"Project {queries} vectors."
    return define(types.void, *[types.int64] * 5)(emit)


def _sums_of_four(b: Builder, parts: list[Any]) -> Any:
    """The sum of each of four vectors' lanes, in four lanes."""
    for side in (8, 4):  # Two vectors become one, each of their sums in half as many lanes, until it has four.
        near = [lane // side * 2 * side + lane % side for lane in range(LANES)]  # Of 32 lanes: both vectors.
        masks = [ir.Constant(ir.VectorType(I32, LANES), [lane + more for lane in near]) for more in (0, side)]
        parts = [
            b.fadd(*(b.shuffle_vector(*parts[i : i + 2], mask) for mask in masks)) for i in range(0, len(parts), 2)
        ]
    total = parts[0]
    for distance in (2, 1):
        mask = ir.Constant(ir.VectorType(I32, LANES), [lane ^ distance for lane in range(LANES)])
        total = b.fadd(total, b.shuffle_vector(total, total, mask))
    return total


def _expand_rows(queries: int) -> Any:
    """Intrinsic: add the rows of a factor [r, length], times what `_project_rows` wrote, to float32 [count] each."""

    def emit(b: Builder, factors: Any, matrix: Any, length: Any, count: Any, out: Any, out_step: Any) -> None:
        scales = {
            (n, r): splat(b, load(b, FLOAT, offset(b, factors, 64 * n + 16 * r), 4), FLOATS)
            for n, r in itertools.product(range(queries), range(LOW_RANK))
        }
        with cgutils.for_range(b, b.lshr(count, ir.Constant(I64, 4))) as loop:
            at = b.mul(loop.index, ir.Constant(I64, 64))
            rows = [b.add(b.add(matrix, at), b.mul(length, ir.Constant(I64, 4 * r))) for r in range(LOW_RANK)]
            parts = [load(b, FLOATS, row, 4) for row in rows]
            for n in range(queries):
                to = b.add(b.add(out, at), b.mul(out_step, ir.Constant(I64, n)))
                value = load(b, FLOATS, to, 4)
                for r, part in enumerate(parts):
                    value = emit_fma(b, scales[n, r], part, value)
                b.store(value, pointer(b, to), align=4)

    emit.__name__, emit.__doc__ = f"expand_{queries}", f"Expand {queries} vectors."
    return define(types.void, *[types.int64] * 6)(emit)


_project_4, _project_1 = _project_rows(4), _project_rows(1)
_expand_4, _expand_1 = _expand_rows(4), _expand_rows(1)


@numba.njit(nogil=True)
def _correct(
    x: int,
    x_step: int,
    queries: int,
    left: int,
    width: int,
    right: int,
    length: int,
    count: int,
    out: int,
    out_step: int,
    factors: int,
) -> None:
    """Add (x left^T) right to float32 [count] of every query.

    Args (addresses and bytes): x float32 [queries, width] and the step from row to row; number of queries; factors left
    [r, width] and right [r, length]; how much of a row is wanted; out and the step from row to row; scratch, 256 bytes.
    """
    n = 0
    while n + 4 <= queries:
        _project_4(x + n * x_step, x_step, left, width, factors)
        _expand_4(factors, right, length, count, out + n * out_step, out_step)
        n += 4
    while n < queries:
        _project_1(x + n * x_step, x_step, left, width, factors)
        _expand_1(factors, right, length, count, out + n * out_step, out_step)
        n += 1


def gear_room(queries: int, padded: int, tokens: int) -> int:
    """Bytes of scratch for the corrections; arguments as of `attention.page.page_scratch`."""
    blocks = (queries + BLOCK - 1) // BLOCK
    return _VECTOR * (3 * blocks * padded + 2 * tokens) + 4 * LOW_RANK * (padded + tokens) + 256


_gear_room = numba.njit(nogil=True)(gear_room)


@numba.njit(nogil=True)
def room_of(cache: int, queries: int) -> int:
    """Bytes of scratch for the corrections of a cache: 0 where it has none."""
    if word(cache, page.RANK) == 0:
        return 0
    return _gear_room(queries, word(cache, page.PADDED), word(cache, page.TOKENS))


@numba.njit(nogil=True)
def _parts(cache: int, queries: int, room: int) -> tuple[int, int, int, int, int]:
    """Addresses in the room: queries [blocks, D, 8], sums [blocks, 2, D, 8], two buffers [T, 8], factors A and B."""
    padded, tokens = word(cache, page.PADDED), word(cache, page.TOKENS)
    blocks = (queries + BLOCK - 1) // BLOCK
    sums = room + _VECTOR * blocks * padded
    first = sums + 2 * _VECTOR * blocks * padded
    second = first + _VECTOR * tokens
    return room, sums, first, second, second + _VECTOR * tokens


@numba.njit(nogil=True)
def begin_corrections(cache: int, q: int, queries: int, room: int) -> None:
    """Make ready for the first page of a run.

    Args:
        cache: Address of the cache's description.
        q: Address of the queries, float32 [queries, D padded].
        queries: Number of queries.
        room: Address of `room_of` bytes.
    """
    if word(cache, page.KEY_OUTLIERS) == 0:
        return
    padded = word(cache, page.PADDED)
    turned, sums = _parts(cache, queries, room)[:2]
    for n in range(0, queries, BLOCK):
        for d in range(0, padded, BLOCK):
            turn(q + 4 * (n * padded + d), 4 * padded, turned + _VECTOR * (n // BLOCK * padded + d), _VECTOR)
    for at in range(sums, sums + 2 * _VECTOR * padded * ((queries + BLOCK - 1) // BLOCK), 64):
        store_floats(at, zero_floats())


@numba.njit(nogil=True)
def _by_token(cache: int, record: int, q: int, kept: int, sums: int) -> None:
    """Sum up what outliers of the keys add to the scores of a block: float32 [T, 8]."""
    tokens, dim, count = word(cache, page.TOKENS), word(cache, page.DIM), word(cache, page.KEY_OUTLIERS)
    indices = record + word(cache, page.KEY_INDICES)
    widen(record + word(cache, page.KEY_KEPT), dim * count, dim * count, 1.0, kept)
    for at in range(sums, sums + _VECTOR * tokens, 64):
        store_floats(at, zero_floats())
    _spread(q, kept, indices, dim, count // 2, sums, sums)


@numba.njit(nogil=True)
def correct_scores(cache: int, record: int, q: int, queries: int, scores: int, scores_step: int, room: int) -> None:
    """Add (q B) A^T and the outliers of the keys to all queries' scores.

    Args:
        cache: Address of the cache's description.
        record: Address of what the page keeps of the key-value head.
        q: Address of the queries, float32 [queries, D padded].
        queries: Number of queries.
        scores: Address of float32 [queries, T].
        scores_step: Bytes from query to query.
        room: Address of `room_of` bytes, after `begin_corrections`.
    """
    tokens, padded, sparse = word(cache, page.TOKENS), word(cache, page.PADDED), word(cache, page.KEY_OUTLIERS) != 0
    turned, _, by_token, by_query, a = _parts(cache, queries, room)
    b = a + 4 * LOW_RANK * tokens
    widen(record + word(cache, page.KEY_A), LOW_RANK * tokens, LOW_RANK * tokens, 1.0, a)
    widen(record + word(cache, page.KEY_B), LOW_RANK * padded, LOW_RANK * padded, 1.0, b)
    factors = b + 4 * LOW_RANK * padded
    _correct(q, 4 * padded, queries, b, padded, a, tokens, tokens, scores, scores_step, factors)
    for n in range(queries if sparse else 0):
        if n % BLOCK == 0:
            _by_token(cache, record, turned + _VECTOR * (n // BLOCK) * padded, by_query, by_token)
            for t in range(0, tokens, BLOCK):
                turn(by_token + _VECTOR * t, _VECTOR, by_query + 4 * t, 4 * tokens)
        to, more = scores + n * scores_step, by_query + 4 * tokens * (n % BLOCK)
        for t in range(0, 4 * tokens, 64):
            store_floats(to + t, add(load_floats(to + t), load_floats(more + t)))


@numba.njit(nogil=True)
def correct_sums(
    cache: int,
    record: int,
    queries: int,
    heads: int,
    weights: int,
    weights_step: int,
    noted: int,
    sums: int,
    sums_row: int,
    sums_head: int,
    room: int,
) -> None:
    """Add (p A) B^T to the partial results, and the outliers of the values to the sums by channel.

    Args:
        cache: Address of the cache's description.
        record: Address of what the page keeps of the key-value head.
        queries: Number of queries.
        heads: Query heads of a row.
        weights: Address of float32 [queries, T].
        weights_step: Bytes from query to query.
        noted: Address of what is noted of the queries.
        sums: Address of the first row's and head's partial result.
        sums_row: Bytes from row to row.
        sums_head: Bytes from head to head.
        room: Address of `room_of` bytes, after `begin_corrections`.
    """
    tokens, padded, sparse = word(cache, page.TOKENS), word(cache, page.PADDED), word(cache, page.VALUE_OUTLIERS) != 0
    channels = (word(cache, page.DIM) + 15) // 16 * 16
    _, by_channel, by_token, buffer, a = _parts(cache, queries, room)
    b = a + 4 * LOW_RANK * tokens
    widen(record + word(cache, page.VALUE_A), LOW_RANK * tokens, LOW_RANK * tokens, 1.0, a)
    widen(record + word(cache, page.VALUE_B), LOW_RANK * padded, LOW_RANK * padded, 1.0, b)
    factors = b + 4 * LOW_RANK * padded
    for row in range(queries // heads):
        x, to = weights + weights_step * row * heads, sums + row * sums_row
        _correct(x, weights_step, heads, a, tokens, b, padded, channels, to, sums_head, factors)
    if sparse:
        for n in range(0, queries, BLOCK):
            block = by_channel + 2 * _VECTOR * padded * (n // BLOCK)
            _rescale(noted + NOTED * n, min(queries - n, BLOCK), block, 2 * padded, buffer)
            for t in range(0, tokens, BLOCK):
                turn(weights + weights_step * n + 4 * t, weights_step, by_token + _VECTOR * t, _VECTOR)
            _by_channel(cache, record, by_token, buffer, block, block + _VECTOR * padded)


@numba.njit(nogil=True)
def _by_channel(cache: int, record: int, weights: int, kept: int, lesser: int, greater: int) -> None:
    """Add what outliers of the values give to the sums of a block: float32 [D, 8] each."""
    tokens, count = word(cache, page.TOKENS), word(cache, page.VALUE_OUTLIERS)
    indices = record + word(cache, page.VALUE_INDICES)
    widen(record + word(cache, page.VALUE_KEPT), tokens * count, tokens * count, 1.0, kept)
    _spread(weights, kept, indices, tokens, count // 2, lesser, greater)


@numba.njit(nogil=True)
def _rescale(noted: int, queries: int, sums: int, vectors: int, changes: int) -> None:
    """Multiply a block's sums by what each query's others were multiplied by, where any were."""
    changed = False
    store_floats(changes, zero_floats())
    for n in range(queries):
        change = get_float(noted + NOTED * n + CHANGE)
        set_float(changes + 4 * n, change)
        set_float(changes + 4 * (BLOCK + n), change)
        changed = changed or change != numba.float32(1.0)
    if changed:
        change_of_all = load_floats(changes)
        for at in range(sums, sums + _VECTOR * vectors, 64):
            store_floats(at, mul(load_floats(at), change_of_all))


@numba.njit(nogil=True)
def settle_corrections(
    cache: int, queries: int, heads: int, sums: int, sums_row: int, sums_head: int, room: int
) -> None:
    """Add the sums by channel to the partial results. Arguments as of `correct_sums`."""
    if word(cache, page.VALUE_OUTLIERS) == 0:
        return
    padded, channels = word(cache, page.PADDED), (word(cache, page.DIM) + 15) // 16 * 16
    by_channel, buffer = _parts(cache, queries, room)[1:3]
    for first in range(0, queries, BLOCK):
        block = by_channel + 2 * _VECTOR * padded * (first // BLOCK)
        for d in range(0, channels, LANES):
            for i in range(_VECTOR * d, _VECTOR * (d + LANES), 64):
                store_floats(block + i, add(load_floats(block + i), load_floats(block + _VECTOR * padded + i)))
            for half in range(2):
                turn(block + _VECTOR * (d + BLOCK * half), _VECTOR, buffer + _VECTOR * half, 64)
            for n in range(first, min(first + BLOCK, queries)):
                to = sums + n // heads * sums_row + n % heads * sums_head + 4 * d
                store_floats(to, add(load_floats(to), load_floats(buffer + 64 * (n - first))))
