"""Compensation of all rows of a prompt with a shared set of residual rows, on tensor cores.

The channels are known before the prompt, so their residuals are copied to the device ahead of their layer
(`runtime.backends.triton.staging`): by `stage`, whose few programs read page-locked memory during the previous layer's
product, or by the copy engine if all channels are wanted. `multiply` then adds sum over i of x[m, c_i] * R̂[c_i, n], in
half precision with float32 sums: codes of 2 to 8 bits are exact in halves, and an output channel's scale is applied to
its sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.triton.kernels.compensate import unpack_residuals
from runtime.errors import BackendError

PROGRAMS = 16
"""Programs that fetch: with 4 KiB in flight each, four tiles deep, they saturate a link."""
_WORDS = 256
"""Words of a row per program and iteration."""
_DEPTH = 4
"""Pipeline stages of the fetch."""
BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 32
"""Rows, output channels and input channels of a product's tile."""
_FETCH_WARPS, WARPS, STAGES = 2, 4, 3


class Form(NamedTuple):
    """Compile-time parameters of the product."""

    BITS: int
    """Bits of a residual."""
    ALL: bool
    """Whether the channels are all channels, in order."""
    BLOCK_M: int = BLOCK_M
    """See the module, as the next."""
    BLOCK_N: int = BLOCK_N
    BLOCK_K: int = BLOCK_K


class Factors(NamedTuple):
    """The tensors of a product."""

    x: Any
    """float16 [M, K]."""
    channels: Any
    """int32 [k]; None for all channels."""
    staged: Any
    """int32 [k, words]."""
    scales: Any
    """float16 [N], or None at 16 bits."""


@triton.jit(do_not_specialize=["k"])
def _stage_kernel(codes_ptr, channels_ptr, staged_ptr, k, words, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Copy the rows of codes [K, words] that channels [k] name to staged [k, words]."""
    tiles = tl.cdiv(words, BLOCK)
    for step in tl.range(tl.program_id(0), k * tiles, tl.num_programs(0), num_stages=DEPTH):
        row = step // tiles
        offs = step % tiles * BLOCK + tl.arange(0, BLOCK)
        source = codes_ptr + tl.load(channels_ptr + row).to(tl.int64) * words
        values = tl.load(source + offs, mask=offs < words, other=0, cache_modifier=".cg")
        tl.store(staged_ptr + row.to(tl.int64) * words + offs, values, mask=offs < words)


@triton.jit
def residual_product(rows, factors, k, words, form: tl.constexpr):
    """The product of rows of activations, which the pointers [BLOCK_M, 1] begin, with a block of output channels.

    Returns float32 [BLOCK_M, BLOCK_N], not yet scaled; the block is that of program axis 1.
    """
    BITS: tl.constexpr = form.BITS
    BLOCK_M: tl.constexpr = form.BLOCK_M
    BLOCK_N: tl.constexpr = form.BLOCK_N
    BLOCK_K: tl.constexpr = form.BLOCK_K
    EACH: tl.constexpr = BLOCK_N * BITS // 32
    offs_w = tl.program_id(1) * EACH + tl.arange(0, EACH)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        inside = offs_k < k
        channels = offs_k
        if not form.ALL:
            channels = tl.load(factors.channels + offs_k, mask=inside, other=0)
        x = tl.load(rows + channels[None, :], mask=inside[None, :], other=0.0)
        place = factors.staged + offs_k.to(tl.int64)[:, None] * words + offs_w[None, :]
        codes = tl.load(place, mask=inside[:, None] & (offs_w < words)[None, :], other=0)
        residuals = tl.reshape(unpack_residuals(codes[:, :, None], BITS).to(tl.float16), [BLOCK_K, BLOCK_N])
        acc = tl.dot(x, residuals, acc)
    return acc


@triton.jit(do_not_specialize=["M", "k"])
def _multiply_kernel(factors, out_ptr, M, N, K, k, words, form: tl.constexpr):
    """Program (i, j): rows of block i, output channels of block j."""
    BLOCK_M: tl.constexpr = form.BLOCK_M
    BLOCK_N: tl.constexpr = form.BLOCK_N
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the end read the last row again, and are not stored.
    rows = factors.x + tl.minimum(offs_m, M - 1).to(tl.int64)[:, None] * K
    acc = residual_product(rows, factors, k, words, form)
    if factors.scales is not None:
        acc *= tl.load(factors.scales + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    places = out_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    tl.store(places, tl.load(places, mask, other=0.0) + acc, mask)


def stage(codes: torch.Tensor, channels: torch.Tensor, staged: torch.Tensor) -> None:
    """Copy rows of residuals to the device.

    Args:
        codes: int32 [K, words] in page-locked memory (`GpuResidual.codes`).
        channels: int32 [k] on the device, each < K.
        staged: int32 [k, words] on the device, written.
    """
    k, words = staged.shape
    _stage_kernel[(min(PROGRAMS, k),)](
        codes, channels, staged, k, words, BLOCK=_WORDS, DEPTH=_DEPTH, num_warps=_FETCH_WARPS
    )  # fmt: skip


def multiply(
    x: torch.Tensor,
    channels: torch.Tensor | None,
    staged: torch.Tensor,
    scales: torch.Tensor | None,
    bits: int,
    out: torch.Tensor,
) -> None:
    """Add the residuals' part to a product: out[m] += sum over i of x[m, channels[i]] * R̂[channels[i]].

    Args:
        x: float16 [M, K], contiguous.
        channels: int32 [k]; None: all, in order.
        staged: int32 [k, words], the residual rows of these channels in canonical packing.
        scales: float16 [N], of the residuals; None at 16 bits.
        bits: 2, 4, 8 or 16.
        out: float32 [M, N], contiguous, added to.

    Raises:
        BackendError: inconsistent operands.
    """
    (M, K), N, (k, words) = x.shape, out.shape[1], staged.shape
    if k != (K if channels is None else channels.numel()) or words * 32 < N * bits or (scales is None) != (bits == 16):
        raise BackendError(f"{k} rows of {words} words are not the {bits}-bit residuals of a product {[M, K]} x {N}")
    grid = (-(-M // BLOCK_M), -(-N // BLOCK_N))
    if grid[1] > 65535:
        raise BackendError(f"{N} output channels are more than a launch can cover")
    form = Form(BITS=bits, ALL=channels is None)
    _multiply_kernel[grid](
        Factors(x, channels, staged, scales), out, M, N, K, k, words, form=form, num_warps=WARPS, num_stages=STAGES
    )  # fmt: skip
