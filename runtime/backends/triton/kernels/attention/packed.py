"""Loads of a page's keys and values in their packed form, for the GPU's attention kernel.

A code becomes a half-precision number by setting its exponent bits: 0x6400 | code is 1024 + code. `record` points to a
head's record of a page, `layout` describes it (`runtime.backends.triton.kernels.cache.pages`).

Source: QServe §5.3, GEAR §4.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    """Codes of BLOCK_T tokens of a page, from its token `first` on: float16 [BLOCK_T, BLOCK_D], exact.

    At 16 bits the numbers themselves. Tokens that are not `written` [BLOCK_T] read as 0 where MASKED, and channels from
    D on always.
    """
    BITS: tl.constexpr = layout.bits
    PAIRED: tl.constexpr = BITS < 16 and (BITS < 8 or layout.planes == 2) and tile.BLOCK_T < PAIRED_BELOW
    EACH: tl.constexpr = (1 if BITS >= 8 else 8 // BITS) * (2 if PAIRED else 1)
    ROW: tl.constexpr = (layout.D + EACH - 1) // EACH
    offs_j = tl.arange(0, tile.BLOCK_D // EACH)[None, :]
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
    """GEAR's factors: A of BLOCK_T tokens from `first` on, float16 [BLOCK_T, 16], and B [BLOCK_D, 16]."""
    offs_r = tl.arange(0, RANK_PADDED)[None, :]
    offs_t = (first + tl.arange(0, tile.BLOCK_T))[:, None]
    offs_d = tl.arange(0, tile.BLOCK_D)[:, None]
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
