"""Causal grouped-query attention over the paged cache on the GPU, for decoding, verification and prefill.

The query heads that share a key-value head, and adjacent rows of a step, are rows of one matrix product, so every key
is read once for all of them, in packed form. The visible positions are divided among many programs, whose results
`_merge_kernel` combines. The number of launched programs depends on the device and the cache's capacity. Which of them
have work, and what each reads, depends on positions and tables on the device: so a captured launch can be replayed at
any length, and at a short one most of its programs end at once. The order of summation depends only on shapes,
positions and the device, so results are reproducible bit for bit.

Blocks that are fully visible to all rows are processed without a causal mask; later blocks, including the window of
recent tokens if there is one, with a mask.

Source: QuantSpec §4.3 (both planes, the window), QServe §5.3 (codes become halves by their bits), GEAR §4 (the low-rank
path as (qB)A^T).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
import triton
import triton.language as tl

from runtime.backends.triton import sizes
from runtime.backends.triton.kernels.activations import (
    Projected,
    projected_at,
    sigmoid,
    softplus,
    spaced,
    store_left,
    to_half,
)
from runtime.backends.triton.kernels.attention_blocks import Blocks, HeadCache, Queries, Softmax, visit_slot
from runtime.backends.triton.kernels.cache import LayerPages, LayerTensors, Rows, moved, power_of_two
from runtime.backends.triton.workspace import Workspace, capability
from runtime.kv.kinds import CacheKind

SPLIT_ROWS = 8
"""Steps of up to this many rows, such as decoded tokens and drafts to verify, are split finely along the context."""
FEW_TILE_ROWS = 32
"""Most rows of such a step's matrix products: its rows share a product, so that keys are read once for them. Where a
key-value head has eight query heads, steps of 5 to 8 rows read them twice: with 64, registers spilled, and a program
over 128 channels took 105 KiB of shared memory, more than an RTX has."""
MIN_BLOCKS = 2
"""Fewest blocks of the cache per split: smaller splits cost more to start and merge than they save. Read by kernels."""
SPLIT_OVERHEAD = 1.0
"""Overhead of a program, in blocks: its start, its queries, and its part of the merge."""
MAX_SPLITS = 64
KEPT_ROWS = sizes.SPLIT_ROWS
"""Most split rows (query heads times rows times splits) stored until they are merged: 8.5 MB at 128 channels. Steps
with more rows are launched in parts."""
SHARED_KIB = {16: 72, 8: 40, 4: 72, 2: 72}
"""Shared memory of a program for one decoded token over 128 channels, by the bits of a number (`make kernels`): it
limits the programs per multiprocessor. Programs of several rows take a fifth more."""
DOT_ROWS = 16
"""Fewest rows of a tensor core product."""
DOT_CHANNELS = 32
"""Fewest channels of one: where codes of 4 bits become halves, Triton gives each of four threads 8 neighbouring
channels, and a product over 16 of them came out wrong on a card, though not interpreted."""
TILE_ROWS = 128
"""Rows of the matrix products in a step of many rows. At least as many rows as channels: the compiler then gives every
warp rows of its own, and each holds only these of q."""
BLOCKS_AHEAD = {16: 2, 8: 2, 4: 3, 2: 3}
"""Blocks of the cache that a program of one decoded token prefetches, by the bits of a number: 24 to 64 KiB. Fewer
leave the memory of a large GPU idle during computation; more do not fit beside other programs on a small GPU."""
NARROW_TILE_ROWS = 64
"""The same up to 64 channels, where the whole tile spills registers, and over 8-bit codes of 128, where it leaves none
for blocks on their way: half the rows with half the warps take an eighth fewer instructions a row, too."""
WIDE_TILE_ROWS = 32
"""The same for heads wider than 128 channels: more rows would not fit in registers."""
WIDEST = 256
"""Channels beyond which a program has twice the warps, and blocks of `WIDEST_BLOCK` positions: more do not fit in the
99 KiB of shared memory that an RTX has. Numbers of two planes then leave registers for `DOT_ROWS` rows alone, and
GEAR's corrections for one row of the step; so do further channels of keys shared memory. A program has no more query
heads than `DOT_ROWS`."""
WIDEST_BLOCK = 16

REGISTERS = {10: 255, 12: 255}
"""Registers of a thread that the assembler may use for heads wider than 128 channels, by major compute capability: of
its own accord it stops at 168 there, and spills."""
NARROW_REGISTERS = {9: 255, **REGISTERS}
"""The same for a few rows over heads of up to 64 channels."""
_MIN_BLOCKS = tl.constexpr(MIN_BLOCKS)
_LEFT, _COMPENSATED = tl.constexpr(1), tl.constexpr(2)
"""Bits of `given`: whether `store_left` is wanted of a merge, and whether gates have a compensation."""
_MERGED = 16
"""Splits that a merge loads at a time."""
_MERGE_WARPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """A way to launch attention."""

    block_m: int
    """Rows of a matrix product: `rows` rows of the step times the query heads of a program, padded."""
    rows: int
    """Rows of the step per program."""
    parts: int
    """Programs among which the query heads of a key-value head are divided."""
    block_t: int
    """Cached positions per iteration."""
    block_d: int
    """Channels of a head's values, padded to a power of two, and as many of its keys."""
    rest: int
    """Further channels of its keys, padded likewise; 0 = none."""
    splits: int
    """Most programs among which the positions seen by a tile of rows are divided: this many are launched, and those
    without positions end at once."""
    num_warps: int
    """Warps of a program."""
    num_stages: int
    """Pipeline stages for prefetching keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Capacity of a device for programs."""

    multiprocessors: int = 128
    """The default is that of a large device, for the interpreter and for compiling ahead."""
    shared_kib: int = 100
    """Shared memory per multiprocessor."""


class Reading(NamedTuple):
    """Access of a program to a page."""

    bits: int = 16
    planes: int = 1  # Planes joined into a number
    corrected: bool = False  # Whether GEAR's corrections are added, for which registers must be reserved
    behind: int = 0  # Channels that keys have and values do not


@lru_cache(maxsize=1024)
def launch_config(
    M: int,
    group: int,
    kv_heads: int,
    dim: int,
    seen: int,
    reading: Reading = Reading(),  # noqa: B008 - it is frozen
    *,
    room: Room = Room(),
) -> LaunchConfig:
    """The launch configuration for M rows and H / H_kv = `group`; it does not depend on positions.

    `dim` are the channels of values. `seen` are the most positions visible to a row: the capacity of the cache, or the
    window if smaller. Of the device, `room`, only `splits` depends.
    """
    bits, planes, corrected, behind = reading
    block_d = max(DOT_CHANNELS, power_of_two(dim))
    rest = max(0, dim + behind - block_d)
    few = M <= SPLIT_ROWS
    light = (bits, planes, dim) == (8, 1, 128)
    narrow, widest = block_d <= 64 or light, block_d > WIDEST
    parts = next(n for n in range(1, group + 1) if group % n == 0 and group // n <= DOT_ROWS) if widest else 1
    group, kv_heads = group // parts, kv_heads * parts
    tile = WIDE_TILE_ROWS if block_d > 128 else NARROW_TILE_ROWS if narrow else TILE_ROWS
    if few:
        together = 1 if M == 1 else SPLIT_ROWS
        tile = min(max(DOT_ROWS, power_of_two(together * group)), tile, FEW_TILE_ROWS)
    if corrected or (widest and (planes == 2 or rest)):
        tile = DOT_ROWS
    block_m = max(tile, power_of_two(group))
    rows = 1 if M == 1 or (widest and corrected) else block_m // group
    alike = 1 if widest and rows == 1 else M  # a program of one row has the kernel of a token
    block_t = WIDEST_BLOCK if widest else 64 if few and block_d <= 128 and not corrected else 32
    shared = SHARED_KIB[bits] * block_d / 128 * (1 if M == 1 else 1.2)
    programs = room.multiprocessors * max(1, int(room.shared_kib // shared))
    return LaunchConfig(
        block_m=block_m,
        rows=rows,
        parts=parts,
        block_t=block_t,
        block_d=block_d,
        rest=max(DOT_CHANNELS, power_of_two(rest)) if rest else 0,
        splits=_splits(
            -(-M // rows) * kv_heads,
            -(-seen // block_t),
            programs,
            KEPT_ROWS // (M * group * kv_heads),
        ),
        num_warps=8 if block_m >= 128 or widest or (few and bits == 8 and block_m == 2 * DOT_ROWS) else 4,
        num_stages=5 if light and not few else _stages(alike, block_m, reading, widest=widest),
    )


def _splits(tiles: int, blocks: int, programs: int, most: int) -> int:
    """Splits per tile of rows, given the blocks that each tile sees and the number of concurrent programs.

    The programs run in waves over the device, each as long as its blocks plus the overhead. The number of splits whose
    waves end first is chosen; ties go to the smallest.
    """

    def cost(splits: int) -> float:
        return -(-tiles * splits // programs) * (-(-blocks // splits) + SPLIT_OVERHEAD)

    return min(range(1, max(1, min(most, MAX_SPLITS, blocks // MIN_BLOCKS)) + 1), key=cost)


def _stages(M: int, block_m: int, reading: Reading, *, widest: bool) -> int:
    """Pipeline stages. A block is addressed through its page's number, so each prefetched block takes two stages."""
    bits, planes, corrected, _ = reading
    if planes == 2 and block_m >= TILE_ROWS:  # with two, joining the planes spills up to 40 bytes on sm_86 to sm_120
        return 1
    if widest and (corrected or M > 1):  # with more, blocks of several rows do not fit in shared memory
        return 2 if corrected or planes == 2 else 5
    verified = 1 < M <= SPLIT_ROWS and bits < 16 and not corrected
    if (M == 1 and block_m == DOT_ROWS) or (verified and block_m <= 2 * DOT_ROWS):
        return 2 * BLOCKS_AHEAD[bits] + 1
    if corrected or (M > SPLIT_ROWS and bits == 8):  # with more, registers spill
        return 2
    return 5


def options(config: LaunchConfig, major: int) -> dict[str, int]:
    """Further options of the compiler, for a device of this major compute capability."""
    few = config.block_d <= 64 and config.rows > 1 and config.block_m <= FEW_TILE_ROWS
    registers = REGISTERS if config.block_d > 128 else NARROW_REGISTERS if few else {}
    return {"maxnreg": registers[major]} if major in registers else {}


class Tile(NamedTuple):
    """Compile-time parameters of a program of `_attend_kernel`."""

    H: int
    GROUP: int  # Query heads of a program
    ROWS: int  # See `LaunchConfig`, as all that follow to BLOCK_D
    PARTS: int
    BLOCK_M: int
    BLOCK_T: int
    BLOCK_D: int
    SLIDING: int  # Whether a row's visible positions are limited by a window
    CAP: float = 0.0  # Soft cap of the scores, to base 2 as they are; 0 = none
    DIM: int = 0  # Channels of a head that are given
    FIRST: int = 0  # The first of BLOCK_D channels
    rest: Any = None  # The tile of those behind, which only keys have; None: there are none


class Step(NamedTuple):
    """The tensors of a step that `_attend_kernel` reads and writes."""

    q: Any  # float16 [M, H, D]
    rows: Rows  # Positions and slots of its rows
    partial: Any  # float32, the results of splits for `_merge_kernel`, see `_leave`
    used: Any  # int32 [tiles], the number of splits with work for each tile of rows


class Merged(NamedTuple):
    """The tensors that `_merge_kernel` reads and writes."""

    partial: Any  # See `Step`; as `_leave` writes it
    used: Any
    x: Any  # float16 [M, H, D]
    left: Any  # Of heads that are multiples of what is left (`store_left`), where it is wanted


class Share(NamedTuple):
    """Division of the visible blocks of a tile of rows."""

    span: Any  # Blocks per split
    used: Any  # Number of nonempty splits


class Heads(NamedTuple):
    """The rows of a program's matrix products, BLOCK_M of them, as heads of [M, H, D]."""

    first: Any  # The first, int64
    offset: Any  # int32 [BLOCK_M], each counted from the first
    mask: Any  # [BLOCK_M], the mask of existing ones


@triton.jit
def _blocks(lowest, last, window, BLOCK_T: tl.constexpr):
    """First block and number of blocks visible to rows from position `lowest` to `last` of a slot."""
    first = tl.maximum(lowest - window + 1, 0) // BLOCK_T
    return first, last // BLOCK_T + 1 - first


@triton.jit
def _segment(rows, row, slot_m, window, tile: tl.constexpr):
    """Slot, number, first and last position of a slot's rows from `row` of a tile on; first block they see, blocks."""
    slot = tl.load(rows.slots + row)
    count = tl.sum((slot_m == slot).to(tl.int32), axis=0) // tile.GROUP
    lowest = tl.load(rows.positions + row)
    last = tl.load(rows.positions + row + count - 1)
    first_block, number = _blocks(lowest, last, window, tile.BLOCK_T)
    return slot, count, lowest, last, first_block, number


@triton.jit
def _share(step, total, splits):
    """Division of `total` blocks among at most `splits` splits. Stores the number of splits for the merge."""
    span = tl.maximum(tl.cdiv(total, splits), _MIN_BLOCKS)
    used = tl.cdiv(total, span)
    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        tl.store(step.used + tl.program_id(0), used)
    return Share(span, used)


@triton.jit
def _heads(first_row, end_row, tile: tl.constexpr):
    """The rows of a program's matrix products."""
    offs_m = tl.arange(0, tile.BLOCK_M)
    first = first_row.to(tl.int64) * tile.H + tl.program_id(1) * tile.GROUP
    offset = offs_m // tile.GROUP * tile.H + offs_m % tile.GROUP
    return Heads(first, offset, first_row + offs_m // tile.GROUP < end_row)


@triton.jit
def _leave(step, state, M, splits, heads, tile: tl.constexpr):
    """Store a program's results for `_merge_kernel`.

    partial: acc [M, H, splits, DIM], then peak and total [M, H, splits] each; a split that saw nothing has peak -inf
    and total 0, and leaves acc unwritten.
    """
    H: tl.constexpr = tile.H
    D: tl.constexpr = tile.DIM
    offs_d = tl.arange(0, tile.BLOCK_D)
    first_split = heads.first * splits + tl.program_id(2)
    peak_ptr = step.partial + M.to(tl.int64) * H * splits * D + first_split
    total_ptr = peak_ptr + M.to(tl.int64) * H * splits
    tl.store(peak_ptr + heads.offset * splits, state.peak, mask=heads.mask)
    tl.store(total_ptr + heads.offset * splits, state.total, mask=heads.mask)
    offs = heads.offset[:, None] * (splits * D) + offs_d[None, :]
    seen_m = heads.mask & (state.total != 0)  # also true for NaN
    tl.store(step.partial + first_split * D + offs, state.acc, mask=seen_m[:, None] & (offs_d < D)[None, :])


@triton.jit
def _begin(step, layer, heads, kv_head, tile: tl.constexpr, layout: tl.constexpr):
    """The queries of a program, those of further channels, their sums, and the cache of their head."""
    D: tl.constexpr = layout.k.D
    REST: tl.constexpr = tile.rest
    q = _queries(step, heads, tile, D)
    q_sum, rest = tl.sum(q.to(tl.float32), axis=1), q
    if REST is not None:
        rest = _queries(step, heads, REST, D)
        q_sum += tl.sum(rest.to(tl.float32), axis=1)
    k = moved(layer.k, kv_head * layout.k.nbytes)
    v = moved(layer.v, kv_head * layout.v.nbytes)
    layer = LayerTensors(k, v, layer.k_window, layer.v_window, layer.tables, layer.paged)
    return q, rest, q_sum, layer


@triton.jit
def _queries(step, heads, tile: tl.constexpr, D: tl.constexpr):
    """A tile's channels of the queries of a program, 0 from D on."""
    offs_d = tile.FIRST + tl.arange(0, tile.BLOCK_D)
    offs_q = heads.offset[:, None] * D + offs_d[None, :]
    return tl.load(step.q + heads.first * D + offs_q, mask=heads.mask[:, None] & (offs_d < D)[None, :], other=0.0)


@triton.jit
def _nothing(tile: tl.constexpr):
    """The initial state of the running softmax."""
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_D: tl.constexpr = tile.BLOCK_D
    return Softmax(
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
    )


@triton.jit(do_not_specialize=["M", "splits", "stride", "per_slot", "window"])
def _attend_kernel(
    step, layer, M, splits, stride, per_slot, window, scale, tile: tl.constexpr, layout: tl.constexpr
):  # fmt: skip
    """Program (tile, h, s): ROWS rows of the step, query heads of key-value head h // PARTS, split s of what they see.

    The rows of a tile may belong to several slots: the tile passes over the positions of one after another, and splits
    divide the blocks of all of them. `step` as `Step` says, `layer` as `LayerPages` does; ten parameters, because
    numbers that must not each make a kernel of their own can't be told so inside a tuple.
    """
    kv_head = tl.program_id(1) // tile.PARTS
    first_row = tl.program_id(0) * tile.ROWS
    end_row = tl.minimum(first_row + tile.ROWS, M)
    if tile.ROWS == 1:
        slot = tl.load(step.rows.slots + first_row)
        position = tl.load(step.rows.positions + first_row)
        first_block, number = _blocks(position, position, window, tile.BLOCK_T)
        share = _share(step, number, splits)
        if tl.program_id(2) < share.used:
            q, rest, q_sum, layer = _begin(step, layer, _heads(first_row, end_row, tile), kv_head, tile, layout)
            cache = HeadCache(layer, kv_head, stride, per_slot)
            begin = tl.program_id(2) * share.span
            blocks = Blocks(first_block + begin, first_block + tl.minimum(begin + share.span, number), position)
            queries = Queries(q, rest, q_sum, tl.full([1], position, tl.int32), window, scale)
            state = visit_slot(queries, _nothing(tile), cache, slot, position, blocks, tile, layout)
            _leave(step, state, M, splits, _heads(first_row, end_row, tile), tile)
    else:
        row_m = first_row + tl.arange(0, tile.BLOCK_M) // tile.GROUP
        slot_m = tl.load(step.rows.slots + row_m, mask=row_m < end_row, other=-1)
        position_m = tl.load(step.rows.positions + row_m, mask=row_m < end_row, other=-1)
        total = 0
        row = first_row
        while row < end_row:
            _, count, _, _, _, number = _segment(step.rows, row, slot_m, window, tile)
            total += number
            row += count
        share = _share(step, total, splits)
        if tl.program_id(2) < share.used:
            q, rest, q_sum, layer = _begin(step, layer, _heads(first_row, end_row, tile), kv_head, tile, layout)
            cache = HeadCache(layer, kv_head, stride, per_slot)
            state = _nothing(tile)
            begin = tl.program_id(2) * share.span
            end = begin + share.span
            before = 0
            row = first_row
            while (row < end_row) & (before < end):
                slot, count, lowest, last, first_block, number = _segment(step.rows, row, slot_m, window, tile)
                queries = Queries(q, rest, q_sum, tl.where(slot_m == slot, position_m, -1), window, scale)
                from_block = first_block + tl.maximum(begin - before, 0)
                blocks = Blocks(from_block, first_block + tl.minimum(end - before, number), last)
                state = visit_slot(queries, state, cache, slot, lowest, blocks, tile, layout)
                before += number
                row += count
            _leave(step, state, M, splits, _heads(first_row, end_row, tile), tile)


@triton.jit(do_not_specialize=["given", "M", "splits", "rows"])
def _merge_kernel(
    merged, sinks_ptr, gates, given, M, splits, rows,
    H: tl.constexpr, D: tl.constexpr, EACH: tl.constexpr, SOFT: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program (m, h) merges the splits of query head h of row m, in a tile of `rows` rows. sinks [H]; see `Merged`.

    `gates` is `Spaced`, or None; one is of `EACH` channels, and its softplus counts if `SOFT`, else its sigmoid.
    """
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
    head = tl.program_id(0).to(tl.int64) * H + tl.program_id(1)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    peak_ptr = merged.partial + M.to(tl.int64) * H * splits * D + head * splits
    total_ptr = peak_ptr + M.to(tl.int64) * H * splits
    used = tl.load(merged.used + tl.program_id(0) // rows)
    top = float("-inf")
    weights = 0.0
    if sinks_ptr is not None:
        top = tl.load(sinks_ptr + tl.program_id(1)) * 1.4426950408889634
        weights = 1.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, used, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        peak = tl.load(peak_ptr + offs_s, mask=offs_s < used, other=float("-inf"))
        total = tl.load(total_ptr + offs_s, mask=offs_s < used, other=0.0)
        seen = total != 0  # also true for NaN, which thus reaches the output
        at = merged.partial + (head * splits + offs_s[:, None]) * D + offs_d[None, :]
        part = tl.load(at, mask=seen[:, None] & mask_d[None, :], other=0.0)
        highest = tl.maximum(top, tl.max(peak, axis=0))
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        fade = tl.exp2(top - shift)
        weight = tl.where(seen, tl.exp2(peak - shift), 0.0)
        acc = acc * fade + tl.sum(part * weight[:, None], axis=0)
        weights = weights * fade + tl.sum(total * weight, axis=0)
        top = highest
    x = tl.where(mask_d, acc / weights, 0.0)
    if gates is not None:
        offs = tl.program_id(0).to(tl.int64) * gates.stride + (tl.program_id(1) * D + offs_d) // EACH
        opened = projected_at(gates.projected, offs, mask_d, given & _COMPENSATED)
        x *= softplus(opened) if SOFT else sigmoid(opened)
    x = to_half(x)
    tl.store(merged.x + head * D + offs_d, x, mask=mask_d)
    if D % 32 == 0:  # noqa: SIM102 - a constant and a number of the device
        if (given & _LEFT) != 0:
            first = tl.program_id(1) * D
            store_left(merged.left, tl.program_id(0).to(tl.int64), x, first, first + D, H * D, BLOCK_D)


class How(TypedDict, total=False):
    """Options of attention; what is absent is off."""

    draft: bool
    """Whether to read only the upper plane, if there are two."""
    cap: float | None
    """Soft cap of q k^T / sqrt(D); None = none."""
    sinks: torch.Tensor | None
    """float32 [H], a score of each query head that takes a share of the softmax and adds nothing; None = none."""
    gates: Projected | None
    """float32 [M, H * D] or [M, H], numbers whose sigmoids x or its heads are multiplied by, and their compensation, or
    None; None = none. Rows may be further apart."""
    softplus: bool
    """Whether it is their softplus instead."""


def attend(
    q: torch.Tensor,
    pages: LayerPages,
    rows: Rows,
    window: int | None,
    x: torch.Tensor,
    workspace: Workspace,
    *,
    context: int,
    left: torch.Tensor | None = None,
    **how: Unpack[How],
) -> None:
    """softmax(q k^T / sqrt(D)) v over the cached positions p - window < t <= p of the slot of every row at position p.

    Query head h reads key-value head h // (H / H_kv), and of its values the first DIM channels. The launch only depends
    on the shapes, the window and the device.

    Args:
        q: float16 [M, H * D], rotated, not scaled.
        pages: Cache of one layer, with the keys and values of this step already in it.
        rows: Positions in [0, context). Rows of one slot are adjacent, in ascending positions.
        window: Visible tokens, including the query's own, >= 1; None = all before it.
        x: float16 [M, H * DIM], DIM <= D; overwritten.
        workspace: Its scratch stores the splits until they are merged.
        context: Most tokens of a slot.
        left: What products read of x; overwritten as `store_left` does. None: not needed.
        how: See `How`.

    Source: the running softmax of Milakov and Gimelshein (2018), split over the keys as in Flash-Decoding (2023).
    """
    draft, cap, sinks, gates = how.get("draft", False), how.get("cap"), how.get("sinks"), how.get("gates")
    D, H_kv, kind = pages.head_dim, pages.kv_heads, pages.kind
    M, H = q.shape[0], q.shape[1] // D
    dim = x.shape[1] // H
    seen = context if window is None else min(window, context)
    scale = D**-0.5 * math.log2(math.e)
    together = max(1, KEPT_ROWS // H)  # more rows would need more memory for splits than there is
    for start in range(0, M, together):
        some = min(together, M - start)
        config = _config(kind, some, H, H_kv, (D, dim), seen, draft=draft, room=_room(q.device))
        tiles, splits = triton.cdiv(some, config.rows), config.splits
        partial = workspace.scratch(some * H * splits * (dim + 2), torch.float32)
        used = workspace.scratch(tiles, torch.int32)
        of = Rows(*(one[start : start + some] for one in rows))
        _attend_kernel[(tiles, H_kv * config.parts, splits)](
            Step(q[start:], of, partial, used), pages.tensors, some, splits, pages.stride, pages.per_slot, seen, scale,
            tile=_tile(H, H_kv, config, dim, sliding=seen < context, cap=cap), layout=pages.layout(draft=draft),
            num_warps=config.num_warps, num_stages=config.num_stages, **options(config, capability(q.device)),
        )  # fmt: skip
        merged = Merged(partial, used, x[start:], partial if left is None else left[start:])
        given = (left is not None) | (gates is not None and gates.dec is not None) << 1
        _merge_kernel[(some, H)](
            merged, sinks, None if gates is None else spaced(*(_from(start, each) for each in gates)), given, some,
            splits, config.rows, H=H, D=dim, EACH=1 if gates is None else x.shape[1] // gates.y.shape[1],
            SOFT=how.get("softplus", False), BLOCK_S=_MERGED, num_warps=_MERGE_WARPS,
        )  # fmt: skip


def _from(start: int, x: torch.Tensor | None) -> torch.Tensor | None:
    """The rows of a tensor from one on, if there is one."""
    return None if x is None else x[start:]


@cache
def _room(device: torch.device) -> Room:
    """Capacity of the device; that of a large one under the interpreter."""
    if device.type != "cuda":
        return Room()
    properties = torch.cuda.get_device_properties(device)
    return Room(
        multiprocessors=properties.multi_processor_count,
        shared_kib=properties.shared_memory_per_multiprocessor // 1024,
    )


def _config(
    kind: CacheKind, M: int, H: int, H_kv: int, dims: tuple[int, int], seen: int, *, draft: bool = False, room: Room
) -> LaunchConfig:
    """The launch configuration for a kind of cache, and heads of so many channels, of which the second are given."""
    D, dim = dims
    drafted = draft and kind.has_draft
    bits, planes = 4 if drafted else kind.keys.bits, 2 if kind.hierarchical and not drafted else 1
    reading = Reading(bits, planes, kind.rank > 0, D - dim)
    return launch_config(M, H // H_kv, H_kv, dim, seen, reading, room=room)


def _tile(H: int, H_kv: int, config: LaunchConfig, dim: int, *, sliding: bool, cap: float | None = None) -> Tile:
    tile = Tile(
        H=H,
        GROUP=H // H_kv // config.parts,
        ROWS=config.rows,
        PARTS=config.parts,
        BLOCK_M=config.block_m,
        BLOCK_T=config.block_t,
        BLOCK_D=config.block_d,
        SLIDING=int(sliding),
        CAP=0.0 if cap is None else cap * math.log2(math.e),
        DIM=dim,
    )
    return tile._replace(rest=tile._replace(BLOCK_D=config.rest, FIRST=config.block_d)) if config.rest else tile
