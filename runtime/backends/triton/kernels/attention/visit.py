"""Blocks of tokens that meet a tile of queries: those of a page in their packed form, and those of the window."""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.backends.triton.kernels.attention.packed import add_outliers, codes_of, factors, scales_of, value_scales


@triton.jit
def _weigh(scores, peak, total, acc):
    """Weights of a block's scores to base 2, and the running softmax with them: weights, peak, total, faded acc."""
    next_peak = tl.maximum(peak, tl.max(scores, axis=1))
    shift = tl.where(next_peak == float("-inf"), 0.0, next_peak)
    p = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(peak - shift)
    return p.to(tl.float16), next_peak, total * fade + tl.sum(p, axis=1), acc * fade[:, None]


@triton.jit
def _hide(
    scores, positions, position_m, window, CAUSAL: tl.constexpr, SLIDING: tl.constexpr, SEVERAL: tl.constexpr
):  # fmt: skip
    """-inf where a row does not see a position. position_m is -1 for rows of other slots, which see nothing."""
    if CAUSAL:
        scores = tl.where(positions[None, :] <= position_m[:, None], scores, float("-inf"))
    elif SEVERAL:
        scores = tl.where((position_m >= 0)[:, None], scores, float("-inf"))
    if SLIDING:
        scores = tl.where(positions[None, :] > position_m[:, None] - window, scores, float("-inf"))
    return scores


@triton.jit
def visit_window(
    q, k_ptr, v_ptr, peak, total, acc, position_m, first, last, window, begin, end, scale,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, SLIDING: tl.constexpr,
):  # fmt: skip
    """Add the blocks [begin, end) of a slot, which lie in its window, to the running softmax of a tile's rows.

    k, v [tokens, D] of one slot and head, from position `first` on. q [BLOCK_M, BLOCK_D] float16. peak, total
    [BLOCK_M] and acc [BLOCK_M, BLOCK_D] are the state, float32, to base 2.
    """
    offs_t = tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    for block in tl.range(begin, end, num_stages=2):
        positions = block * BLOCK_T + offs_t
        mask = (positions <= last)[:, None] & mask_d[None, :]  # behind it lies what no step has written for this slot
        offs = (positions - first)[:, None] * D + offs_d[None, :]
        k = tl.load(k_ptr + offs, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = _hide(scores, positions, position_m, window, True, SLIDING, False)
        p, peak, total, acc = _weigh(scores, peak, total, acc)
        v = tl.load(v_ptr + offs, mask=mask, other=0.0)
        acc = tl.dot(p, v, acc)
    return peak, total, acc


@triton.jit
def visit_pages(
    q, q_sum, k_codes_ptr, k_halves_ptr, k_shorts_ptr, v_codes_ptr, v_halves_ptr, v_shorts_ptr, table_ptr, stride, peak,
    total, acc, position_m, last, window, begin, end, scale,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, CAUSAL: tl.constexpr, SLIDING: tl.constexpr,
    SEVERAL: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, CHANNEL: tl.constexpr,
    RANK: tl.constexpr, K_RECORD: tl.constexpr, K_LOWER: tl.constexpr, K_SCALES: tl.constexpr, K_A: tl.constexpr,
    K_B: tl.constexpr, K_INDICES: tl.constexpr, K_OUTLIERS: tl.constexpr, K_GROUP: tl.constexpr, K_GROUPS: tl.constexpr,
    K_COUNT: tl.constexpr, V_RECORD: tl.constexpr, V_LOWER: tl.constexpr, V_SCALES: tl.constexpr, V_A: tl.constexpr,
    V_B: tl.constexpr, V_INDICES: tl.constexpr, V_OUTLIERS: tl.constexpr, V_GROUP: tl.constexpr, V_GROUPS: tl.constexpr,
    V_COUNT: tl.constexpr,
):  # fmt: skip
    """Add the blocks [begin, end) of a slot, which lie in its pages, to the running softmax of a tile's rows.

    Pointers point at the head's record of page 0; table at the slot's pages. q_sum [BLOCK_M] float32 is the sum of q
    over channels. The rest as in `visit_window` and `runtime.backends.triton.kernels.cache.pages.record_sizes`.
    """
    offs_t = tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    for block in range(begin, end):
        positions = block * BLOCK_T + offs_t
        page = tl.load(table_ptr + block * BLOCK_T // PAGE).to(tl.int64) * stride
        first = block * BLOCK_T % PAGE
        k_at, v_at = page * K_RECORD, page * V_RECORD
        k_halves, v_halves = k_halves_ptr + k_at // 2, v_halves_ptr + v_at // 2
        written = positions <= last  # behind it lies what no step has written for this slot
        k = codes_of(
            k_codes_ptr + k_at, k_halves, first, written, D, BLOCK_T, BLOCK_D, CAUSAL, BITS, PLANES, K_LOWER
        )  # fmt: skip
        if CHANNEL:
            step, zero = scales_of(k_halves + K_SCALES, offs_d * K_GROUPS + first // K_GROUP, offs_d < D, True)
            if PLANES == 2:
                step = step * 0.0625
            k = k * step[None, :] + zero[None, :]
            if K_COUNT > 0:
                k = add_outliers(
                    k, k_halves, k_shorts_ptr + k_at // 2, offs_d, first + offs_t, 1, D, K_INDICES, K_OUTLIERS, K_COUNT,
                )  # fmt: skip
        scores = tl.dot(q, tl.trans(k))
        if RANK > 0:
            a, b = factors(k_halves + K_A, k_halves + K_B, first, D, BLOCK_T, BLOCK_D, RANK)
            scores = tl.dot(tl.dot(q, b).to(tl.float16), tl.trans(a), scores)
        if not CHANNEL and BITS < 16:
            step, zero = scales_of(k_halves + K_SCALES, first + offs_t, written, CAUSAL)
            scores = scores * step.to(tl.float32)[None, :] + q_sum[:, None] * zero.to(tl.float32)[None, :]
        scores = _hide(scores * scale, positions, position_m, window, CAUSAL, SLIDING, SEVERAL)
        p, peak, total, acc = _weigh(scores, peak, total, acc)
        v = codes_of(
            v_codes_ptr + v_at, v_halves, first, written, D, BLOCK_T, BLOCK_D, CAUSAL, BITS, PLANES, V_LOWER
        )  # fmt: skip
        if BITS < 16:
            step, zero = value_scales(
                v_halves + V_SCALES, first + offs_t, written, BLOCK_D, CAUSAL, V_GROUP, V_GROUPS
            )  # fmt: skip
            if PLANES == 2:
                step = step * 0.0625
            v = v * step + zero
        if V_COUNT > 0:
            v = add_outliers(
                v, v_halves, v_shorts_ptr + v_at // 2, first + offs_t, offs_d, 0, PAGE, V_INDICES, V_OUTLIERS, V_COUNT,
            )  # fmt: skip
        acc = tl.dot(p, v, acc)
        if RANK > 0:
            a, b = factors(v_halves + V_A, v_halves + V_B, first, D, BLOCK_T, BLOCK_D, RANK)
            acc = tl.dot(tl.dot(p, a).to(tl.float16), tl.trans(b), acc)
    return peak, total, acc


@triton.jit
def visit_slot(
    q, q_sum, k_codes_ptr, k_halves_ptr, k_shorts_ptr, v_codes_ptr, v_halves_ptr, v_shorts_ptr, k_window_ptr,
    v_window_ptr, tables_ptr, paged_ptr, stride, per_slot, kv_head, peak, total, acc, position_m, slot, lowest, last,
    window, begin, end, scale,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, SLIDING: tl.constexpr, SEVERAL: tl.constexpr,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, CHANNEL: tl.constexpr,
    RANK: tl.constexpr, K_RECORD: tl.constexpr, K_LOWER: tl.constexpr, K_SCALES: tl.constexpr, K_A: tl.constexpr,
    K_B: tl.constexpr, K_INDICES: tl.constexpr, K_OUTLIERS: tl.constexpr, K_GROUP: tl.constexpr, K_GROUPS: tl.constexpr,
    K_COUNT: tl.constexpr, V_RECORD: tl.constexpr, V_LOWER: tl.constexpr, V_SCALES: tl.constexpr, V_A: tl.constexpr,
    V_B: tl.constexpr, V_INDICES: tl.constexpr, V_OUTLIERS: tl.constexpr, V_GROUP: tl.constexpr, V_GROUPS: tl.constexpr,
    V_COUNT: tl.constexpr,
):  # fmt: skip
    """Add the blocks [begin, end) of a slot to the running softmax of a tile's rows, of which its first is at `lowest`.

    Blocks of codes that all rows see whole come first, without a causal mask; then the window, or the last pages. Of
    halves there is one loop with a mask: they need no unpacking, and two loops take more registers.
    """
    table_ptr = tables_ptr + slot.to(tl.int64) * per_slot
    paged = lowest + 1
    if WINDOW > 0:
        paged = tl.load(paged_ptr + slot)
    border = begin
    if BITS < 16:
        border = tl.minimum(tl.maximum(paged // BLOCK_T, begin), end)
        peak, total, acc = visit_pages(
            q, q_sum, k_codes_ptr, k_halves_ptr, k_shorts_ptr, v_codes_ptr, v_halves_ptr, v_shorts_ptr, table_ptr,
            stride, peak, total, acc, position_m, last, window, begin, border, scale,
            D, BLOCK_T, BLOCK_D, False, SLIDING, SEVERAL, PAGE, BITS, PLANES, CHANNEL, RANK, K_RECORD, K_LOWER,
            K_SCALES, K_A, K_B, K_INDICES, K_OUTLIERS, K_GROUP, K_GROUPS, K_COUNT, V_RECORD, V_LOWER, V_SCALES, V_A,
            V_B, V_INDICES, V_OUTLIERS, V_GROUP, V_GROUPS, V_COUNT,
        )  # fmt: skip
    if WINDOW > 0:
        at = (slot.to(tl.int64) * stride + kv_head) * WINDOW * D
        peak, total, acc = visit_window(
            q, k_window_ptr + at, v_window_ptr + at, peak, total, acc, position_m, paged, last, window, border, end,
            scale, D, BLOCK_T, BLOCK_D, SLIDING,
        )  # fmt: skip
    else:
        peak, total, acc = visit_pages(
            q, q_sum, k_codes_ptr, k_halves_ptr, k_shorts_ptr, v_codes_ptr, v_halves_ptr, v_shorts_ptr, table_ptr,
            stride, peak, total, acc, position_m, last, window, border, end, scale,
            D, BLOCK_T, BLOCK_D, True, SLIDING, SEVERAL, PAGE, BITS, PLANES, CHANNEL, RANK, K_RECORD, K_LOWER,
            K_SCALES, K_A, K_B, K_INDICES, K_OUTLIERS, K_GROUP, K_GROUPS, K_COUNT, V_RECORD, V_LOWER, V_SCALES, V_A,
            V_B, V_INDICES, V_OUTLIERS, V_GROUP, V_GROUPS, V_COUNT,
        )  # fmt: skip
    return peak, total, acc
