"""The instructions that cut a page off a window and quantize it, and that write a page back into a window.

Each layer's key-value heads are independent of each other, keys of values too, so the threads share them out.
"""

from __future__ import annotations

from typing import Any

import numba
from numba.extending import register_jitable

from runtime.backends.cpu.data import pages as page
from runtime.backends.cpu.data.instructions import Page, flush_at, restore_at
from runtime.backends.cpu.data.operands import word
from runtime.backends.cpu.data.step import share_of
from runtime.backends.cpu.kernels.cache.gear import (
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
    clear_codes,
    decode_lanes,
    encode_lanes,
    join_keys,
    join_values,
    load_keys,
    load_values,
    move_bytes,
    split_keys,
    split_values,
    write_keys,
    write_values,
)
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.machine.vector import set_float

_LANES = 16


def paging_scratch(tokens: int, padded: int, rank: int, outliers: int) -> int:
    """Bytes of scratch that a thread needs for FLUSH and RESTORE.

    Args:
        tokens: T.
        padded: D padded to 32.
        rank: Of GEAR's corrections.
        outliers: Most outliers of a vector.
    """
    longest = max(tokens, padded)
    return 14 * tokens * padded + 128 * longest + 4 * outliers * longest + 4 * rank * (tokens + padded + 1) + 1024


@numba.njit(nogil=True)
def _sizes(cache: int, key: bool) -> tuple[int, int, int, int]:
    """Numbers of a vector, vectors, vectors padded to whole lanes, and numbers of a group."""
    tokens, dim = word(cache, page.TOKENS), word(cache, page.DIM)
    if key:
        return tokens, dim, word(cache, page.PADDED), word(cache, page.KEY_GROUP)
    return dim, tokens, tokens, word(cache, page.VALUE_GROUP)


@numba.njit(nogil=True)
def _scales(cache: int, record: int, key: bool) -> tuple[int, int]:
    """Addresses of the scales and of the zeros."""
    if key:
        return record + word(cache, page.KEY_SCALES), record + word(cache, page.KEY_ZEROS)
    return record + word(cache, page.VALUE_SCALES), record + word(cache, page.VALUE_ZEROS)


@numba.njit(nogil=True)
def _bits(cache: int) -> tuple[int, bool]:
    """Bits of a plane, and whether there are two."""
    form = word(cache, page.FORMAT)
    return (4, True) if form == page.TWO_PLANES else (form, False)


@numba.njit(nogil=True)
def _areas(cache: int, scratch: int) -> tuple[int, int, int, int]:
    """Places in the scratch: numbers, other numbers, codes of both planes, and what follows."""
    size = word(cache, page.TOKENS) * word(cache, page.PADDED)
    return scratch, scratch + 4 * size, scratch + 12 * size, scratch + 14 * size


@numba.njit(nogil=True)
def _write_codes(cache: int, record: int, key: bool, codes: int, lower: int) -> None:
    """Join the codes of both planes into the record's vectors."""
    tokens, dim, padded = word(cache, page.TOKENS), word(cache, page.DIM), word(cache, page.PADDED)
    bits, _ = _bits(cache)
    for plane in range(1 if lower == 0 else 2):
        own = lower if plane == 1 else codes
        if key:
            at = record + word(cache, page.KEY_CODES) + plane * word(cache, page.KEY_LOWER)
            clear_codes(own, tokens, dim, padded, padded)
            join_keys(own, tokens, padded, word(cache, page.KEY_VECTORS), bits, at)
        else:
            at = record + word(cache, page.VALUE_CODES) + plane * word(cache, page.VALUE_LOWER)
            clear_codes(own + dim * tokens, padded - dim, 0, tokens, tokens)
            join_values(own, tokens, padded, word(cache, page.VALUE_BLOCK), bits, at)


@register_jitable
def _plain(cache: int, record: int, key: bool, scratch: int, _start: int) -> None:
    """Quantize the numbers in the scratch."""
    count, _, lanes, group = _sizes(cache, key)
    scales, zeros = _scales(cache, record, key)
    x, _, codes, _ = _areas(cache, scratch)
    bits, both = _bits(cache)
    lower = codes + word(cache, page.TOKENS) * word(cache, page.PADDED) if both else 0
    for r in range(0, lanes, _LANES):
        at, own = x + 4 * r, lower + r if both else 0
        encode_lanes(at, count, lanes, at, at, 4 * lanes, group, bits, scales + 2 * r, zeros + 2 * r, codes + r, own)
    _write_codes(cache, record, key, codes, lower)


@register_jitable
def _corrected(cache: int, record: int, key: bool, scratch: int, start: int) -> None:
    """Quantize the numbers in the scratch and store GEAR's corrections."""
    count, vectors, lanes, group = _sizes(cache, key)
    scales, zeros = _scales(cache, record, key)
    x, lost, codes, rest = _areas(cache, scratch)
    tokens, dim, padded = word(cache, page.TOKENS), word(cache, page.DIM), word(cache, page.PADDED)
    bits, rank, step = word(cache, page.FORMAT), word(cache, page.RANK), 4 * lanes
    each = word(cache, page.KEY_OUTLIERS if key else page.VALUE_OUTLIERS) // 2
    low, high = rest, rest + 64 * count
    places = high + 64 * count
    a = places + 8 * each * lanes
    b = a + 4 * rank * tokens
    for r in range(0, lanes, _LANES):
        at, s, z = x + 4 * r, scales + 2 * r, zeros + 2 * r
        choose_outliers(at, count, step, each, low, high, places + 8 * each * r)
        encode_lanes(at, count, lanes, low, high, 64, group, bits, s, z, codes + r, 0)
        decode_lanes(codes + r, 0, count, lanes, group, s, z, lost + 4 * r)
        subtract(at, low, high, count, step, lost + 4 * r)
    _write_codes(cache, record, key, codes, 0)
    turned = lost + 4 * tokens * padded
    if key:
        turn(lost, tokens, padded, step, turned, 4 * tokens)
        low_rank(lost, turned, tokens, dim, padded, rank, start, a, b, b + 4 * rank * padded)
    else:
        for i in range(0, 4 * tokens * padded, 4):
            set_float(turned + i, numba.float32(0.0))
        turn(lost, dim, tokens, step, turned, 4 * padded)
        low_rank(turned, lost, tokens, dim, padded, rank, start, a, b, b + 4 * rank * padded)
    store_rounded(a, rank * tokens, record + word(cache, page.KEY_A if key else page.VALUE_A))
    store_rounded(b, rank * padded, record + word(cache, page.KEY_B if key else page.VALUE_B))
    if each == 0:
        return
    indices = record + word(cache, page.KEY_INDICES if key else page.VALUE_INDICES)
    kept = record + word(cache, page.KEY_KEPT if key else page.VALUE_KEPT)
    for r in range(0, lanes, _LANES):
        decode_lanes(codes + r, 0, count, lanes, group, scales + 2 * r, zeros + 2 * r, lost + 4 * r)
    _add_low_rank(cache, record, key, lost)
    for r in range(0, vectors, _LANES):
        at, here = 4 * each * r, min(_LANES, vectors - r)
        keep_outliers(x + 4 * r, lost + 4 * r, step, places + 8 * each * r, each, here, indices + at, kept + at)


@numba.njit(nogil=True)
def _add_low_rank(cache: int, record: int, key: bool, x: int) -> None:
    """Add what the stored factors give."""
    count, _, lanes, _ = _sizes(cache, key)
    tokens, padded, rank = word(cache, page.TOKENS), word(cache, page.PADDED), word(cache, page.RANK)
    a = record + word(cache, page.KEY_A if key else page.VALUE_A)
    b = record + word(cache, page.KEY_B if key else page.VALUE_B)
    if key:
        add_low_rank(x, count, lanes, 4 * lanes, a, b, rank, tokens)
    else:
        add_low_rank(x, count, lanes, 4 * lanes, b, a, rank, padded)


@numba.njit(nogil=True)
def _record(of: Page, layer: int, head: int) -> int:
    """Address of what the page keeps of a layer's head."""
    return of.pages.at + layer * of.pages.stride + (of.number * of.heads + head) * word(of.cache, page.RECORD)


@numba.njit(nogil=True)
def _flush(quantize: Any, i: int, part: int, parts: int, scratch: int) -> None:
    """Cut a page off a slot's window: one part."""
    flush = flush_at(i)
    of, rest, start, own = flush.page, flush.rest, flush.start, scratch
    cache, heads, slot = of.cache, of.heads, of.slot
    tokens, dim, window = word(cache, page.TOKENS), word(cache, page.DIM), word(cache, page.WINDOW)
    width = (dim + 15) // 16 * 16
    first, last = share_of(2 * of.layers * heads, part, parts)
    for item in range(first, last):
        layer, head, key = item // (2 * heads), item // 2 % heads, item % 2 == 0
        record = _record(of, layer, head)
        if key:
            at = of.keys.at + layer * of.keys.stride + 2 * dim * window * (slot * heads + head)
            load_keys(at, tokens, dim, word(cache, page.PADDED), own)
            quantize(cache, record, True, own, start)
            move_bytes(at, at + 2 * dim * tokens, 2 * dim * ((rest + 15) // 16 * 16))
        else:
            at = of.values.at + layer * of.values.stride + 2 * width * window * (slot * heads + head)
            load_values(at, tokens, dim, own)
            quantize(cache, record, False, own, start)
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
    """Run the RESTORE instruction at address i: the first tokens of a page, dequantized, go to a window's front."""
    restore = restore_at(i)
    of, wanted = restore.page, restore.tokens
    cache, heads, slot = of.cache, of.heads, of.slot
    tokens, dim, padded = word(cache, page.TOKENS), word(cache, page.DIM), word(cache, page.PADDED)
    width, window = (dim + 15) // 16 * 16, word(cache, page.WINDOW)
    x, _, codes, _ = _areas(cache, scratch)
    bits, both = _bits(cache)
    first, last = share_of(2 * of.layers * heads, part, parts)
    for item in range(first, last):
        layer, head, key = item // (2 * heads), item // 2 % heads, item % 2 == 0
        record = _record(of, layer, head)
        count, vectors, lanes, group = _sizes(cache, key)
        scales, zeros = _scales(cache, record, key)
        lower = codes + tokens * padded if both else 0
        for plane in range(2 if both else 1):
            to = lower if plane == 1 else codes
            if key:
                at = record + word(cache, page.KEY_CODES) + plane * word(cache, page.KEY_LOWER)
                split_keys(at, tokens, padded, word(cache, page.KEY_VECTORS), bits, to)
            else:
                at = record + word(cache, page.VALUE_CODES) + plane * word(cache, page.VALUE_LOWER)
                split_values(at, tokens, padded, word(cache, page.VALUE_BLOCK), bits, to)
        for r in range(0, lanes, _LANES):
            other = lower + r if both else 0
            decode_lanes(codes + r, other, count, lanes, group, scales + 2 * r, zeros + 2 * r, x + 4 * r)
        if word(cache, page.RANK) != 0:
            _add_low_rank(cache, record, key, x)
        outliers = word(cache, page.KEY_OUTLIERS if key else page.VALUE_OUTLIERS)
        if outliers != 0:
            indices = record + word(cache, page.KEY_INDICES if key else page.VALUE_INDICES)
            kept = record + word(cache, page.KEY_KEPT if key else page.VALUE_KEPT)
            add_outliers(x, 4 * lanes, outliers, vectors, indices, kept)
        if key:
            write_keys(
                x, dim, padded, wanted, of.keys.at + layer * of.keys.stride + 2 * dim * window * (slot * heads + head)
            )
        else:
            at = of.values.at + layer * of.values.stride + 2 * width * window * (slot * heads + head)
            write_values(x, tokens, dim, wanted, at)
