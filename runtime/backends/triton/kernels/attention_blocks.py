"""Attention of a tile of queries to blocks of tokens: packed blocks of pages, and blocks of the window.

A code becomes a half-precision number by setting its exponent bits: 0x6400 | code is 1024 + code. `record` points to a
head's record of a page, `layout` describes it (`runtime.backends.triton.kernels.cache`).

Source: QServe §5.3, GEAR §4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from runtime.backends.triton.kernels.cache import LayerTensors, Record, moved

RANK_PADDED = tl.constexpr(16)
"""Fewest columns of a tensor core product: GEAR's factors are padded with zeros to this width."""
PAIRED_BELOW = tl.constexpr(32)
"""Positions of a block below which bytes of several codes are read in pairs. Where halves are made of such bytes,
Triton gives each of four threads 8 neighbours along a product's sum, of pairs 4; a sum over fewer than these 32 comes
out wrong on a card, though not interpreted."""


@triton.jit
def _exact(codes, BIAS: tl.constexpr):
    """Codes uint8 below 256, minus BIAS, as float16, exactly."""
    return (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + BIAS)


@triton.jit
def codes_of(record, first, written, MASKED: tl.constexpr, tile: tl.constexpr, layout: tl.constexpr):
    """Codes of BLOCK_T tokens of a page from its token `first` on, in a tile: float16 [BLOCK_T, BLOCK_D], exact.

    At 16 bits the numbers themselves. Tokens that are not `written` [BLOCK_T] read as 0 where MASKED, and channels from
    D on always.
    """
    BITS: tl.constexpr = layout.bits
    PAIRED: tl.constexpr = BITS < 16 and (BITS < 8 or layout.planes == 2) and tile.BLOCK_T < PAIRED_BELOW
    EACH: tl.constexpr = (1 if BITS >= 8 else 8 // BITS) * (2 if PAIRED else 1)
    ROW: tl.constexpr = (layout.D + EACH - 1) // EACH
    offs_j = (tile.FIRST // EACH + tl.arange(0, tile.BLOCK_D // EACH))[None, :]
    mask = offs_j < ROW
    if MASKED:
        mask = mask & written[:, None]
    offs = (first + tl.arange(0, tile.BLOCK_T))[:, None] * ROW + offs_j
    if BITS == 16:
        x = tl.load(record.halves + offs, mask=mask, other=0.0)
    else:
        at = record.codes
        if PAIRED:
            at = at.to(tl.pointer_type(tl.uint16), bitcast=True)
        codes = tl.load(at + offs, mask=mask, other=0)
        if layout.planes == 2:
            lower = tl.load(at + layout.at.lower // (2 if PAIRED else 1) + offs, mask=mask, other=0)
            even = (_part(codes, 0, 15, PAIRED) << 4) | (_part(lower, 0, 15, PAIRED) ^ 8)
            odd = (_part(codes, 4, 15, PAIRED) << 4) | (_part(lower, 4, 15, PAIRED) ^ 8)
            x = tl.interleave(_exact(even, 8.0), _exact(odd, 8.0))
        elif BITS == 8:
            x = _exact(codes, 0.0)
        elif BITS == 4:
            even, odd = _part(codes, 0, 15, PAIRED), _part(codes, 4, 15, PAIRED)
            x = tl.interleave(_exact(even, 0.0), _exact(odd, 0.0))
        else:
            even = tl.interleave(_exact(_part(codes, 0, 3, PAIRED), 0.0), _exact(_part(codes, 4, 3, PAIRED), 0.0))
            odd = tl.interleave(_exact(_part(codes, 2, 3, PAIRED), 0.0), _exact(_part(codes, 6, 3, PAIRED), 0.0))
            x = tl.interleave(even, odd)
    return x


@triton.jit
def _part(numbers, SHIFT: tl.constexpr, MASK: tl.constexpr, PAIRED: tl.constexpr):
    """The part of each byte of `numbers` that is MASK behind SHIFT bits; of numbers of two bytes, twice as many."""
    part = (numbers >> SHIFT) & MASK
    if PAIRED:
        part = tl.interleave(part, (numbers >> (8 + SHIFT)) & MASK)
    return part


@triton.jit
def scales_of(record, numbers, there, MASKED: tl.constexpr, layout: tl.constexpr):
    """Scale and zero of groups `numbers` [N]: float16 [N] each; 0 where not `there` [N] and MASKED.

    They are adjacent and read as one 4-byte number: smaller loads cannot be prefetched.
    """
    at = (record.halves + layout.at.scales).to(tl.pointer_type(tl.uint32), bitcast=True) + numbers
    pair = tl.load(at, mask=there, other=0) if MASKED else tl.load(at)
    scale = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    zero = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return scale, zero


@triton.jit
def value_scales(record, tokens, written, MASKED: tl.constexpr, tile: tl.constexpr, layout: tl.constexpr):
    """Scale and zero of tokens [BLOCK_T] of a page, [tokens, groups, 2] there: float16 [BLOCK_T, 1 or BLOCK_D] each."""
    GROUPS: tl.constexpr = layout.groups
    scale, zero = scales_of(record, GROUPS * tokens, written, MASKED, layout)
    scale, zero = scale[:, None], zero[:, None]
    for group in tl.static_range(1, GROUPS):
        later = (tl.arange(0, tile.BLOCK_D) >= group * layout.group)[None, :]
        next_scale, next_zero = scales_of(record, GROUPS * tokens + group, written, MASKED, layout)
        scale = tl.where(later, next_scale[:, None], scale)
        zero = tl.where(later, next_zero[:, None], zero)
    return scale, zero


@triton.jit
def factors(record, first, tile: tl.constexpr, layout: tl.constexpr):
    """GEAR's factors: A of BLOCK_T tokens from `first` on, float16 [BLOCK_T, 16], and B of a tile's channels."""
    offs_r = tl.arange(0, RANK_PADDED)[None, :]
    offs_t = (first + tl.arange(0, tile.BLOCK_T))[:, None]
    offs_d = (tile.FIRST + tl.arange(0, tile.BLOCK_D))[:, None]
    mask_a = (offs_r < layout.rank) & (offs_t >= 0)
    mask_b = (offs_r < layout.rank) & (offs_d < layout.D)
    a = tl.load(record.halves + layout.at.a + offs_t * layout.rank + offs_r, mask=mask_a, other=0.0)
    b = tl.load(record.halves + layout.at.b + offs_d * layout.rank + offs_r, mask=mask_b, other=0.0)
    return a, b


@triton.jit
def add_outliers(x, record, vectors, others, layout: tl.constexpr):
    """Add GEAR's outliers to x float16 [BLOCK_T, BLOCK_D].

    `vectors` numbers the columns of x where a vector is a channel (keys), else its rows (values); `others` are what the
    outliers' indices count along the other axis.
    """
    COUNT: tl.constexpr = layout.outliers
    there = vectors < layout.vectors
    for outlier in tl.static_range(COUNT):
        at = vectors * COUNT + outlier
        index = tl.load(record.shorts + layout.at.indices + at, mask=there, other=-1).to(tl.int32)
        missing = tl.load(record.halves + layout.at.outliers + at, mask=there, other=0.0)
        if layout.channel:
            x = tl.where(index[None, :] == others[:, None], x + missing[None, :], x)
        else:
            x = tl.where(index[:, None] == others[None, :], x + missing[:, None], x)
    return x


class Queries(NamedTuple):
    """The rows of a tile that attend to a slot; BLOCK_M of them, including rows of other slots."""

    q: Any  # float16 [BLOCK_M, BLOCK_D]
    rest: Any  # float16 [BLOCK_M, channels], those behind that only keys have; q again where there are none
    q_sum: Any  # float32 [BLOCK_M], sums of q over the channels
    position: Any  # int32 [BLOCK_M]; -1 for rows of other slots, which see nothing
    window: Any  # Positions visible to a row, including its own
    scale: Any  # Factor of the scores, chosen so that weights are powers of two


class Softmax(NamedTuple):
    """The running softmax of a tile's rows, float32, to base 2."""

    peak: Any  # [BLOCK_M], the largest score so far
    total: Any  # [BLOCK_M], the sum of weights
    acc: Any  # [BLOCK_M, BLOCK_D], the weighted sum of values


class Blocks(NamedTuple):
    """Blocks of BLOCK_T positions of a slot."""

    begin: Any
    end: Any
    last: Any  # Last position visible to any row: later ones have not been written for this slot


class HeadCache(NamedTuple):
    """The cache of one key-value head."""

    layer: LayerTensors  # The layer's, whose records are this head's
    kv_head: Any
    stride: Any  # Distance between pages, in records, and between slots, in windows
    per_slot: Any


class SlotPages(NamedTuple):
    """The pages of one slot."""

    k: Record  # The head's keys in page 0
    v: Record  # Its values there
    table: Any
    stride: Any  # Distance between pages, in records


@triton.jit
def _capped(scores, tile: tl.constexpr):
    """Soft cap of scores s to base 2: c * tanh(s / c), with the c of the tile; the same scores where it has none."""
    if tile.CAP > 0:
        falling = tl.exp2(tl.abs(scores) * (-2.0 * 1.4426950408889634 / tile.CAP))
        size = tile.CAP * (1.0 - falling) / (1.0 + falling)
        scores = tl.where(scores < 0, -size, size)
    return scores


@triton.jit
def _weigh(scores, state):
    """Weights of a block's scores to base 2, and the updated running softmax, before adding the block to acc."""
    peak = tl.maximum(state.peak, tl.max(scores, axis=1))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    p = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(state.peak - shift)
    return p.to(tl.float16), Softmax(peak, state.total * fade + tl.sum(p, axis=1), state.acc * fade[:, None])


@triton.jit
def _hide(scores, positions, queries, CAUSAL: tl.constexpr, tile: tl.constexpr):
    """Mask with -inf the positions that a row does not see; without CAUSAL, all precede every row's own."""
    if CAUSAL:
        scores = tl.where(positions[None, :] <= queries.position[:, None], scores, float("-inf"))
    elif tile.ROWS > 1:
        scores = tl.where((queries.position >= 0)[:, None], scores, float("-inf"))
    if tile.SLIDING:
        scores = tl.where(positions[None, :] > queries.position[:, None] - queries.window, scores, float("-inf"))
    return scores


@triton.jit
def visit_window(queries, state, window, paged, blocks, in_pages, tile: tl.constexpr, layout: tl.constexpr):
    """Add a slot's blocks in the window, all but those `in_pages`, to the running softmax of a tile's rows.

    The window is k and v [tokens, D] of one slot and head: the sinks, then the tokens after the `paged` ones.
    """
    D: tl.constexpr = layout.k.D
    offs_t = tl.arange(0, tile.BLOCK_T)
    offs_d = tl.arange(0, tile.BLOCK_D)
    mask_d = offs_d < D
    REST: tl.constexpr = tile.rest
    skipped = in_pages.end - in_pages.begin
    # Beside several rows of the widest heads, shared memory has no room for two more blocks.
    AHEAD: tl.constexpr = 3 if tile.BLOCK_D <= 256 or tile.BLOCK_M == 16 else 2
    for number in tl.range(blocks.begin, blocks.end - skipped, num_stages=AHEAD):
        block, before = number + skipped, paged
        if layout.sinks > 0:
            block = tl.where(number < in_pages.begin, number, block)
            before = tl.where(block * tile.BLOCK_T < layout.sinks, 0, paged)
        positions = block * tile.BLOCK_T + offs_t
        written = positions <= blocks.last
        mask = written[:, None] & mask_d[None, :]
        offs = (positions - before)[:, None] * D + offs_d[None, :]
        k = tl.load(window[0] + offs, mask=mask, other=0.0)
        scores = tl.dot(queries.q, tl.trans(k))
        if REST is not None:
            offs_r = (REST.FIRST + tl.arange(0, REST.BLOCK_D))[None, :]
            at = window[0] + (positions - before)[:, None] * D + offs_r
            k = tl.load(at, mask=written[:, None] & (offs_r < D), other=0.0)
            scores = tl.dot(queries.rest, tl.trans(k), scores)
        scores = _capped(scores * queries.scale, tile)
        p, state = _weigh(_hide(scores, positions, queries, True, tile), state)
        v = tl.load(window[1] + offs, mask=mask, other=0.0)
        state = Softmax(state.peak, state.total, tl.dot(p, v, state.acc))
    return state


@triton.jit
def _key_scores(queries, record, first, written, CAUSAL: tl.constexpr, tile: tl.constexpr, layout: tl.constexpr):
    """Products of the queries with BLOCK_T keys of a page from its token `first` on, float32 [BLOCK_M, BLOCK_T]."""
    REST: tl.constexpr = tile.rest
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_T: tl.constexpr = tile.BLOCK_T
    scores = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
    scores = _add_scores(queries.q, scores, record, first, written, CAUSAL, tile, layout)
    if REST is not None:
        scores = _add_scores(queries.rest, scores, record, first, written, CAUSAL, REST, layout)
    if not layout.channel and layout.bits < 16:
        step, zero = scales_of(record, first + tl.arange(0, BLOCK_T), written, CAUSAL, layout)
        scores = scores * step.to(tl.float32)[None, :] + queries.q_sum[:, None] * zero.to(tl.float32)[None, :]
    return scores


@triton.jit
def _add_scores(q, scores, record, first, written, CAUSAL: tl.constexpr, tile: tl.constexpr, layout: tl.constexpr):
    """Add a tile's channels of these products; where a key has one scale, of its codes."""
    offs_t = tl.arange(0, tile.BLOCK_T)
    offs_d = tile.FIRST + tl.arange(0, tile.BLOCK_D)
    k = codes_of(record, first, written, CAUSAL, tile, layout)
    if layout.channel:
        numbers = offs_d * layout.groups + first // layout.group
        step, zero = scales_of(record, numbers, offs_d < layout.D, True, layout)
        if layout.planes == 2:
            step = step * 0.0625
        k = k * step[None, :] + zero[None, :]
        if layout.outliers > 0:
            k = add_outliers(k, record, offs_d, first + offs_t, layout)
    scores = tl.dot(q, tl.trans(k), scores)
    if layout.rank > 0:
        a, b = factors(record, first, tile, layout)
        scores = tl.dot(tl.dot(q, b).to(tl.float16), tl.trans(a), scores)
    return scores


@triton.jit
def _add_values(p, acc, record, first, written, CAUSAL: tl.constexpr, tile: tl.constexpr, layout: tl.constexpr):
    """Add BLOCK_T values of a page, from its token `first` on, to acc, weighted by p float16 [BLOCK_M, BLOCK_T]."""
    offs_t = tl.arange(0, tile.BLOCK_T)
    offs_d = tl.arange(0, tile.BLOCK_D)
    v = codes_of(record, first, written, CAUSAL, tile, layout)
    if layout.bits < 16:
        step, zero = value_scales(record, first + offs_t, written, CAUSAL, tile, layout)
        if layout.planes == 2:
            step = step * 0.0625
        v = v * step + zero
    if layout.outliers > 0:
        v = add_outliers(v, record, first + offs_t, offs_d, layout)
    acc = tl.dot(p, v, acc)
    if layout.rank > 0:
        a, b = factors(record, first, tile, layout)
        acc = tl.dot(tl.dot(p, a).to(tl.float16), tl.trans(b), acc)
    return acc


@triton.jit
def visit_pages(queries, state, pages, blocks, CAUSAL: tl.constexpr, tile: tl.constexpr, layout: tl.constexpr):
    """Add a slot's blocks in pages to the running softmax of a tile's rows."""
    K: tl.constexpr = layout.k
    V: tl.constexpr = layout.v
    for block in range(blocks.begin, blocks.end):
        positions = block * tile.BLOCK_T + tl.arange(0, tile.BLOCK_T)
        at = block * tile.BLOCK_T - layout.sinks
        page = tl.load(pages.table + at // layout.page).to(tl.int64) * pages.stride
        first = at % layout.page
        written = positions <= blocks.last
        scores = _key_scores(queries, moved(pages.k, page * K.nbytes), first, written, CAUSAL, tile, K)
        scores = _capped(scores * queries.scale, tile)
        p, state = _weigh(_hide(scores, positions, queries, CAUSAL, tile), state)
        acc = _add_values(p, state.acc, moved(pages.v, page * V.nbytes), first, written, CAUSAL, tile, V)
        state = Softmax(state.peak, state.total, acc)
    return state


@triton.jit
def visit_slot(queries, state, cache, slot, lowest, blocks, tile: tl.constexpr, layout: tl.constexpr):
    """Add blocks of a slot to the running softmax of a tile's rows, whose first in the slot is at position `lowest`.

    Blocks of codes that all rows see whole come first, without a causal mask; then the window, or the last pages. Of
    halves there is one loop with a mask: they need no unpacking, and two loops take more registers.
    """
    layer = cache.layer
    pages = SlotPages(layer.k, layer.v, layer.tables + slot.to(tl.int64) * cache.per_slot, cache.stride)
    paged = lowest + 1
    if layout.window > 0:
        paged = tl.load(layer.paged + slot)
    first = blocks.begin
    if layout.sinks > 0:
        first = tl.minimum(tl.maximum(layout.sinks // tile.BLOCK_T, first), blocks.end)
    border = first
    if layout.k.bits < 16:
        border = tl.minimum(tl.maximum((layout.sinks + paged) // tile.BLOCK_T, border), blocks.end)
        seen_whole = Blocks(first, border, blocks.last)
        state = visit_pages(queries, state, pages, seen_whole, False, tile, layout)
    if layout.window > 0:
        at = (slot.to(tl.int64) * cache.stride + cache.kv_head) * layout.window * layout.k.D
        k_ptr, v_ptr = layer.k_window + at, layer.v_window + at
        in_pages = Blocks(first, border, blocks.last)
        state = visit_window(queries, state, (k_ptr, v_ptr), paged, blocks, in_pages, tile, layout)
    else:
        rest = Blocks(border, blocks.end, blocks.last)
        state = visit_pages(queries, state, pages, rest, True, tile, layout)
    return state
