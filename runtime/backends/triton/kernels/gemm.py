"""Low-bit matrix times many rows on the GPU (prefill, batches): arithmetic is the limit, so codes are unpacked once.

A tile of weights becomes float16 in registers, (code - zero) exactly and then rounded once by its scale, and meets up
to 64 rows of activations; sums are float32. Up to 16 rows, memory is still the limit and the matrix-vector kernel
serves them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from runtime.backends.triton.kernels.gemv import (
    EXPONENT,
    ROWS,
    WEIGHT_SIGNATURE,
    LaunchConfig,
    check_operands,
    few_rows,
    halves_of,
    natural_rows,
    row_words,
    spread,
    values_of,
    weight_arguments,
    weight_constants,
)
from runtime.backends.triton.layout import GpuLinear
from runtime.backends.triton.workspace import Workspace
from runtime.errors import BackendError

if TYPE_CHECKING:
    from runtime.backends.triton.ahead import Ahead

BLOCK_N = 64
"""Output channels of a program: with 128, sums, codes and unpacked weights no longer fit the registers."""
WARPS = 4
"""Warps of a program."""
STAGES = 1
"""No copies ahead: they would take 80 to 150 KiB of shared memory and leave one program on a multiprocessor."""
DOT = 64
"""Channels that are unpacked at a time, at most."""


@triton.jit
def _gemm_kernel(
    x_ptr, codes_ptr, groups_ptr, book_ptr, bias_ptr, out_ptr, M, N, K, exponent, GROUP_SIZE: tl.constexpr,
    BITS: tl.constexpr, CODEBOOK: tl.constexpr, DOT: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """Program (i, j): rows of block i, output channels of block j. Programs of one weight tile run side by side."""
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    # Rows beyond the end read the last one again, and are not stored.
    load_n = tl.minimum(pid_n * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    offs_n = pid_n * BLOCK_N + natural_rows(BLOCK_N, WARPS)
    half = tl.arange(0, BLOCK_N // 2)
    first_n = pid_n * BLOCK_N + half // (8 * WARPS) * (16 * WARPS) + half // 8 % WARPS * 8 + half % 8
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    stride_xm = K // 512 * 512 if EVEN_K else K  # the same, but seen to keep rows aligned
    rows = x_ptr + tl.minimum(offs_m, M - 1).to(tl.int64) * stride_xm
    book = book_ptr + (load_n << BITS)[:, None]
    words = codes_ptr + load_n[:, None] * 16 + tl.arange(0, 16)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for block in range(tl.cdiv(K, 512)):
        at = words + block * BITS * N * 16
        c0 = tl.load(at)
        c1 = tl.load(at + N * 16)
        c2 = tl.load(at + N * 32)
        c3 = tl.load(at + N * 48) if BITS == 4 else c2
        for start in tl.static_range(0, 512, DOT):
            offs_k = block * 512 + start + tl.arange(0, DOT)
            x_at = rows[None, :] + offs_k[:, None]
            x = tl.load(x_at) if EVEN_K else tl.load(x_at, mask=(offs_k < K)[:, None], other=0.0)
            w = values_of(c0, c1, c2, c3, book, exponent, start // 32, DOT, BITS, BLOCK_N, WARPS, CODEBOOK)
            if not CODEBOOK:
                group = tl.minimum((block * 512 + start) // GROUP_SIZE, (K - 1) // GROUP_SIZE)
                scale, offset = halves_of(row_words(groups_ptr + group * N, first_n, N, BLOCK_N, WARPS))
                w = (w + spread(offset, DOT, BLOCK_N)) * spread(scale, DOT, BLOCK_N)
            acc = tl.dot(w, x, acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + tl.minimum(offs_n, N - 1))[:, None]
    mask = (offs_n < N)[:, None] & (offs_m < M)[None, :]
    tl.store(out_ptr + offs_m.to(tl.int64)[None, :] * N + offs_n[:, None], acc, mask)


def gemm(
    x: torch.Tensor,
    weight: GpuLinear,
    out: torch.Tensor,
    workspace: Workspace | None = None,
    config: LaunchConfig | None = None,
) -> None:
    """The product of a low-bit matrix with rows of activations, plus the bias: out = x Ŵᵀ + b.

    Args:
        x: float16 [M, K], contiguous, M at least 1.
        weight: The matrix.
        out: float32 [M, N], written.
        workspace: Lets up to `ROWS` rows be split along K, see `runtime.backends.triton.kernels.gemv.few_rows`;
            without one they are not.
        config: The cut of that product; chosen when None.

    Raises:
        BackendError: operands of another type or shape.
    """
    if x.ndim == 2 and 1 <= x.shape[0] <= ROWS:
        if workspace is None:
            workspace, config = Workspace(x.device), config or LaunchConfig(split=1)
        few_rows(x, weight, out, workspace, config)
        return
    check_operands(x, weight, out)
    M, (N, K) = x.shape[0], weight.shape
    block_m = 32 if M <= 32 else 64
    grid = (-(-M // block_m), -(-N // BLOCK_N))
    if grid[1] > 65535:
        raise BackendError(f"{weight.name}: {N} output channels are more than a launch can cover")
    constants = weight_constants(weight)
    dot = min(DOT, constants.pop("SPAN"))
    _gemm_kernel[grid](
        x, *weight_arguments(weight, out), out, M, N, K, EXPONENT[weight.bits], **constants, DOT=dot,
        BLOCK_M=block_m, BLOCK_N=BLOCK_N, WARPS=WARPS, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


def ahead() -> tuple[Ahead, ...]:
    """Specializations for models: prompts with groups of 128 at 3 and 4 bits, and with a codebook."""
    from runtime.backends.triton.ahead import Ahead

    constants = {"GROUP_SIZE": 128, "DOT": DOT, "HAS_BIAS": False, "EVEN_K": True, "BLOCK_N": BLOCK_N, "WARPS": WARPS}
    return tuple(
        Ahead(
            name=name,
            kernel=_gemm_kernel,
            signature={**WEIGHT_SIGNATURE, **dict.fromkeys([*constants, *special], "constexpr")},
            constants={**constants, **special},
            num_warps=WARPS,
            num_stages=STAGES,
        )
        for name, special in (
            ("gemm b4", {"BITS": 4, "CODEBOOK": False, "BLOCK_M": 64}),
            ("gemm b3", {"BITS": 3, "CODEBOOK": False, "BLOCK_M": 64}),
            ("gemm b3 short", {"BITS": 3, "CODEBOOK": False, "BLOCK_M": 32}),
            ("gemm b3 codebook", {"BITS": 3, "CODEBOOK": True, "BLOCK_M": 64}),
        )
    )
