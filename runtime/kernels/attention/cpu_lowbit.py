"""Attention over one packed page, by integer products with its codes.

Scores: a query is rounded to INT8 with a scale of its own. Where a key scale spans a channel it is multiplied into the
query first, page by page; where it spans a token it multiplies the score. Zeros are one product of the exact query with
them. Output: the softmax weights times the values' scales are rounded to INT8 likewise, and zeros are one sum.

With 8-bit codes, queries and weights have two planes, 128 * high + low, so that rounding them does not show beside the
codes'. With fewer bits one plane does: queries are rounded to nearest and weights with a fixed dither, for thousands of
weights just under half a step would otherwise vanish together. What rounding takes from the mean of the codes is given
back exactly (`centre`), so only the codes' deviations from their middle are multiplied by rounding errors.

GEAR's corrections are added in the same pass: scores += (q B) A^T, output += (p A) B^T, and single outliers.
"""

from __future__ import annotations

import math

import numba

from runtime.cpu import pages as page
from runtime.cpu.codes import exp2, get_short, larger, largest_lane, store_bytes, whole
from runtime.cpu.vector import (
    absolute,
    add,
    fill,
    fma,
    get_float,
    get_half,
    get_word,
    keep_lanes,
    load_floats,
    load_halves,
    mul,
    prefetch,
    rounded,
    set_float,
    store_floats,
    sum_lanes,
    zero_floats,
)
from runtime.kernels.attention.cpu_products import (
    key_products_2,
    key_products_4,
    key_products_8,
    key_products_planes,
    value_products_2,
    value_products_4,
    value_products_8,
    value_products_planes,
)

_LOWEST = -1e30
_LOG2E = math.log2(math.e)
_META = 256
"""Bytes of what is noted of a query: floats as by the numbers below, then sixteen sums of its weights and sixteen of
what all channels get alike, which are only added up at the end."""
_SCALE, _MEAN, _ZEROS, _LARGEST, _STEP = 0, 4, 8, 12, 16
"""Scale of the query's codes, correction of their mean, product with the zeros; the largest score in the page; scale of
the weights' codes."""
_TOTAL, _BESIDES = 64, 128
_SMALLEST = 1.1754944e-38


@numba.njit(nogil=True)
def word(cache: int, index: int) -> int:
    """A word of a cache's description (`runtime.cpu.pages`)."""
    return get_word(cache + 8 * index)


@numba.njit(nogil=True)
def copy_queries(q: int, q_row: int, rows: int, heads: int, dim: int, padded: int, out: int) -> None:
    """Copy the query heads of some rows to float32 [rows * heads, padded], zero-padded, with nothing noted of them."""
    for n in range(rows * heads):
        source, to = q + n // heads * q_row + 4 * dim * (n % heads), out + 4 * padded * n
        d = 0
        while d + 16 <= dim:
            store_floats(to + 4 * d, load_floats(source + 4 * d))
            d += 16
        for i in range(d, dim):
            set_float(to + 4 * i, get_float(source + 4 * i))
        for i in range(dim, padded):
            set_float(to + 4 * i, numba.float32(0.0))
        meta = out + 4 * padded * rows * heads + _META * n
        store_floats(meta + _TOTAL, zero_floats())
        store_floats(meta + _BESIDES, zero_floats())


@numba.njit(nogil=True)
def _step_of(top: float, planes: int) -> tuple[float, float]:
    """Scale, and its inverse, of codes whose largest magnitude is `top`."""
    step = numba.float32(top / numba.float32(127.0 if planes == 1 else 16256.0))
    inverse = numba.float32(0.0)
    if step > numba.float32(_SMALLEST):
        inverse = numba.float32(numba.float32(1.0) / step)
    return step, inverse


@numba.njit(nogil=True)
def quantize_query(
    q: int,
    padded: int,
    scales: int,
    zeros: int,
    factor: float,
    shift: float,
    planes: int,
    centre: float,
    codes: int,
    codes_step: int,
    meta: int,
    folded: int,
) -> None:
    """Round a query to INT8, times the scales of the channels where there are any.

    Args:
        q: Address of float32 [padded].
        padded: D padded to 32.
        scales: Address of float16 [padded], one scale a channel; 0 = none.
        zeros: Address of float16 [padded].
        factor: What the scales are multiplied by.
        shift: Scales added to the zeros.
        planes: 1 or 2.
        centre: Middle of the codes that the query will meet.
        codes: Address of int8 [planes, padded].
        codes_step: Bytes from plane to plane.
        meta: Address of what is noted of the query: scale, correction of the mean, and product with the zeros (or sum
            of q, without scales) are written.
        folded: Address of scratch, float32 [padded].
    """
    largest, total, with_zeros = zero_floats(), zero_floats(), zero_floats()
    for d in range(0, padded, 16):
        value = load_floats(q + 4 * d)
        if scales != 0:
            scale = load_halves(scales + 2 * d)
            zero = fma(scale, fill(numba.float32(shift)), load_halves(zeros + 2 * d))
            with_zeros = fma(value, zero, with_zeros)
            value = mul(value, mul(scale, fill(numba.float32(factor))))
        else:
            with_zeros = add(with_zeros, value)
        total = add(total, value)
        largest = larger(absolute(value), largest)
        store_floats(folded + 4 * d, value)
    step, inverse = _step_of(largest_lane(largest), planes)
    rounded_sum = zero_floats()
    for d in range(0, padded, 16):
        code = rounded(mul(load_floats(folded + 4 * d), fill(inverse)))
        rounded_sum = add(rounded_sum, code)
        if planes == 2:
            high = rounded(mul(code, fill(numba.float32(1 / 128))))
            store_bytes(codes + codes_step + d, fma(high, fill(numba.float32(-128.0)), code))
            code = high
        store_bytes(codes + d, code)
    set_float(meta + _SCALE, step)
    mean = numba.float32(sum_lanes(total) - step * sum_lanes(rounded_sum))
    set_float(meta + _MEAN, numba.float32(mean * numba.float32(centre)))
    set_float(meta + _ZEROS, sum_lanes(with_zeros))


@numba.njit(nogil=True)
def _finish_scores(
    scores: int, step: int, planes: int, tokens: int, meta: int, key_scales: int, key_zeros: int
) -> None:
    """Turn integer products into scores, in the first plane's row, and note the largest.

    Args:
        scores: Address of float32 [planes, tokens].
        step: Bytes from plane to plane.
        planes: 1 or 2.
        tokens: A multiple of 16.
        meta: As `quantize_query` wrote it.
        key_scales: Address of float32 [tokens], or 0 where scales were the channels'.
        key_zeros: Address of float32 [tokens].
    """
    scale, zero = fill(get_float(meta + _SCALE)), fill(get_float(meta + _ZEROS))
    mean = fill(get_float(meta + _MEAN))
    if key_scales == 0:
        mean = add(mean, zero)
    largest = fill(get_float(meta + _LARGEST))
    for tile in range(0, 4 * tokens, 64):
        value = load_floats(scores + tile)
        if planes == 2:
            value = fma(value, fill(numba.float32(128.0)), load_floats(scores + step + tile))
        value = fma(value, scale, mean)
        if key_scales != 0:
            value = fma(value, load_floats(key_scales + tile), mul(zero, load_floats(key_zeros + tile)))
        store_floats(scores + tile, value)
        largest = larger(value, largest)
    set_float(meta + _LARGEST, largest_lane(largest))


@numba.njit(nogil=True)
def _mask_scores(scores: int, tokens: int, first: int, end: int, meta: int) -> None:
    """Make the scores of tokens outside first .. end - 1 very small, and note the largest of the others."""
    largest = fill(numba.float32(_LOWEST))
    for tile in range(0, tokens, 16):
        value = load_floats(scores + 4 * tile)
        if tile < first or tile + 16 > end:
            value = keep_lanes(value, first - tile, end - tile)
            store_floats(scores + 4 * tile, value)
        largest = larger(value, largest)
    set_float(meta + _LARGEST, largest_lane(largest))


@numba.njit(nogil=True)
def _raise_maximum(meta: int, sums: int, padded: int) -> float:
    """Bring a query's running maximum up to date, and what has been summed up under the one before. Returns it."""
    state = sums + 4 * padded
    before, top = get_float(state), get_float(meta + _LARGEST)
    if top <= before:
        return before
    change = numba.float32(math.exp(before - top))
    set_float(state, top)
    set_float(state + 4, numba.float32(get_float(state + 4) * change))
    for at in (meta + _TOTAL, meta + _BESIDES):
        store_floats(at, mul(load_floats(at), fill(change)))
    for d in range(0, padded, 16):
        store_floats(sums + 4 * d, mul(load_floats(sums + 4 * d), fill(change)))
    return top


@numba.njit(nogil=True)
def _exponentials(scores: int, tokens: int, top: float, meta: int) -> None:
    """Turn one query's scores into weights: e^(score - top)."""
    total = load_floats(meta + _TOTAL)
    factor, shift = fill(numba.float32(_LOG2E)), fill(numba.float32(-top * numba.float32(_LOG2E)))
    for tile in range(0, 4 * tokens, 64):
        weight = exp2(fma(load_floats(scores + tile), factor, shift))
        total = add(total, weight)
        store_floats(scores + tile, weight)
    store_floats(meta + _TOTAL, total)


@numba.njit(nogil=True)
def quantize_weights(
    weights: int,
    scales: int,
    zeros: int,
    tokens: int,
    planes: int,
    centre: float,
    dither: int,
    codes: int,
    codes_step: int,
    meta: int,
    besides: int,
) -> None:
    """Round softmax weights, times the values' scales, to INT8.

    Args:
        weights: Address of float32 [tokens].
        scales: Address of float32 [tokens].
        zeros: Address of float32 [tokens].
        tokens: A multiple of 16.
        planes: 1 or 2.
        centre: Middle of the values' codes.
        dither: Address of float32 [tokens] in [0, 1): what is added before cutting off, one plane only.
        codes: Address of int8 [planes, tokens].
        codes_step: Bytes from plane to plane.
        meta: Address of what is noted of the query; the scale is written.
        besides: Address of float32 [16], whose sum every channel gets besides: zeros and the mean's correction are
            added.
    """
    largest = zero_floats()
    for tile in range(0, 4 * tokens, 64):
        largest = larger(mul(load_floats(weights + tile), load_floats(scales + tile)), largest)
    step, inverse = _step_of(largest_lane(largest), planes)
    factor, middle, lost = fill(inverse), fill(numba.float32(centre)), fill(numba.float32(-step * centre))
    both = load_floats(besides)
    for tile in range(0, tokens, 16):
        weight = load_floats(weights + 4 * tile)
        both = fma(weight, load_floats(zeros + 4 * tile), both)
        weight = mul(weight, load_floats(scales + 4 * tile))
        if planes == 1:
            code = whole(fma(weight, factor, load_floats(dither + 4 * tile)))
            store_bytes(codes + tile, code)
        else:
            code = rounded(mul(weight, factor))
            high = rounded(mul(code, fill(numba.float32(1 / 128))))
            store_bytes(codes + codes_step + tile, fma(high, fill(numba.float32(-128.0)), code))
            store_bytes(codes + tile, high)
        both = fma(weight, middle, fma(code, lost, both))
    store_floats(besides, both)
    set_float(meta + _STEP, step)


@numba.njit(nogil=True)
def _add_products(products: int, step: int, planes: int, channels: int, meta: int, sums: int) -> None:
    """Add integer products of weights and values, times their scale, to a query's sums."""
    scale = fill(get_float(meta + _STEP))
    for d in range(0, 4 * channels, 64):
        value = load_floats(products + d)
        if planes == 2:
            value = fma(value, fill(numba.float32(128.0)), load_floats(products + step + d))
        store_floats(sums + d, fma(value, scale, load_floats(sums + d)))


@numba.njit(nogil=True)
def _add_to_all(sums: int, channels: int, value: float) -> None:
    """Add a number to some of a query's sums."""
    for d in range(0, 4 * channels, 64):
        store_floats(sums + d, add(load_floats(sums + d), fill(value)))


@numba.njit(nogil=True)
def settle_queries(cache: int, rows: int, heads: int, sums: int, sums_row: int, sums_head: int, scratch: int) -> None:
    """Add what `attend_page` has left in the scratch to the partial results. Arguments as there."""
    padded, channels = word(cache, page.PADDED), (word(cache, page.DIM) + 15) // 16 * 16
    for n in range(rows * heads):
        to = sums + n // heads * sums_row + n % heads * sums_head
        meta = scratch + 4 * padded * rows * heads + _META * n
        state = to + 4 * channels
        set_float(state + 4, numba.float32(get_float(state + 4) + sum_lanes(load_floats(meta + _TOTAL))))
        _add_to_all(to, channels, sum_lanes(load_floats(meta + _BESIDES)))


@numba.njit(nogil=True)
def _widen(halves: int, tokens: int, valid: int, factor: float, out: int) -> None:
    """Halves as floats, times a factor; 0 behind the first `valid`."""
    for t in range(0, tokens, 16):
        store_floats(out + 4 * t, mul(load_halves(halves + 2 * t), fill(numba.float32(factor))))
    for t in range(valid, tokens):
        set_float(out + 4 * t, numba.float32(0.0))


@numba.njit(nogil=True)
def _widen_shifted(halves: int, scales: int, tokens: int, valid: int, shift: float, out: int) -> None:
    """Zeros as floats, plus the scales times a number; 0 behind the first `valid`."""
    for t in range(0, tokens, 16):
        scale = load_halves(scales + 2 * t)
        store_floats(out + 4 * t, fma(scale, fill(numba.float32(shift)), load_halves(halves + 2 * t)))
    for t in range(valid, tokens):
        set_float(out + 4 * t, numba.float32(0.0))


@numba.njit(nogil=True)
def correct_scores(cache: int, record: int, q: int, tokens: int, dim: int, padded: int, scores: int) -> None:
    """Add (q B) A^T and the outliers of the keys to one query's scores."""
    a, b = record + word(cache, page.KEY_A), record + word(cache, page.KEY_B)
    for r in range(word(cache, page.RANK)):
        total = zero_floats()
        for d in range(0, padded, 16):
            total = fma(load_floats(q + 4 * d), load_halves(b + 2 * (r * padded + d)), total)
        factor = fill(sum_lanes(total))
        for t in range(0, tokens, 16):
            at = scores + 4 * t
            store_floats(at, fma(factor, load_halves(a + 2 * (r * tokens + t)), load_floats(at)))
    count = word(cache, page.KEY_OUTLIERS)
    if count == 0:
        return
    indices, kept = record + word(cache, page.KEY_INDICES), record + word(cache, page.KEY_KEPT)
    for d in range(dim):
        value = get_float(q + 4 * d)
        for i in range(d * count, (d + 1) * count):
            at = scores + 4 * numba.int64(get_short(indices + 2 * i))
            set_float(at, numba.float32(get_float(at) + value * get_half(kept + 2 * i)))


@numba.njit(nogil=True)
def correct_sums(cache: int, record: int, weights: int, tokens: int, padded: int, sums: int) -> None:
    """Add (p A) B^T and the outliers of the values to one query's sums."""
    a, b = record + word(cache, page.VALUE_A), record + word(cache, page.VALUE_B)
    channels = (word(cache, page.DIM) + 15) // 16 * 16
    for r in range(word(cache, page.RANK)):
        total = zero_floats()
        for t in range(0, tokens, 16):
            total = fma(load_floats(weights + 4 * t), load_halves(a + 2 * (r * tokens + t)), total)
        factor = fill(sum_lanes(total))
        for d in range(0, channels, 16):
            at = sums + 4 * d
            store_floats(at, fma(factor, load_halves(b + 2 * (r * padded + d)), load_floats(at)))
    count = word(cache, page.VALUE_OUTLIERS)
    if count == 0:
        return
    indices, kept = record + word(cache, page.VALUE_INDICES), record + word(cache, page.VALUE_KEPT)
    for t in range(tokens):
        weight = get_float(weights + 4 * t)
        for i in range(t * count, (t + 1) * count):
            at = sums + 4 * numba.int64(get_short(indices + 2 * i))
            set_float(at, numba.float32(get_float(at) + weight * get_half(kept + 2 * i)))


def page_scratch(queries: int, padded: int, tokens: int) -> int:
    """Bytes of scratch that `attend_page` needs.

    Args:
        queries: Most query heads of all rows that it takes at once.
        padded: D padded to 32.
        tokens: Tokens of a page.
    """
    each = 4 * padded + _META + 2 * (padded + 4 * tokens + tokens + 4 * padded)
    return queries * each + 4 * max(padded, tokens) + 16 * tokens + 64


@numba.njit(nogil=True)
def attend_page(
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
    prepared: bool,
) -> None:
    """Add one page's share to the partial results of all query heads of a few rows.

    Args:
        cache: Address of the cache's description.
        record: Address of what the page keeps of the key-value head.
        following: Address of the page's record that comes next, which is fetched on the way; 0 = none.
        draft: 1 = read the upper plane alone, where there are two.
        rows: Rows, at consecutive positions.
        heads: Query heads that share the key-value head.
        position: Position of the first row, counted from the page's first token.
        window: Tokens that a query sees, itself included; 0 = all.
        sums: Address of the first row's and head's partial result: float32 [D padded to 16], then maximum and sum.
        sums_row: Bytes from row to row.
        sums_head: Bytes from head to head.
        scratch: Address of `page_scratch` bytes, whose first are the queries as `copy_queries` wrote them.
        prepared: Whether a page of the same run came before with this scratch.
    """
    bits, tokens, dim = word(cache, page.FORMAT), word(cache, page.TOKENS), word(cache, page.DIM)
    if bits == page.TWO_PLANES and draft != 0:
        bits = 4
    both = bits == page.TWO_PLANES
    precise = both or bits == 8
    planes, padded, queries = 2 if precise else 1, word(cache, page.PADDED), rows * heads
    channels = (dim + 15) // 16 * 16
    factor, shift = (1 / 16, -0.5) if both else (1.0, 0.0)
    centre = 127.5 if precise else (7.5 if bits == 4 else 1.5)
    valid = min(tokens, position + rows)
    meta = scratch + 4 * padded * queries
    codes = meta + _META * queries
    scaled = (codes + planes * padded * queries + 63) // 64 * 64
    key_scales = scaled + 4 * max(padded, tokens)
    key_zeros, value_scales = key_scales + 4 * tokens, key_scales + 8 * tokens
    value_zeros, scores = key_scales + 12 * tokens, key_scales + 16 * tokens
    weights = scores + 4 * tokens * planes * queries
    products = weights + tokens * planes * queries
    tokenwise = word(cache, page.KEY_TOKENWISE) != 0
    if tokenwise:
        _widen(record + word(cache, page.KEY_SCALES), tokens, valid, 1.0, key_scales)
        _widen(record + word(cache, page.KEY_ZEROS), tokens, valid, 1.0, key_zeros)
    for n in range(queries):
        set_float(meta + _META * n + _LARGEST, numba.float32(_LOWEST))
    group = word(cache, page.KEY_GROUP)
    vectors, lower = word(cache, page.KEY_VECTORS), word(cache, page.KEY_LOWER)
    for g in range(tokens // group):
        if not (tokenwise and prepared):
            scales = 0 if tokenwise else record + word(cache, page.KEY_SCALES) + 2 * padded * g
            zeros = 0 if tokenwise else record + word(cache, page.KEY_ZEROS) + 2 * padded * g
            for n in range(queries):
                at = codes + planes * padded * n
                q = scratch + 4 * padded * n
                quantize_query(
                    q, padded, scales, zeros, factor, shift, planes, centre, at, padded, meta + _META * n, scaled
                )
        keys = record + word(cache, page.KEY_CODES) + 4 * group * vectors * g
        out, step, tiles = scores + 4 * group * g, 4 * tokens, group // 16
        if both:
            key_products_planes(codes, padded, 2 * queries, keys, lower, vectors, tiles, out, step)
        elif precise:
            key_products_8(codes, padded, 2 * queries, keys, lower, vectors, tiles, out, step)
        elif bits == 4:
            key_products_4(codes, padded, queries, keys, lower, vectors, tiles, out, step)
        else:
            key_products_2(codes, padded, queries, keys, lower, vectors, tiles, out, step)
        for n in range(queries):
            at = out + planes * step * n
            _finish_scores(at, step, planes, group, meta + _META * n, key_scales if tokenwise else 0, key_zeros)
    size = word(cache, page.RECORD)
    for n in range(queries):
        row, at, noted = n // heads, scores + 4 * tokens * planes * n, meta + _META * n
        if following != 0:
            for line in range(size * n // queries // 64 * 64, size * (n + 1) // queries, 64):
                prefetch(following + line)
        end = min(position + row + 1, tokens)
        first = 0 if window == 0 else max(0, position + row + 1 - window)
        to = sums + row * sums_row + n % heads * sums_head
        corrected = word(cache, page.RANK) != 0
        if corrected:
            correct_scores(cache, record, scratch + 4 * padded * n, tokens, dim, padded, at)
        if first >= end:
            for t in range(0, tokens, 16):
                store_floats(at + 4 * t, zero_floats())
            continue
        if corrected or first > 0 or end < tokens:
            _mask_scores(at, tokens, first, end, noted)
        _exponentials(at, tokens, _raise_maximum(noted, to, channels), noted)
        if corrected:
            correct_sums(cache, record, at, tokens, padded, to)
    width, lower = word(cache, page.VALUE_GROUP), word(cache, page.VALUE_LOWER)
    count, block = word(cache, page.VALUE_COUNT), word(cache, page.VALUE_BLOCK)
    for start in range(0, padded, width):
        stop, g = min(start + width, padded), start // width
        scales = record + word(cache, page.VALUE_SCALES) + 2 * tokens * g
        zeros = record + word(cache, page.VALUE_ZEROS) + 2 * tokens * g
        _widen(scales, tokens, valid, factor, value_scales)
        _widen_shifted(zeros, scales, tokens, valid, shift, value_zeros)
        several = width < padded
        for n in range(queries):
            besides = scaled if several else meta + _META * n + _BESIDES
            if several:
                store_floats(besides, zero_floats())
            quantize_weights(
                scores + 4 * tokens * planes * n,
                value_scales,
                value_zeros,
                tokens,
                planes,
                centre,
                word(cache, page.DITHER),
                weights + tokens * planes * n,
                tokens,
                meta + _META * n,
                besides,
            )
            if several:
                to = sums + n // heads * sums_row + n % heads * sums_head + 4 * start
                _add_to_all(to, min(stop, channels) - start, sum_lanes(load_floats(besides)))
        values, blocks, step = (
            record + word(cache, page.VALUE_CODES) + start // 32 * block,
            (stop - start) // 32,
            4 * padded,
        )
        if both:
            value_products_planes(weights, tokens, 2 * queries, values, lower, count, block, blocks, products, step)
        elif precise:
            value_products_8(weights, tokens, 2 * queries, values, lower, count, block, blocks, products, step)
        elif bits == 4:
            value_products_4(weights, tokens, queries, values, lower, count, block, blocks, products, step)
        else:
            value_products_2(weights, tokens, queries, values, lower, count, block, blocks, products, step)
        for n in range(queries):
            to = sums + n // heads * sums_row + n % heads * sums_head + 4 * start
            at = products + planes * step * n
            _add_products(at, step, planes, min(stop, channels) - start, meta + _META * n, to)
