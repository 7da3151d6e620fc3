"""The instructions that write a step's keys and values into the cache, and attend to it."""

from __future__ import annotations

from typing import Any

import numba
from numba.extending import register_jitable

from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data import pages as page
from runtime.backends.cpu.data.operands import inner_of, operands, parameter, rows_of, share_of, word
from runtime.backends.cpu.kernels.attention.page import (
    attend_page_2,
    attend_page_4,
    attend_page_8,
    attend_page_planes,
    begin_queries,
    settle_queries,
)
from runtime.backends.cpu.kernels.attention.span import SPAN, attend_span, clear_sums
from runtime.backends.cpu.kernels.cache.tokens import store_half_key, store_half_value, store_key, store_value
from runtime.backends.cpu.kernels.norm import norm_head
from runtime.backends.cpu.kernels.rope import rotate_head
from runtime.backends.cpu.machine.unit import Unit, call_13, compiled_unit
from runtime.backends.cpu.machine.vector import as_float, get_float, get_int, set_float

_heads_operands, _attend_operands = operands(op.HEADS), operands(op.ATTEND)


@numba.njit(nogil=True)
def _record(cache: int, pages: int, slot: int, number: int, kv_heads: int, head: int) -> int:
    """Address of what a slot's page keeps of a head in the layer whose pages begin at `pages`."""
    table = word(cache, page.TABLES) + word(cache, page.TABLE_STEP) * slot
    return pages + (numba.int64(get_int(table + 4 * number)) * kv_heads + head) * word(cache, page.RECORD)


@numba.njit(nogil=True)
def _paged(cache: int, slot: int) -> int:
    """Tokens of a slot that are in pages; all of them where there is no window."""
    return numba.int64(get_int(word(cache, page.PAGED) + 4 * slot))


@numba.njit(nogil=True)
def _window(cache: int, windows: int, slot: int, kv_heads: int, head: int, width: int) -> int:
    """Address of a head's keys, or values, in a slot's window."""
    return windows + 2 * width * word(cache, page.WINDOW) * (slot * kv_heads + head)


@register_jitable
def _write_window(i: int, x: int, key: bool, slot: int, head: int, position: int) -> None:
    kv_heads, dim = _heads_operands(i)[3], _heads_operands(i)[4]
    cache, _, window_keys, window_values = _heads_operands(i)[12:]
    width, place = (dim + 15) // 16 * 16, position - _paged(cache, slot)
    if key:
        store_half_key(x, dim, _window(cache, window_keys, slot, kv_heads, head, dim), place)
    else:
        store_half_value(x, dim, _window(cache, window_values, slot, kv_heads, head, width), place)


@register_jitable
def _write_halves(i: int, x: int, key: bool, slot: int, head: int, position: int) -> None:
    dim, cache = _heads_operands(i)[4], _heads_operands(i)[12]
    tokens = word(cache, page.TOKENS)
    record = _record(cache, _heads_operands(i)[13], slot, position // tokens, _heads_operands(i)[3], head)
    if key:
        store_half_key(x, dim, record + word(cache, page.KEY_CODES), position % tokens)
    else:
        store_half_value(x, dim, record + word(cache, page.VALUE_CODES), position % tokens)


@register_jitable
def _write_codes(i: int, x: int, key: bool, slot: int, head: int, position: int) -> None:
    cache = _heads_operands(i)[12]
    tokens = word(cache, page.TOKENS)
    record = _record(cache, _heads_operands(i)[13], slot, position // tokens, _heads_operands(i)[3], head)
    if key:
        store_key(x, cache, record, position % tokens)
    else:
        store_value(x, cache, record, position % tokens)


@numba.njit(nogil=True)
def _finish_heads(write: Any, i: int, control: int, thread: int, threads: int) -> None:
    """Norm and rotate queries and keys, scale queries, store keys and values: one thread's share."""
    qkv, stride, heads, kv_heads, dim, half, cos, sin, q_norm, k_norm, eps, scale = _heads_operands(i)[:12]
    slots, positions = parameter(control, op.SLOTS), parameter(control, op.POSITIONS)
    all_heads = heads + 2 * kv_heads
    first, last = share_of(rows_of(control, 0) * all_heads, thread, threads)
    for work in range(first, last):
        row, head = work // all_heads, work % all_heads
        position = numba.int64(get_int(positions + 4 * row))
        x = qkv + row * stride + 4 * head * dim
        if head < heads + kv_heads:
            norm = q_norm if head < heads else k_norm
            if norm != 0:
                norm_head(x, norm, dim, as_float(eps))
            rotate_head(x, cos + 4 * half * position, sin + 4 * half * position, half)
        if head < heads:
            for d in range(dim):
                set_float(x + 4 * d, get_float(x + 4 * d) * as_float(scale))
            continue
        slot, kv_head = numba.int64(get_int(slots + 4 * row)), (head - heads) % kv_heads
        write(i, x, head < heads + kv_heads, slot, kv_head, position)


@compiled_unit
def heads_to_window(i: int, control: int, thread: int, threads: int, _scratch: int) -> None:
    """Run the HEADS instruction at address i: keys and values go to a window."""
    _finish_heads(_write_window, i, control, thread, threads)


@compiled_unit
def heads_to_halves(i: int, control: int, thread: int, threads: int, _scratch: int) -> None:
    """Run the HEADS instruction at address i: keys and values go to pages of half precision."""
    _finish_heads(_write_halves, i, control, thread, threads)


@compiled_unit
def heads_to_codes(i: int, control: int, thread: int, threads: int, _scratch: int) -> None:
    """Run the HEADS instruction at address i: keys and values go to packed pages at once."""
    _finish_heads(_write_codes, i, control, thread, threads)


@compiled_unit
def attend(i: int, control: int, thread: int, threads: int, scratch: int) -> None:
    """Attention of a step's rows: one thread's share of runs, key-value heads and splits."""
    qkv, stride, heads, kv_heads, dim, window, cache, pages, window_keys, window_values, out = _attend_operands(i)
    slots, positions = parameter(control, op.SLOTS), parameter(control, op.POSITIONS)
    runs, splits = parameter(control, op.RUN_ROWS), parameter(control, op.SPLITS)
    part, share = 4 * ((dim + 15) // 16 * 16 + 16), heads // kv_heads
    tokens = word(cache, page.TOKENS)
    first, last = share_of(parameter(control, op.RUNS) * kv_heads * splits, thread, threads)
    for work in range(first, last):
        run, kv_head, split = work // (kv_heads * splits), work // splits % kv_heads, work % splits
        row, count = numba.int64(get_int(runs + 8 * run)), numba.int64(get_int(runs + 8 * run + 4))
        position, slot = numba.int64(get_int(positions + 4 * row)), numba.int64(get_int(slots + 4 * row))
        q, to = qkv + row * stride + 4 * kv_head * share * dim, out + ((row * heads + kv_head * share) * splits) * part
        to += split * part
        clear_sums(count, share, dim, to, heads * splits * part, splits * part)
        # Units: the pages of the slot, then spans of its window.
        paged = _paged(cache, slot) if word(cache, page.WINDOW) != 0 else position + count
        whole = (paged + tokens - 1) // tokens
        units = whole + (position + count - paged + SPAN - 1) // SPAN
        seen = 0 if window == 0 else max(0, position + 1 - window)
        begin = seen // tokens if seen < paged else whole + (seen - paged) // SPAN
        start, stop = begin + (units - begin) * split // splits, begin + (units - begin) * (split + 1) // splits
        _attend_pages(
            inner_of(i),
            cache,
            parameter(control, op.DRAFT),
            pages,
            slot,
            kv_heads,
            kv_head,
            q,
            stride,
            count,
            share,
            position,
            window,
            start,
            min(stop, whole),
            to,
            heads * splits * part,
            splits * part,
            scratch,
        )
        for unit in range(max(start, whole), stop):
            place = SPAN * (unit - whole)
            keys = _window(cache, window_keys, slot, kv_heads, kv_head, dim) + 2 * dim * place
            width = (dim + 15) // 16 * 16
            values = _window(cache, window_values, slot, kv_heads, kv_head, width) + 2 * width * place
            attend_span(
                q,
                stride,
                count,
                share,
                position - paged - place,
                window,
                keys,
                values,
                dim,
                to,
                heads * splits * part,
                splits * part,
                scratch,
            )


@numba.njit(nogil=True)
def _attend_pages(
    page_kernel: int,
    cache: int,
    draft: int,
    pages: int,
    slot: int,
    kv_heads: int,
    kv_head: int,
    q: int,
    stride: int,
    rows: int,
    heads: int,
    position: int,
    window: int,
    start: int,
    stop: int,
    sums: int,
    sums_row: int,
    sums_head: int,
    scratch: int,
) -> None:
    """Add what a run's query heads of one key-value head get from pages start .. stop - 1 of its slot.

    Packed pages are the business of the unit at `page_kernel`, one of those at the end of this module.
    """
    tokens, dim = word(cache, page.TOKENS), word(cache, page.DIM)
    lowbit = word(cache, page.FORMAT) != page.HALF
    if lowbit and start < stop:
        begin_queries(cache, q, stride, rows, heads, scratch)
    for number in range(start, stop):
        record = _record(cache, pages, slot, number, kv_heads, kv_head)
        here = position - tokens * number
        if lowbit:
            prepared = number > start
            following = _record(cache, pages, slot, number + 1, kv_heads, kv_head) if number + 1 < stop else 0
            call_13(
                page_kernel,
                *(cache, record, following, draft, rows, heads, here, window),
                *(sums, sums_row, sums_head, scratch, numba.int64(prepared)),
            )
            continue
        keys, values = record + word(cache, page.KEY_CODES), record + word(cache, page.VALUE_CODES)
        attend_span(
            q,
            stride,
            rows,
            heads,
            here,
            window,
            keys,
            values,
            dim,
            sums,
            sums_row,
            sums_head,
            scratch,
        )
    if lowbit and start < stop:
        settle_queries(cache, rows, heads, sums, sums_row, sums_head, scratch)


@compiled_unit
def page_2(
    cache: int,
    record: int,
    following: int,
    _draft: int,
    rows: int,
    heads: int,
    position: int,
    window: int,
    sums: int,
    sums_row: int,
    sums_head: int,
    scratch: int,
    prepared: int,
) -> None:
    """Attend to a page with codes of 2 bits."""
    attend_page_2(
        cache, record, following, rows, heads, position, window, sums, sums_row, sums_head, scratch, prepared != 0
    )


@compiled_unit
def page_4(
    cache: int,
    record: int,
    following: int,
    _draft: int,
    rows: int,
    heads: int,
    position: int,
    window: int,
    sums: int,
    sums_row: int,
    sums_head: int,
    scratch: int,
    prepared: int,
) -> None:
    """Attend to a page with codes of 4 bits."""
    attend_page_4(
        cache, record, following, rows, heads, position, window, sums, sums_row, sums_head, scratch, prepared != 0
    )


@compiled_unit
def page_8(
    cache: int,
    record: int,
    following: int,
    _draft: int,
    rows: int,
    heads: int,
    position: int,
    window: int,
    sums: int,
    sums_row: int,
    sums_head: int,
    scratch: int,
    prepared: int,
) -> None:
    """Attend to a page with codes of 8 bits."""
    attend_page_8(
        cache, record, following, rows, heads, position, window, sums, sums_row, sums_head, scratch, prepared != 0
    )


@compiled_unit
def page_planes(
    cache: int,
    record: int,
    following: int,
    draft: int,
    rows: int,
    heads: int,
    position: int,
    window: int,
    sums: int,
    sums_row: int,
    sums_head: int,
    scratch: int,
    prepared: int,
) -> None:
    """Attend to a page with two planes of 4 bits, of which a draft reads the upper alone."""
    if draft != 0:
        attend_page_4(
            cache, record, following, rows, heads, position, window, sums, sums_row, sums_head, scratch, prepared != 0
        )
    else:
        attend_page_planes(
            cache, record, following, rows, heads, position, window, sums, sums_row, sums_head, scratch, prepared != 0
        )


_PAGE_UNITS = {2: page_2, 4: page_4, 8: page_8, page.TWO_PLANES: page_planes}


def page_unit(form: int) -> Unit | None:
    """The unit that attends to a page, by the cache's FORMAT; None where `attend` does it itself."""
    return _PAGE_UNITS.get(form)


def heads_unit(form: int, window: int) -> Unit:
    """The unit of HEADS instructions, by the cache's FORMAT and WINDOW."""
    if window:
        return heads_to_window
    return heads_to_halves if form == page.HALF else heads_to_codes
