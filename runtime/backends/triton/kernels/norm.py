"""The residual sum and the root-mean-square normalization after it, in one pass over the row, on the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from runtime.backends.triton.kernels.sums import store_sums

if TYPE_CHECKING:
    from runtime.backends.triton.ahead import Ahead

CHANNELS_PER_WARP = 256
"""Channels that a warp keeps in registers: 8 a thread. One program holds a whole row, so few warps would wait long."""
MAX_WARPS = 32
"""Warps that a block of threads can have."""


@triton.jit
def _add_norm_kernel(
    h_ptr, y_ptr, dec_ptr, rows_ptr, weight_ptr, x_ptr, sums_ptr, eps, C: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Program r handles row r, or row rows[r]. h, y, dec [M, C], weight [C], x [M, C] or [R, C]; rows [R].

    sums [M or R, ceil(C / 32)].
    """
    out_row = tl.program_id(0).to(tl.int64)
    row = out_row
    if rows_ptr is not None:
        row = tl.load(rows_ptr + out_row).to(tl.int64)
    offs_c = tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    h = tl.load(h_ptr + row * C + offs_c, mask=mask_c, other=0.0)
    if y_ptr is not None:
        y = tl.load(y_ptr + row * C + offs_c, mask=mask_c, other=0.0)
        if dec_ptr is not None:
            y += tl.load(dec_ptr + row * C + offs_c, mask=mask_c, other=0.0)
        h += y
        if rows_ptr is None:
            tl.store(h_ptr + row * C + offs_c, h, mask=mask_c)
    weight = tl.load(weight_ptr + offs_c, mask=mask_c, other=0.0)
    scale = tl.rsqrt(tl.sum(h * h, axis=0) / C + eps)
    x = (h * scale * weight).to(tl.float16)
    tl.store(x_ptr + out_row * C + offs_c, x, mask=mask_c)
    if sums_ptr is not None:
        store_sums(sums_ptr + out_row * ((C + 31) // 32), x, 0, C, BLOCK_C)


def add_norm(
    h: torch.Tensor,
    y: torch.Tensor | None,
    dec: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    x: torch.Tensor,
    rows: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> None:
    """Add y + dec to the residual stream, then x = h / sqrt(mean(h²) + eps) * weight, rounded to half precision.

    Args:
        h: float32 [M, C], the residual stream; updated in place; with `rows` it is left as it is.
        y: float32 [M, C], output of the linear layer that ended the sublayer; None before the first block.
        dec: float32 [M, C], its compensation; None where it has none, and where y is None.
        weight: float32 [C].
        eps: `ModelSpec.norm_eps`.
        x: float16 [M, C], or [R, C] with `rows`; overwritten.
        rows: int32 [R], the rows of h to normalize, each in [0, M); None = all, in order.
        sums: float32 [M, ceil(C / 32)], or [R, ...] with `rows`; overwritten with the sums of the pieces of x
            (`runtime.backends.triton.kernels.sums`). None: nobody asks.
    """
    assert y is not None or dec is None, "a compensation belongs to the output of a linear layer"
    R, C = x.shape
    block, warps = _shape(C)
    _add_norm_kernel[(R,)](h, y, dec, rows, weight, x, sums, eps, C=C, BLOCK_C=block, num_warps=warps)


def _shape(channels: int) -> tuple[int, int]:
    """Channels of a program, a power of two, and its warps."""
    block = max(32, triton.next_power_of_2(channels))
    return block, max(1, min(MAX_WARPS, block // CHANNELS_PER_WARP))


def ahead() -> tuple[Ahead, ...]:
    """A block's norm with compensation for 4096 channels and for 5120, padded to 8192, and the last norm with rows."""
    return (_ahead(4096, rows=False), _ahead(5120, rows=False), _ahead(4096, rows=True))


def _ahead(channels: int, *, rows: bool) -> Ahead:
    """One specialization."""
    from runtime.backends.triton.ahead import Ahead

    block, warps = _shape(channels)
    pointers = dict.fromkeys(("h_ptr", "y_ptr", "dec_ptr"), "*fp32")
    constants: dict[str, int | None] = {"C": channels, "BLOCK_C": block}
    if not rows:
        constants["rows_ptr"] = None
    return Ahead(
        name=f"add_norm C{channels}{' rows' if rows else ''}",
        kernel=_add_norm_kernel,
        signature={
            **pointers,
            "rows_ptr": "*i32" if rows else "constexpr",
            "weight_ptr": "*fp32",
            "x_ptr": "*fp16",
            "sums_ptr": "*fp32",
            "eps": "fp32",
            "C": "constexpr",
            "BLOCK_C": "constexpr",
        },
        constants=constants,
        num_warps=warps,
    )
