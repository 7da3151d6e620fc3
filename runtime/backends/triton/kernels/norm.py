"""Residual addition and the following RMSNorm, in one pass over a row, on the GPU.

What is added may pass a norm of its own first, and what follows may be none: so norms before, behind and on both sides
of attention and MLP take one launch, and so do two outputs that are added, as of experts beside an MLP, where both pass
a norm before. The first norm of a step also initializes the residual stream, with the embeddings of the step's tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.triton.kernels.activations import Tokens, rounding_shape, store_left, store_tokens, to_half

CHANNELS_PER_WARP = 256
"""Channels per warp, kept in registers: 8 a thread. One program handles a whole row, so few warps would be slow."""
MAX_WARPS = 32
_ADDED, _COMPENSATED, _GATHERED, _EMBEDDED, _LEFT, _BOTH = (tl.constexpr(1 << place) for place in range(6))
"""Bits of `given`: whether y, and dec, are added; whether `index` contains rows; whether the stream begins with
embeddings; whether `store_left` is wanted; whether the output beside y has a compensation. A run-time argument, so
that a model needs one kernel; pointers that are not given are not read."""


class Beside(NamedTuple):
    """An output that is added beside another, and the norms that both pass before; None: it is added as it is."""

    y: Any  # float32 [M, C]
    dec: Any  # float32 [M, C], its compensation; None: there is none
    weight: Any  # float32 [C], weight of its norm
    other: Any  # float32 [C], weight of the norm of the other output


class RowNorms(NamedTuple):
    """RMSNorms on both sides of an addition to the residual stream."""

    weight: Any  # float32 [C], weight of the norm of the sum; None: the sum is left as it is
    eps: Any
    added: Any = None  # float32 [C], weight of the norm of what is added; None: that is added as it is
    added_eps: Any = 0.0  # Its epsilon, and that of the norms of `beside`
    beside: Any = None  # `Beside`; None: one output is added
    scale: Any = None  # float32 [1], by which the sum is multiplied before its norm; None: it is not
    apart: Any = None  # Numbers from a row of h to the next, and of y; None: C


@triton.jit
def normalized(x, weight_ptr, eps, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """RMSNorm of x float32 [BLOCK_C], 0 from C on. The weight is float32 [C]."""
    offs_c = tl.arange(0, BLOCK_C)
    weight = tl.load(weight_ptr + offs_c, mask=offs_c < C, other=0.0)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / C + eps) * weight


@triton.jit(do_not_specialize=["given"])
def _add_norm_kernel(
    h_ptr, y_ptr, dec_ptr, index_ptr, embeddings_ptr, norms, x_ptr, left_ptr, given,
    C: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Program r handles row r, or row index[r]. h, y, dec [M, C], x [M, C] or [R, C]; index [R]; `RowNorms`.

    embeddings [M, C], with which the residual stream begins; left as in `store_left`, of the rows of x.
    """
    pointers = (h_ptr, y_ptr, dec_ptr, index_ptr, embeddings_ptr)
    x = to_half(_normed_row(pointers, norms, given, C, BLOCK_C))
    out_row = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    tl.store(x_ptr + out_row * C + offs_c, x, mask=offs_c < C)
    if (given & _LEFT) != 0:
        store_left(left_ptr, out_row, x, 0, C, C, BLOCK_C)


@triton.jit(do_not_specialize=["given"])
def _add_norm_round_kernel(
    h_ptr, y_ptr, dec_ptr, index_ptr, embeddings_ptr, norms, x_ptr, tokens, given,
    C: tl.constexpr, shape: tl.constexpr,
):  # fmt: skip
    """The same, with rows also quantized to INT8."""
    pointers = (h_ptr, y_ptr, dec_ptr, index_ptr, embeddings_ptr)
    x = _normed_row(pointers, norms, given, C, shape.BLOCK_K)
    out_row = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, shape.BLOCK_K)
    tl.store(x_ptr + out_row * C + offs_c, to_half(x), mask=offs_c < C)
    store_tokens(tokens, out_row, x, shape)


@triton.jit
def _normed_row(pointers, norms, given, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """The row of this program, added up, kept in h and normalized, float32 [BLOCK_C]; 0 from C on.

    The pointers are those of h, y, dec, index and embeddings.
    """
    h_ptr, y_ptr, dec_ptr, index_ptr, embeddings_ptr = pointers
    out_row = tl.program_id(0).to(tl.int64)
    gathered = (given & _GATHERED) != 0
    embedded = (given & _EMBEDDED) != 0
    row = tl.where(gathered, tl.load(index_ptr + out_row, mask=gathered, other=0).to(tl.int64), out_row)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    offs = row * (C if norms.apart is None else norms.apart) + offs_c
    h = tl.load(h_ptr + offs, mask=mask_c & ((given & _EMBEDDED) == 0), other=0.0)
    h += tl.load(embeddings_ptr + offs, mask=mask_c & embedded, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=mask_c & ((given & _ADDED) != 0), other=0.0)
    y += tl.load(dec_ptr + offs, mask=mask_c & ((given & _COMPENSATED) != 0), other=0.0)
    if norms.beside is not None:
        other = tl.load(norms.beside.y + offs, mask=mask_c, other=0.0)
        other += tl.load(norms.beside.dec + offs, mask=mask_c & ((given & _BOTH) != 0), other=0.0)
        if norms.beside.other is not None:
            y = normalized(y, norms.beside.other, norms.added_eps, C, BLOCK_C)
        if norms.beside.weight is not None:
            other = normalized(other, norms.beside.weight, norms.added_eps, C, BLOCK_C)
        y += other
    if norms.added is not None:
        y = normalized(y, norms.added, norms.added_eps, C, BLOCK_C)
    h += y
    if norms.scale is not None:
        h *= tl.load(norms.scale)
    tl.store(h_ptr + offs, h, mask=mask_c & ((given & _GATHERED) == 0))
    if norms.weight is not None:
        h = normalized(h, norms.weight, norms.eps, C, BLOCK_C)
    return h


def add_norm(
    h: torch.Tensor,
    y: torch.Tensor | None,
    dec: torch.Tensor | None,
    norms: RowNorms,
    x: torch.Tensor,
    rows: torch.Tensor | None = None,
    left: torch.Tensor | Tokens | None = None,
) -> None:
    """Add y + dec to the residual stream, then x = h / sqrt(mean(h²) + eps) * weight, rounded to half precision.

    With `norms.added`, y + dec is normalized likewise before it is added; without `norms.weight`, x = h. With
    `norms.beside`, what is added is the sum of that output and y + dec, maybe both normalized. With `norms.scale`, h is
    the sum times that.

    Args:
        h: float32 [M, C], the residual stream; updated in place, or unchanged with `rows`. Its rows may be further
            apart, and those of y then are as far.
        y: float32 [M, C], output of the linear layer that ended the sublayer; None: nothing is added.
        dec: float32 [M, C], its compensation; None if there is none, or if y is None.
        norms: Weights and epsilons.
        x: float16 [M, C], or [R, C] with `rows`; overwritten.
        rows: int32 [R], the rows of h to normalize, each in [0, M); None = all, in order.
        left: What products read of the same rows; overwritten. As `store_left` writes it, or INT8 tokens [M or R, C],
            quantized before half precision. None: not needed.
    """
    assert y is not None or dec is None, "a compensation belongs to the output of a linear layer"
    given = (y is not None) | (dec is not None) << 1 | (rows is not None) << 2
    _launch(h, (y, dec), rows, x, norms, x, left, given)


def embed_norm(
    embeddings: torch.Tensor,
    h: torch.Tensor,
    norms: RowNorms,
    x: torch.Tensor,
    left: torch.Tensor | Tokens | None = None,
) -> None:
    """Initialize the residual stream h with embeddings, float16 [M, C], and normalize it as `add_norm` does."""
    _launch(h, (None, None), None, embeddings, norms, x, left, _EMBEDDED.value)


def _launch(
    h: torch.Tensor,
    added: tuple[torch.Tensor | None, torch.Tensor | None],
    index: torch.Tensor | None,
    embeddings: torch.Tensor,
    norms: RowNorms,
    x: torch.Tensor,
    left: torch.Tensor | Tokens | None,
    given: int,
) -> None:
    """Launch over the rows of x; absent tensors are replaced by another of the same type.

    `added` is an output and its compensation, `left` what else is left of the rows.
    """
    y, dec = added
    R, C = x.shape
    if norms.beside is not None:
        both = norms.beside
        given |= 0 if both.dec is None else _BOTH.value
        norms = norms._replace(beside=both._replace(dec=both.y if both.dec is None else both.dec))
    if h.stride(0) != C:
        norms = norms._replace(apart=h.stride(0))
    block, warps = _shape(C)
    y, dec, index = h if y is None else y, h if dec is None else dec, h.view(torch.int32) if index is None else index
    if isinstance(left, Tokens):
        shape, warps = rounding_shape(C, left.group_size)
        _add_norm_round_kernel[(R,)](
            h, y, dec, index, embeddings, norms, x, left.operands, given, C=C, shape=shape, num_warps=warps,
            enable_fp_fusion=False,
        )  # fmt: skip
        return
    given |= 0 if left is None else _LEFT.value
    _add_norm_kernel[(R,)](
        h, y, dec, index, embeddings, norms, x, h if left is None else left, given, C=C, BLOCK_C=block, num_warps=warps
    )  # fmt: skip


def _shape(channels: int) -> tuple[int, int]:
    """Channels of a program, a power of two, and its warps."""
    block = max(64, triton.next_power_of_2(channels))
    return block, max(1, min(MAX_WARPS, block // CHANNELS_PER_WARP))
