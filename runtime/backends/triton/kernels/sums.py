"""Sums of 32 adjacent activations on the GPU, used by low-bit products to subtract code offsets.

A code becomes the number 2^bits + code (`runtime.backends.triton.kernels.gemv`), and its zero must be subtracted as
well: in total (2^bits + zero) * sum of a group's activations. Kernels that write activations also store the sums of
their pieces with `store_sums`; otherwise a kernel here computes them. Sums are those of the rounded activations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_K = 1024
"""Activations per program: 8 for each of its 128 threads."""


@triton.jit
def store_sums(sums_ptr, x, first, K, BLOCK_K: tl.constexpr):
    """Write the sums of the pieces of x float16 [BLOCK_K] to sums [ceil(K / 32)]; x starts with its piece `first`.

    Activations from K on must be zero.
    """
    totals = tl.sum(tl.reshape(x.to(tl.float32), [BLOCK_K // 32, 32]), axis=1)
    offs = first + tl.arange(0, BLOCK_K // 32)
    tl.store(sums_ptr + offs, totals, mask=offs * 32 < K)


@triton.jit
def _sums_kernel(x_ptr, sums_ptr, K, BLOCK_K: tl.constexpr):
    """Program (m, block) handles activations [block * BLOCK_K, ...) of row m. x [M, K], sums [M, ceil(K / 32)]."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + row * K + offs, mask=offs < K, other=0.0)
    store_sums(sums_ptr + row * tl.cdiv(K, 32), x, tl.program_id(1) * (BLOCK_K // 32), K, BLOCK_K)


def piece_sums(x: torch.Tensor, sums: torch.Tensor) -> None:
    """Write the sums of every 32 adjacent activations; the last may cover fewer.

    Args:
        x: float16 [M, K], contiguous.
        sums: float32 [M, ceil(K / 32)], contiguous; overwritten.
    """
    M, K = x.shape
    assert sums.shape == (M, triton.cdiv(K, 32))
    _sums_kernel[(M, triton.cdiv(K, BLOCK_K))](x, sums, K, BLOCK_K=BLOCK_K, num_warps=4)
