"""Product of a low-bit matrix with many rows on the GPU (prefill, batches): compute-bound, so codes are unpacked once.

A tile of weights becomes float16 in registers, (code - zero) exactly and then rounded once by its scale, and is
multiplied with 64 or 128 rows of activations; sums are float32. Up to 16 rows are memory-bound and use the
matrix-vector kernel, in one launch or two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.backends.triton.kernels.codes import (
    Tile,
    halves_of,
    load_words,
    matrix_of,
    natural_rows,
    row_words,
    scaled,
    spread,
    tail_tile,
    tail_words,
    values_of,
    weight_form,
)
from runtime.backends.triton.kernels.gemv import ROWS, LaunchConfig, Operands, check_operands, few_rows
from runtime.backends.triton.layout import GpuLinear
from runtime.backends.triton.sizes import BYTE, PIECE
from runtime.backends.triton.workspace import Workspace, capability
from runtime.errors import BackendError

BLOCK_N = 64
"""Output channels per program: with 128, sums, codes and unpacked weights no longer fit in registers."""
BLOCK_M = 64
"""Rows per program. A second kernel with 32, for short prompts, took 6.3 instead of 8.1 instructions a weight; one that
skips an empty half took 11.8, because activations then pass through shared memory twice."""
TALL = 128
"""Rows per program on Hopper, whose tensor cores read activations from shared memory; others' need registers for them.
On an H200, 512 rows of Llama 3 8B's four matrices at 4 bits took 763 µs instead of 972, but 384 rows 692 instead of
671. 128 channels by 256 rows were faster still for some of them, and left half of the device idle for others."""
TALL_FROM = 512
"""Rows from which on they pay."""
HOPPER = 9
"""Its major compute capability."""
WARPS = 4
STAGES = 1
"""No asynchronous copies: they would take 80 to 150 KiB of shared memory, leaving one program per multiprocessor."""
DOT = 64
"""Most channels unpacked at a time."""


@triton.jit
def _add_block(acc, words, ops, rows, block, PIECES: tl.constexpr, form: tl.constexpr, tile: tl.constexpr):
    """Multiply PIECES pieces of a block of codes with rows of activations, which the pointers [BLOCK_M] begin."""
    DOT: tl.constexpr = tile.DOT
    N, K = ops.matrix.N, ops.matrix.K
    for start in tl.static_range(0, PIECES * 32, DOT):
        offs_k = block * 512 + start + tl.arange(0, DOT)
        x_at = rows[None, :] + offs_k[:, None]
        x = tl.load(x_at) if form.EVEN_K else tl.load(x_at, mask=(offs_k < K)[:, None], other=0.0)
        w = values_of(words, ops.book, ops.matrix.exponent, start // 32, form, tile)
        if form.KIND == "uniform" or form.KIND == "minimums":
            group = (block * 512 + start) // form.GROUP_SIZE
            words_of_group = row_words(ops.matrix.groups, group * N, ops.first_n, N, tile.BLOCK_N, tile.WARPS)
            scale, offset = halves_of(words_of_group)
            offset, scale = spread(offset, DOT, tile.BLOCK_N), spread(scale, DOT, tile.BLOCK_N)
            w = (w + offset) * scale if form.KIND == "uniform" else (w - (1 << form.BITS)) * scale + offset
        acc = tl.dot(w, x, acc)
    return acc


@triton.jit
def multiply_rows(rows, matrix, pid_n, form: tl.constexpr, tile: tl.constexpr):
    """Output channels of block pid_n for rows of activations, which the pointers [BLOCK_M] begin.

    Returns float32 [BLOCK_N, BLOCK_M], channels in the order of `natural_rows`.
    """
    N, K = matrix.N, matrix.K
    BITS: tl.constexpr = form.BITS
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    WARPS: tl.constexpr = tile.WARPS
    # Channels beyond the end read the last one again, and are not stored.
    load_n = tl.minimum(pid_n * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    half = tl.arange(0, BLOCK_N // 2)
    first_n = pid_n * BLOCK_N + half // (8 * WARPS) * (16 * WARPS) + half // 8 % WARPS * 8 + half % 8
    ops = Operands(None, None, matrix, matrix.book + (load_n << BITS)[:, None], first_n, None)
    codes = matrix.codes + load_n[:, None] * 16 + tl.arange(0, 16)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    blocks = tl.cdiv(K, 32) // 16
    for block in range(blocks):
        words = load_words(codes + block * BITS * N * 16, N, block + 1 < tl.cdiv(K, 512), form)
        acc = _add_block(acc, words, ops, rows, block, 16, form, tile)
    if form.TAIL > 0:  # noqa: SIM102 - a constant and a number of the device
        if tl.cdiv(K, 32) % 16 > 0:
            words = tail_words(matrix.codes, load_n, N, blocks, form)
            acc = _add_block(acc, words, ops, rows, blocks, form.TAIL, form, tail_tile(form, tile))
    return scaled(acc, matrix, pid_n, form, tile)


@triton.jit(do_not_specialize=["biased", "M"])
def _gemm_kernel(x_ptr, matrix, biased, out_ptr, M, form: tl.constexpr, tile: tl.constexpr):
    """Program (i, j): rows of block i, output channels of block j. Programs of one weight tile run side by side."""
    N, K = matrix.N, matrix.K
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    WARPS: tl.constexpr = tile.WARPS
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    offs_n = pid_n * BLOCK_N + natural_rows(BLOCK_N, WARPS)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    stride_xm = K // 32 * 32 if form.EVEN_K else K  # the same, but seen to keep rows aligned
    # Rows beyond the end read the last row again, and are not stored.
    rows = x_ptr + tl.minimum(offs_m, M - 1).to(tl.int64) * stride_xm
    acc = multiply_rows(rows, matrix, pid_n, form, tile)
    acc += tl.load(matrix.bias + offs_n, mask=(offs_n < N) & (biased != 0), other=0.0)[:, None]
    mask = (offs_n < N)[:, None] & (offs_m < M)[None, :]
    tl.store(out_ptr + offs_m.to(tl.int64)[None, :] * N + offs_n[:, None], acc, mask)


def gemm(
    x: torch.Tensor,
    weight: GpuLinear,
    out: torch.Tensor,
    workspace: Workspace | None = None,
    *,
    sums: torch.Tensor | None = None,
) -> None:
    """The product of a low-bit matrix with any number of rows of activations, plus the bias: out = x Ŵᵀ + b.

    Args:
        x: float16 [M, K], contiguous, M at least 1; of a trellis as `rotate` writes it.
        weight: The matrix.
        out: float32 [M, N], written.
        workspace: Allows up to `ROWS` rows to be split along K (`few_rows`); None: no splitting.
        sums: As in `few_rows`.

    Raises:
        BackendError: operands of the wrong type or shape.
    """
    if weight.bits == BYTE:
        _gemm_bytes(x, weight, out)
        return
    if x.ndim == 2 and 1 <= x.shape[0] <= ROWS:
        config = LaunchConfig(split=1) if workspace is None else None
        few_rows(x, weight, out, workspace or Workspace(x.device), config, sums=sums)
        return
    check_operands(x, weight, out)
    M, N = out.shape
    block_m = TALL if M >= TALL_FROM and capability(x.device) == HOPPER else BLOCK_M
    grid = (-(-M // block_m), -(-N // BLOCK_N))
    if grid[1] > 65535:
        raise BackendError(f"{weight.name}: {N} output channels are more than a launch can cover")
    form = weight_form(weight)
    tile = Tile(DOT=min(DOT, form.SPAN), BLOCK_M=block_m, BLOCK_N=BLOCK_N, WARPS=WARPS)
    biased = int(weight.bias is not None)
    _gemm_kernel[grid](
        x, matrix_of(weight, out), biased, out, M, form=form, tile=tile, num_warps=WARPS, num_stages=STAGES
    )  # fmt: skip


@triton.jit(do_not_specialize=["biased", "M"])
def _bytes_kernel(x_ptr, codes_ptr, scales_ptr, bias_ptr, biased, out_ptr, M, N, K, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr, GROUP_SIZE: tl.constexpr):  # fmt: skip
    """Program (i, j): rows of block i, output channels of block j; a group's sum is scaled in float32."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k, load_n = tl.arange(0, GROUP_SIZE), tl.minimum(offs_n, N - 1)
    codes = codes_ptr + load_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    rows = x_ptr + tl.minimum(offs_m, M - 1).to(tl.int64)[None, :] * K + offs_k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for group in range(K // GROUP_SIZE):
        scale = tl.load(scales_ptr + group * N + load_n).to(tl.float32)
        w = tl.load(codes + group * GROUP_SIZE).to(tl.float16)
        acc += tl.dot(w, tl.load(rows + group * GROUP_SIZE)) * scale[:, None]
    acc += tl.load(bias_ptr + load_n, mask=(offs_n < N) & (biased != 0), other=0.0)[:, None]
    mask = (offs_n < N)[:, None] & (offs_m < M)[None, :]
    tl.store(out_ptr + offs_m.to(tl.int64)[None, :] * N + offs_n[:, None], acc, mask)


def _gemm_bytes(x: torch.Tensor, weight: GpuLinear, out: torch.Tensor) -> None:
    """The product with a matrix of 8 bits; arguments as of `gemm`."""
    check_operands(x, weight, out)
    M, (N, K) = len(x), weight.shape
    block_m = ROWS if M <= ROWS else BLOCK_M
    bias = out if weight.bias is None else weight.bias
    _bytes_kernel[-(-M // block_m), -(-N // BLOCK_N)](
        x, weight.codes, weight.groups, bias, int(weight.bias is not None), out, M, N, K,
        BLOCK_M=block_m, BLOCK_N=BLOCK_N, GROUP_SIZE=PIECE, num_warps=WARPS,
    )  # fmt: skip
