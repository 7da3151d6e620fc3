"""Causal attention of grouped query heads over the half-precision cache on the GPU, for decode and prefill alike.

The query heads that read one key-value head stand as rows of one matrix product, so every key is read once for all of
them. In decode a row of the step is a tile of its own and the positions it sees are divided among many programs, which
`_merge_kernel` puts together; in prefill neighbouring rows share a tile. How many programs there are depends on the
cache's capacity, what each reads on the positions, which lie on the device: a captured launch replays at any length.
The sums run in an order that depends on shapes and positions alone, so results repeat to the last bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from runtime.kernels.attention.configs import LaunchConfig, launch_config, power_of_two

if TYPE_CHECKING:
    from runtime.triton.ahead import Ahead
    from runtime.triton.workspace import Workspace


@triton.jit
def _blocks(lowest, last, window, BLOCK_T: tl.constexpr):
    """First block, and number of blocks, of what rows from position `lowest` to `last` of a slot see."""
    first = tl.maximum(lowest - window + 1, 0) // BLOCK_T
    return first, last // BLOCK_T + 1 - first


@triton.jit
def _segment(slots_ptr, positions_ptr, row, slot_m, window, GROUP: tl.constexpr, BLOCK_T: tl.constexpr):
    """The rows of one slot that start at `row` of a tile: slot, their number, last position, first block, blocks."""
    slot = tl.load(slots_ptr + row)
    count = tl.sum((slot_m == slot).to(tl.int32), axis=0) // GROUP
    last = tl.load(positions_ptr + row + count - 1)
    first_block, number = _blocks(tl.load(positions_ptr + row), last, window, BLOCK_T)
    return slot, count, last, first_block, number


@triton.jit
def _visit(
    q, keys_ptr, values_ptr, peak, total, acc, position_m, last, window, begin, end, scale,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add the blocks [begin, end) of one slot to the running softmax of a tile's rows.

    keys, values [T, D] of one slot and head. q [BLOCK_M, BLOCK_D] float16. position_m [BLOCK_M], or [1] for all,
    is -1 for rows of other slots, which see nothing. peak, total [BLOCK_M] and acc [BLOCK_M, BLOCK_D] are the state,
    float32, to base 2.
    """
    offs_t = tl.arange(0, BLOCK_T)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    start = begin.to(tl.int64) * BLOCK_T * D
    keys_ptr += start
    values_ptr += start
    for block in range(begin, end):
        positions = block * BLOCK_T + offs_t
        written = positions <= last  # behind it lies what no step has written for this slot
        k = tl.load(
            keys_ptr + offs_t[None, :] * D + offs_d[:, None], mask=written[None, :] & mask_d[:, None], other=0.0
        )
        scores = tl.dot(q, k) * scale
        visible = (positions[None, :] <= position_m[:, None]) & (positions[None, :] > position_m[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        next_peak = tl.maximum(peak, tl.max(scores, axis=1))
        shift = tl.where(next_peak == float("-inf"), 0.0, next_peak)
        p = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(peak - shift)
        total = total * fade + tl.sum(p, axis=1)
        v = tl.load(
            values_ptr + offs_t[:, None] * D + offs_d[None, :], mask=written[:, None] & mask_d[None, :], other=0.0
        )
        acc = tl.dot(p.to(tl.float16), v, acc * fade[:, None])
        peak = next_peak
        keys_ptr += BLOCK_T * D
        values_ptr += BLOCK_T * D
    return peak, total, acc


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


@triton.jit
def _nothing(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Peak, total and acc before the first block."""
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return peak, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit(do_not_specialize=["M", "T", "window"])
def _decode_kernel(
    q_ptr, keys_ptr, values_ptr, positions_ptr, slots_ptr, x_ptr, partial_ptr, M, T, window, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (m, h, s): row m, the query heads of key-value head h, split s of the positions that the row sees.

    q, x [M, H, D]; keys, values [slots, H_kv, T, D]; partial as `_leave` says.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < GROUP
    offs_d = tl.arange(0, BLOCK_D)
    slot = tl.load(slots_ptr + row)
    position = tl.load(positions_ptr + row)
    first_head = row.to(tl.int64) * H + kv_head * GROUP
    first_block, number = _blocks(position, position, window, BLOCK_T)
    span = tl.cdiv(number, SPLITS)
    begin = tl.program_id(2) * span
    peak, total, acc = _nothing(BLOCK_M, BLOCK_D)
    if begin >= number:
        _leave(x_ptr, partial_ptr, peak, total, acc, M, first_head, offs_m, mask_m, H, D, SPLITS, BLOCK_D)
        return
    offs_q = offs_m[:, None] * D + offs_d[None, :]
    q = tl.load(q_ptr + first_head * D + offs_q, mask=mask_m[:, None] & (offs_d < D)[None, :], other=0.0)
    start = (slot.to(tl.int64) * (H // GROUP) + kv_head) * T * D
    peak, total, acc = _visit(
        q, keys_ptr + start, values_ptr + start, peak, total, acc, tl.full([1], position, tl.int32), position, window,
        first_block + begin, first_block + tl.minimum(begin + span, number), scale, D, BLOCK_T, BLOCK_D,
    )  # fmt: skip
    _leave(x_ptr, partial_ptr, peak, total, acc, M, first_head, offs_m, mask_m, H, D, SPLITS, BLOCK_D)


@triton.jit(do_not_specialize=["M", "T", "window"])
def _tiled_kernel(
    q_ptr, keys_ptr, values_ptr, positions_ptr, slots_ptr, x_ptr, partial_ptr, M, T, window, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (tile, h, s): as many rows as fit a tile, the query heads of key-value head h, split s of what they see.

    The rows of a tile may belong to several slots: the tile passes over the positions of one after another, and splits
    divide the blocks of all of them. Shapes as in `_decode_kernel`.
    """
    ROWS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    first_row = tl.program_id(0) * ROWS
    end_row = tl.minimum(first_row + ROWS, M)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    row_m = first_row + offs_m // GROUP
    mask_m = row_m < end_row
    slot_m = tl.load(slots_ptr + row_m, mask=mask_m, other=-1)
    position_m = tl.load(positions_ptr + row_m, mask=mask_m, other=-1)
    first_head = first_row.to(tl.int64) * H + kv_head * GROUP
    head_m = offs_m // GROUP * H + offs_m % GROUP
    begin = 0
    end = 2147483647
    if SPLITS > 1:
        blocks = 0
        row = first_row
        while row < end_row:
            _, count, _, _, number = _segment(slots_ptr, positions_ptr, row, slot_m, window, GROUP, BLOCK_T)
            blocks += number
            row += count
        span = tl.cdiv(blocks, SPLITS)
        begin = tl.program_id(2) * span
        end = begin + span
    offs_q = head_m[:, None] * D + offs_d[None, :]
    q = tl.load(q_ptr + first_head * D + offs_q, mask=mask_m[:, None] & (offs_d < D)[None, :], other=0.0)
    peak, total, acc = _nothing(BLOCK_M, BLOCK_D)
    before = 0
    row = first_row
    while (row < end_row) & (before < end):
        slot, count, last, first_block, number = _segment(slots_ptr, positions_ptr, row, slot_m, window, GROUP, BLOCK_T)
        start = (slot.to(tl.int64) * (H // GROUP) + kv_head) * T * D
        peak, total, acc = _visit(
            q, keys_ptr + start, values_ptr + start, peak, total, acc, tl.where(slot_m == slot, position_m, -1), last,
            window, first_block + tl.maximum(begin - before, 0), first_block + tl.minimum(end - before, number), scale,
            D, BLOCK_T, BLOCK_D,
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
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    window: int | None,
    x: torch.Tensor,
    workspace: Workspace,
) -> None:
    """softmax(q k^T / sqrt(D)) v over the cached positions p - window < t <= p of the slot of every row at position p.

    Query head h reads key-value head h // (H / H_kv). Nothing but the shapes and the window decides what is launched.

    Args:
        q: float16 [M, H * D], rotated, not scaled.
        keys: float16 [slots, H_kv, T, D], with the keys of this step already in it. T * D < 2^31.
        values: float16, shaped like keys.
        positions: int32 [M], each in [0, T). Rows of one slot stand together, in ascending positions.
        slots: int32 [M].
        window: Tokens that a query sees, itself included, >= 1; None = all before it.
        x: float16 [M, H * D]; overwritten.
        workspace: Its scratch holds the splits until they are merged.

    Source: the running softmax of Milakov and Gimelshein (2018), split over the keys as in Flash-Decoding (2023).
    """
    _, H_kv, T, D = keys.shape
    M, H = q.shape[0], q.shape[1] // D
    assert T * D < 2**31, "offsets within one head of a slot are 32 bits wide"
    seen = T if window is None else min(window, T)
    config = launch_config(M, H // H_kv, H_kv, D, seen)
    splits = config.splits
    partial = workspace.scratch(M * H * splits * (D + 2), torch.float32) if splits > 1 else None
    kernel = _decode_kernel if config.rows == 1 else _tiled_kernel
    kernel[(triton.cdiv(M, config.rows), H_kv, splits)](
        q,
        keys,
        values,
        positions,
        slots,
        x,
        partial,
        M,
        T,
        seen,
        D**-0.5 * math.log2(math.e),
        **_sizes(H, H_kv, D, config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if splits > 1:
        _merge_kernel[(M, H)](partial, x, M, **_merge_sizes(H, D, config), num_warps=4)


def _sizes(H: int, H_kv: int, D: int, config: LaunchConfig) -> dict[str, int]:
    """Constants of `_decode_kernel` and `_tiled_kernel`."""
    return {
        "H": H,
        "GROUP": H // H_kv,
        "D": D,
        "SPLITS": config.splits,
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
    """Decode and prefill of Llama-3-8B at 8192 positions, decode of Phi-3-mini, prefill of Llama-3.2-1B."""
    llama = {"H": 32, "H_kv": 8, "D": 128}
    wide = {"H": 16, "H_kv": 8, "D": 256}
    return (
        _ahead("decode", M=1, **llama),
        _ahead("decode", M=1, H=32, H_kv=32, D=96),
        _ahead("prefill", M=128, **llama),
        _ahead("prefill", M=128, H=32, H_kv=8, D=64),
        _ahead_merge(M=1, **llama),
        _ahead_merge(M=1, **wide),
    )


def _ahead(kind: str, *, M: int, H: int, H_kv: int, D: int, seen: int = 8192) -> Ahead:
    """One specialization of the attention kernel."""
    from runtime.triton.ahead import Ahead

    config = launch_config(M, H // H_kv, H_kv, D, seen)
    sizes = _sizes(H, H_kv, D, config)
    constants: dict[str, int | None] = dict(sizes)
    if config.splits == 1:
        constants["partial_ptr"] = None
    return Ahead(
        name=f"attend {kind} H{H}/{H_kv} D{D}",
        kernel=_decode_kernel if config.rows == 1 else _tiled_kernel,
        signature={
            **dict.fromkeys(("q_ptr", "keys_ptr", "values_ptr", "x_ptr"), "*fp16"),
            **dict.fromkeys(("positions_ptr", "slots_ptr"), "*i32"),
            "partial_ptr": "*fp32" if config.splits > 1 else "constexpr",
            **dict.fromkeys(("M", "T", "window"), "i32"),
            "scale": "fp32",
            **dict.fromkeys(sizes, "constexpr"),
        },
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _ahead_merge(*, M: int, H: int, H_kv: int, D: int, seen: int = 8192) -> Ahead:
    """One specialization of the merge."""
    from runtime.triton.ahead import Ahead

    sizes = _merge_sizes(H, D, launch_config(M, H // H_kv, H_kv, D, seen))
    return Ahead(
        name=f"attend merge H{H}/{H_kv} D{D}",
        kernel=_merge_kernel,
        signature={"partial_ptr": "*fp32", "x_ptr": "*fp16", "M": "i32", **dict.fromkeys(sizes, "constexpr")},
        constants=sizes,
    )
