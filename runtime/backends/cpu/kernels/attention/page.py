"""Attention over one packed page, by integer products with its codes.

Scores: a query is rounded to INT8 with a scale of its own. Where a key scale spans a channel it is multiplied into the
query first, page by page; where it spans a token it multiplies the score. Zeros are one product of the exact query with
them. Output: the softmax weights times the values' scales are rounded to INT8 likewise, and zeros are one sum.

With 8-bit codes, queries and weights have two planes, 128 * high + low, so that their rounding errors stay below those
of the codes. With fewer bits one plane suffices: queries are rounded to nearest, and weights with a fixed dither,
because thousands of weights just under half a step would otherwise vanish together. The error that rounding causes
through the mean of the codes is corrected exactly (`centre`), so rounding errors only multiply the codes' deviations
from their middle.

Each form of codes has its own functions, `packed_2` and so on, compiled separately.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba

from runtime.backends.cpu.data.pages import Cache
from runtime.backends.cpu.kernels.attention.gear import (
    Weighed,
    begin_corrections,
    correct_scores,
    correct_sums,
    settle_corrections,
)
from runtime.backends.cpu.kernels.attention.products import (
    Codes,
    Out,
    Rows,
    products_2,
    products_4,
    products_8,
    products_planes,
)
from runtime.backends.cpu.kernels.attention.queries import (
    APART,
    BESIDES,
    CHANGE,
    LARGEST,
    LOWEST,
    Factors,
    Queries,
    Sums,
    add_products,
    add_to_all,
    copy_queries,
    exponentials,
    finish_scores,
    mask_scores,
    padded_channels,
    quantize_query,
    quantize_weights,
    raise_maximum,
    seen_by,
    settle,
    weigh_again,
    widen,
    widen_shifted,
)
from runtime.backends.cpu.kernels.rows import cap_floats
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import load_floats, prefetch, set_float, store_floats, sum_lanes, zero_floats
from runtime.backends.cpu.scratch import NOTED, PageAreas, gear_room, lay_out_pages

_lay_out = kernel(lay_out_pages)
_gear_room = kernel(gear_room)


def _areas_of(planes: int, corrected: bool) -> Any:
    """The areas for the queries of a run."""

    @kernel
    def areas(cache: Cache, queries: Queries, scratch: int) -> PageAreas:
        count = queries.rows * queries.heads
        room = _gear_room(count, cache.padded, cache.tokens) if corrected else 0
        return _lay_out(count, cache.padded, cache.tokens, planes, room, scratch)

    return areas


class Visit(NamedTuple):
    """A page visited by a run."""

    record: int  # address of what it keeps of the key-value head
    following: int  # address of the next record, which is prefetched; 0 = none
    start: int  # position of its first token
    prepared: bool  # whether an earlier page of the same run used this scratch


class Form(NamedTuple):
    """Parameters of attention for one form of codes."""

    key_products: Any
    value_products: Any
    planes: int  # planes of queries and weights: 1 or 2
    factor: float  # factor of the stored scales
    shift: float  # scales that are added to the stored zeros
    centre: float  # middle of the codes
    tile: int  # bytes of one of a page's vectors of keys
    tokens: int  # tokens of one of the products' steps through a page's values
    corrected: bool  # whether pages have GEAR's corrections


class Attention(NamedTuple):
    """Functions of attention to pages of a form."""

    begin: Any  # prepares the scratch for the pages of a run: (cache, queries, scratch)
    attend: Any  # adds a page to the partial results: (cache, visit, queries, sums, scratch)
    settle: Any  # adds the remaining sums in the scratch: (cache, queries, sums, scratch)


@kernel
def _ahead(visit: Visit) -> int:
    """Bytes from a page to the next; 0 if there is none."""
    return visit.following - visit.record if visit.following != 0 else 0


@kernel
def _valid(cache: Cache, visit: Visit, queries: Queries) -> int:
    """Tokens of a page visible to any row."""
    return min(cache.tokens, queries.position - visit.start + queries.rows)


def _scores_of(form: Form) -> Any:
    """Scores of all queries with a page's keys, and the largest of each, before corrections."""
    products, planes, size = form.key_products, form.planes, form.tile
    factor, shift, centre = form.factor, form.shift, form.centre

    @kernel
    def score(cache: Cache, visit: Visit, queries: Queries, areas: PageAreas) -> None:
        keys, tokens, padded, count = cache.keys, cache.tokens, cache.padded, queries.rows * queries.heads
        stored_scales, stored_zeros = visit.record + keys.scales, visit.record + keys.zeros
        tokenwise, group, tile = keys.tokenwise != 0, keys.group, size * keys.vectors
        by_channel = Factors(0 if tokenwise else areas.scales, areas.zeros)
        by_token = Factors(areas.scales if tokenwise else 0, areas.zeros)
        folded = areas.scores + 4 * tokens * planes * count
        if tokenwise:
            valid = _valid(cache, visit, queries)
            widen(stored_scales, tokens, valid, 1.0, areas.scales)
            widen(stored_zeros, tokens, valid, 1.0, areas.zeros)
        for n in range(count):
            set_float(areas.noted + NOTED * n + LARGEST, numba.float32(LOWEST))
        for g in range(tokens // group):
            if not tokenwise:
                at = 2 * padded * g
                widen(stored_scales + at, padded, padded, factor, areas.scales)
                widen_shifted(stored_zeros + at, stored_scales + at, padded, padded, shift, areas.zeros)
            if not (tokenwise and visit.prepared):
                for n in range(count):
                    q, to = areas.queries + 4 * padded * n, areas.codes + planes * padded * n
                    quantize_query(q, padded, by_channel, planes, centre, to, areas.noted + NOTED * n, folded)
            at, out = visit.record + keys.codes + group // 16 * tile * g, areas.scores + 4 * group * g
            codes = Codes(at, keys.lower - keys.codes, tile, keys.vectors, _ahead(visit))
            products(Rows(areas.codes, padded, planes * count), codes, Out(out, 4 * tokens), group // 32, 2 * tile)
            for n in range(count):
                at = out + 4 * tokens * planes * n
                finish_scores(at, 4 * tokens, planes, group, areas.noted + NOTED * n, by_token)

    return score


@kernel
def _nothing_seen(scores: int, weighed: int, tokens: int, noted: int) -> None:
    """Zero weights of a query that sees none of a page's tokens."""
    for t in range(0, 4 * tokens, 64):
        store_floats(scores + t, zero_floats())
        store_floats(weighed + t, zero_floats())
    set_float(noted + LARGEST, numba.float32(0.0))


@kernel
def _fetch_share(cache: Cache, following: int, n: int, count: int) -> None:
    """Prefetch the n-th of `count` shares of the next page's non-code data."""
    rest = cache.keys.scales
    lines = (cache.record - rest) // 64 + 1
    for line in range(lines * n // count, lines * (n + 1) // count):
        prefetch(following + rest + 64 * line)


def _weights_of(form: Form) -> Any:
    """Turn all queries' scores into weights, and those times the scales of the values' first group of channels."""
    planes, corrected = form.planes, form.corrected

    @kernel
    def weigh(cache: Cache, visit: Visit, queries: Queries, sums: Sums, areas: PageAreas) -> None:
        tokens, heads, count = cache.tokens, queries.heads, queries.rows * queries.heads
        values, channels = Factors(areas.scales, areas.zeros), padded_channels(queries.dim)
        several = cache.values.group < cache.padded
        for n in range(count):
            at, to = areas.scores + 4 * tokens * planes * n, areas.weighed + 4 * tokens * n
            noted = areas.noted + NOTED * n
            if visit.following != 0:
                _fetch_share(cache, visit.following, n, count)
            first, end = seen_by(queries, n // heads, visit.start, tokens)
            set_float(noted + CHANGE, numba.float32(1.0))
            if several:
                store_floats(noted + APART, zero_floats())
            if first >= end:
                _nothing_seen(at, to, tokens, noted)
                continue
            if queries.cap != 0.0:
                cap_floats(at, tokens, queries.cap)
            if corrected or first > 0 or end < tokens or queries.cap != 0.0:
                mask_scores(at, tokens, first, end, noted)
            top = raise_maximum(noted, sums.at + n // heads * sums.row + n % heads * sums.head, channels)
            besides = noted + (APART if several else BESIDES)
            exponentials(at, tokens, top, corrected or several, values, to, noted, besides)

    return weigh


def _sums_of(form: Form) -> Any:
    """Multiply weights with one group of the values' channels, and add them to the partial results."""
    products, planes, centre, step = form.value_products, form.planes, form.centre, form.tokens

    @kernel
    def add_values(cache: Cache, visit: Visit, queries: Queries, sums: Sums, areas: PageAreas, start: int) -> None:
        values, tokens, padded, heads = cache.values, cache.tokens, cache.padded, queries.heads
        count = queries.rows * heads
        stop = min(start + values.group, padded)
        several, size = values.group < padded, 4 * padded
        channels = min(stop, padded_channels(queries.dim)) - start
        for n in range(count):
            noted, to = areas.noted + NOTED * n, areas.weights + planes * tokens * n
            besides, weighed = noted + (APART if several else BESIDES), areas.weighed + 4 * tokens * n
            quantize_weights(weighed, tokens, planes, centre, cache.dither, to, noted, besides)
        at = visit.record + values.codes + start // 32 * values.block
        codes = Codes(at, values.lower - values.codes, 64, tokens // step, _ahead(visit))
        weights = Rows(areas.weights, tokens, planes * count)
        products(weights, codes, Out(areas.products, size), (stop - start) // 32, values.block)
        for n in range(count):
            noted, to = areas.noted + NOTED * n, sums.at + n // heads * sums.row + n % heads * sums.head + 4 * start
            add_products(areas.products + size * planes * n, size, planes, channels, noted, to)
            if several:
                add_to_all(to, channels, sum_lanes(load_floats(noted + APART)))

    return add_values


def _begin(form: Form) -> Any:
    """The function run before the first page."""
    areas_of, corrected = _areas_of(form.planes, form.corrected), form.corrected

    @kernel
    def begin(cache: Cache, queries: Queries, scratch: int) -> None:
        areas = areas_of(cache, queries, scratch)
        copy_queries(queries, cache.padded, areas.queries, areas.noted)
        if corrected:
            begin_corrections(cache, areas.queries, queries.rows * queries.heads, areas.room)

    return begin


def _settle(form: Form) -> Any:
    """The function run after the last page."""
    areas_of, corrected = _areas_of(form.planes, form.corrected), form.corrected

    @kernel
    def settle_all(cache: Cache, queries: Queries, sums: Sums, scratch: int) -> None:
        areas, heads, channels = areas_of(cache, queries, scratch), queries.heads, padded_channels(queries.dim)
        for n in range(queries.rows * heads):
            settle(areas.noted + NOTED * n, sums.at + n // heads * sums.row + n % heads * sums.head, channels)
        if corrected:
            settle_corrections(cache, queries, sums, areas.room)

    return settle_all


def _attend(form: Form) -> Any:
    """One page."""
    score, weigh, add_values = _scores_of(form), _weights_of(form), _sums_of(form)
    planes, factor, shift, corrected = form.planes, form.factor, form.shift, form.corrected
    areas_of = _areas_of(planes, corrected)

    @kernel
    def attend_page(cache: Cache, visit: Visit, queries: Queries, sums: Sums, scratch: int) -> None:
        values, tokens, count = cache.values, cache.tokens, queries.rows * queries.heads
        areas, row, valid = areas_of(cache, queries, scratch), 4 * tokens, _valid(cache, visit, queries)
        score(cache, visit, queries, areas)
        if corrected:
            correct_scores(cache, visit.record, areas.queries, count, Out(areas.scores, planes * row), areas.room)
        for start in range(0, cache.padded, values.group):
            at = 2 * tokens * (start // values.group)
            stored_scales, stored_zeros = visit.record + values.scales + at, visit.record + values.zeros + at
            widen(stored_scales, tokens, valid, factor, areas.scales)
            widen_shifted(stored_zeros, stored_scales, tokens, valid, shift, areas.zeros)
            if start == 0:
                weigh(cache, visit, queries, sums, areas)
            else:
                for n in range(count):
                    at, to = areas.scores + planes * row * n, areas.noted + NOTED * n
                    store_floats(to + APART, zero_floats())
                    weighed = areas.weighed + row * n
                    weigh_again(at, tokens, Factors(areas.scales, areas.zeros), weighed, to, to + APART)
            add_values(cache, visit, queries, sums, areas, start)
        if corrected:
            weights = Weighed(areas.scores, planes * row, areas.noted)
            correct_sums(cache, visit.record, queries, weights, sums, areas.room)

    return attend_page


def _attention(form: Form) -> Attention:
    return Attention(_begin(form), _attend(form), _settle(form))


packed_2 = _attention(Form(*products_2, 1, 1.0, 0.0, 1.5, 64, 16, corrected=False))
"""Attention over pages with codes of 2 bits; likewise the others."""
packed_4 = _attention(Form(*products_4, 1, 1.0, 0.0, 7.5, 64, 8, corrected=False))
packed_8 = _attention(Form(*products_8, 2, 1.0, 0.0, 127.5, 128, 8, corrected=False))
packed_planes = _attention(Form(*products_planes, 2, 1 / 16, -0.5, 127.5, 64, 8, corrected=False))
"""Attention with both of two planes of 4 bits; a draft reads the upper alone, with `packed_4`."""
corrected_2 = _attention(Form(*products_2, 1, 1.0, 0.0, 1.5, 64, 16, corrected=True))
"""With GEAR's corrections."""
corrected_4 = _attention(Form(*products_4, 1, 1.0, 0.0, 7.5, 64, 8, corrected=True))
