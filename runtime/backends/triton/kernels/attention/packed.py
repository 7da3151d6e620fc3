"""Reading keys and values of a page in their packed form, for the GPU's attention kernel.

A code becomes a half-precision number by its bits alone: 0x6400 | code is 1024 + code.

Source: QServe §5.3, GEAR §4.
"""

from __future__ import annotations

import triton
import triton.language as tl

RANK_PADDED = tl.constexpr(16)
"""Fewest columns of a matrix product of the tensor cores: GEAR's factors are filled up with zeros to these."""


@triton.jit
def _exact(codes, BIAS: tl.constexpr):
    """Codes uint8 below 256, less BIAS, as float16, exactly."""
    return (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + BIAS)


@triton.jit
def codes_of(
    codes_ptr, halves_ptr, first, written, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, LOWER: tl.constexpr,
):  # fmt: skip
    """Codes of BLOCK_T tokens of a page, from its token `first` on: float16 [BLOCK_T, BLOCK_D], exact.

    At 16 bits the numbers themselves. Tokens that are not `written` [BLOCK_T] read as 0 where MASKED, and channels from
    D on always.
    """
    EACH: tl.constexpr = 1 if BITS >= 8 else 8 // BITS
    ROW: tl.constexpr = (D + EACH - 1) // EACH
    offs_j = tl.arange(0, BLOCK_D // EACH)[None, :]
    mask = offs_j < ROW
    if MASKED:
        mask = mask & written[:, None]
    offs = (first + tl.arange(0, BLOCK_T))[:, None] * ROW + offs_j
    if BITS == 16:
        x = tl.load(halves_ptr + offs, mask=mask, other=0.0)
    else:
        codes = tl.load(codes_ptr + offs, mask=mask, other=0)
        if BITS == 8:
            x = _exact(codes, 0.0)
        elif PLANES == 2:
            lower = tl.load(codes_ptr + LOWER + offs, mask=mask, other=0)
            even = ((codes & 15) << 4) | ((lower & 15) ^ 8)
            odd = (codes & 240) | ((lower >> 4) ^ 8)
            x = tl.interleave(_exact(even, 8.0), _exact(odd, 8.0))
        elif BITS == 4:
            x = tl.interleave(_exact(codes & 15, 0.0), _exact(codes >> 4, 0.0))
        else:
            even = tl.interleave(_exact(codes & 3, 0.0), _exact((codes >> 4) & 3, 0.0))
            odd = tl.interleave(_exact((codes >> 2) & 3, 0.0), _exact(codes >> 6, 0.0))
            x = tl.interleave(even, odd)
    return x


@triton.jit
def scales_of(scales_ptr, numbers, there, MASKED: tl.constexpr):
    """Scale and zero of groups `numbers` [N]: float16 [N] each; 0 where not `there` [N] and MASKED.

    They stand side by side in four bytes and are read as one number: less than that cannot be fetched ahead.
    """
    at = scales_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + numbers
    pair = tl.load(at, mask=there, other=0) if MASKED else tl.load(at)
    scale = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    zero = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return scale, zero


@triton.jit
def value_scales(
    scales_ptr, tokens, written, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Scale and zero of tokens [BLOCK_T] of a page, [tokens, GROUPS, 2] there: float16 [BLOCK_T, 1 or BLOCK_D] each."""
    scale, zero = scales_of(scales_ptr, GROUPS * tokens, written, MASKED)
    scale, zero = scale[:, None], zero[:, None]
    for group in tl.static_range(1, GROUPS):
        later = (tl.arange(0, BLOCK_D) >= group * GROUP)[None, :]
        next_scale, next_zero = scales_of(scales_ptr, GROUPS * tokens + group, written, MASKED)
        scale = tl.where(later, next_scale[:, None], scale)
        zero = tl.where(later, next_zero[:, None], zero)
    return scale, zero


@triton.jit
def factors(
    a_ptr, b_ptr, first, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, RANK: tl.constexpr
):  # fmt: skip
    """GEAR's factors: A of BLOCK_T tokens from `first` on, float16 [BLOCK_T, 16], and B [BLOCK_D, 16]."""
    offs_r = tl.arange(0, RANK_PADDED)[None, :]
    offs_t = (first + tl.arange(0, BLOCK_T))[:, None]
    offs_d = tl.arange(0, BLOCK_D)[:, None]
    a = tl.load(a_ptr + offs_t * RANK + offs_r, mask=(offs_r < RANK) & (offs_t >= 0), other=0.0)
    b = tl.load(b_ptr + offs_d * RANK + offs_r, mask=(offs_r < RANK) & (offs_d < D), other=0.0)
    return a, b


@triton.jit
def add_outliers(
    x, halves_ptr, shorts_ptr, vectors, others, AXIS: tl.constexpr, LAST: tl.constexpr, INDICES: tl.constexpr,
    OUTLIERS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Add GEAR's outliers to x float16 [BLOCK_T, BLOCK_D].

    `vectors` numbers the rows (AXIS 0, values) or the columns (AXIS 1, keys) of x, of which each has COUNT outliers,
    those from LAST on none; `others` are what the outliers' indices count along the other axis.
    """
    there = vectors < LAST
    for outlier in tl.static_range(COUNT):
        at = vectors * COUNT + outlier
        index = tl.load(shorts_ptr + INDICES + at, mask=there, other=-1).to(tl.int32)
        missing = tl.load(halves_ptr + OUTLIERS + at, mask=there, other=0.0)
        if AXIS == 0:
            x = tl.where(index[:, None] == others[None, :], x + missing[:, None], x)
        else:
            x = tl.where(index[None, :] == others[:, None], x + missing[None, :], x)
    return x
