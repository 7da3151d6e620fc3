"""Query, key and value heads on the GPU: norm, rotation, the cache's basis, and the append to the cache."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.triton.kernels.activations import limited, projected_at, spaced
from runtime.backends.triton.kernels.cache import LayerPages, Rows, moved, store_token
from runtime.kv.basis import hadamard_block
from runtime.kv.kinds import LARGEST

_MOST = tl.constexpr(LARGEST)


class Shape(NamedTuple):
    """The heads of a row, as a constant."""

    H: int
    H_KV: int  # Key heads, and as many value heads
    GROUP: int  # Query heads of a key head
    HALF: int  # Half the channels of a head that rotate
    BLOCK_D: int  # Channels of a head, padded to a power of two
    STAGES: int  # Binary logarithm of the rows of the Hadamard matrix
    SCALE: float  # One over the root of their number
    RUN: int  # Numbers of a run, in which the distance of rows is counted
    WIDE: bool = False  # Whether norms are over all heads together
    LAST: bool = False  # Whether norms come behind the rotation


class HeadNorms(NamedTuple):
    """RMSNorms of heads: of queries and keys, or of neither; and of values."""

    q: Any  # float32 [D], weight for every query head; [H * D] if all heads are normalized together; or None
    k: Any  # Likewise for key heads
    eps: Any
    value_eps: Any = None  # Epsilon of the norm of every value head, which has no weight; None: there is none
    latent: Any = None  # R, channels at the end of a key and at the beginning of a value that alone pass it; None: all


class TurnedNorms(HeadNorms):
    """Norms behind the rotation instead of before it."""


class Rope(NamedTuple):
    """Tables of the rotation of the first r <= D channels, where each half is rotated with the other."""

    cos: Any  # float32 [>= T, r / 2], from `models.rope.tables`
    sin: Any  # float32, shaped like cos
    growth: Any = None  # float32 [>= T], factors of queries by their positions; None = 1


class Basis(NamedTuple):
    """The basis of queries and keys, see `runtime.kv.basis.KeyBasis`; both None if unchanged."""

    reflection: Any  # float32 [H_kv, D]
    mean: Any  # float32 [H_kv, D], subtracted from the keys


@triton.jit
def _sums_and_differences(x, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr):
    """Replace neighbouring runs of WIDTH numbers of x [BLOCK_D], two by two, by their sum and their difference."""
    pairs = tl.permute(tl.reshape(x, [BLOCK_D // (2 * WIDTH), 2, WIDTH]), [0, 2, 1])
    first, second = tl.split(pairs)
    both = tl.permute(tl.join(first + second, first - second), [0, 2, 1])
    return tl.reshape(both, [BLOCK_D])


@triton.jit
def _hadamard(x, BLOCK_D: tl.constexpr, STAGES: tl.constexpr):
    """Multiply each 2^STAGES numbers of x float32 [BLOCK_D] by the Hadamard matrix, without normalization."""
    for stage in tl.static_range(STAGES):
        x = _sums_and_differences(x, BLOCK_D, 1 << stage)
    return x


@triton.jit
def _mean_square(projected, row_start, first, end, mask_d, compensated, BLOCK_D: tl.constexpr, D: tl.constexpr):
    """Mean square of the channels of heads first .. end - 1 of a row."""
    offs_d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for head in range(first, end):
        x = projected_at(projected, row_start + head * D + offs_d, mask_d, compensated)
        total += x * x
    return tl.sum(total, axis=0) / ((end - first) * D)


@triton.jit(do_not_specialize=["compensated", "stride", "per_slot"])
def _heads_kernel(
    projected, compensated, norms, rope, basis, rows, layer, q_ptr, stride, per_slot,
    shape: tl.constexpr, layout: tl.constexpr,
):  # fmt: skip
    """Program (m, head) handles one of the H + 2 H_kv heads of row m, or of the first H; `Spaced` outputs by runs.

    The channels [0, HALF) rotate with the channels [HALF, 2 HALF), which every channel reads a second time; the rest
    pass through. Keys and values go to a window [slots, .., H_kv, tokens, D], or where there is none to a page. Twelve
    parameters: this is where the projection, the weights, the step and the cache meet.
    """
    H: tl.constexpr = shape.H
    H_KV: tl.constexpr = shape.H_KV
    HALF: tl.constexpr = shape.HALF
    BLOCK_D: tl.constexpr = shape.BLOCK_D
    D: tl.constexpr = layout.k.D
    K: tl.constexpr = layout.k
    V: tl.constexpr = layout.v
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    first = offs_d < HALF
    pairs = offs_d < 2 * HALF
    partner = tl.where(first, offs_d + HALF, offs_d - HALF)
    position = tl.load(rows.positions + row).to(tl.int64)
    slot = tl.load(rows.slots + row).to(tl.int64)
    first_of_row = row * projected.stride * shape.RUN
    projected = projected.projected
    start = first_of_row + head * D
    x = projected_at(projected, start + offs_d, mask_d, compensated)
    turns = head < H + H_KV  # queries and keys; values pass through
    other = projected_at(projected, start + partner, pairs & turns, compensated)
    if norms.q is not None:
        norm_ptr = norms.q
        if head >= H:
            norm_ptr = norms.k
        if shape.WIDE:
            first_head, end_head = 0, H
            if head >= H:
                first_head, end_head = H, H + H_KV
            mean = _mean_square(projected, first_of_row, first_head, end_head, mask_d, compensated, BLOCK_D, D)
            norm_ptr += tl.where(turns, head - first_head, 0) * D
        else:
            mean = tl.sum(x * x, axis=0) / D
        weight = tl.load(norm_ptr + offs_d, mask=mask_d, other=0.0)
        if not shape.LAST:
            scale = tl.rsqrt(mean + norms.eps)
            x = tl.where(turns, x * scale * weight, x)
            other = other * scale * tl.load(norm_ptr + partner, mask=pairs, other=0.0)
    angle = position * HALF + tl.where(first, offs_d, offs_d - HALF)
    cos = tl.load(rope.cos + angle, mask=pairs & turns, other=1.0)
    sin = tl.load(rope.sin + angle, mask=pairs & turns, other=0.0)
    x = x * cos + tl.where(first, -other, other) * sin
    if shape.LAST:
        x = tl.where(turns, x * tl.rsqrt(tl.sum(x * x, axis=0) / D + norms.eps) * weight, x)
    if norms.value_eps is not None:
        if norms.latent is None:
            x = tl.where(turns, x, x * tl.rsqrt(tl.sum(x * x, axis=0) / D + norms.value_eps))
        else:
            latent = (head >= H) & tl.where(turns, offs_d >= D - norms.latent, offs_d < norms.latent)
            square = tl.sum(tl.where(latent, x * x, 0.0), axis=0)
            x = tl.where(latent, x * tl.rsqrt(square / norms.latent + norms.value_eps), x)
    if rope.growth is not None:
        x = tl.where(head < H, x * tl.load(rope.growth + position), x)
    if basis.reflection is not None:
        of_d = tl.where(head < H, head // shape.GROUP, head - H) * D + offs_d
        u = tl.load(basis.reflection + of_d, mask=mask_d & turns, other=0.0)
        turned = _hadamard(x, BLOCK_D, shape.STAGES) * shape.SCALE
        turned = turned - u * tl.sum(u * turned, axis=0)
        turned -= tl.load(basis.mean + of_d, mask=mask_d & turns & (head >= H), other=0.0)
        x = tl.where(turns, turned, x)
    x = limited(x, _MOST)
    if head < H:
        tl.store(q_ptr + (row * H + head) * D + offs_d, x.to(tl.float16), mask=mask_d)
    elif layout.window > 0:
        window_ptr, kv_head = layer.k_window, head - H
        if head >= H + H_KV:
            window_ptr, kv_head = layer.v_window, head - H - H_KV
        place = (slot * stride + kv_head) * layout.window + position - tl.load(layer.paged + slot)
        tl.store(window_ptr + place * D + offs_d, x.to(tl.float16), mask=mask_d)
    else:
        page = tl.load(layer.tables + slot * per_slot + position // layout.page).to(tl.int64) * stride
        if head < H + H_KV:
            record = moved(layer.k, (page + head - H) * K.nbytes)
            store_token(x, record, position % layout.page, BLOCK_D, K)
        else:
            record = moved(layer.v, (page + head - H - H_KV) * V.nbytes)
            store_token(x, record, position % layout.page, BLOCK_D, V)


def heads(
    y: torch.Tensor,
    dec: torch.Tensor | None,
    norms: HeadNorms,
    rope: Rope,
    basis: Basis,
    rows: Rows,
    pages: LayerPages,
    q: torch.Tensor,
) -> None:
    """Split y + dec into heads, normalize and rotate queries and keys, and append keys and values to the cache.

    Queries are *not* scaled by D^-0.5: `attend` does that, in float32. Kinds without a window quantize on the way.

    Args:
        y: float32 [M, (H + 2 H_kv) * D], output of the fused projection: queries, keys, values. What is behind these is
            left alone. With [M, H * D] these are queries alone, and the cache is left as it is; where H is 0, keys and
            values alone.
        dec: float32, shaped like y, its compensation, or None.
        norms: Weights of queries and keys, or none; `TurnedNorms` if heads are rotated first.
        rope: With a row for every position.
        basis: Of the layer.
        rows: Each with a page or a place in the window.
        pages: Cache of one layer.
        q: float16 [M, H * D]; overwritten.
    """
    D, H_kv = pages.head_dim, pages.kv_heads
    M, H = q.shape[0], q.shape[1] // D
    alone, normed = y.shape[1] == H * D, norms.q is not None
    assert alone or normed == (norms.k is not None), "queries and keys are normalized together or not at all"
    run = math.gcd(y.stride(0), D)  # a head, unless gates of heads follow
    shape = _shape(H, H_kv, D, rope.cos.shape[1])._replace(RUN=run)
    shape = shape._replace(WIDE=normed and norms.q.numel() > D, LAST=normed and isinstance(norms, TurnedNorms))
    weights = HeadNorms(norms.q, norms.q if alone else norms.k, *norms[2:])
    _heads_kernel[(M, H if alone else H + 2 * H_kv)](
        spaced(y, dec, run), int(dec is not None), weights, rope, basis, rows, pages.tensors, q, pages.stride,
        pages.per_slot, shape=shape, layout=pages.layout(), num_warps=1,
    )  # fmt: skip


def _shape(H: int, H_kv: int, D: int, half: int) -> Shape:
    block = hadamard_block(D)
    return Shape(
        H, H_kv, max(1, H // H_kv), half, max(2, triton.next_power_of_2(D)), block.bit_length() - 1, block**-0.5, D
    )
