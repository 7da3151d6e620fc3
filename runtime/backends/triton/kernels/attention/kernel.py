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
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import torch
import triton
import triton.language as tl

from runtime.backends.triton.kernels.attention.configs import (
    KEPT_ROWS,
    MIN_BLOCKS,
    LaunchConfig,
    Reading,
    Room,
    launch_config,
    options,
)
from runtime.backends.triton.kernels.attention.visit import Blocks, HeadCache, Queries, Softmax, visit_slot
from runtime.backends.triton.kernels.cache.kernel import moved
from runtime.backends.triton.kernels.cache.pages import (
    LayerPages,
    LayerTensors,
    Rows,
)
from runtime.backends.triton.kernels.gemv import ROWS, capability
from runtime.backends.triton.kernels.rope import Projected, projected_at, spaced
from runtime.backends.triton.kernels.routing import sigmoid
from runtime.backends.triton.kernels.sums import store_sums
from runtime.backends.triton.sizes import PIECE
from runtime.kv.kinds import CacheKind

if TYPE_CHECKING:
    from runtime.backends.triton.workspace import Workspace


_MIN_BLOCKS = tl.constexpr(MIN_BLOCKS)
_SUMMED, _COMPENSATED = tl.constexpr(1), tl.constexpr(2)
"""Bits of `given`: whether a merge is asked for sums, and whether gates have a compensation."""
_MERGED = 16
"""Splits that a merge loads at a time."""
_MERGE_WARPS = 4


class Tile(NamedTuple):
    """Compile-time parameters of a program of `_attend_kernel`."""

    H: int
    """Query heads."""
    GROUP: int
    """Query heads of a key-value head."""
    ROWS: int
    """See `LaunchConfig`, as all that follow but the last."""
    BLOCK_M: int
    BLOCK_T: int
    BLOCK_D: int
    SLIDING: int
    """Whether a row's visible positions are limited by a window."""
    CAP: float = 0.0
    """Soft cap of the scores, to base 2 as they are; 0 = none."""


class Step(NamedTuple):
    """The tensors of a step that `_attend_kernel` reads and writes."""

    q: Any
    """float16 [M, H, D]."""
    rows: Rows
    """Positions and slots of its rows."""
    partial: Any
    """float32, the results of splits for `_merge_kernel`, see `_leave`."""
    used: Any
    """int32 [tiles], the number of splits with work for each tile of rows."""


class Merged(NamedTuple):
    """The tensors that `_merge_kernel` reads and writes."""

    partial: Any
    """See `Step`; as `_leave` writes it."""
    used: Any
    """See `Step`."""
    x: Any
    """float16 [M, H, D]."""
    sums: Any
    """float32 [M, H, D / 32], of the pieces of x, where they are asked for, and D is a multiple."""


class Share(NamedTuple):
    """Division of the visible blocks of a tile of rows."""

    span: Any
    """Blocks per split."""
    used: Any
    """Number of nonempty splits."""


class Heads(NamedTuple):
    """The rows of a program's matrix products, BLOCK_M of them, as heads of [M, H, D]."""

    first: Any
    """The first, int64."""
    offset: Any
    """int32 [BLOCK_M], each counted from the first."""
    mask: Any
    """[BLOCK_M], the mask of existing ones."""


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
def _leave(step, state, M, splits, heads, tile: tl.constexpr, D: tl.constexpr):
    """Store a program's results for `_merge_kernel`.

    partial: acc [M, H, splits, D], then peak and total [M, H, splits] each; a split that saw nothing has peak -inf and
    total 0, and leaves acc unwritten.
    """
    H: tl.constexpr = tile.H
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
    """The queries of a program, their sums, and the cache of their head."""
    D: tl.constexpr = layout.k.D
    offs_d = tl.arange(0, tile.BLOCK_D)
    offs_q = heads.offset[:, None] * D + offs_d[None, :]
    q = tl.load(step.q + heads.first * D + offs_q, mask=heads.mask[:, None] & (offs_d < D)[None, :], other=0.0)
    k = moved(layer.k, kv_head * layout.k.nbytes)
    v = moved(layer.v, kv_head * layout.v.nbytes)
    layer = LayerTensors(k, v, layer.k_window, layer.v_window, layer.tables, layer.paged)
    return q, tl.sum(q.to(tl.float32), axis=1), layer


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
    """Program (tile, h, s): ROWS rows of the step, the query heads of key-value head h, split s of what they see.

    The rows of a tile may belong to several slots: the tile passes over the positions of one after another, and splits
    divide the blocks of all of them. `step` as `Step` says, `layer` as `LayerPages` does; ten parameters, because
    numbers that must not each make a kernel of their own can't be told so inside a tuple.
    """
    D: tl.constexpr = layout.k.D
    kv_head = tl.program_id(1)
    first_row = tl.program_id(0) * tile.ROWS
    end_row = tl.minimum(first_row + tile.ROWS, M)
    if tile.ROWS == 1:
        slot = tl.load(step.rows.slots + first_row)
        position = tl.load(step.rows.positions + first_row)
        first_block, number = _blocks(position, position, window, tile.BLOCK_T)
        share = _share(step, number, splits)
        if tl.program_id(2) < share.used:
            q, q_sum, layer = _begin(step, layer, _heads(first_row, end_row, tile), kv_head, tile, layout)
            cache = HeadCache(layer, kv_head, stride, per_slot)
            begin = tl.program_id(2) * share.span
            blocks = Blocks(first_block + begin, first_block + tl.minimum(begin + share.span, number), position)
            queries = Queries(q, q_sum, tl.full([1], position, tl.int32), window, scale)
            state = visit_slot(queries, _nothing(tile), cache, slot, position, blocks, tile, layout)
            _leave(step, state, M, splits, _heads(first_row, end_row, tile), tile, D)
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
            q, q_sum, layer = _begin(step, layer, _heads(first_row, end_row, tile), kv_head, tile, layout)
            cache = HeadCache(layer, kv_head, stride, per_slot)
            state = _nothing(tile)
            begin = tl.program_id(2) * share.span
            end = begin + share.span
            before = 0
            row = first_row
            while (row < end_row) & (before < end):
                slot, count, lowest, last, first_block, number = _segment(step.rows, row, slot_m, window, tile)
                queries = Queries(q, q_sum, tl.where(slot_m == slot, position_m, -1), window, scale)
                from_block = first_block + tl.maximum(begin - before, 0)
                blocks = Blocks(from_block, first_block + tl.minimum(end - before, number), last)
                state = visit_slot(queries, state, cache, slot, lowest, blocks, tile, layout)
                before += number
                row += count
            _leave(step, state, M, splits, _heads(first_row, end_row, tile), tile, D)


@triton.jit(do_not_specialize=["given", "M", "splits", "rows"])
def _merge_kernel(
    merged, sinks_ptr, gates, given, M, splits, rows, H: tl.constexpr, D: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Program (m, h) merges the splits of query head h of row m, in a tile of `rows` rows. sinks [H]; see `Merged`.

    `gates` is `Spaced`, or None.
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
        offs = tl.program_id(0).to(tl.int64) * gates.stride + tl.program_id(1) * D + offs_d
        x *= sigmoid(projected_at(gates.projected, offs, mask_d, given & _COMPENSATED))
    x = x.to(tl.float16)
    tl.store(merged.x + head * D + offs_d, x, mask=mask_d)
    if D % 32 == 0:  # noqa: SIM102 - a constant and a number of the device
        if (given & _SUMMED) != 0:
            store_sums(merged.sums + head * (D // 32), x, 0, D, BLOCK_D)


class How(TypedDict, total=False):
    """Options of attention; what is absent is off."""

    draft: bool
    """Whether to read only the upper plane, if there are two."""
    cap: float | None
    """Soft cap of q k^T / sqrt(D); None = none."""
    sinks: torch.Tensor | None
    """float32 [H], a score of each query head that takes a share of the softmax and adds nothing; None = none."""
    gates: Projected | None
    """float32 [M, H * D], numbers whose sigmoids x is multiplied by, and their compensation, or None; None = none. Rows
    may be further apart."""


def attend(
    q: torch.Tensor,
    pages: LayerPages,
    rows: Rows,
    window: int | None,
    x: torch.Tensor,
    workspace: Workspace,
    *,
    context: int,
    **how: Unpack[How],
) -> torch.Tensor | None:
    """softmax(q k^T / sqrt(D)) v over the cached positions p - window < t <= p of the slot of every row at position p.

    Query head h reads key-value head h // (H / H_kv). The launch only depends on the shapes, the window and the device.

    Args:
        q: float16 [M, H * D], rotated, not scaled.
        pages: Cache of one layer, with the keys and values of this step already in it.
        rows: Positions in [0, context). Rows of one slot are adjacent, in ascending positions.
        window: Visible tokens, including the query's own, >= 1; None = all before it.
        x: float16 [M, H * D]; overwritten.
        workspace: Its scratch stores the splits until they are merged.
        context: Most tokens of a slot.
        how: See `How`.

    Returns:
        float32 [M, H * D / 32], the sums of the pieces of x (`runtime.backends.triton.kernels.sums`), in the workspace
        until other sums are asked of it. None of more than `gemv.ROWS` rows, and where D is no multiple of 32.

    Source: the running softmax of Milakov and Gimelshein (2018), split over the keys as in Flash-Decoding (2023).
    """
    draft, cap, sinks, gates = how.get("draft", False), how.get("cap"), how.get("sinks"), how.get("gates")
    D, H_kv, kind = pages.head_dim, pages.kv_heads, pages.kind
    M, H = q.shape[0], q.shape[1] // D
    seen = context if window is None else min(window, context)
    sums = workspace.sums(M, H * D // PIECE) if M <= ROWS and D % PIECE == 0 else None
    scale = D**-0.5 * math.log2(math.e)
    together = max(1, KEPT_ROWS // H)  # more rows would need more memory for splits than there is
    for start in range(0, M, together):
        some = min(together, M - start)
        config = _config(kind, some, H, H_kv, D, seen, draft=draft, room=_room(q.device))
        tiles, splits = triton.cdiv(some, config.rows), config.splits
        partial = workspace.scratch(some * H * splits * (D + 2), torch.float32)
        used = workspace.scratch(tiles, torch.int32)
        of = Rows(*(one[start : start + some] for one in rows))
        _attend_kernel[(tiles, H_kv, splits)](
            Step(q[start:], of, partial, used), pages.tensors, some, splits, pages.stride, pages.per_slot, seen, scale,
            tile=_tile(H, H_kv, config, sliding=seen < context, cap=cap), layout=pages.layout(draft=draft),
            num_warps=config.num_warps, num_stages=config.num_stages, **options(config, capability(q.device)),
        )  # fmt: skip
        merged = Merged(partial, used, x[start:], partial if sums is None else sums[start:])
        given = (sums is not None) | (gates is not None and gates.dec is not None) << 1
        _merge_kernel[(some, H)](
            merged, sinks, None if gates is None else spaced(*(_from(start, each) for each in gates)), given, some,
            splits, config.rows, H=H, D=D, BLOCK_S=_MERGED, num_warps=_MERGE_WARPS,
        )  # fmt: skip
    return sums


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
    kind: CacheKind, M: int, H: int, H_kv: int, D: int, seen: int, *, draft: bool = False, room: Room
) -> LaunchConfig:
    """The launch configuration for a kind of cache."""
    drafted = draft and kind.has_draft
    bits, planes = 4 if drafted else kind.keys.bits, 2 if kind.hierarchical and not drafted else 1
    return launch_config(M, H // H_kv, H_kv, D, seen, Reading(bits, planes, kind.rank > 0), room=room)


def _tile(H: int, H_kv: int, config: LaunchConfig, *, sliding: bool, cap: float | None = None) -> Tile:
    """The compile-time parameters of a program."""
    return Tile(
        H=H,
        GROUP=H // H_kv,
        ROWS=config.rows,
        BLOCK_M=config.block_m,
        BLOCK_T=config.block_t,
        BLOCK_D=config.block_d,
        SLIDING=int(sliding),
        CAP=0.0 if cap is None else cap * math.log2(math.e),
    )
