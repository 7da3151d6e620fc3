"""Causal attention of grouped query heads over the paged cache on the GPU, for decode, verification and prefill alike.

The query heads that read one key-value head, and neighbouring rows of a step, stand as rows of one matrix product, so
every key is read once for all of them, in its packed form. The positions that they see are divided among many
programs, which `_merge_kernel` puts together. How many programs there are depends on the cache's capacity, what each
reads on positions and tables, which lie on the device: a captured launch replays at any length. The sums run in an
order that depends on shapes and positions alone, so results repeat to the last bit.

Blocks of tokens that all rows see whole are visited without a causal mask; what is behind them, the window of recent
tokens where the kind has one, with it.

Source: QuantSpec §4.3 (both planes, the window), QServe §5.3 (codes become halves by their bits), GEAR §4 (the
low-rank path as (qB)A^T).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.triton.kernels.attention.configs import LaunchConfig, launch_config
from runtime.backends.triton.kernels.attention.visit import Blocks, HeadCache, Queries, Softmax, visit_slot
from runtime.backends.triton.kernels.cache.kernel import moved
from runtime.backends.triton.kernels.cache.pages import (
    LAYER_TYPES,
    LayerPages,
    LayerTensors,
    Rows,
    page_layout,
    power_of_two,
)
from runtime.kv.kinds import KINDS, CacheKind, KVKind

if TYPE_CHECKING:
    from runtime.backends.triton.ahead import Ahead
    from runtime.backends.triton.workspace import Workspace


class Tile(NamedTuple):
    """What a program of `_attend_kernel` handles, as a constant."""

    H: int
    """Query heads."""
    GROUP: int
    """Query heads of a key-value head."""
    SPLITS: int
    """See `LaunchConfig`, as all that follow but the last."""
    ROWS: int
    BLOCK_M: int
    BLOCK_T: int
    BLOCK_D: int
    SLIDING: int
    """Whether there are positions before its own that a row doesn't see."""


class Step(NamedTuple):
    """The tensors of a step that `_attend_kernel` reads and writes."""

    q: Any
    """float16 [M, H, D]."""
    rows: Rows
    """Where its rows belong."""
    x: Any
    """float16 [M, H, D], the output."""
    partial: Any
    """What splits leave for `_merge_kernel`, see `_leave`; None where there is one."""


class Heads(NamedTuple):
    """The rows of a program's matrix products, BLOCK_M of them, as heads of [M, H, D]."""

    first: Any
    """The first, int64."""
    offset: Any
    """int32 [BLOCK_M], each counted from the first."""
    mask: Any
    """[BLOCK_M], which there are."""


@triton.jit
def _blocks(lowest, last, window, BLOCK_T: tl.constexpr):
    """First block, and number of blocks, of what rows from position `lowest` to `last` of a slot see."""
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
def _leave(step, state, M, heads, tile: tl.constexpr, D: tl.constexpr):
    """Store what a program found: the output where it saw everything, else its split for `_merge_kernel`.

    partial: acc [M, H, SPLITS, D], then peak and total [M, H, SPLITS] each; a split that saw nothing has peak -inf and
    total 0, and leaves acc unwritten.
    """
    H: tl.constexpr = tile.H
    SPLITS: tl.constexpr = tile.SPLITS
    offs_d = tl.arange(0, tile.BLOCK_D)
    mask_d = offs_d < D
    if SPLITS > 1:
        first_split = heads.first * SPLITS + tl.program_id(2)
        peak_ptr = step.partial + M.to(tl.int64) * (H * SPLITS * D) + first_split
        total_ptr = peak_ptr + M.to(tl.int64) * (H * SPLITS)
        tl.store(peak_ptr + heads.offset * SPLITS, state.peak, mask=heads.mask)
        tl.store(total_ptr + heads.offset * SPLITS, state.total, mask=heads.mask)
        offs = heads.offset[:, None] * (SPLITS * D) + offs_d[None, :]
        seen_m = heads.mask & (state.total != 0)  # true for a NaN as well
        tl.store(step.partial + first_split * D + offs, state.acc, mask=seen_m[:, None] & mask_d[None, :])
    else:
        x = state.acc / tl.where(heads.mask, state.total, 1.0)[:, None]
        offs = heads.offset[:, None] * D + offs_d[None, :]
        tl.store(step.x + heads.first * D + offs, x.to(tl.float16), mask=heads.mask[:, None] & mask_d[None, :])


@triton.jit(do_not_specialize=["M", "stride", "per_slot", "window"])
def _attend_kernel(
    step, layer, M, stride, per_slot, window, scale, tile: tl.constexpr, layout: tl.constexpr
):  # fmt: skip
    """Program (tile, h, s): ROWS rows of the step, the query heads of key-value head h, split s of what they see.

    The rows of a tile may belong to several slots: the tile passes over the positions of one after another, and splits
    divide the blocks of all of them. `step` as `Step` says, `layer` as `LayerPages` does; nine parameters, because
    numbers that must not each make a kernel of their own can't be told so inside a tuple.
    """
    H: tl.constexpr = tile.H
    GROUP: tl.constexpr = tile.GROUP
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_D: tl.constexpr = tile.BLOCK_D
    D: tl.constexpr = layout.k.D
    kv_head = tl.program_id(1)
    first_row = tl.program_id(0) * tile.ROWS
    end_row = tl.minimum(first_row + tile.ROWS, M)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    row_m = first_row + offs_m // GROUP
    mask_m = row_m < end_row
    heads = Heads(first_row.to(tl.int64) * H + kv_head * GROUP, offs_m // GROUP * H + offs_m % GROUP, mask_m)
    offs_q = heads.offset[:, None] * D + offs_d[None, :]
    q = tl.load(step.q + heads.first * D + offs_q, mask=mask_m[:, None] & (offs_d < D)[None, :], other=0.0)
    q_sum = tl.sum(q.to(tl.float32), axis=1)
    k = moved(layer.k, kv_head * layout.k.nbytes)
    v = moved(layer.v, kv_head * layout.v.nbytes)
    layer = LayerTensors(k, v, layer.k_window, layer.v_window, layer.tables, layer.paged)
    cache = HeadCache(layer, kv_head, stride, per_slot)
    state = Softmax(
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
    )
    if tile.ROWS == 1:
        slot = tl.load(step.rows.slots + first_row)
        position = tl.load(step.rows.positions + first_row)
        first_block, number = _blocks(position, position, window, tile.BLOCK_T)
        span = tl.cdiv(number, tile.SPLITS)
        begin = tl.program_id(2) * span
        blocks = Blocks(first_block + begin, first_block + tl.minimum(begin + span, number), position)
        queries = Queries(q, q_sum, tl.full([1], position, tl.int32), window, scale)
        state = visit_slot(queries, state, cache, slot, position, blocks, tile, layout)
    else:
        slot_m = tl.load(step.rows.slots + row_m, mask=mask_m, other=-1)
        position_m = tl.load(step.rows.positions + row_m, mask=mask_m, other=-1)
        begin = 0
        end = 2147483647
        if tile.SPLITS > 1:
            total = 0
            row = first_row
            while row < end_row:
                _, count, _, _, _, number = _segment(step.rows, row, slot_m, window, tile)
                total += number
                row += count
            span = tl.cdiv(total, tile.SPLITS)
            begin = tl.program_id(2) * span
            end = begin + span
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
    _leave(step, state, M, heads, tile, D)


@triton.jit(do_not_specialize=["M"])
def _merge_kernel(
    partial_ptr, x_ptr, M, H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (m, h) merges the splits of query head h of row m; partial as `_leave` says, x [M, H, D]."""
    head = tl.program_id(0).to(tl.int64) * H + tl.program_id(1)
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_D)
    mask_s = offs_s < SPLITS
    mask_d = offs_d < D
    peak_ptr = partial_ptr + M.to(tl.int64) * (H * SPLITS * D)
    total_ptr = peak_ptr + M.to(tl.int64) * (H * SPLITS)
    peak = tl.load(peak_ptr + head * SPLITS + offs_s, mask=mask_s, other=float("-inf"))
    total = tl.load(total_ptr + head * SPLITS + offs_s, mask=mask_s, other=0.0)
    seen = total != 0  # true for a NaN as well, which so reaches the output
    acc = tl.load(
        partial_ptr + (head * SPLITS + offs_s[:, None]) * D + offs_d[None, :],
        mask=seen[:, None] & mask_d[None, :],
        other=0.0,
    )
    top = tl.max(peak, axis=0)
    weight = tl.where(seen, tl.exp2(peak - top), 0.0)
    x = tl.sum(acc * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    tl.store(x_ptr + head * D + offs_d, x.to(tl.float16), mask=mask_d)


def attend(
    q: torch.Tensor,
    pages: LayerPages,
    rows: Rows,
    window: int | None,
    x: torch.Tensor,
    workspace: Workspace,
    *,
    context: int,
    draft: bool = False,
) -> None:
    """softmax(q k^T / sqrt(D)) v over the cached positions p - window < t <= p of the slot of every row at position p.

    Query head h reads key-value head h // (H / H_kv). Nothing but the shapes and the window decides what is launched.

    Args:
        q: float16 [M, H * D], rotated, not scaled.
        pages: Cache of one layer, with the keys and values of this step already in it.
        rows: Positions in [0, context). Rows of one slot stand together, in ascending positions.
        window: Tokens that a query sees, itself included, >= 1; None = all before it.
        x: float16 [M, H * D]; overwritten.
        workspace: Its scratch holds the splits until they are merged.
        context: Most tokens of a slot.
        draft: Whether to read the upper plane alone, where the kind has two.

    Source: the running softmax of Milakov and Gimelshein (2018), split over the keys as in Flash-Decoding (2023).
    """
    D, H_kv, kind = pages.head_dim, pages.kv_heads, pages.kind
    M, H = q.shape[0], q.shape[1] // D
    seen = context if window is None else min(window, context)
    config = _config(kind, M, H, H_kv, D, seen, draft=draft)
    splits = config.splits
    partial = workspace.scratch(M * H * splits * (D + 2), torch.float32) if splits > 1 else None
    _attend_kernel[(triton.cdiv(M, config.rows), H_kv, splits)](
        Step(q, rows, x, partial), pages.tensors, M, pages.stride, pages.per_slot, seen, D**-0.5 * math.log2(math.e),
        tile=_tile(H, H_kv, config, sliding=seen < context), layout=pages.layout(draft=draft),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(M, H)](partial, x, M, **_merge_sizes(H, D, config), num_warps=4)


def _config(kind: CacheKind, M: int, H: int, H_kv: int, D: int, seen: int, *, draft: bool = False) -> LaunchConfig:
    """How to launch attention over a kind of cache."""
    drafted = draft and kind.has_draft
    bits, planes = 4 if drafted else kind.keys.bits, 2 if kind.hierarchical and not drafted else 1
    return launch_config(M, H // H_kv, H_kv, D, seen, bits=bits, planes=planes, corrected=kind.rank > 0)


def _tile(H: int, H_kv: int, config: LaunchConfig, *, sliding: bool) -> Tile:
    """What a program handles."""
    return Tile(
        H=H,
        GROUP=H // H_kv,
        SPLITS=config.splits,
        ROWS=config.rows,
        BLOCK_M=config.block_m,
        BLOCK_T=config.block_t,
        BLOCK_D=config.block_d,
        SLIDING=int(sliding),
    )


def _merge_sizes(H: int, D: int, config: LaunchConfig) -> dict[str, int]:
    """Constants of `_merge_kernel`."""
    return {
        "H": H,
        "D": D,
        "SPLITS": config.splits,
        "BLOCK_S": power_of_two(config.splits),
        "BLOCK_D": config.block_d,
    }


def ahead() -> tuple[Ahead, ...]:
    """Decode of Llama-3-8B at 8192 positions over many kinds of cache, other shapes, drafts, verification, prefill."""
    llama = {"H": 32, "H_kv": 8, "D": 128}
    wide = {"H": 16, "H_kv": 8, "D": 256}
    return (
        *(_ahead("decode", KINDS[name], M=1, **llama) for name in _DECODED),
        _ahead("decode", KINDS["fp16"], M=1, H=32, H_kv=32, D=96),
        _ahead("draft", KINDS["hierarchical"], M=1, draft=True, **llama),
        *(_ahead("verify", KINDS[name], M=5, **llama) for name in _VERIFIED),
        *(_ahead("prefill", KINDS[name], M=128, **llama) for name in _PREFILLED),
        _ahead("prefill", KINDS["fp16"], M=128, H=32, H_kv=8, D=64),
        _ahead_merge(M=1, **llama),
        _ahead_merge(M=1, **wide),
    )


_DECODED: tuple[KVKind, ...] = ("fp16", "int8", "int4", "hierarchical", "kivi2", "gear4", "gear2")
_VERIFIED: tuple[KVKind, ...] = ("int8", "int4", "hierarchical", "gear4")
_PREFILLED: tuple[KVKind, ...] = ("fp16", "int8", "int4", "hierarchical", "gear2")


def _ahead(
    use: str, kind: CacheKind, *, M: int, H: int, H_kv: int, D: int, context: int = 8192, draft: bool = False
) -> Ahead:
    """One specialization of the attention kernel."""
    from runtime.backends.triton.ahead import Ahead

    config = _config(kind, M, H, H_kv, D, context, draft=draft)
    partial = "*fp32" if config.splits > 1 else "constexpr"
    return Ahead(
        name=f"attend {kind.name} {use} H{H}/{H_kv} D{D}",
        kernel=_attend_kernel,
        signature={
            "step": Step("*fp16", Rows("*i32", "*i32"), "*fp16", partial),
            "layer": LAYER_TYPES,
            **dict.fromkeys(("M", "stride", "per_slot", "window"), "i32"),
            "scale": "fp32",
            **dict.fromkeys(("tile", "layout"), "constexpr"),
        },
        constants={
            "tile": _tile(H, H_kv, config, sliding=False),
            "layout": page_layout(kind, D, window=kind.window_capacity(128), draft=draft),
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _ahead_merge(*, M: int, H: int, H_kv: int, D: int, seen: int = 8192) -> Ahead:
    """One specialization of the merge."""
    from runtime.backends.triton.ahead import Ahead

    sizes = _merge_sizes(H, D, launch_config(M, H // H_kv, H_kv, D, seen))
    return Ahead(
        name=f"attend merge H{H}/{H_kv} D{D}",
        kernel=_merge_kernel,
        signature={"partial_ptr": "*fp32", "x_ptr": "*fp16", "M": "i32", **dict.fromkeys(sizes, "constexpr")},
        constants=sizes,
    )
