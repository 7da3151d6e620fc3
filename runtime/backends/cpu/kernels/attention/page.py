"""Attention over one packed page, by integer products with its codes.

Scores: a query is rounded to INT8 with a scale of its own. Where a key scale spans a channel it is multiplied into the
query first, page by page; where it spans a token it multiplies the score. Zeros are one product of the exact query with
them. Output: the softmax weights times the values' scales are rounded to INT8 likewise, and zeros are one sum.

With 8-bit codes, queries and weights have two planes, 128 * high + low, so that rounding them does not show beside the
codes'. With fewer bits one plane does: queries are rounded to nearest and weights with a fixed dither, for thousands of
weights just under half a step would otherwise vanish together. What rounding takes from the mean of the codes is given
back exactly (`centre`), so only the codes' deviations from their middle are multiplied by rounding errors.

There is one function for each form of codes, `attend_page_2` and so on, each compiled without the others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba

from runtime.backends.cpu.data import pages as page
from runtime.backends.cpu.data.operands import word
from runtime.backends.cpu.kernels.attention.gear import (
    begin_corrections,
    correct_scores,
    correct_sums,
    gear_room,
    room_of,
    settle_corrections,
)
from runtime.backends.cpu.kernels.attention.products import products_2, products_4, products_8, products_planes
from runtime.backends.cpu.kernels.attention.queries import (
    APART,
    BESIDES,
    CHANGE,
    LARGEST,
    LOWEST,
    NOTED,
    copy_queries,
    finish_scores,
    mask_scores,
    quantize_query,
    widen,
    widen_shifted,
)
from runtime.backends.cpu.kernels.attention.weights import (
    add_products,
    add_to_all,
    exponentials,
    quantize_weights,
    raise_maximum,
    settle,
    weigh_again,
)
from runtime.backends.cpu.machine.vector import load_floats, prefetch, set_float, store_floats, sum_lanes, zero_floats


def page_scratch(queries: int, padded: int, tokens: int) -> int:
    """Bytes of scratch that a page's attention needs.

    Args:
        queries: Most query heads of all rows that it takes at once.
        padded: D padded to 32.
        tokens: Tokens of a page.
    """
    each = 4 * padded + NOTED + 2 * (padded + 4 * tokens + tokens + 4 * padded) + 4 * tokens
    beyond = 32 * tokens  # Corrections read eight queries' scores at once.
    return queries * each + 8 * max(padded, tokens) + 64 + beyond + gear_room(queries, padded, tokens)


@numba.njit(nogil=True)
def _scratch_parts(cache: int, queries: int, planes: int, scratch: int) -> tuple[int, int, int, int, int, int, int]:
    """Addresses in the scratch, where the queries come first and the products of weights and values last.

    In between: what is noted of queries, room of the corrections, codes of the queries, scales with zeros, scores,
    weights times scales, codes of the weights.
    """
    padded, tokens = word(cache, page.PADDED), word(cache, page.TOKENS)
    noted = scratch + 4 * padded * queries
    room = noted + NOTED * queries
    codes = room + room_of(cache, queries)
    scales = (codes + planes * padded * queries + 63) // 64 * 64
    scores = scales + 8 * max(padded, tokens)
    weighed = scores + 4 * tokens * planes * queries
    return noted, room, codes, scales, scores, weighed, weighed + 4 * tokens * queries


@numba.njit(nogil=True)
def begin_queries(cache: int, q: int, q_row: int, rows: int, heads: int, scratch: int) -> None:
    """Make the scratch ready for the pages of a run.

    Args:
        cache: Address of the cache's description.
        q: Address of the first row's first query head of the group, float32, rotated and divided by sqrt(D).
        q_row: Bytes from row to row.
        rows: Rows, at consecutive positions.
        heads: Query heads that share the key-value head.
        scratch: Address of `page_scratch` bytes.
    """
    padded, queries = word(cache, page.PADDED), rows * heads
    copy_queries(q, q_row, rows, heads, word(cache, page.DIM), padded, scratch)
    if word(cache, page.RANK) != 0:
        begin_corrections(cache, scratch, queries, scratch + (4 * padded + NOTED) * queries)


@numba.njit(nogil=True)
def settle_queries(cache: int, rows: int, heads: int, sums: int, sums_row: int, sums_head: int, scratch: int) -> None:
    """Add what the pages of a run have left in the scratch to the partial results. Arguments as of `attend_page_4`."""
    padded, queries = word(cache, page.PADDED), rows * heads
    channels = (word(cache, page.DIM) + 15) // 16 * 16
    for n in range(queries):
        settle(
            scratch + 4 * padded * queries + NOTED * n, sums + n // heads * sums_row + n % heads * sums_head, channels
        )
    if word(cache, page.RANK) != 0:
        settle_corrections(cache, queries, heads, sums, sums_row, sums_head, scratch + (4 * padded + NOTED) * queries)


class Form(NamedTuple):
    """What one form of codes is attended to with."""

    key_products: Any
    value_products: Any
    planes: int
    """Of queries and weights: 1 or 2."""
    factor: float
    """What the stored scales are multiplied by."""
    shift: float
    """Scales that are added to the stored zeros."""
    centre: float
    """Middle of the codes."""
    tile: int
    """Bytes of one of a page's vectors of keys."""
    tokens: int
    """Tokens of one of the products' steps through a page's values."""
    corrections: bool
    """Whether there are kinds with GEAR's corrections."""


def _scores_of(form: Form) -> Any:
    """Scores of all queries with a page's keys, and the largest of each, before corrections."""
    products, planes, size = form.key_products, form.planes, form.tile
    factor, shift, centre = form.factor, form.shift, form.centre

    @numba.njit(nogil=True)
    def score(cache: int, record: int, ahead: int, queries: int, valid: int, scratch: int, prepared: bool) -> None:
        tokens, padded = word(cache, page.TOKENS), word(cache, page.PADDED)
        noted, _, codes, scales, scores, _, _ = _scratch_parts(cache, queries, planes, scratch)
        zeros = scales + 4 * max(padded, tokens)
        stored_scales, stored_zeros = record + word(cache, page.KEY_SCALES), record + word(cache, page.KEY_ZEROS)
        tokenwise, group = word(cache, page.KEY_TOKENWISE) != 0, word(cache, page.KEY_GROUP)
        keys, tile = record + word(cache, page.KEY_CODES), size * word(cache, page.KEY_VECTORS)
        if tokenwise:
            widen(stored_scales, tokens, valid, 1.0, scales)
            widen(stored_zeros, tokens, valid, 1.0, zeros)
        for n in range(queries):
            set_float(noted + NOTED * n + LARGEST, numba.float32(LOWEST))
        for g in range(tokens // group):
            if not tokenwise:
                at = 2 * padded * g
                widen(stored_scales + at, padded, padded, factor, scales)
                widen_shifted(stored_zeros + at, stored_scales + at, padded, padded, shift, zeros)
            if not (tokenwise and prepared):
                for n in range(queries):
                    to = codes + planes * padded * n
                    by_channel = 0 if tokenwise else scales
                    folded = scores + 4 * tokens * planes * queries
                    q = scratch + 4 * padded * n
                    quantize_query(q, padded, by_channel, zeros, planes, centre, to, noted + NOTED * n, folded)
            at, out = keys + group // 16 * tile * g, scores + 4 * group * g
            rows, lower, vectors = planes * queries, word(cache, page.KEY_LOWER), word(cache, page.KEY_VECTORS)
            products(codes, padded, rows, at, lower, tile, vectors, group // 32, 2 * tile, out, 4 * tokens, ahead)
            for n in range(queries):
                at, by_token = out + 4 * tokens * planes * n, scales if tokenwise else 0
                finish_scores(at, 4 * tokens, planes, group, noted + NOTED * n, by_token, zeros)

    return score


@numba.njit(nogil=True)
def _nothing_seen(scores: int, weighed: int, tokens: int, noted: int) -> None:
    """Weights of a query that sees none of a page's tokens."""
    for t in range(0, 4 * tokens, 64):
        store_floats(scores + t, zero_floats())
        store_floats(weighed + t, zero_floats())
    set_float(noted + LARGEST, numba.float32(0.0))


def _weights_of(form: Form) -> Any:
    """Turn all queries' scores into weights, and those times the scales of the values' first group of channels."""
    planes, corrections = form.planes, form.corrections

    @numba.njit(nogil=True)
    def weigh(
        cache: int,
        following: int,
        rows: int,
        heads: int,
        position: int,
        window: int,
        sums: int,
        sums_row: int,
        sums_head: int,
        scratch: int,
    ) -> None:
        tokens, dim, queries = word(cache, page.TOKENS), word(cache, page.DIM), rows * heads
        all_noted, _, _, scales, scores, weighed, _ = _scratch_parts(cache, queries, planes, scratch)
        zeros = scales + 4 * max(word(cache, page.PADDED), tokens)
        corrected = corrections and word(cache, page.RANK) != 0
        several = word(cache, page.VALUE_GROUP) < word(cache, page.PADDED)
        rest, size = word(cache, page.KEY_SCALES), word(cache, page.RECORD)
        for n in range(queries):
            row, at, to, noted = (
                n // heads,
                scores + 4 * tokens * planes * n,
                weighed + 4 * tokens * n,
                all_noted + NOTED * n,
            )
            if following != 0:
                share = (size - rest) // 64 + 1
                for line in range(share * n // queries, share * (n + 1) // queries):
                    prefetch(following + rest + 64 * line)
            end = min(position + row + 1, tokens)
            first = 0 if window == 0 else max(0, position + row + 1 - window)
            set_float(noted + CHANGE, numba.float32(1.0))
            if several:
                store_floats(noted + APART, zero_floats())
            if first >= end:
                _nothing_seen(at, to, tokens, noted)
                continue
            if corrected or first > 0 or end < tokens:
                mask_scores(at, tokens, first, end, noted)
            top = raise_maximum(noted, sums + row * sums_row + n % heads * sums_head, (dim + 15) // 16 * 16)
            besides = noted + (APART if several else BESIDES)
            exponentials(at, tokens, top, corrected or several, scales, zeros, to, noted, besides)

    return weigh


def _sums_of(form: Form) -> Any:
    """Multiply weights with one group of the values' channels, and add them to the partial results."""
    products, planes, centre, step = form.value_products, form.planes, form.centre, form.tokens

    @numba.njit(nogil=True)
    def add_values(
        cache: int,
        record: int,
        ahead: int,
        rows: int,
        heads: int,
        start: int,
        sums: int,
        sums_row: int,
        sums_head: int,
        scratch: int,
    ) -> None:
        tokens, padded, queries = word(cache, page.TOKENS), word(cache, page.PADDED), rows * heads
        all_noted, _, _, _, _, weighed, codes = _scratch_parts(cache, queries, planes, scratch)
        out, block = codes + planes * tokens * queries, word(cache, page.VALUE_BLOCK)
        stop = min(start + word(cache, page.VALUE_GROUP), padded)
        several = word(cache, page.VALUE_GROUP) < padded
        channels = min(stop, (word(cache, page.DIM) + 15) // 16 * 16) - start
        for n in range(queries):
            noted, to = all_noted + NOTED * n, codes + planes * tokens * n
            besides = noted + (APART if several else BESIDES)
            quantize_weights(
                weighed + 4 * tokens * n, tokens, planes, centre, word(cache, page.DITHER), to, noted, besides
            )
        values, lower = record + word(cache, page.VALUE_CODES) + start // 32 * block, word(cache, page.VALUE_LOWER)
        number, size = (stop - start) // 32, 4 * padded
        products(codes, tokens, planes * queries, values, lower, 64, tokens // step, number, block, out, size, ahead)
        for n in range(queries):
            noted, to = all_noted + NOTED * n, sums + n // heads * sums_row + n % heads * sums_head + 4 * start
            add_products(out + size * planes * n, size, planes, channels, noted, to)
            if several:
                add_to_all(to, channels, sum_lanes(load_floats(noted + APART)))

    return add_values


def _attend(form: Form) -> Any:
    """Attention over a page of a form."""
    score, weigh, add_values = _scores_of(form), _weights_of(form), _sums_of(form)
    planes, factor, shift, corrections = form.planes, form.factor, form.shift, form.corrections

    @numba.njit(nogil=True)
    def attend_page(
        cache: int,
        record: int,
        following: int,
        rows: int,
        heads: int,
        position: int,
        window: int,
        sums: int,
        sums_row: int,
        sums_head: int,
        scratch: int,
        prepared: bool,
    ) -> None:
        tokens, padded, queries = word(cache, page.TOKENS), word(cache, page.PADDED), rows * heads
        noted, room, _, scales, scores, weighed, _ = _scratch_parts(cache, queries, planes, scratch)
        corrected = corrections and word(cache, page.RANK) != 0
        zeros, row = scales + 4 * max(padded, tokens), 4 * tokens
        ahead, valid = following - record if following != 0 else 0, min(tokens, position + rows)
        score(cache, record, ahead, queries, valid, scratch, prepared)
        if corrected:
            correct_scores(cache, record, scratch, queries, scores, planes * row, room)
        width = word(cache, page.VALUE_GROUP)
        for start in range(0, padded, width):
            at = 2 * tokens * (start // width)
            stored_scales = record + word(cache, page.VALUE_SCALES) + at
            stored_zeros = record + word(cache, page.VALUE_ZEROS) + at
            widen(stored_scales, tokens, valid, factor, scales)
            widen_shifted(stored_zeros, stored_scales, tokens, valid, shift, zeros)
            if start == 0:
                weigh(cache, following, rows, heads, position, window, sums, sums_row, sums_head, scratch)
            else:
                for n in range(queries):
                    at, to = scores + planes * row * n, noted + NOTED * n
                    store_floats(to + APART, zero_floats())
                    weigh_again(at, tokens, scales, zeros, weighed + row * n, to, to + APART)
            add_values(cache, record, ahead, rows, heads, start, sums, sums_row, sums_head, scratch)
        if corrected:
            correct_sums(cache, record, queries, heads, scores, planes * row, noted, sums, sums_row, sums_head, room)

    return attend_page


attend_page_2 = _attend(Form(*products_2, 1, 1.0, 0.0, 1.5, 64, 16, True))
"""Add one page's share to the partial results of all query heads of a few rows; likewise the others.

Args:
    cache: Address of the cache's description.
    record: Address of what the page keeps of the key-value head.
    following: Address of the page's record that comes next, which is fetched on the way; 0 = none.
    rows: Rows, at consecutive positions.
    heads: Query heads that share the key-value head.
    position: Position of the first row, counted from the page's first token.
    window: Tokens that a query sees, itself included; 0 = all.
    sums: Address of the first row's and head's partial result: float32 [D padded to 16], then maximum and sum.
    sums_row: Bytes from row to row.
    sums_head: Bytes from head to head.
    scratch: Address of `page_scratch` bytes, as `begin_queries` left them or a page before.
    prepared: Whether a page of the same run came before with this scratch.
"""
attend_page_4 = _attend(Form(*products_4, 1, 1.0, 0.0, 7.5, 64, 8, True))
attend_page_8 = _attend(Form(*products_8, 2, 1.0, 0.0, 127.5, 128, 8, False))
attend_page_planes = _attend(Form(*products_planes, 2, 1 / 16, -0.5, 127.5, 64, 8, False))
"""Of two planes of 4 bits, both; a draft reads the upper alone as `attend_page_4` does."""
