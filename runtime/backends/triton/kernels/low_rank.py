"""GEAR's low-rank correction of quantized pages on the GPU: all iterations of a head's page in one program.

torch's batched QR takes tens of milliseconds for the pages flushed at once, one for each layer and head, and no token
is decoded meanwhile. A page's residual fits in the registers of one program, so the subspace iteration is one launch;
heads whose residuals do not fit leave it to torch.
Columns are orthonormalized by applying Gram-Schmidt twice, which for four columns is as good as Householder. Their
signs may differ from those of `runtime.kv.oracle.correction`, but their product does not.

Source: GEAR Algorithm 2; Giraud et al. (2005) on going over the columns twice.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from runtime.kv.low_rank import ITERATIONS, start
from runtime.kv.oracle import correction

_VALUES_PER_WARP = 2048
"""Numbers of a residual per warp: 64 for each of its threads."""
_MOST = 32768
"""Most numbers of a residual: of twice as many a thread would hold 64, and has 64 registers in all."""
MAX_WARPS = 32
"""Most warps of a thread block."""


class Shape(NamedTuple):
    """A residual and its factors, as a constant."""

    T: int
    """Tokens."""
    D: int
    """Channels."""
    RANK: int
    """Columns of the factors."""
    BLOCK_T: int
    """Each padded to a power of two, as the next two."""
    BLOCK_D: int
    BLOCK_R: int


@triton.jit
def _column(matrix, offs_r, j):
    """Column j of a matrix [n, BLOCK_R]: [n]."""
    return tl.sum(tl.where(offs_r[None, :] == j, matrix, 0.0), axis=1)


@triton.jit
def _orthonormal(column, before):
    """A column [n] less its parts along the orthonormal or empty columns `before` [n, BLOCK_R], at length 1 or 0."""
    for _ in tl.static_range(2):
        along = tl.sum(column[:, None] * before, axis=0)
        column -= tl.sum(before * along[None, :], axis=1)
    length = tl.sqrt_rn(tl.sum(column * column, axis=0))
    return tl.div_rn(column, tl.where(length == 0, 1.0, length))  # a NaN stays one


@triton.jit(do_not_specialize=["rounds"])
def _low_rank_kernel(residual_ptr, start_ptr, a_ptr, b_ptr, rounds, alike, shape: tl.constexpr):
    """Program i finds the factors of residual i. residual [n, T, D], start [D, RANK], a [n, T, RANK], b [n, D, RANK].

    `rounds` of the iteration; `alike` as in `low_rank`.
    """
    T: tl.constexpr = shape.T
    D: tl.constexpr = shape.D
    RANK: tl.constexpr = shape.RANK
    BLOCK_T: tl.constexpr = shape.BLOCK_T
    BLOCK_R: tl.constexpr = shape.BLOCK_R
    record = tl.program_id(0).to(tl.int64)
    offs_t, offs_d, offs_r = tl.arange(0, BLOCK_T), tl.arange(0, shape.BLOCK_D), tl.arange(0, BLOCK_R)
    mask_t, mask_d, mask_r = offs_t < T, offs_d < D, offs_r < RANK
    at = record * (T * D) + offs_t[:, None] * D + offs_d[None, :]
    x = tl.load(residual_ptr + at, mask=mask_t[:, None] & mask_d[None, :], other=0.0)
    offs_b, mask_b = offs_d[:, None] * RANK + offs_r[None, :], mask_d[:, None] & mask_r[None, :]
    b = tl.load(start_ptr + offs_b, mask=mask_b, other=0.0)
    a = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    for _ in range(rounds):
        b = tl.where(mask_b, b + (alike / D) * tl.sum(b, axis=0)[None, :], 0.0)
        a = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for j in tl.static_range(RANK):
            column = tl.sum(x * _column(b, offs_r, j)[None, :], axis=1)
            a = tl.where(offs_r[None, :] == j, _orthonormal(column, a)[:, None], a)
        for j in tl.static_range(RANK):
            column = tl.sum(x * _column(a, offs_r, j)[:, None], axis=0)
            b = tl.where(offs_r[None, :] == j, column[:, None], b)
    offs_a, mask_a = offs_t[:, None] * RANK + offs_r[None, :], mask_t[:, None] & mask_r[None, :]
    tl.store(a_ptr + record * (T * RANK) + offs_a, a.to(tl.float16), mask=mask_a)
    tl.store(b_ptr + record * (D * RANK) + offs_b, b.to(tl.float16), mask=mask_b)


def low_rank(residual: torch.Tensor, rank: int, *, alike: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """As `runtime.kv.oracle.correction.low_rank`, but for signs, and for columns of zeros at residuals of lower rank.

    Args:
        residual: float32 [..., T, D].
        rank: r, at most D.
        alike: See there.

    Returns:
        a float16 [..., T, r] and b float16 [..., D, r]; does not wait for the device, unless torch computes them.
    """
    *records, T, D = residual.shape
    if triton.next_power_of_2(T) * triton.next_power_of_2(D) > _MOST:
        return correction.low_rank(residual, rank, alike=alike)
    residual = residual.contiguous()
    a = torch.empty(*records, T, rank, dtype=torch.float16, device=residual.device)
    b = torch.empty(*records, D, rank, dtype=torch.float16, device=residual.device)
    shape, warps = _shape(T, D, rank)
    _low_rank_kernel[(residual.numel() // (T * D),)](
        residual, _start(D, rank, residual.device), a, b, ITERATIONS, float(alike), shape=shape, num_warps=warps
    )  # fmt: skip
    return a, b


@cache
def _start(head_dim: int, rank: int, device: torch.device) -> torch.Tensor:
    """The start matrix of the iteration, on the device."""
    return torch.from_numpy(start(head_dim, rank)).to(device)


def _shape(T: int, D: int, rank: int) -> tuple[Shape, int]:
    """The constants, and warps."""
    block_t, block_d, block_r = (triton.next_power_of_2(size) for size in (T, D, rank))
    warps = min(MAX_WARPS, max(1, block_t * block_d // _VALUES_PER_WARP))
    return Shape(T, D, rank, block_t, block_d, block_r), warps
