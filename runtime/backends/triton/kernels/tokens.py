"""INT8 tokens on the GPU: activations quantized with one scale per row, by the kernel that computes them.

Norms and the MLP's gate process a whole row, so they know its largest magnitude before writing: they store codes, scale
and the sums of the codes of each group, which W4A8 products use to subtract zero-points. Attention's output is
quantized by a separate kernel.

Source: QServe §4.1, Fig. 11 (which kernels round activations).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.triton.sizes import token_width

CHANNELS_PER_WARP = 512
"""Channels quantized per warp: 16 a thread."""
MAX_WARPS = 16
"""Most warps of a program: 32 would leave a thread 64 registers, too few on sm_120."""
_TOP = tl.constexpr(127.0)
_TINY = tl.constexpr(1.1754943508222875e-38)
"""The smallest normal number of float32: rows with a smaller scale count as zero (`models.per_token`)."""
_WHOLE = tl.constexpr(12582912.0)
"""1.5 · 2^23: a number of float32 that is added to it and taken off again is rounded to even."""


class Shape(NamedTuple):
    """Compile-time parameters of kernels that quantize."""

    BLOCK_K: int
    """Channels of a program, a power of two: the whole row."""
    WIDTH: int
    """Codes of a row."""
    GROUP_SIZE: int
    """`Tokens.group_size`."""


class Operands(NamedTuple):
    """INT8 tokens as a kernel argument."""

    codes: Any
    """int8 [M, width], 0 from K on."""
    scales: Any
    """float32 [M]."""
    sums: Any
    """int32 [M, G]."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """INT8 tokens on the device: x[m, k] is approximately codes[m, k] * scales[m]."""

    codes: torch.Tensor
    """int8 [M, width], 0 from K on (`runtime.backends.triton.sizes.token_width`)."""
    scales: torch.Tensor
    """float32 [M]."""
    sums: torch.Tensor
    """int32 [M, G], the sums of the codes of every `group_size` channels, the last of fewer."""
    group_size: int
    """0 = one sum for the row."""

    @property
    def operands(self) -> Operands:
        """The kernel argument."""
        return Operands(self.codes, self.scales, self.sums)


@triton.jit
def store_tokens(tokens, row, x, shape: tl.constexpr):
    """Quantize a row x float32 [BLOCK_K], 0 from K on, and store it. The scale is NaN if a number is not finite."""
    BLOCK_K: tl.constexpr = shape.BLOCK_K
    GROUP_SIZE: tl.constexpr = shape.GROUP_SIZE
    WIDTH: tl.constexpr = shape.WIDTH
    offs = tl.arange(0, BLOCK_K)
    finite = tl.abs(x) < float("inf")
    x = tl.where(finite, x, 0.0)
    scale = tl.div_rn(tl.max(tl.abs(x), axis=0), _TOP) + tl.sum(tl.where(finite, 0.0, float("nan")), axis=0)
    inverse = tl.where(scale > _TINY, tl.div_rn(1.0, tl.where(scale > _TINY, scale, 1.0)), 0.0)
    rounded = (x * inverse + _WHOLE) - _WHOLE
    codes = tl.minimum(tl.maximum(rounded, -_TOP), _TOP).to(tl.int32)
    tl.store(tokens.codes + row * WIDTH + offs, codes.to(tl.int8), mask=offs < WIDTH)
    tl.store(tokens.scales + row, scale)
    if GROUP_SIZE == 0:
        tl.store(tokens.sums + row, tl.sum(codes, axis=0))
    else:
        sums = tl.sum(tl.reshape(codes, [BLOCK_K // GROUP_SIZE, GROUP_SIZE]), axis=1)
        groups = WIDTH // GROUP_SIZE
        offs_g = tl.arange(0, BLOCK_K // GROUP_SIZE)
        tl.store(tokens.sums + row * groups + offs_g, sums, mask=offs_g < groups)


@triton.jit
def _round_kernel(x_ptr, tokens, K: tl.constexpr, shape: tl.constexpr):
    """Program m rounds row m of x float16 [M, K]."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, shape.BLOCK_K)
    store_tokens(tokens, row, tl.load(x_ptr + row * K + offs, mask=offs < K, other=0.0).to(tl.float32), shape)


def round_tokens(x: torch.Tensor, to: Tokens) -> None:
    """Quantize rows stored in half precision.

    Args:
        x: float16 [M, K], contiguous.
        to: Destination.
    """
    M, K = x.shape
    shape, warps = rounding_shape(K, to.group_size)
    assert to.codes.shape == (M, shape.WIDTH)
    _round_kernel[(M,)](x, to.operands, K=K, shape=shape, num_warps=warps, enable_fp_fusion=False)


def rounding_shape(K: int, group_size: int) -> tuple[Shape, int]:
    """The compile-time parameters of kernels that quantize rows of K channels, and their warps."""
    width = token_width(K, group_size)
    block = max(256, triton.next_power_of_2(width))
    return Shape(block, width, group_size), max(1, min(MAX_WARPS, block // CHANNELS_PER_WARP))
