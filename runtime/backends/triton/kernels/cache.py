"""The paged cache in kernels: its layout as arguments, tokens appended, pages flushed from a window, GEAR's factors.

A page has one record of bytes for each layer and key-value head, keys and values separately, in the order of
`runtime.kv.kinds.page_fields`: byte for byte as in the reference cache. Kernels take all of it as one tuple of tensors,
`LayerTensors`, and one constant, `PageLayout`. Codes, scales and zeros are those of
`runtime.backends.operations.pages`, bit for bit: the same float32 arithmetic, with exact division and ties to even.

GEAR's low-rank correction takes one launch: a page's residual fits in the registers of one program, where torch's
batched QR takes tens of milliseconds for the pages flushed at once, and no token is decoded meanwhile. Columns are
orthonormalized by applying Gram-Schmidt twice, which for four columns is as good as Householder. Their signs may differ
from those of `runtime.backends.operations.pages`, but their product does not.

Source: GEAR Algorithm 2; Giraud et al. (2005) on going over the columns twice.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.operations import pages as operations
from runtime.kv.basis import ITERATIONS, low_rank_start
from runtime.kv.kinds import KINDS, PARTS, CacheKind, Part, page_fields

_SIZES = {"float16": 2, "int16": 2, "uint8": 1}
_FIELDS = dict.fromkeys(
    field.name for kind in KINDS.values() for part in PARTS for field in page_fields(kind, part, 16)
)
Starts = namedtuple("Starts", _FIELDS, defaults=[0] * len(_FIELDS))
"""Offset of each field of `page_fields` in a record, in units of its own type; 0 = absent, or the first."""
_ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding it to a small float32 and subtracting it again rounds to the nearest integer, ties to even."""
_PIECE = 16
"""Channels of keys, and tokens of values, per program of a flush."""
_TILE = 8192
"""Most numbers of one: more spill registers."""
_WARPS = 4
_VALUES_PER_WARP = 2048
"""Numbers of a residual per warp: 64 for each of its threads."""
_MOST = 32768
"""Most numbers of a residual: of twice as many a thread would hold 64, and has 64 registers in all."""
MAX_WARPS = 32


class RecordLayout(NamedTuple):
    """Compile-time layout of a record of keys or values."""

    nbytes: int
    at: Any
    D: int
    bits: int  # Bits of a code, or of one plane of it; 16: half precision
    planes: int  # Planes that are read, 0 if codes are not divided into planes
    channel: int  # Whether a vector, whose numbers share scales, is a channel; otherwise a token
    vectors: int  # Vectors: channels, or tokens of a page
    group: int  # Numbers of a vector per scale
    groups: int
    rank: int  # Rank of the low-rank correction; 0 = none
    outliers: int  # Outliers of a vector; 0 = none
    exact_mean: int  # Whether the zero is refitted, so that a vector keeps its mean


class PageLayout(NamedTuple):
    """Compile-time layout of a kind of cache."""

    page: int
    window: int  # Capacity of a window in tokens; 0 if the kind has none
    sinks: int  # Of these, the first tokens of the sequence, which precede the pages
    k: RecordLayout
    v: RecordLayout


class Record(NamedTuple):
    """Records of keys or of values, as numbers of each type; in kernels, pointers to one."""

    codes: Any  # uint8
    halves: Any  # float16
    shorts: Any  # int16


class LayerTensors(NamedTuple):
    """The tensors of `LayerPages`, as one kernel argument."""

    k: Record
    v: Record
    k_window: Any
    v_window: Any
    tables: Any
    paged: Any


class Rows(NamedTuple):
    """Positions and slots of a step's rows, as one kernel argument."""

    positions: Any  # int32 [M], in its sequence
    slots: Any  # int32 [M], the sequence's slot


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPages:
    """The cache of one layer on the device. Kernels get each buffer from this layer's first number on."""

    kind: CacheKind  # The kind of cache
    head_dim: int
    kv_heads: int
    layers: int  # Layers of the model: pages and slots are layers * H_kv records or windows apart
    pools: Mapping[Part, torch.Tensor]  # All pages: uint8 [pages, H_kv, record bytes]
    windows: Mapping[Part, torch.Tensor]
    """All windows: float16 [slots, H_kv, tokens, D]; no tokens if the kind has no window."""
    tables: torch.Tensor  # int32 [slots, pages of a slot]: a slot's pages in the order of its tokens
    paged: torch.Tensor  # int32 [slots]: tokens in pages, if the kind has a window, which contains the later ones

    @property
    def stride(self) -> int:
        """Distance between pages, in records, and between slots, in windows."""
        return self.layers * self.kv_heads

    @property
    def per_slot(self) -> int:
        return self.tables.shape[1]

    @property
    def tensors(self) -> LayerTensors:
        k, v = (record_views(self.pools[part]) for part in PARTS)
        return LayerTensors(k, v, self.windows["keys"], self.windows["values"], self.tables, self.paged)

    def layout(self, *, draft: bool = False) -> PageLayout:
        return page_layout(self.kind, self.head_dim, window=self.windows["keys"].shape[2], draft=draft)


def record_views(records: torch.Tensor) -> Record:
    """Records, uint8 [..., record bytes], viewed as numbers of each type."""
    return Record(records, records.view(torch.float16), records.view(torch.int16))


def power_of_two(number: int) -> int:
    """The smallest power of two at or above a positive number."""
    return 1 << (number - 1).bit_length()


def page_layout(kind: CacheKind, head_dim: int, *, window: int = 0, draft: bool = False) -> PageLayout:
    """The compile-time layout of a kind's pages and windows of so many tokens; a draft reads one plane of two."""
    k, v = (record_layout(kind, part, head_dim, draft=draft) for part in PARTS)
    return PageLayout(kind.page, window, kind.sinks, k, v)


def record_layout(kind: CacheKind, part: Part, head_dim: int, *, draft: bool = False) -> RecordLayout:
    """The compile-time layout of a record of keys or values; arguments as in `page_layout`."""
    code, start, starts = kind.code(part), 0, {}
    for field in page_fields(kind, part, head_dim):
        starts[field.name] = start // _SIZES[field.dtype]
        start += field.nbytes
    vectors, length = (head_dim, kind.page) if code.axis == "channel" else (kind.page, head_dim)
    group = code.group or length
    return RecordLayout(
        nbytes=start,
        at=Starts(**starts),
        D=head_dim,
        bits=4 if kind.hierarchical else code.bits,
        planes=(1 if draft else 2) if kind.hierarchical else 0,
        channel=int(code.axis == "channel"),
        vectors=vectors,
        group=group,
        groups=-(-length // group),
        rank=min(kind.rank, head_dim),
        outliers=2 * kind.outliers(length),
        exact_mean=int(code.exact_mean),
    )


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
    BLOCK_D: int  # Channels of a tile, padded to a power of two
    ACROSS: int  # Tiles that the tokens of a page are cut into
    ALONG: int  # Tiles that the channels are cut into
    layout: Any  # The record's `RecordLayout`


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

    windows are float16 [layers, H_kv, tokens, D], one slot's; records uint8 [layers, H_kv, record bytes], one page's,
    overwritten.
    """
    L, H_kv, tokens, D = windows["keys"].shape
    keys, values = (_cut(kind, record_layout(kind, part, D)) for part in PARTS)
    grid = (max(keys.ACROSS, values.ACROSS), max(keys.ALONG, values.ALONG), 2 * L * H_kv)
    _flush_kernel[grid](
        *(windows[part] for part in PARTS), *(record_views(records[part]) for part in PARTS), L * H_kv,
        WINDOW=tokens, SINKS=kind.sinks, keys=keys, values=values, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _cut(kind: CacheKind, layout: RecordLayout) -> Cut:
    BLOCK_D = max(4, power_of_two(min(_PIECE, layout.D) if layout.channel else layout.group))
    BLOCK_T = layout.group if layout.channel else min(_PIECE, _TILE // BLOCK_D)
    return Cut(BLOCK_T, BLOCK_D, kind.page // BLOCK_T, -(-layout.D // BLOCK_D), layout)


class FactorShape(NamedTuple):
    """A residual and its factors, as a constant."""

    T: int
    D: int
    RANK: int
    BLOCK_T: int  # Each padded to a power of two, as the next two
    BLOCK_D: int
    BLOCK_R: int


@triton.jit
def _column(matrix, offs_r, j):
    """Column j of a matrix [n, BLOCK_R]: [n]."""
    return tl.sum(tl.where(offs_r[None, :] == j, matrix, 0.0), axis=1)


@triton.jit
def _orthonormal(column, before):
    """A column [n] less its parts along the orthonormal or empty columns `before` [n, BLOCK_R], at length 1 or 0."""
    for _ in tl.static_range(2):
        along = tl.sum(column[:, None] * before, axis=0)
        column -= tl.sum(before * along[None, :], axis=1)
    length = tl.sqrt_rn(tl.sum(column * column, axis=0))
    return tl.div_rn(column, tl.where(length == 0, 1.0, length))  # a NaN stays one


@triton.jit(do_not_specialize=["rounds"])
def _low_rank_kernel(residual_ptr, start_ptr, a_ptr, b_ptr, rounds, alike, shape: tl.constexpr):
    """Program i finds the factors of residual i. residual [n, T, D], start [D, RANK], a [n, T, RANK], b [n, D, RANK].

    `rounds` of the iteration; `alike` as in `low_rank`.
    """
    T: tl.constexpr = shape.T
    D: tl.constexpr = shape.D
    RANK: tl.constexpr = shape.RANK
    BLOCK_T: tl.constexpr = shape.BLOCK_T
    BLOCK_R: tl.constexpr = shape.BLOCK_R
    record = tl.program_id(0).to(tl.int64)
    offs_t, offs_d, offs_r = tl.arange(0, BLOCK_T), tl.arange(0, shape.BLOCK_D), tl.arange(0, BLOCK_R)
    mask_t, mask_d, mask_r = offs_t < T, offs_d < D, offs_r < RANK
    at = record * (T * D) + offs_t[:, None] * D + offs_d[None, :]
    x = tl.load(residual_ptr + at, mask=mask_t[:, None] & mask_d[None, :], other=0.0)
    offs_b, mask_b = offs_d[:, None] * RANK + offs_r[None, :], mask_d[:, None] & mask_r[None, :]
    b = tl.load(start_ptr + offs_b, mask=mask_b, other=0.0)
    a = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for _ in range(rounds):
        b = tl.where(mask_b, b + (alike / D) * tl.sum(b, axis=0)[None, :], 0.0)
        a = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for j in tl.static_range(RANK):
            column = tl.sum(x * _column(b, offs_r, j)[None, :], axis=1)
            a = tl.where(offs_r[None, :] == j, _orthonormal(column, a)[:, None], a)
        for j in tl.static_range(RANK):
            column = tl.sum(x * _column(a, offs_r, j)[:, None], axis=0)
            b = tl.where(offs_r[None, :] == j, column[:, None], b)
    offs_a, mask_a = offs_t[:, None] * RANK + offs_r[None, :], mask_t[:, None] & mask_r[None, :]
    tl.store(a_ptr + record * (T * RANK) + offs_a, a.to(tl.float16), mask=mask_a)
    tl.store(b_ptr + record * (D * RANK) + offs_b, b.to(tl.float16), mask=mask_b)


def low_rank(residual: torch.Tensor, rank: int, *, alike: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """As `operations.pages.low_rank`, but for signs, and for columns of zeros at residuals of lower rank.

    Args:
        residual: float32 [..., T, D].
        rank: r, at most D.
        alike: See there.

    Returns:
        a float16 [..., T, r] and b float16 [..., D, r]; does not wait for the device, unless torch computes them.
    """
    *records, T, D = residual.shape
    if triton.next_power_of_2(T) * triton.next_power_of_2(D) > _MOST:
        return operations.low_rank(residual, rank, alike=alike)
    residual = residual.contiguous()
    a = torch.empty(*records, T, rank, dtype=torch.float16, device=residual.device)
    b = torch.empty(*records, D, rank, dtype=torch.float16, device=residual.device)
    shape, warps = _factor_shape(T, D, rank)
    _low_rank_kernel[(residual.numel() // (T * D),)](
        residual, _start_matrix(D, rank, residual.device), a, b, ITERATIONS, float(alike), shape=shape, num_warps=warps
    )  # fmt: skip
    return a, b


@cache
def _start_matrix(head_dim: int, rank: int, device: torch.device) -> torch.Tensor:
    """The start matrix of the iteration, on the device."""
    return torch.from_numpy(low_rank_start(head_dim, rank)).to(device)


def _factor_shape(T: int, D: int, rank: int) -> tuple[FactorShape, int]:
    block_t, block_d, block_r = (triton.next_power_of_2(size) for size in (T, D, rank))
    warps = min(MAX_WARPS, max(1, block_t * block_d // _VALUES_PER_WARP))
    return FactorShape(T, D, rank, block_t, block_d, block_r), warps
