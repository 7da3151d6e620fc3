"""From the fused projection to heads on the GPU: normalization per head, rotation, and the append to the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from runtime.backends.triton.kernels.cache.kernel import store_token
from runtime.backends.triton.kernels.cache.pages import LayerPages, record_sizes
from runtime.kv.kinds import KINDS, PARTS, CacheKind, KVKind

if TYPE_CHECKING:
    from runtime.backends.triton.ahead import Ahead


@triton.jit
def _sum(y_ptr, dec_ptr, offsets, mask):
    """Output of the projection and its compensation at the offsets. float32."""
    y = tl.load(y_ptr + offsets, mask=mask, other=0.0)
    if dec_ptr is not None:
        y += tl.load(dec_ptr + offsets, mask=mask, other=0.0)
    return y


@triton.jit(do_not_specialize=["per_slot"])
def _heads_kernel(
    y_ptr, dec_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, tables_ptr, paged_ptr,
    k_codes_ptr, k_halves_ptr, v_codes_ptr, v_halves_ptr, k_window_ptr, v_window_ptr, q_ptr, eps, stride, per_slot,
    H: tl.constexpr, H_KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr,
    BITS: tl.constexpr, K_RECORD: tl.constexpr, K_SCALES: tl.constexpr, V_RECORD: tl.constexpr, V_SCALES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (m, head) handles one of the H + 2 H_kv heads of row m.

    The channels [0, HALF) rotate with the channels [HALF, 2 HALF), which every channel reads a second time; the rest
    pass through. Keys and values go to a window [slots, .., H_kv, WINDOW, D], or where WINDOW is 0 to a page, of which
    slot s has `tables` [slots, per_slot].
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    first = offs_d < HALF
    pairs = offs_d < 2 * HALF
    partner = tl.where(first, offs_d + HALF, offs_d - HALF)
    position = tl.load(positions_ptr + row).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    start = (row * (H + 2 * H_KV) + head) * D
    x = _sum(y_ptr, dec_ptr, start + offs_d, mask_d)
    turns = head < H + H_KV  # queries and keys; values pass through
    other = _sum(y_ptr, dec_ptr, start + partner, pairs & turns)
    if q_norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        norm_ptr = q_norm_ptr
        if head >= H:
            norm_ptr = k_norm_ptr
        x = tl.where(turns, x * scale * tl.load(norm_ptr + offs_d, mask=mask_d, other=0.0), x)
        other = other * scale * tl.load(norm_ptr + partner, mask=pairs, other=0.0)
    angle = position * HALF + tl.where(first, offs_d, offs_d - HALF)
    cos = tl.load(cos_ptr + angle, mask=pairs & turns, other=1.0)
    sin = tl.load(sin_ptr + angle, mask=pairs & turns, other=0.0)
    x = x * cos + tl.where(first, -other, other) * sin
    if head < H:
        tl.store(q_ptr + (row * H + head) * D + offs_d, x.to(tl.float16), mask=mask_d)
    elif WINDOW > 0:
        window_ptr, kv_head = k_window_ptr, head - H
        if head >= H + H_KV:
            window_ptr, kv_head = v_window_ptr, head - H - H_KV
        place = (slot * stride + kv_head) * WINDOW + position - tl.load(paged_ptr + slot)
        tl.store(window_ptr + place * D + offs_d, x.to(tl.float16), mask=mask_d)
    else:
        page = tl.load(tables_ptr + slot * per_slot + position // PAGE).to(tl.int64) * stride
        if head < H + H_KV:
            at = (page + head - H) * K_RECORD
            store_token(x, k_codes_ptr + at, k_halves_ptr + at // 2, position % PAGE, D, BITS, K_SCALES, BLOCK_D)
        else:
            at = (page + head - H - H_KV) * V_RECORD
            store_token(x, v_codes_ptr + at, v_halves_ptr + at // 2, position % PAGE, D, BITS, V_SCALES, BLOCK_D)


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
    pages: LayerPages,
    q: torch.Tensor,
) -> None:
    """Split y + dec into heads, normalize and rotate queries and keys, append keys and values to the cache.

    Queries are *not* scaled by D^-0.5: `attend` does that, in float32. Kinds without a window quantize on the way.

    Args:
        y: float32 [M, (H + 2 H_kv) * D], output of the fused projection: queries, keys, values.
        dec: float32, shaped like y, its compensation, or None.
        q_norm: float32 [D], weight of the RMSNorm of every query head before the rotation, or None.
        k_norm: float32 [D], the same of every key head; given where q_norm is.
        eps: `ModelSpec.norm_eps`.
        cos: float32 [>= T, r / 2], from `models.rope.tables`; r <= D channels of a head rotate.
        sin: float32, shaped like cos.
        positions: int32 [M], each with a page or a place in the window.
        slots: int32 [M].
        pages: Cache of one layer.
        q: float16 [M, H * D]; overwritten.
    """
    assert (q_norm is None) == (k_norm is None), "queries and keys are normalized together or not at all"
    D, H_kv = pages.head_dim, pages.kv_heads
    M, H = q.shape[0], q.shape[1] // D
    codes, halves = zip(*(pages.views(part)[:2] for part in PARTS), strict=True)
    _heads_kernel[(M, H + 2 * H_kv)](
        y, dec, q_norm, k_norm, cos, sin, positions, slots, pages.tables, pages.paged, codes[0], halves[0], codes[1],
        halves[1], pages.windows["keys"], pages.windows["values"], q, eps, pages.stride, pages.tables.shape[1],
        **_sizes(pages.kind, H, H_kv, D, cos.shape[1], pages.window_tokens), num_warps=1,
    )  # fmt: skip


def _sizes(kind: CacheKind, H: int, H_kv: int, D: int, half: int, window: int) -> dict[str, int]:
    """Constants of `_heads_kernel`."""
    sizes = record_sizes(kind, D)
    names = ("PAGE", "BITS", "K_RECORD", "K_SCALES", "V_RECORD", "V_SCALES")
    return {
        "H": H,
        "H_KV": H_kv,
        "D": D,
        "HALF": half,
        "WINDOW": window,
        **{name: sizes[name] for name in names},
        "BLOCK_D": max(2, triton.next_power_of_2(D)),
    }


def ahead() -> tuple[Ahead, ...]:
    """Llama-3-8B's heads, Qwen3-8B's with norms, and heads of 96 channels of which 72 rotate, for several caches."""
    llama = {"H": 32, "H_kv": 8, "D": 128, "half": 64}
    return (
        _ahead("fp16", **llama, norm=False),
        _ahead("fp16", **llama, norm=True),
        _ahead("fp16", H=32, H_kv=32, D=96, half=36, norm=False),
        _ahead("int8", **llama, norm=True),
        _ahead("int4", **llama, norm=True),
        _ahead("hierarchical", **llama, norm=False),
    )


def _ahead(kv: KVKind, *, H: int, H_kv: int, D: int, half: int, norm: bool) -> Ahead:
    """One specialization, with compensation."""
    from runtime.backends.triton.ahead import Ahead

    norms = ("q_norm_ptr", "k_norm_ptr")
    sizes = _sizes(KINDS[kv], H, H_kv, D, half, KINDS[kv].window_capacity(128))
    codes, halves = ("k_codes_ptr", "v_codes_ptr"), ("k_halves_ptr", "v_halves_ptr")
    return Ahead(
        name=f"heads {kv} H{H}/{H_kv} D{D} r{2 * half}{' norm' if norm else ''}",
        kernel=_heads_kernel,
        signature={
            **dict.fromkeys(("y_ptr", "dec_ptr"), "*fp32"),
            **dict.fromkeys(norms, "*fp32" if norm else "constexpr"),
            **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32"),
            **dict.fromkeys(("positions_ptr", "slots_ptr", "tables_ptr", "paged_ptr"), "*i32"),
            **dict.fromkeys(codes, "*u8"),
            **dict.fromkeys((*halves, "k_window_ptr", "v_window_ptr", "q_ptr"), "*fp16"),
            "eps": "fp32",
            **dict.fromkeys(("stride", "per_slot"), "i32"),
            **dict.fromkeys(sizes, "constexpr"),
        },
        constants={**sizes, **({} if norm else dict.fromkeys(norms))},
        num_warps=1,
    )
