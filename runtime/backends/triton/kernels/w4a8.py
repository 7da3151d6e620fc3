"""W4A8 on INT8 tensor cores: 4-bit codes in groups with whole scales, tokens in INT8 with one scale each.

K is padded with zeros to whole groups, or blocks without groups, and divided into blocks of 2 · H input channels; H is
64, or 32 where groups have 64 channels. The activations' codes are padded in the same way, so products need no masks.
Byte j of a block has channel j in its low and channel H + j in its high half, so that one AND makes an operand of H
neighbouring channels, and one shift the other. For one block, the [N, H] bytes of all output channels are contiguous. A
group's whole scale s and z · s, 240 at most, lie in one half-word.

Both operands meet the tokens' codes as they are; sums are whole numbers of 32 bits. A group's sum is multiplied by s
and after that z · s times the sum of the group's activations is subtracted, so that nothing rounds before the two
scales in floating point:

    y[m, n] = float(sum over groups of s (sum of code · a) - z s (sum of a)) · (scale[n] · scale[m]) + bias[n]

The result has the bits of `runtime.backends.operations.linear.gemm_w4a8` and of the CPU's kernels. Without groups s is
1 and the zero-point's term is one for the whole row, in the epilogue.

Source: QServe §4.2 (compute-aware order of weights, z · s, subtraction after multiplication), here once for a group's
sum rather than once for a weight: two integer multiplications for each of a tile's sums and 128 channels, and none for
its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from models.packed import PackedLinear
from runtime.backends.triton.kernels.activations import Tokens
from runtime.backends.triton.kernels.gemv import configure
from runtime.backends.triton.layout import unpacked_rows
from runtime.backends.triton.sizes import half_of, token_width, w4a8_bytes
from runtime.backends.triton.workspace import Workspace, sm_count
from runtime.errors import BackendError

SMALLEST_GROUP = 64
"""Fewest input channels of a group: a power of two."""
BLOCK_N = 64
"""Output channels of a program."""
FEW, MANY = 16, 64
"""Rows of a program: of a decoded or verified step, and of a prompt or a large batch."""
_FEW = tl.constexpr(FEW)
WARPS = 4
STAGES = 3
"""Stages of the loop's pipeline."""
RESIDENT = 6
"""Programs for few rows that a multiprocessor holds at the same time, by registers (`make kernels`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class W4A8Linear:
    """A W4A8 matrix on the device."""

    name: str  # For example `layers.3.qkv`
    shape: tuple[int, int]  # (N, K)
    group_size: int
    """Input channels per integer scale: a power of two from 64 on; 0 = the whole row, without an integer scale."""
    codes: torch.Tensor  # uint8 [width / 2H, N, H]; see the module
    scales: torch.Tensor  # float16 [N]
    groups: torch.Tensor  # int16 [G, N]: the low byte s, the high byte z · s
    bias: torch.Tensor | None  # float32 [N] or None

    @property
    def width(self) -> int:
        return token_width(self.shape[1], self.group_size)

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.groups, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


def repack_w4a8(packed: PackedLinear, device: torch.device | str) -> W4A8Linear:
    """Copy a stored W4A8 matrix to the device; raises BackendError for an unsupported group size."""
    (N, K), group_size = packed.shape, 0 if packed.group_scales is None else packed.group_size
    if group_size and (group_size < SMALLEST_GROUP or group_size & (group_size - 1)):
        raise BackendError(
            f"{packed.name}: groups of {group_size} channels; of qoq's, the GPU takes 64, 128 and so on, and none: "
            "quantize the model again with --group-size 128"
        )
    if w4a8_bytes((N, K), group_size) >= 1 << 31:
        raise BackendError(f"{packed.name}: {N} by {K} is more than the kernels can address")
    assert packed.zeros is not None
    half = half_of(group_size)
    blocks = token_width(K, group_size) // (2 * half)
    codes = torch.empty(blocks, N, half, dtype=torch.uint8, device=device)
    for start, stop, values in unpacked_rows(packed.codes, packed.bits, device):
        row = values.flatten(1).to(torch.uint8)
        halves = torch.nn.functional.pad(row, (0, 2 * half * blocks - row.shape[1])).view(-1, blocks, 2, half)
        codes[:, start:stop] = (halves[:, :, 0] | halves[:, :, 1] << 4).transpose(0, 1)
    scales = np.ones_like(packed.zeros) if packed.group_scales is None else packed.group_scales
    groups = scales.astype(np.uint16) | (packed.zeros.astype(np.uint16) * scales) << 8
    return W4A8Linear(
        name=packed.name,
        shape=packed.shape,
        group_size=group_size,
        codes=codes,
        scales=torch.from_numpy(np.array(packed.scales[:, 0], np.float16)).to(device),
        groups=torch.from_numpy(np.ascontiguousarray(groups.T).view(np.int16)).to(device),
        bias=None if packed.bias is None else torch.from_numpy(np.array(packed.bias, np.float32)).to(device),
    )


class Matrix(NamedTuple):
    """A `W4A8Linear` as the kernel takes it."""

    codes: Any  # uint8 [blocks, N, HALF]
    scales: Any  # float16 [N]
    groups: Any  # int16 [G, N]: z · s and s, a byte each
    bias: Any  # float32 [N]
    N: Any
    blocks: Any


class Form(NamedTuple):
    """Compile-time parameters of the kernel."""

    GROUP_SIZE: int  # Input channels that share a whole scale; 0 = all of a row
    HALF: int
    BLOCK_M: int
    BLOCK_N: int


@triton.jit
def _add_block(acc, rows, codes, block, N, HALF: tl.constexpr):
    """Add the products of a block of codes, int32 [BLOCK_N, BLOCK_M]."""
    pairs = tl.load(codes + block * N * HALF)
    x_at = rows[None, :] + (block * 2 * HALF + tl.arange(0, HALF))[:, None]
    acc = tl.dot((pairs & 15).to(tl.int8), tl.load(x_at), acc, out_dtype=tl.int32)
    return tl.dot((pairs >> 4).to(tl.int8), tl.load(x_at + HALF), acc, out_dtype=tl.int32)


@triton.jit
def _part(count, split, BLOCK_M: tl.constexpr):
    """First of this program's groups or blocks, and the one behind its last; all of them with many rows."""
    first = 0
    behind = count
    if BLOCK_M <= _FEW:
        each = tl.cdiv(count, split)
        first = tl.program_id(2) * each
        behind = tl.minimum(first + each, count)
    return first, behind


@triton.jit(do_not_specialize=["biased", "M", "split"])
def _gemm_w4a8_kernel(x, matrix, biased, out_ptr, parts_ptr, counters_ptr, M, split, form: tl.constexpr):
    """Program (i, j, p): rows of block i, output channels of block j, part p of the input channels.

    The last of the parts to arrive adds them: whole numbers, so that no order matters. parts [split, M, N], counters
    [blocks of j], zero before and after; one block of rows where there are several parts.
    """
    N = matrix.N
    HALF: tl.constexpr = form.HALF
    BLOCK_N: tl.constexpr = form.BLOCK_N
    BLOCK_M: tl.constexpr = form.BLOCK_M
    GROUP: tl.constexpr = form.GROUP_SIZE
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows and channels beyond the end read the last one again, and are not stored.
    load_n, load_m = tl.minimum(offs_n, N - 1), tl.minimum(offs_m, M - 1).to(tl.int64)
    rows = x.codes + load_m * (matrix.blocks * 2 * HALF)
    codes = matrix.codes + load_n[:, None] * HALF + tl.arange(0, HALF)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.int32)
    if GROUP == 0:
        first, behind = _part(matrix.blocks, split, BLOCK_M)
        for block in range(first, behind):
            total = _add_block(total, rows, codes, block, N, HALF)
    else:
        EACH: tl.constexpr = GROUP // (2 * HALF)
        groups = matrix.blocks // EACH
        first, behind = _part(groups, split, BLOCK_M)
        for group in range(first, behind):
            products = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.int32)
            for part in tl.static_range(EACH):
                products = _add_block(products, rows, codes, group * EACH + part, N, HALF)
            of_group = tl.load(matrix.groups + group * N + load_n).to(tl.int32)
            sums = tl.load(x.sums + load_m * groups + group)
            total += products * (of_group & 0xFF)[:, None] - (of_group >> 8 & 0xFF)[:, None] * sums[None, :]
    mask = (offs_n < N)[:, None] & (offs_m < M)[None, :]
    at = offs_m.to(tl.int64)[None, :] * N + offs_n[:, None]
    arrived = split - 1
    if BLOCK_M <= _FEW:  # noqa: SIM102 - a constant and a number of the device; with many rows registers would spill
        if split > 1:
            tl.store(parts_ptr + tl.program_id(2) * M * N + at, total, mask)
            tl.debug_barrier()  # all of the program's part is written before its arrival is counted
            arrived = tl.atomic_add(counters_ptr + tl.program_id(1), 1, sem="acq_rel")
    if arrived == split - 1:
        if BLOCK_M <= _FEW:  # noqa: SIM102
            if split > 1:
                total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.int32)
                for part in range(split):
                    # Past the first-level cache, which doesn't see what other multiprocessors write.
                    total += tl.load(parts_ptr + part * M * N + at, mask, other=0, cache_modifier=".cg")
                tl.store(counters_ptr + tl.program_id(1), 0)
        if GROUP == 0:
            zeros = tl.load(matrix.groups + load_n).to(tl.int32) >> 8 & 0xFF
            total -= zeros[:, None] * tl.load(x.sums + load_m)[None, :]
        scale = tl.load(matrix.scales + load_n).to(tl.float32)[:, None] * tl.load(x.scales + load_m)[None, :]
        bias = tl.load(matrix.bias + offs_n, mask=(offs_n < N) & (biased != 0), other=0.0)
        tl.store(out_ptr + at, total.to(tl.float32) * scale + bias[:, None], mask)


def gemm_w4a8(
    x: Tokens,
    weight: W4A8Linear,
    out: torch.Tensor,
    workspace: Workspace | None = None,
    split: int | None = None,
) -> None:
    """The product of a W4A8 matrix with rows of rounded activations, plus the bias.

    Args:
        x: INT8 tokens [M, K] with the sums of `weight.group_size`; M at least 1.
        weight: The matrix.
        out: float32 [M, N], contiguous; written.
        workspace: Allows up to `FEW` rows to be split along K, belonging to the current stream; None: no splitting.
        split: Parts along K, chosen if None. The bits do not depend on them.

    Raises:
        BackendError: operands of another shape.
    """
    (N, K), M = weight.shape, x.codes.shape[0]
    if x.codes.shape != (M, weight.width) or out.shape != (M, N) or not M or not out.is_contiguous():
        raise BackendError(
            f"{weight.name}: {tuple(x.codes.shape)} activations and {tuple(out.shape)} results for {N} by {K} weights"
        )
    if x.group_size != weight.group_size:
        raise BackendError(
            f"{weight.name} has groups of {weight.group_size}; the activations have sums of {x.group_size}"
        )
    block_m = FEW if M <= FEW else MANY
    parts, counters = x.sums, x.sums  # of the types that a split product has: it shares its kernel
    if workspace is None or M > FEW:
        split = 1
    elif split is None:
        split = configure(N, K, sm_count(out.device), RESIDENT).split
    if workspace is not None and split > 1:
        parts, counters = workspace.scratch(split * M * N, torch.int32), workspace.counters(triton.cdiv(N, BLOCK_N))
    grid = (triton.cdiv(M, block_m), triton.cdiv(N, BLOCK_N), split)
    if grid[1] > 65535:
        raise BackendError(f"{weight.name}: {N} output channels are more than a launch can cover")
    bias = out if weight.bias is None else weight.bias
    matrix = Matrix(weight.codes, weight.scales, weight.groups, bias, N, weight.codes.shape[0])
    _gemm_w4a8_kernel[grid](
        x.operands, matrix, int(weight.bias is not None), out, parts, counters, M, split,
        form=_form(weight.group_size, block_m), num_warps=WARPS, num_stages=STAGES, enable_fp_fusion=False,
    )  # fmt: skip


def _form(group_size: int, block_m: int) -> Form:
    return Form(group_size, half_of(group_size), block_m, BLOCK_N)
