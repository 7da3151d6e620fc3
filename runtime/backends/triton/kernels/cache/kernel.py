"""Quantization of keys and values on the GPU: single tokens when appended, or a page when flushed from a window.

Codes, scales and zeros are those of `runtime.kv.oracle.page`, bit for bit: the same float32 arithmetic, with exact
division and ties to even.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.triton.kernels.cache.pages import (
    Record,
    RecordLayout,
    power_of_two,
    record_layout,
    record_views,
)
from runtime.kv.kinds import PARTS, CacheKind, Part

_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it to a small float32 and subtracting it again rounds to the nearest integer, ties to even."""
_PIECE = 16
"""Channels of keys, and tokens of values, per program of a flush."""
_WARPS = 4
"""Warps of such a program."""


@triton.jit
def _nearest(x):
    """The nearest integer of |x| < 2^22, ties to even."""
    return (x + _ROUND) - _ROUND


@triton.jit
def _encode(x, scale, zero, LARGEST: tl.constexpr):
    """The nearest codes 0 .. LARGEST, float32; 0 where the scale is. All float32, of shapes that broadcast."""
    exact = tl.div_rn(x - zero, tl.where(scale > 0, scale, 1.0))
    return tl.minimum(tl.maximum(_nearest(tl.where(scale > 0, exact, 0.0)), 0.0), LARGEST)


@triton.jit
def moved(record, nbytes):
    """The record an even number of bytes after another."""
    return Record(record.codes + nbytes, record.halves + nbytes // 2, record.shorts + nbytes // 2)


@triton.jit
def store_token(x, record, place, BLOCK_D: tl.constexpr, layout: tl.constexpr):
    """Store one token's key or value of one head in its page's `record`.

    x [BLOCK_D] float32, the channels from D on 0. With 4 bits a byte holds two channels, the first in its low half. A
    number that is not finite makes the scale NaN.
    """
    D: tl.constexpr = layout.D
    BITS: tl.constexpr = layout.bits
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    if BITS == 16:
        tl.store(record.halves + place * D + offs_d, x.to(tl.float16), mask=mask_d)
    else:
        LARGEST: tl.constexpr = (1 << BITS) - 1.0
        EACH: tl.constexpr = 8 // BITS
        ROW: tl.constexpr = (D + EACH - 1) // EACH
        x = x.to(tl.float16).to(tl.float32)
        spoilt = tl.sum(x * 0.0, axis=0)
        least = tl.min(tl.where(mask_d, x, float("inf")), axis=0)
        largest = tl.max(tl.where(mask_d, x, float("-inf")), axis=0)
        scale = (tl.div_rn(largest - least, LARGEST) + spoilt).to(tl.float16)
        zero = least.to(tl.float16)
        codes = tl.where(mask_d, _encode(x, scale.to(tl.float32), zero.to(tl.float32), LARGEST), 0.0)
        packed = _packed(tl.reshape(codes.to(tl.int32), [1, BLOCK_D]), 1, BLOCK_D, BITS)
        offs_j = tl.arange(0, BLOCK_D // EACH)[None, :]
        tl.store(record.codes + place * ROW + offs_j, packed, mask=offs_j < ROW)
        tl.store(record.halves + layout.at.scales + 2 * place, scale)
        tl.store(record.halves + layout.at.scales + 2 * place + 1, zero)


@triton.jit
def _packed(codes, ROWS: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr):
    """Codes int32 [ROWS, CHANNELS] side by side in bytes, the first in the lowest bits.

    Returns uint8 [ROWS, CHANNELS * BITS / 8].
    """
    if BITS < 8:
        even, odd = tl.split(tl.reshape(codes, [ROWS, CHANNELS // 2, 2]))
        codes = even | (odd << BITS)
    if BITS == 2:
        even, odd = tl.split(tl.reshape(codes, [ROWS, CHANNELS // 4, 2]))
        codes = even | (odd << 4)
    return codes.to(tl.uint8)


class Cut(NamedTuple):
    """Compile-time division of a record of keys or values into the tiles of programs."""

    BLOCK_T: int
    """Tokens of a tile."""
    BLOCK_D: int
    """Channels of a tile, padded to a power of two."""
    ACROSS: int
    """Tiles that the tokens of a page are cut into."""
    ALONG: int
    """Tiles that the channels are cut into."""
    layout: Any
    """The record's `RecordLayout`."""


@triton.jit
def _quantize_tile(window_ptr, records, record, WINDOW: tl.constexpr, SINKS: tl.constexpr, cut: tl.constexpr):
    """Quantize tile (i, j) of a record: one group of each of its vectors.

    Where a vector is a channel, the tile is group i of the tokens, piece j of the channels; else, piece i of the
    tokens, group j of the channels.
    """
    layout: tl.constexpr = cut.layout
    BLOCK_T: tl.constexpr = cut.BLOCK_T
    BLOCK_D: tl.constexpr = cut.BLOCK_D
    D: tl.constexpr = layout.D
    BITS: tl.constexpr = layout.bits
    offs_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = (offs_d < D)[None, :]
    x = tl.load(window_ptr + (record * WINDOW + SINKS + offs_t[:, None]) * D + offs_d[None, :], mask=mask_d, other=0.0)
    x = x.to(tl.float32)
    AXIS: tl.constexpr = 0 if layout.channel else 1
    LARGEST: tl.constexpr = (1 << BITS) - 1.0
    least = tl.min(tl.where(mask_d, x, float("inf")), axis=AXIS)
    largest = tl.max(tl.where(mask_d, x, float("-inf")), axis=AXIS)
    if layout.channel:
        vector, mask_s, group = offs_d, offs_d < D, tl.program_id(0)
        least, largest = tl.where(mask_s, least, 0.0), tl.where(mask_s, largest, 0.0)
    else:
        vector, mask_s, group = offs_t, offs_t >= 0, tl.program_id(1)
    half = (tl.div_rn(largest - least, LARGEST) + tl.sum(x * 0.0, axis=AXIS)).to(tl.float16)
    scales_ptr = records.halves + record * (layout.nbytes // 2) + layout.at.scales
    tl.store(scales_ptr + (vector * layout.groups + group) * 2, half, mask=mask_s)
    scale, zero = tl.expand_dims(half.to(tl.float32), AXIS), tl.expand_dims(least, AXIS)
    codes = tl.where(mask_d, _encode(x, scale, zero, LARGEST), 0.0)
    if layout.exact_mean:
        least = (tl.sum(x, axis=AXIS) - half.to(tl.float32) * tl.sum(codes, axis=AXIS)) / layout.group
        least = tl.minimum(tl.maximum(least, -65504.0), 65504.0)
    tl.store(scales_ptr + (vector * layout.groups + group) * 2 + 1, least.to(tl.float16), mask=mask_s)
    EACH: tl.constexpr = 8 // BITS
    ROW: tl.constexpr = (D + EACH - 1) // EACH
    offs_j = (tl.program_id(1) * (BLOCK_D // EACH) + tl.arange(0, BLOCK_D // EACH))[None, :]
    at = records.codes + record * layout.nbytes + offs_t[:, None] * ROW + offs_j
    tl.store(at, _packed(codes.to(tl.int32), BLOCK_T, BLOCK_D, BITS), mask=offs_j < ROW)
    if layout.planes > 0:
        error = x - (codes * scale + zero)
        exact = tl.div_rn(error, tl.where(scale > 0, scale / 16, 1.0))
        lower = tl.minimum(tl.maximum(_nearest(tl.where((scale > 0) & mask_d, exact, 0.0)), -8.0), 7.0)
        packed = _packed(lower.to(tl.int32) & 15, BLOCK_T, BLOCK_D, BITS)
        tl.store(at + layout.at.lower, packed, mask=offs_j < ROW)


@triton.jit(do_not_specialize=["number"])
def _flush_kernel(
    k_window, v_window, k_records, v_records, number,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, keys: tl.constexpr, values: tl.constexpr,
):  # fmt: skip
    """Program (i, j, h) quantizes a tile of record h, of all layers' heads; behind those of keys come those of values.

    windows [number, WINDOW, D] of one slot, whose first SINKS tokens stay; records of one page.
    """
    i, j, record = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if record < number:
        if (i < keys.ACROSS) & (j < keys.ALONG):
            _quantize_tile(k_window, k_records, record, WINDOW, SINKS, keys)
    elif (i < values.ACROSS) & (j < values.ALONG):
        _quantize_tile(v_window, v_records, record - number, WINDOW, SINKS, values)


def flush(kind: CacheKind, windows: Mapping[Part, torch.Tensor], records: Mapping[Part, torch.Tensor]) -> None:
    """Quantize the page of tokens after a window's sinks, for a kind with a window and without GEAR's corrections.

    Args:
        kind: The kind of cache.
        windows: float16 [layers, H_kv, tokens, D], one slot's.
        records: uint8 [layers, H_kv, record bytes], one page's; overwritten.
    """
    L, H_kv, tokens, D = windows["keys"].shape
    keys, values = (_cut(kind, record_layout(kind, part, D)) for part in PARTS)
    grid = (max(keys.ACROSS, values.ACROSS), max(keys.ALONG, values.ALONG), 2 * L * H_kv)
    _flush_kernel[grid](
        *(windows[part] for part in PARTS), *(record_views(records[part]) for part in PARTS), L * H_kv,
        WINDOW=tokens, SINKS=kind.sinks, keys=keys, values=values, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _cut(kind: CacheKind, layout: RecordLayout) -> Cut:
    """The division of records into tiles."""
    BLOCK_T = layout.group if layout.channel else _PIECE
    BLOCK_D = max(4, power_of_two(min(_PIECE, layout.D) if layout.channel else layout.group))
    return Cut(BLOCK_T, BLOCK_D, kind.page // BLOCK_T, -(-layout.D // BLOCK_D), layout)
