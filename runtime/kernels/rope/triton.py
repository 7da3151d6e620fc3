"""From the fused projection to heads on the GPU: normalization per head, rotation, and the append to the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from runtime.triton.ahead import Ahead


@triton.jit
def _sum(y_ptr, dec_ptr, offsets, mask):
    """Output of the projection and its compensation at the offsets. float32."""
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
    if dec_ptr is not None:
        y += tl.load(dec_ptr + offsets, mask=mask, other=0.0)
    return y


@triton.jit
def _store(out_ptr, first, second, rest, offs_i, offs_j, HALF: tl.constexpr, REST: tl.constexpr):
    """Store a head's three parts as halves. out_ptr points at channel 0 of the head."""
    mask_i = offs_i < HALF
    tl.store(out_ptr + offs_i, first.to(tl.float16), mask=mask_i)
    tl.store(out_ptr + HALF + offs_i, second.to(tl.float16), mask=mask_i)
    if REST > 0:
        tl.store(out_ptr + 2 * HALF + offs_j, rest.to(tl.float16), mask=offs_j < REST)


@triton.jit(do_not_specialize=["T"])
def _heads_kernel(
    y_ptr,
    dec_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    keys_ptr,
    values_ptr,
    q_ptr,
    eps,
    T,
    H: tl.constexpr,
    H_KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Program (m, head) handles one of the H + 2 H_kv heads of row m.

    A head lies in three parts: the channels [0, HALF) and [HALF, 2 HALF) that rotate in pairs, and the D - 2 HALF
    channels behind them, so no channel has to move between threads.
    """
    REST: tl.constexpr = D - 2 * HALF
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    offs_i = tl.arange(0, BLOCK_HALF)
    offs_j = tl.arange(0, BLOCK_REST)
    mask_i = offs_i < HALF
    mask_j = offs_j < REST
    position = tl.load(positions_ptr + row).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    start = (row * (H + 2 * H_KV) + head) * D
    first = _sum(y_ptr, dec_ptr, start + offs_i, mask_i)
    second = _sum(y_ptr, dec_ptr, start + HALF + offs_i, mask_i)
    rest = tl.zeros([BLOCK_REST], tl.float32)
    if REST > 0:
        rest = _sum(y_ptr, dec_ptr, start + 2 * HALF + offs_j, mask_j)
    turns = head < H + H_KV  # queries and keys; values pass through
    if q_norm_ptr is not None:
        square = tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0) + tl.sum(rest * rest, axis=0)
        scale = tl.rsqrt(square / D + eps)
        norm_ptr = q_norm_ptr
        if head >= H:
            norm_ptr = k_norm_ptr
        first = tl.where(turns, first * scale * tl.load(norm_ptr + offs_i, mask=mask_i, other=0.0), first)
        second = tl.where(turns, second * scale * tl.load(norm_ptr + HALF + offs_i, mask=mask_i, other=0.0), second)
        if REST > 0:
            rest = tl.where(turns, rest * scale * tl.load(norm_ptr + 2 * HALF + offs_j, mask=mask_j, other=0.0), rest)
    cos = tl.load(cos_ptr + position * HALF + offs_i, mask=mask_i & turns, other=1.0)
    sin = tl.load(sin_ptr + position * HALF + offs_i, mask=mask_i & turns, other=0.0)
    turned_first = tl.where(turns, first * cos - second * sin, first)
    turned_second = tl.where(turns, second * cos + first * sin, second)
    if head < H:
        out_ptr = q_ptr + (row * H + head) * D
    elif head < H + H_KV:
        out_ptr = keys_ptr + ((slot * H_KV + head - H) * T + position) * D
    else:
        out_ptr = values_ptr + ((slot * H_KV + head - H - H_KV) * T + position) * D
    _store(out_ptr, turned_first, turned_second, rest, offs_i, offs_j, HALF, REST)


def heads(
    y: torch.Tensor,
    dec: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q: torch.Tensor,
) -> None:
    """Split y + dec into heads, normalize and rotate queries and keys, append keys and values to the cache.

    Queries are *not* scaled by D^-0.5: `attend` does that, in float32.

    Args:
        y: float32 [M, (H + 2 H_kv) * D], output of the fused projection: queries, keys, values.
        dec: float32, shaped like y, its compensation, or None.
        q_norm: float32 [D], weight of the RMSNorm of every query head before the rotation, or None.
        k_norm: float32 [D], the same of every key head; given where q_norm is.
        eps: `ModelSpec.norm_eps`.
        cos: float32 [>= T, r / 2], from `models.rope.tables`; r <= D channels of a head rotate.
        sin: float32, shaped like cos.
        positions: int32 [M], each in [0, T).
        slots: int32 [M].
        keys: float16 [slots, H_kv, T, D], cache of one layer; row `positions[m]` of slot `slots[m]` is overwritten.
        values: float16, shaped like keys.
        q: float16 [M, H * D]; overwritten.
    """
    assert (q_norm is None) == (k_norm is None), "queries and keys are normalized together or not at all"
    _, H_kv, T, D = keys.shape
    M, H = q.shape[0], q.shape[1] // D
    half = cos.shape[1]
    _heads_kernel[(M, H + 2 * H_kv)](
        y,
        dec,
        q_norm,
        k_norm,
        cos,
        sin,
        positions,
        slots,
        keys,
        values,
        q,
        eps,
        T,
        H=H,
        H_KV=H_kv,
        D=D,
        HALF=half,
        BLOCK_HALF=_block(half),
        BLOCK_REST=_block(D - 2 * half),
        num_warps=1,
    )


def _block(channels: int) -> int:
    """Channels of a masked part of a head: a power of two, at least 1."""
    return max(1, triton.next_power_of_2(channels))


def ahead() -> tuple[Ahead, ...]:
    """Llama-3-8B's heads, Qwen3-8B's with norms, and heads of 96 channels of which 72 rotate."""
    return (
        _ahead(H=32, H_kv=8, D=128, half=64, norm=False),
        _ahead(H=32, H_kv=8, D=128, half=64, norm=True),
        _ahead(H=32, H_kv=32, D=96, half=36, norm=False),
    )


def _ahead(*, H: int, H_kv: int, D: int, half: int, norm: bool) -> Ahead:
    """One specialization, with compensation."""
    from runtime.triton.ahead import Ahead

    norms = ("q_norm_ptr", "k_norm_ptr")
    sizes = {
        "H": H,
        "H_KV": H_kv,
        "D": D,
        "HALF": half,
        "BLOCK_HALF": _block(half),
        "BLOCK_REST": _block(D - 2 * half),
    }
    return Ahead(
        name=f"heads H{H}/{H_kv} D{D} r{2 * half}{' norm' if norm else ''}",
        kernel=_heads_kernel,
        signature={
            **dict.fromkeys(("y_ptr", "dec_ptr"), "*fp32"),
            **dict.fromkeys(norms, "*fp32" if norm else "constexpr"),
            **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32"),
            **dict.fromkeys(("positions_ptr", "slots_ptr"), "*i32"),
            **dict.fromkeys(("keys_ptr", "values_ptr", "q_ptr"), "*fp16"),
            "eps": "fp32",
            "T": "i32",
            **dict.fromkeys(sizes, "constexpr"),
        },
        constants={**sizes, **({} if norm else dict.fromkeys(norms))},
        num_warps=1,
    )
