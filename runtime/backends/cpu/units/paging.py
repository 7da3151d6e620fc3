"""Units that flush a page from a window, quantizing it, and that restore a page into a window.

Each layer's key-value heads are independent, as are keys and values, so the threads share them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba

from runtime.backends.cpu.data.instructions import Page
from runtime.backends.cpu.data.pages import TWO_PLANES, Cache
from runtime.backends.cpu.kernels.attention.run import padded_channels
from runtime.backends.cpu.kernels.cache.gear import (
    LowRank,
    add_low_rank,
    add_outliers,
    choose_outliers,
    keep_outliers,
    low_rank,
    store_rounded,
    subtract,
    turn,
)
from runtime.backends.cpu.kernels.cache.page import (
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
    turn_codes,
    write_keys,
    write_values,
)
from runtime.backends.cpu.kernels.views import cache_at, flush_at, restore_at, share_of
from runtime.backends.cpu.machine.kernel import kernel, routine
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.machine.vector import set_float
from runtime.backends.cpu.scratch import PagingAreas, lay_out_paging

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

    key: bool
    """Whether these are the keys."""
    record: int
    """Address of what the page keeps."""
    window: int
    """Address of the window behind its sinks."""


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
