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
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from runtime.backends.triton.kernels.attention.configs import LaunchConfig, launch_config
from runtime.backends.triton.kernels.attention.visit import visit_slot
from runtime.backends.triton.kernels.cache.pages import LayerPages, power_of_two, record_sizes
from runtime.kv.kinds import KINDS, PARTS, CacheKind, KVKind

if TYPE_CHECKING:
    from runtime.backends.triton.ahead import Ahead
    from runtime.backends.triton.workspace import Workspace


@triton.jit
def _blocks(lowest, last, window, BLOCK_T: tl.constexpr):
    """First block, and number of blocks, of what rows from position `lowest` to `last` of a slot see."""
    first = tl.maximum(lowest - window + 1, 0) // BLOCK_T
    return first, last // BLOCK_T + 1 - first


@triton.jit
def _segment(slots_ptr, positions_ptr, row, slot_m, window, GROUP: tl.constexpr, BLOCK_T: tl.constexpr):
    """Slot, number, first and last position of a slot's rows from `row` of a tile on; first block they see, blocks."""
    slot = tl.load(slots_ptr + row)
    count = tl.sum((slot_m == slot).to(tl.int32), axis=0) // GROUP
    lowest = tl.load(positions_ptr + row)
    last = tl.load(positions_ptr + row + count - 1)
    first_block, number = _blocks(lowest, last, window, BLOCK_T)
    return slot, count, lowest, last, first_block, number


@triton.jit
def _leave(
    x_ptr, partial_ptr, peak, total, acc, M, first_head, head_m, mask_m,
    H: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store what a program found: the output where it saw everything, else its split for `_merge_kernel`.

    head_m [BLOCK_M] counts heads of [M, H] from `first_head` on. x [M, H, D]. partial: acc [M, H, SPLITS, D], then peak
    and total [M, H, SPLITS] each; a split that saw nothing has peak -inf and total 0, and leaves acc unwritten.
    """
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    if SPLITS > 1:
        first_split = first_head * SPLITS + tl.program_id(2)
        peak_ptr = partial_ptr + M.to(tl.int64) * (H * SPLITS * D) + first_split
        total_ptr = peak_ptr + M.to(tl.int64) * (H * SPLITS)
        tl.store(peak_ptr + head_m * SPLITS, peak, mask=mask_m)
        tl.store(total_ptr + head_m * SPLITS, total, mask=mask_m)
        offs = head_m[:, None] * (SPLITS * D) + offs_d[None, :]
        seen_m = mask_m & (total != 0)  # true for a NaN as well
        tl.store(partial_ptr + first_split * D + offs, acc, mask=seen_m[:, None] & mask_d[None, :])
    else:
        x = acc / tl.where(mask_m, total, 1.0)[:, None]
        offs = head_m[:, None] * D + offs_d[None, :]
        tl.store(x_ptr + first_head * D + offs, x.to(tl.float16), mask=mask_m[:, None] & mask_d[None, :])


@triton.jit(do_not_specialize=["M", "stride", "per_slot", "window"])
def _attend_kernel(
    q_ptr, k_codes_ptr, k_halves_ptr, k_shorts_ptr, v_codes_ptr, v_halves_ptr, v_shorts_ptr, k_window_ptr, v_window_ptr,
    tables_ptr, paged_ptr, positions_ptr, slots_ptr, x_ptr, partial_ptr, M, stride, per_slot, window, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, SLIDING: tl.constexpr, WINDOW: tl.constexpr,
    PAGE: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, CHANNEL: tl.constexpr, RANK: tl.constexpr,
    K_RECORD: tl.constexpr, K_LOWER: tl.constexpr, K_SCALES: tl.constexpr, K_A: tl.constexpr, K_B: tl.constexpr,
    K_INDICES: tl.constexpr, K_OUTLIERS: tl.constexpr, K_GROUP: tl.constexpr, K_GROUPS: tl.constexpr,
    K_COUNT: tl.constexpr, V_RECORD: tl.constexpr, V_LOWER: tl.constexpr, V_SCALES: tl.constexpr, V_A: tl.constexpr,
    V_B: tl.constexpr, V_INDICES: tl.constexpr, V_OUTLIERS: tl.constexpr, V_GROUP: tl.constexpr, V_GROUPS: tl.constexpr,
    V_COUNT: tl.constexpr,
):  # fmt: skip
    """Program (tile, h, s): ROWS rows of the step, the query heads of key-value head h, split s of what they see.

    The rows of a tile may belong to several slots: the tile passes over the positions of one after another, and splits
    divide the blocks of all of them. q, x [M, H, D]; pages and windows as `LayerPages` says, `stride` records or
    windows from one to the next; tables [slots, per_slot]; partial as `_leave` says.
    """
    kv_head = tl.program_id(1)
    first_row = tl.program_id(0) * ROWS
    end_row = tl.minimum(first_row + ROWS, M)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    row_m = first_row + offs_m // GROUP
    mask_m = row_m < end_row
    first_head = first_row.to(tl.int64) * H + kv_head * GROUP
    head_m = offs_m // GROUP * H + offs_m % GROUP
    offs_q = head_m[:, None] * D + offs_d[None, :]
    q = tl.load(q_ptr + first_head * D + offs_q, mask=mask_m[:, None] & (offs_d < D)[None, :], other=0.0)
    q_sum = tl.sum(q.to(tl.float32), axis=1)
    k_at, v_at = kv_head * K_RECORD, kv_head * V_RECORD
    k_codes_ptr += k_at
    v_codes_ptr += v_at
    k_halves_ptr += k_at // 2
    v_halves_ptr += v_at // 2
    k_shorts_ptr += k_at // 2
    v_shorts_ptr += v_at // 2
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if ROWS == 1:
        slot = tl.load(slots_ptr + first_row)
        position = tl.load(positions_ptr + first_row)
        first_block, number = _blocks(position, position, window, BLOCK_T)
        span = tl.cdiv(number, SPLITS)
        begin = tl.program_id(2) * span
        to_block = first_block + tl.minimum(begin + span, number)
        peak, total, acc = visit_slot(
            q, q_sum, k_codes_ptr, k_halves_ptr, k_shorts_ptr, v_codes_ptr, v_halves_ptr, v_shorts_ptr, k_window_ptr,
            v_window_ptr, tables_ptr, paged_ptr, stride, per_slot, kv_head, peak, total, acc, tl.full([1], position,
            tl.int32), slot, position, position, window, first_block + begin, to_block, scale, D, BLOCK_T, BLOCK_D,
            SLIDING, ROWS > 1, WINDOW, PAGE, BITS, PLANES, CHANNEL, RANK, K_RECORD, K_LOWER, K_SCALES, K_A, K_B,
            K_INDICES, K_OUTLIERS, K_GROUP, K_GROUPS, K_COUNT, V_RECORD, V_LOWER, V_SCALES, V_A, V_B, V_INDICES,
            V_OUTLIERS, V_GROUP, V_GROUPS, V_COUNT,
        )  # fmt: skip
    else:
        slot_m = tl.load(slots_ptr + row_m, mask=mask_m, other=-1)
        position_m = tl.load(positions_ptr + row_m, mask=mask_m, other=-1)
        begin = 0
        end = 2147483647
        if SPLITS > 1:
            blocks = 0
            row = first_row
            while row < end_row:
                _, count, _, _, _, number = _segment(slots_ptr, positions_ptr, row, slot_m, window, GROUP, BLOCK_T)
                blocks += number
                row += count
            span = tl.cdiv(blocks, SPLITS)
            begin = tl.program_id(2) * span
            end = begin + span
        before = 0
        row = first_row
        while (row < end_row) & (before < end):
            slot, count, lowest, last, first_block, number = _segment(
                slots_ptr, positions_ptr, row, slot_m, window, GROUP, BLOCK_T
            )  # fmt: skip
            own_m = tl.where(slot_m == slot, position_m, -1)
            from_block = first_block + tl.maximum(begin - before, 0)
            to_block = first_block + tl.minimum(end - before, number)
            peak, total, acc = visit_slot(
                q, q_sum, k_codes_ptr, k_halves_ptr, k_shorts_ptr, v_codes_ptr, v_halves_ptr, v_shorts_ptr,
                k_window_ptr, v_window_ptr, tables_ptr, paged_ptr, stride, per_slot, kv_head, peak, total, acc, own_m,
                slot, lowest, last, window, from_block, to_block, scale, D, BLOCK_T, BLOCK_D, SLIDING, ROWS > 1, WINDOW,
                PAGE, BITS, PLANES, CHANNEL, RANK, K_RECORD, K_LOWER, K_SCALES, K_A, K_B, K_INDICES, K_OUTLIERS,
                K_GROUP, K_GROUPS, K_COUNT, V_RECORD, V_LOWER, V_SCALES, V_A, V_B, V_INDICES, V_OUTLIERS, V_GROUP,
                V_GROUPS, V_COUNT,
            )  # fmt: skip
            before += number
            row += count
    _leave(x_ptr, partial_ptr, peak, total, acc, M, first_head, head_m, mask_m, H, D, SPLITS, BLOCK_D)


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
    positions: torch.Tensor,
    slots: torch.Tensor,
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
        positions: int32 [M], each in [0, context). Rows of one slot stand together, in ascending positions.
        slots: int32 [M].
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
    views = [view for part in PARTS for view in pages.views(part)]
    _attend_kernel[(triton.cdiv(M, config.rows), H_kv, splits)](
        q, *views, pages.windows["keys"], pages.windows["values"], pages.tables, pages.paged, positions, slots, x,
        partial, M, pages.stride, pages.tables.shape[1], seen, D**-0.5 * math.log2(math.e),
        **_sizes(H, H_kv, D, config), SLIDING=int(seen < context), WINDOW=pages.window_tokens,
        **record_sizes(kind, D, draft=draft), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(M, H)](partial, x, M, **_merge_sizes(H, D, config), num_warps=4)


def _config(kind: CacheKind, M: int, H: int, H_kv: int, D: int, seen: int, *, draft: bool = False) -> LaunchConfig:
    """How to launch attention over a kind of cache."""
    drafted = draft and kind.has_draft
    bits, planes = 4 if drafted else kind.keys.bits, 2 if kind.hierarchical and not drafted else 1
    return launch_config(M, H // H_kv, H_kv, D, seen, bits=bits, planes=planes, corrected=kind.rank > 0)


def _sizes(H: int, H_kv: int, D: int, config: LaunchConfig) -> dict[str, int]:
    """Constants of `_attend_kernel` that a shape decides."""
    return {
        "H": H,
        "GROUP": H // H_kv,
        "D": D,
        "SPLITS": config.splits,
        "ROWS": config.rows,
        "BLOCK_M": config.block_m,
        "BLOCK_T": config.block_t,
        "BLOCK_D": config.block_d,
    }


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
    sizes = {
        **_sizes(H, H_kv, D, config),
        "SLIDING": 0,
        "WINDOW": kind.window_capacity(128),
        **record_sizes(kind, D, draft=draft),
    }
    constants: dict[str, int | None] = dict(sizes)
    if config.splits == 1:
        constants["partial_ptr"] = None
    return Ahead(
        name=f"attend {kind.name} {use} H{H}/{H_kv} D{D}",
        kernel=_attend_kernel,
        signature={
            **dict.fromkeys(("k_codes_ptr", "v_codes_ptr"), "*u8"),
            **dict.fromkeys(("k_shorts_ptr", "v_shorts_ptr"), "*i16"),
            **dict.fromkeys(("q_ptr", "k_halves_ptr", "v_halves_ptr", "x_ptr"), "*fp16"),
            **dict.fromkeys(("k_window_ptr", "v_window_ptr"), "*fp16"),
            **dict.fromkeys(("tables_ptr", "paged_ptr", "positions_ptr", "slots_ptr"), "*i32"),
            "partial_ptr": "*fp32" if config.splits > 1 else "constexpr",
            **dict.fromkeys(("M", "stride", "per_slot", "window"), "i32"),
            "scale": "fp32",
            **dict.fromkeys(sizes, "constexpr"),
        },
        constants=constants,
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
