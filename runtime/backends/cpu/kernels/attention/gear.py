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
from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from runtime.backends.cpu.data.pages import Cache
from runtime.backends.cpu.data.records import LANES
from runtime.backends.cpu.kernels.attention.products import Out, Rows
from runtime.backends.cpu.kernels.attention.queries import CHANGE, Queries, Sums, padded_channels, widen
from runtime.backends.cpu.machine.emit import (
    FLOAT,
    FLOATS,
    I16,
    I32,
    I64,
    Builder,
    call,
    constant,
    define,
    emit_fma,
    load,
    named,
    offset,
    parts,
    pointer,
    splat,
)
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    add,
    get_float,
    load_floats,
    mul,
    set_float,
    store_floats,
    zero_floats,
)
from runtime.backends.cpu.scratch import GEAR_QUERIES, NOTED
from runtime.kv.kinds import LOW_RANK

_VECTOR = 4 * GEAR_QUERIES
"""Bytes of a block's vector."""
_EIGHT = ir.VectorType(FLOAT, GEAR_QUERIES)


class Factor(NamedTuple):
    """One side of a low-rank matrix in float32, [LOW_RANK, width]."""

    at: int  # address
    width: int  # numbers of a row


class Outliers(NamedTuple):
    """Outliers of a page's vectors."""

    kept: int  # address of float32 [vectors, 2, half]
    indices: int  # address of int16 [vectors, 2, half]: their positions in their vectors
    vectors: int  # number of vectors
    half: int  # half of a vector's outliers


class Weighed(NamedTuple):
    """The softmax weights of a run's queries with a page's tokens."""

    at: int  # address of the first query's, float32 [T]
    step: int  # bytes from query to query
    noted: int  # address of what is noted of the queries


@define(types.void, types.int64, types.int64, types.int64, types.int64)
def turn(b: Builder, source: Any, source_step: Any, target: Any, target_step: Any) -> None:
    """Transpose eight rows of eight floats: addresses, and bytes from row to row."""
    rows = []
    for _ in range(GEAR_QUERIES):
        rows.append(load(b, _EIGHT, source, 4))
        source = b.add(source, source_step)
    for distance in (1, 2, 4):
        low = [lane if not lane & distance else GEAR_QUERIES + lane - distance for lane in range(GEAR_QUERIES)]
        high = [lane + distance if not lane & distance else GEAR_QUERIES + lane for lane in range(GEAR_QUERIES)]
        masks = [ir.Constant(ir.VectorType(I32, GEAR_QUERIES), mask) for mask in (low, high)]
        for i in range(GEAR_QUERIES):
            if not i & distance:
                pair = rows[i], rows[i + distance]
                rows[i], rows[i + distance] = (b.shuffle_vector(*pair, mask) for mask in masks)
    for row in rows:
        b.store(row, pointer(b, target), align=4)
        target = b.add(target, target_step)


@define(types.void, types.int64, named(Outliers), types.int64, types.int64)
def _spread(b: Builder, source: Any, outliers: Any, lesser: Any, greater: Any) -> None:
    """Add what the outliers of some vectors give to a block's sums.

    Args (addresses): what the vectors are multiplied by, float32 [number, 8]; the outliers; sums of their first halves
    and of the second, float32 [.., 8], which may be the same.
    """
    outliers = parts(b, outliers, Outliers)
    half = outliers.half
    with cgutils.for_range(b, outliers.vectors) as outer:
        value = load(b, _EIGHT, b.add(source, b.mul(outer.index, ir.Constant(I64, _VECTOR))), 4)
        first = b.mul(b.mul(outer.index, half), ir.Constant(I64, 2))
        with cgutils.for_range(b, half) as inner:
            near = b.add(first, inner.index)
            for i, sums in ((near, lesser), (b.add(near, half), greater)):
                place = b.sext(load(b, I16, b.add(outliers.indices, b.shl(i, ir.Constant(I64, 1))), 2), I64)
                at = b.add(sums, b.mul(place, ir.Constant(I64, _VECTOR)))
                factor = splat(b, load(b, FLOAT, b.add(outliers.kept, b.shl(i, ir.Constant(I64, 2))), 4), _EIGHT)
                total = call(b, f"llvm.fma.v{GEAR_QUERIES}f32", _EIGHT, value, factor, load(b, _EIGHT, at, 4))
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


@kernel
def _correct(x: Rows, left: Factor, right: Factor, out: Out, count: int, factors: int) -> None:
    """Add (x left^T) right to float32 [count] of every row.

    Args:
        x: float32 [rows, width of `left`].
        left: The factor that rows are projected on.
        right: The factor that they are expanded by.
        out: What is added to.
        count: Number of columns to correct.
        factors: Address of scratch, 256 bytes.
    """
    n = 0
    while n + 4 <= x.count:
        _project_4(x.at + n * x.step, x.step, left.at, left.width, factors)
        _expand_4(factors, right.at, right.width, count, out.at + n * out.step, out.step)
        n += 4
    while n < x.count:
        _project_1(x.at + n * x.step, x.step, left.at, left.width, factors)
        _expand_1(factors, right.at, right.width, count, out.at + n * out.step, out.step)
        n += 1


class _Room(NamedTuple):
    """The scratch of the corrections: addresses."""

    queries: int  # float32 [blocks, D, 8]
    sums: int  # float32 [blocks, 2, D, 8], by channel
    first: int  # float32 [T, 8]
    second: int  # likewise
    a: int  # factor A, [LOW_RANK, T]
    b: int  # factor B, [LOW_RANK, D]
    factors: int  # 256 bytes


@kernel
def _room_of(cache: Cache, queries: int, room: int) -> _Room:
    padded, tokens, blocks = cache.padded, cache.tokens, (queries + GEAR_QUERIES - 1) // GEAR_QUERIES
    sums = room + _VECTOR * blocks * padded
    first = sums + 2 * _VECTOR * blocks * padded
    second = first + _VECTOR * tokens
    a = second + _VECTOR * tokens
    b = a + 4 * LOW_RANK * tokens
    return _Room(room, sums, first, second, a, b, b + 4 * LOW_RANK * padded)


@kernel
def begin_corrections(cache: Cache, q: int, queries: int, room: int) -> None:
    """Make ready for the first page of a run.

    Args:
        cache: The cache's description.
        q: Address of the queries, float32 [queries, D padded].
        queries: Number of queries.
        room: Address of `gear_room` bytes.
    """
    if cache.keys.kept == 0:
        return
    padded, areas = cache.padded, _room_of(cache, queries, room)
    for n in range(0, queries, GEAR_QUERIES):
        for d in range(0, padded, GEAR_QUERIES):
            turn(
                q + 4 * (n * padded + d),
                4 * padded,
                areas.queries + _VECTOR * (n // GEAR_QUERIES * padded + d),
                _VECTOR,
            )
    for at in range(areas.sums, areas.sums + 2 * _VECTOR * padded * ((queries + GEAR_QUERIES - 1) // GEAR_QUERIES), 64):
        store_floats(at, zero_floats())


@kernel
def _by_token(cache: Cache, record: int, q: int, kept: int, sums: int) -> None:
    """Sum up what outliers of the keys add to the scores of a block: float32 [T, 8]."""
    keys, dim, count = cache.keys, cache.dim, cache.keys.kept
    widen(record + keys.outliers, dim * count, dim * count, 1.0, kept)
    for at in range(sums, sums + _VECTOR * cache.tokens, 64):
        store_floats(at, zero_floats())
    _spread(q, Outliers(kept, record + keys.indices, dim, count // 2), sums, sums)


@kernel
def correct_scores(cache: Cache, record: int, q: int, queries: int, scores: Out, room: int) -> None:
    """Add (q B) A^T and the outliers of the keys to all queries' scores.

    Args:
        cache: The cache's description.
        record: Address of what the page keeps of the key-value head.
        q: Address of the queries, float32 [queries, D padded].
        queries: Number of queries.
        scores: float32 [queries, T].
        room: Address of `gear_room` bytes, after `begin_corrections`.
    """
    keys, tokens, padded = cache.keys, cache.tokens, cache.padded
    areas = _room_of(cache, queries, room)
    by_token, by_query = areas.first, areas.second
    widen(record + keys.a, LOW_RANK * tokens, LOW_RANK * tokens, 1.0, areas.a)
    widen(record + keys.b, LOW_RANK * padded, LOW_RANK * padded, 1.0, areas.b)
    x = Rows(q, 4 * padded, queries)
    _correct(x, Factor(areas.b, padded), Factor(areas.a, tokens), scores, tokens, areas.factors)
    for n in range(queries if keys.kept != 0 else 0):
        if n % GEAR_QUERIES == 0:
            _by_token(cache, record, areas.queries + _VECTOR * (n // GEAR_QUERIES) * padded, by_query, by_token)
            for t in range(0, tokens, GEAR_QUERIES):
                turn(by_token + _VECTOR * t, _VECTOR, by_query + 4 * t, 4 * tokens)
        to, more = scores.at + n * scores.step, by_query + 4 * tokens * (n % GEAR_QUERIES)
        for t in range(0, 4 * tokens, 64):
            store_floats(to + t, add(load_floats(to + t), load_floats(more + t)))


@kernel
def correct_sums(cache: Cache, record: int, queries: Queries, weights: Weighed, sums: Sums, room: int) -> None:
    """Add (p A) B^T to the partial results, and the outliers of the values to the sums by channel.

    Args:
        cache: The cache's description.
        record: Address of what the page keeps of the key-value head.
        queries: The run.
        weights: The weights of its queries.
        sums: Its partial results.
        room: Address of `gear_room` bytes, after `begin_corrections`.
    """
    values, tokens, padded, heads = cache.values, cache.tokens, cache.padded, queries.heads
    count = queries.rows * heads
    areas = _room_of(cache, count, room)
    widen(record + values.a, LOW_RANK * tokens, LOW_RANK * tokens, 1.0, areas.a)
    widen(record + values.b, LOW_RANK * padded, LOW_RANK * padded, 1.0, areas.b)
    a, b, channels = Factor(areas.a, tokens), Factor(areas.b, padded), padded_channels(cache.dim)
    for row in range(queries.rows):
        x, to = Rows(weights.at + weights.step * row * heads, weights.step, heads), sums.at + row * sums.row
        _correct(x, a, b, Out(to, sums.head), channels, areas.factors)
    if values.kept != 0:
        for n in range(0, count, GEAR_QUERIES):
            block = areas.sums + 2 * _VECTOR * padded * (n // GEAR_QUERIES)
            _rescale(weights.noted + NOTED * n, min(count - n, GEAR_QUERIES), block, 2 * padded, areas.second)
            for t in range(0, tokens, GEAR_QUERIES):
                turn(weights.at + weights.step * n + 4 * t, weights.step, areas.first + _VECTOR * t, _VECTOR)
            _by_channel(cache, record, areas.first, areas.second, block)


@kernel
def _by_channel(cache: Cache, record: int, weights: int, kept: int, sums: int) -> None:
    """Add what outliers of the values give to the sums of a block: float32 [2, D, 8]."""
    values, tokens, count = cache.values, cache.tokens, cache.values.kept
    widen(record + values.outliers, tokens * count, tokens * count, 1.0, kept)
    outliers = Outliers(kept, record + values.indices, tokens, count // 2)
    _spread(weights, outliers, sums, sums + _VECTOR * cache.padded)


@kernel
def _rescale(noted: int, queries: int, sums: int, vectors: int, changes: int) -> None:
    """Multiply a block's sums by what each query's others were multiplied by, where any were."""
    changed = False
    store_floats(changes, zero_floats())
    for n in range(queries):
        change = get_float(noted + NOTED * n + CHANGE)
        set_float(changes + 4 * n, change)
        set_float(changes + 4 * (GEAR_QUERIES + n), change)
        changed = changed or change != numba.float32(1.0)
    if changed:
        change_of_all = load_floats(changes)
        for at in range(sums, sums + _VECTOR * vectors, 64):
            store_floats(at, mul(load_floats(at), change_of_all))


@kernel
def settle_corrections(cache: Cache, queries: Queries, sums: Sums, room: int) -> None:
    """Add the sums by channel to the partial results. Arguments as of `correct_sums`."""
    if cache.values.kept == 0:
        return
    padded, heads, count = cache.padded, queries.heads, queries.rows * queries.heads
    areas = _room_of(cache, count, room)
    buffer = areas.first
    for first in range(0, count, GEAR_QUERIES):
        block = areas.sums + 2 * _VECTOR * padded * (first // GEAR_QUERIES)
        for d in range(0, padded_channels(cache.dim), LANES):
            for i in range(_VECTOR * d, _VECTOR * (d + LANES), 64):
                store_floats(block + i, add(load_floats(block + i), load_floats(block + _VECTOR * padded + i)))
            for half in range(2):
                turn(block + _VECTOR * (d + GEAR_QUERIES * half), _VECTOR, buffer + _VECTOR * half, 64)
            for n in range(first, min(first + GEAR_QUERIES, count)):
                to = sums.at + n // heads * sums.row + n % heads * sums.head + 4 * d
                store_floats(to, add(load_floats(to), load_floats(buffer + 64 * (n - first))))
