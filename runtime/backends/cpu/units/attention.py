"""Units that write a step's keys and values into the cache, and that compute attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba

from runtime.backends.cpu.data.instructions import Attend, Heads, Stored
from runtime.backends.cpu.data.pages import Cache
from runtime.backends.cpu.data.records import SPAN, Parameters
from runtime.backends.cpu.kernels.attention.page import (
    Attention,
    Visit,
    corrected_2,
    corrected_4,
    packed_2,
    packed_4,
    packed_8,
    packed_planes,
)
from runtime.backends.cpu.kernels.attention.queries import Queries, Sums, clear_sums, padded_channels, part_bytes
from runtime.backends.cpu.kernels.attention.span import Span, attend_span
from runtime.backends.cpu.kernels.pages import store_half_key, store_half_value, store_key, store_value
from runtime.backends.cpu.kernels.rows import norm_head, rotate_head, turn_head
from runtime.backends.cpu.kernels.views import (
    attend_at,
    cache_at,
    header_at,
    heads_at,
    parameters_at,
    rows_of,
    share_of,
)
from runtime.backends.cpu.machine.kernel import call_4, kernel, routine
from runtime.backends.cpu.machine.unit import Unit, compiled_unit, made_unit
from runtime.backends.cpu.machine.vector import get_float, get_int, set_float
from runtime.kv import kinds

_LARGEST, _INFINITY = numba.float32(kinds.LARGEST), numba.float32(float("inf"))


@kernel
def _record(stored: Stored, slot: int, number: int, kv_heads: int, head: int) -> int:
    """Address of a head's record in a slot's page."""
    cache = cache_at(stored.cache)
    page = numba.int64(get_int(cache.tables + cache.table_step * slot + 4 * number))
    return stored.pages + (page * cache.layers * kv_heads + head) * cache.record


@kernel
def _paged(cache: Cache, slot: int) -> int:
    """Tokens of a slot that are in pages; all of them if there is no window."""
    return numba.int64(get_int(cache.paged + 4 * slot))


@kernel
def _window(stored: Stored, slot: int, kv_heads: int, head: int, dim: int) -> tuple[int, int]:
    """Addresses of a head's keys and values in a slot's window."""
    cache = cache_at(stored.cache)
    tokens = cache.window * (slot * cache.layers * kv_heads + head)
    return stored.keys + 2 * dim * tokens, stored.values + 2 * padded_channels(dim) * tokens


@routine
def _write_window(heads: Heads, x: int, key: bool, slot: int, head: int, position: int) -> None:
    place = position - _paged(cache_at(heads.stored.cache), slot)
    keys, values = _window(heads.stored, slot, heads.kv_heads, head, heads.dim)
    if key:
        store_half_key(x, heads.dim, keys, place)
    else:
        store_half_value(x, heads.dim, values, place)


@routine
def _write_halves(heads: Heads, x: int, key: bool, slot: int, head: int, position: int) -> None:
    cache = cache_at(heads.stored.cache)
    record = _record(heads.stored, slot, position // cache.tokens, heads.kv_heads, head)
    if key:
        store_half_key(x, heads.dim, record + cache.keys.codes, position % cache.tokens)
    else:
        store_half_value(x, heads.dim, record + cache.values.codes, position % cache.tokens)


@routine
def _write_codes(heads: Heads, x: int, key: bool, slot: int, head: int, position: int) -> None:
    cache = cache_at(heads.stored.cache)
    record = _record(heads.stored, slot, position // cache.tokens, heads.kv_heads, head)
    if key:
        store_key(x, cache, record, position % cache.tokens)
    else:
        store_value(x, cache, record, position % cache.tokens)


@kernel
def _turn(heads: Heads, x: int, head: int) -> None:
    """Transform a query or key into the cache's basis."""
    dim, queries = heads.dim, heads.heads
    of = head // (queries // heads.kv_heads) if head < queries else head - queries
    turn_head(x, dim, heads.reflection + 4 * dim * of)
    if head >= queries:
        for d in range(0, 4 * dim, 4):
            set_float(x + d, get_float(x + d) - get_float(heads.mean + 4 * dim * of + d))


@kernel
def _finish_heads(write: Any, i: int, control: int, part: int, parts: int) -> None:
    """Norm, rotate and turn queries and keys, scale queries, store keys and values: a part of the rows' heads."""
    heads, step = heads_at(i), parameters_at(control)
    dim, half, keys = heads.dim, heads.half, heads.heads
    values = keys + heads.kv_heads
    all_heads = keys if heads.alone != 0 else values + heads.kv_heads
    first, last = share_of(rows_of(control, 0) * all_heads, part, parts)
    for work in range(first, last):
        row, head = work // all_heads, work % all_heads
        position = numba.int64(get_int(step.positions + 4 * row))
        x = heads.q.at + row * heads.q.stride + 4 * head * dim
        if head >= keys:
            x = heads.kv.at + row * heads.kv.stride + 4 * (head - keys) * dim
        normed = heads.latent if heads.latent != 0 else dim
        if head < values:
            norm = heads.q_norm if head < keys else heads.k_norm
            if norm != 0 and heads.norm_last == 0:
                norm_head(x + 4 * (dim - normed), norm, normed, heads.eps)
            rotate_head(x, heads.cos + 4 * half * position, heads.sin + 4 * half * position, half)
            if norm != 0 and heads.norm_last != 0:
                norm_head(x, norm, dim, heads.eps)
            if heads.reflection != 0:
                _turn(heads, x, head)
        elif heads.v_norm != 0:
            norm_head(x, heads.v_norm, normed, heads.eps)
        if head < keys:
            scale = heads.scale
            if heads.growth != 0:
                scale *= get_float(heads.growth + 4 * position)
            for d in range(dim):
                set_float(x + 4 * d, get_float(x + 4 * d) * scale)
            continue
        for d in range(0, 4 * dim, 4):
            if _LARGEST < abs(get_float(x + d)) < _INFINITY:
                set_float(x + d, _LARGEST if get_float(x + d) > numba.float32(0.0) else -_LARGEST)
        slot, kv_head = numba.int64(get_int(step.slots + 4 * row)), (head - keys) % heads.kv_heads
        write(heads, x, head < values, slot, kv_head, position)


@compiled_unit
def heads_to_window(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """Run the HEADS instruction at address i: keys and values go to a window."""
    _finish_heads(_write_window, i, control, part, parts)


@compiled_unit
def heads_to_halves(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """Run the HEADS instruction at address i: keys and values go to pages of half precision."""
    _finish_heads(_write_halves, i, control, part, parts)


@compiled_unit
def heads_to_codes(i: int, control: int, part: int, parts: int, _scratch: int) -> None:
    """Run the HEADS instruction at address i: keys and values go to packed pages at once."""
    _finish_heads(_write_codes, i, control, part, parts)


class _Work(NamedTuple):
    """One work item of attention: a run, a key-value head, and a piece of the context.

    The context is cut into *units* in the order of its tokens: where the slot has pages, spans of the sinks in its
    window; the pages; spans of the rest of the window.
    """

    queries: Queries  # the run
    sums: Sums  # its partial results
    slot: int  # the sequence
    head: int  # the key-value head
    sinks: int  # tokens in front of the pages; 0 where there are none
    paged: int  # tokens in pages
    first_page: int  # the unit that is the first page
    end_page: int  # the unit behind the last
    start: int  # first unit of the piece
    stop: int  # end of the piece


@kernel
def _work_of(attend: Attend, step: Parameters, number: int) -> _Work:
    """A work item, by its number among all runs, key-value heads and splits."""
    splits, kv_heads, heads = step.splits, attend.kv_heads, attend.heads // attend.kv_heads
    run, head, split = number // (kv_heads * splits), number // splits % kv_heads, number % splits
    row, rows = numba.int64(get_int(step.run_rows + 8 * run)), numba.int64(get_int(step.run_rows + 8 * run + 4))
    position, slot = numba.int64(get_int(step.positions + 4 * row)), numba.int64(get_int(step.slots + 4 * row))
    q = attend.q.at + row * attend.q.stride + 4 * head * heads * attend.dim
    queries = Queries(q, attend.q.stride, rows, heads, attend.dim, position, attend.window, attend.cap)
    size = part_bytes(attend.dim)
    out = attend.out + ((row * attend.heads + head * heads) * splits + split) * size
    sums = Sums(out, attend.heads * splits * size, splits * size)
    cache = cache_at(attend.stored.cache)
    tokens, end = cache.tokens, position + rows
    paged = _paged(cache, slot) if cache.window != 0 else end
    sinks = cache.sinks if paged != 0 else 0
    first_page = sinks // SPAN
    end_page = first_page + (paged + tokens - 1) // tokens
    units = end_page + (end - sinks - paged + SPAN - 1) // SPAN
    seen = 0 if attend.window == 0 else max(0, position + 1 - attend.window)
    if seen < sinks:
        begin = seen // SPAN
    elif seen < sinks + paged:
        begin = first_page + (seen - sinks) // tokens
    else:
        begin = end_page + (seen - sinks - paged) // SPAN
    # No split is shorter than two units, whatever the step's other rows see; excess splits have nothing to do.
    own = max(1, min(splits, (units - begin) // 2))
    start = begin + (units - begin) * min(split, own) // own
    stop = begin + (units - begin) * min(split + 1, own) // own
    return _Work(queries, sums, slot, head, sinks, paged, first_page, end_page, start, stop)


@compiled_unit
def attend(i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """Attention of a step's rows: a part of the work items. A nested unit handles packed pages."""
    attend, step, packed = attend_at(i), parameters_at(control), header_at(i).inner
    stored, kv_heads, dim = attend.stored, attend.kv_heads, attend.dim
    cache, value = cache_at(stored.cache), 2 * padded_channels(dim)
    first, last = share_of(step.runs * kv_heads * step.splits, part, parts)
    for number in range(first, last):
        work = _work_of(attend, step, number)
        clear_sums(work.queries, work.sums)
        if packed != 0 and max(work.start, work.first_page) < min(work.stop, work.end_page):
            call_4(packed, i, control, number, scratch)
        for unit in range(work.start, work.stop):
            if work.first_page <= unit < work.end_page:
                if packed != 0:
                    continue
                record = _record(stored, work.slot, unit, kv_heads, work.head)
                span = Span(record + cache.keys.codes, record + cache.values.codes, cache.tokens * unit)
            else:
                place, before = SPAN * unit, 0
                if unit >= work.end_page:
                    place, before = work.sinks + SPAN * (unit - work.end_page), work.paged
                keys, values = _window(stored, work.slot, kv_heads, work.head, dim)
                span = Span(keys + 2 * dim * place, values + value * place, before + place)
            attend_span(work.queries, span, work.sums, scratch)


def _pages(attention: Attention) -> Any:
    """Add a work item's packed pages."""
    begin, attend_page, settle = attention

    @kernel
    def attend_pages(i: int, control: int, number: int, scratch: int) -> None:
        attend = attend_at(i)
        stored, kv_heads = attend.stored, attend.kv_heads
        work = _work_of(attend, parameters_at(control), number)
        cache = cache_at(stored.cache)
        start, stop = max(0, work.start - work.first_page), min(work.stop, work.end_page) - work.first_page
        begin(cache, work.queries, scratch)
        record = _record(stored, work.slot, start, kv_heads, work.head)
        for page in range(start, stop):
            following = _record(stored, work.slot, page + 1, kv_heads, work.head) if page + 1 < stop else 0
            visit = Visit(record, following, work.sinks + cache.tokens * page, page > start)
            attend_page(cache, visit, work.queries, work.sums, scratch)
            record = following
        settle(cache, work.queries, work.sums, scratch)

    return attend_pages


def _pages_unit(name: str, attend_pages: Any) -> Unit:
    """The unit that attends to the pages of a work item of the ATTEND instruction at address i."""

    def attend(i: int, control: int, number: int, scratch: int) -> None:
        attend_pages(i, control, number, scratch)

    return made_unit(name, attend)


_attend_4, _attend_planes = _pages(packed_4), _pages(packed_planes)
pages_2, pages_4 = _pages_unit("pages_2", _pages(packed_2)), _pages_unit("pages_4", _attend_4)
pages_8 = _pages_unit("pages_8", _pages(packed_8))
corrected_pages_2 = _pages_unit("corrected_pages_2", _pages(corrected_2))
corrected_pages_4 = _pages_unit("corrected_pages_4", _pages(corrected_4))


@compiled_unit
def pages_planes(i: int, control: int, number: int, scratch: int) -> None:
    """The same unit for two planes of 4 bits, of which a draft reads only the upper, but in sensitive layers."""
    if parameters_at(control).draft != 0 and get_int(attend_at(i).exact) == 0:
        _attend_4(i, control, number, scratch)
    else:
        _attend_planes(i, control, number, scratch)
