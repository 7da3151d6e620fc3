"""Low-bit matrix times one or a few tokens on the GPU: memory is the limit, so a weight may cost three instructions.

Products run on tensor cores although one token fills a single column of them: there, unpacking is all that is left to
do. A word holds the codes of two channels at the same bits of its two halves (`runtime.backends.triton.layout`).
Shifted to the top of a half's mantissa and joined with a constant exponent they *are* the numbers 2^bits + code,
exactly, two in one register that the tensor core takes as it is: for two weights one shift and one AND-OR, no
conversion from integers. A second product with the constant -(2^bits + zero) of each output channel takes the offset
off again inside the accumulator, exactly as well, so a group's sum is that of (code - zero) * x in float32; its scale
is applied once.

For one token, activations and scales are loaded straight into the registers that need them: the loads are smaller than
a program has threads, which makes the compiler repeat them instead of passing them through shared memory. Warps
therefore never wait for each other, except where codes are copied ahead asynchronously.

Codebooks are looked up with one load a weight: 16 or 32 bytes an output channel stay in the first-level cache, where
the 32 lookups of a warp touch two lines. With shuffles they were four, in a tree of selections fifteen instructions.

A matrix with few output channels is cut along its input channels too. The last program of an output block to finish
adds the parts up in their order, so the result is the same every time; it leaves its counter at zero, so that a
captured graph can run again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.triton.layout import BLOCK, GpuLinear
from runtime.backends.triton.workspace import Workspace
from runtime.errors import BackendError

if TYPE_CHECKING:
    from runtime.backends.triton.ahead import Ahead

EXPONENT = {3: 0x48004800, 4: 0x4C004C00}
"""Both halves' exponent bits of 2^bits, so that the top bits of the mantissa count ones."""
ROWS = 16
"""Tokens that the kernel takes at once."""
WARPS = 2
"""Warps of a program. With four, the compiler may choose Hopper's warp-group products, whose operands lie elsewhere."""
BUSY = 4
"""Programs that a multiprocessor needs at the same time to keep its share of the memory busy: a block of codes takes
a program about 3000 cycles from request to result, and a multiprocessor of the fastest device 900 cycles to receive."""
OVERHEAD = 0.5
"""What a program costs beside its blocks, in blocks: its start, and writing and counting its part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How a product is cut into programs."""

    block_n: int = 64
    """Output channels of a program: a power of two, at least 16 for each warp. With 64, an activation that was loaded
    serves two tensor core tiles, and a program has 16 KiB of 4-bit codes on the way."""
    split: int
    """Parts along the input channels."""
    stages: int = 1
    """2: the next block's codes are copied to shared memory while one is computed; 1: loaded into registers."""

    def __post_init__(self) -> None:
        """Check against what the kernel's layout of rows needs."""
        if self.block_n < 16 * WARPS or self.block_n & (self.block_n - 1):
            raise ValueError(f"block_n must be a power of two from {16 * WARPS} on, not {self.block_n}")
        if self.split < 1 or self.stages < 1:
            raise ValueError(f"split and stages must be at least 1, not {self.split} and {self.stages}")


class Matrix(NamedTuple):
    """A low-bit matrix as kernels take it: the tensors of a `GpuLinear`, and numbers."""

    codes: Any
    """`GpuLinear.codes`."""
    groups: Any
    """`GpuLinear.groups`."""
    book: Any
    """`GpuLinear.codebook`."""
    bias: Any
    """`GpuLinear.bias`."""
    N: Any
    """Output channels."""
    K: Any
    """Input channels."""
    exponent: Any
    """Of `EXPONENT`."""


class Form(NamedTuple):
    """What kernels have to know about a matrix, as a constant."""

    GROUP_SIZE: int
    """Input channels that share a scale; 128 with a codebook."""
    BITS: int
    """3 or 4."""
    CODEBOOK: bool
    """Whether codes are looked up."""
    SPAN: int
    """The part of a group that makes one product."""
    HAS_BIAS: bool
    """Whether there is a bias."""
    EVEN_K: bool
    """Whether the last block is whole."""


class Tile(NamedTuple):
    """What a program handles, as a constant."""

    DOT: int
    """Input channels that are unpacked at a time: 32, 64 or 128."""
    BLOCK_M: int
    """Tokens."""
    BLOCK_N: int
    """Output channels."""
    WARPS: int
    """Warps."""
    SPLIT: int = 1
    """Parts along the input channels."""


@cache
def configure(N: int, K: int, bits: int, sm_count: int) -> LaunchConfig:
    """Choose the cut of a matrix for a device.

    The busiest multiprocessor decides: it gets ceil(programs / multiprocessors) programs, and with fewer than `BUSY` of
    them it waits for memory as long as with `BUSY`. Of all cuts of K the one is taken with the least
    max(programs, BUSY) * (blocks of a program + `OVERHEAD`); of equals the one with the fewest parts.

    4-bit codes are copied ahead. At 3 bits that costs a tenth more instructions, which are then the limit on devices
    with the fastest memory, and the 48 registers of a block's codes are free anyway.

    Args:
        N: Output channels.
        K: Input channels.
        bits: 3 or 4.
        sm_count: Multiprocessors of the device.
    """
    blocks, across = -(-K // BLOCK), -(-N // 64)

    def cost(split: int) -> float:
        return max(-(-across * split // sm_count), BUSY) * (-(-blocks // split) + OVERHEAD)

    return LaunchConfig(split=min(range(1, blocks + 1), key=cost), stages=2 if bits == 4 else 1)


@triton.jit
def natural_rows(BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Row of the matrix that stands in each row of a product's tile, int32 [BLOCK_N].

    Loads spread 8 rows over a warp and the next 8 over the next warp; a tensor core tile has 16 rows in one warp. So
    the second 8 rows of a tile are those that the warp loads next.
    """
    row = tl.arange(0, BLOCK_N)
    return row // (16 * WARPS) * (16 * WARPS) + row // 8 % 2 * (8 * WARPS) + row // 16 % WARPS * 8 + row % 8


@triton.jit
def pair_up(low, high, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Both halves of the lanes of a piece, [BLOCK_N, 16] each -> [BLOCK_N, 32] with channels in their natural order."""
    pairs = tl.reshape(tl.join(low, high), (BLOCK_N // (16 * WARPS), 2, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(pairs, (0, 2, 1, 3, 5, 4, 6, 7)), (BLOCK_N, 32))


@triton.jit
def _shift(word, BY: tl.constexpr):
    """The word shifted left by BY bits, right where BY is negative; bits that move in are undefined."""
    return word << BY if BY > 0 else word >> -BY


@triton.jit
def _piece(words, PIECE: tl.constexpr, BITS: tl.constexpr, TOP: tl.constexpr):
    """Codes of a piece in both halves of its lanes, at the bits TOP and up; other bits zero. int32 [BLOCK_N, 16]."""
    if BITS == 3 and PIECE == 15:
        code = _shift(words[0], TOP - 15) & (0x00010001 << TOP)
        code |= _shift(words[1], TOP - 14) & (0x00020002 << TOP)
        code |= _shift(words[2], TOP - 13) & (0x00040004 << TOP)
    else:
        EACH: tl.constexpr = 16 // BITS
        shifted = _shift(words[PIECE // EACH], TOP - PIECE % EACH * BITS)
        code = shifted & (((1 << BITS) - 1) * 0x00010001 << TOP)
    return code


@triton.jit
def halves_of(word):
    """Both halves of a word as float16."""
    return word.to(tl.int16).to(tl.float16, bitcast=True), (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _values(words, book, exponent, PIECE: tl.constexpr, form: tl.constexpr, tile: tl.constexpr):
    """One piece as float16 [BLOCK_N, 32]: 2^BITS + code, or the values of the codebook."""
    if form.CODEBOOK:
        code = _piece(words, PIECE, form.BITS, 0)
        low, high = tl.load(book + (code & 0xFFFF)), tl.load(book + (code >> 16))
    else:
        low, high = halves_of(_piece(words, PIECE, form.BITS, 10 - form.BITS) | exponent)
    return pair_up(low, high, tile.BLOCK_N, tile.WARPS)


@triton.jit
def load_words(at, N, BITS: tl.constexpr):
    """The words of a block of each row, int32 [BLOCK_N, 16] each, of which `at` points at the first."""
    w0 = tl.load(at)
    w1 = tl.load(at + N * 16)
    w2 = tl.load(at + N * 32)
    w3 = tl.load(at + N * 48) if BITS == 4 else w2
    return w0, w1, w2, w3


@triton.jit
def values_of(words, book, exponent, PIECE: tl.constexpr, form: tl.constexpr, tile: tl.constexpr):
    """DOT (32, 64 or 128) channels from a piece on, float16 [BLOCK_N, DOT] in natural order; see `_values`.

    Args (tensors): the block's `load_words`; codebooks of the rows, pointers [BLOCK_N, 1]; the exponent bits, int32, an
    argument of the kernel so that the compiler can't see through it and treat both halves of a word apart.
    """
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    w = _values(words, book, exponent, PIECE, form, tile)
    if tile.DOT > 32:
        w1 = _values(words, book, exponent, PIECE + 1, form, tile)
        w = tl.join(w, w1)
        if tile.DOT > 64:
            w2 = _values(words, book, exponent, PIECE + 2, form, tile)
            w3 = _values(words, book, exponent, PIECE + 3, form, tile)
            w = tl.permute(tl.join(w, tl.join(w2, w3)), (0, 3, 2, 1))
        else:
            w = tl.permute(w, (0, 2, 1))
        w = tl.reshape(w, (BLOCK_N, tile.DOT))
    return w


@triton.jit
def row_words(at, first_n, N, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """One word of each row of a tile, int32 [BLOCK_N], in two loads that are smaller than the program.

    Args (tensors): pointer to the words of all rows; the first 8 rows of every 16 of the tile, int32 [BLOCK_N / 2].
    """
    first = tl.load(at + tl.minimum(first_n, N - 1))
    second = tl.load(at + tl.minimum(first_n + 8 * WARPS, N - 1))
    pairs = tl.reshape(tl.join(first, second), (BLOCK_N // 16, 8, 2))
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), (BLOCK_N,))


@triton.jit
def spread(value, SPAN: tl.constexpr, BLOCK_N: tl.constexpr):
    """One value a row for every channel, [BLOCK_N] -> [BLOCK_N, SPAN], built of pairs as the weights are."""
    pairs = tl.join(value, value)[:, None, :]
    return tl.reshape(tl.broadcast_to(pairs, (BLOCK_N, SPAN // 2, 2)), (BLOCK_N, SPAN))


@triton.jit
def _gemv_kernel(x_ptr, matrix, out_ptr, parts_ptr, counters_ptr, M, form: tl.constexpr, tile: tl.constexpr):
    """Program (i, j): output channels of block i, part j of the input channels, up to BLOCK_M tokens."""
    N, K = matrix.N, matrix.K
    BITS: tl.constexpr = form.BITS
    SPLIT: tl.constexpr = tile.SPLIT
    SPAN: tl.constexpr = form.SPAN
    DOT: tl.constexpr = tile.DOT
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    WARPS: tl.constexpr = tile.WARPS
    pid_n, part = tl.program_id(0), tl.program_id(1)
    blocks = tl.cdiv(K, 512)
    each = tl.cdiv(blocks, SPLIT)
    # Rows beyond the end read the last one again, and are not stored.
    load_n = tl.minimum(pid_n * BLOCK_N + tl.arange(0, BLOCK_N), N - 1)
    offs_n = pid_n * BLOCK_N + natural_rows(BLOCK_N, WARPS)
    read_n = tl.minimum(offs_n, N - 1)
    half = tl.arange(0, BLOCK_N // 2)
    first_n = pid_n * BLOCK_N + half // (8 * WARPS) * (16 * WARPS) + half // 8 % WARPS * 8 + half % 8
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    stride_xm = K // 512 * 512 if form.EVEN_K else K  # the same, but seen to keep rows aligned
    book = matrix.book + (load_n << BITS)[:, None]
    codes = matrix.codes + load_n[:, None] * 16 + tl.arange(0, 16)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for block in range(part * each, tl.minimum(blocks, (part + 1) * each)):
        words = load_words(codes + block * BITS * N * 16, N, BITS)
        for span in tl.static_range(0, 512, SPAN):
            sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            if not form.CODEBOOK:
                group = tl.minimum((block * 512 + span) // form.GROUP_SIZE, (K - 1) // form.GROUP_SIZE)
                scale, offset = halves_of(row_words(matrix.groups + group * N, first_n, N, BLOCK_N, WARPS))
            for start in tl.static_range(span, span + SPAN, DOT):
                offs_k = block * 512 + start + tl.arange(0, DOT)
                if BLOCK_M == 1:
                    x = tl.load(x_ptr + offs_k) if form.EVEN_K else tl.load(x_ptr + offs_k, offs_k < K, 0.0)
                    x = x[:, None]
                else:
                    x_at = x_ptr + offs_k[:, None] + (tl.minimum(offs_m, M - 1) * stride_xm)[None, :]
                    x = tl.load(x_at) if form.EVEN_K else tl.load(x_at, mask=(offs_k < K)[:, None], other=0.0)
                w = values_of(words, book, matrix.exponent, start // 32, form, tile)
                sums = tl.dot(w, x, sums)
                if not form.CODEBOOK:
                    sums = tl.dot(spread(offset, DOT, BLOCK_N), x, sums)
            acc += sums if form.CODEBOOK else sums * scale.to(tl.float32)[:, None]
    at_out = offs_m[None, :] * N + offs_n[:, None]
    mask = (offs_n < N)[:, None] & mask_m[None, :]
    bias = tl.load(matrix.bias + read_n)[:, None] if form.HAS_BIAS else 0.0
    if SPLIT == 1:
        tl.store(out_ptr + at_out, acc + bias, mask)
    else:
        tl.store(parts_ptr + part * M * N + at_out, acc, mask)
        tl.debug_barrier()  # all of the program's part is written before its arrival is counted
        if tl.atomic_add(counters_ptr + pid_n, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            for other in range(SPLIT):
                # Past the first-level cache, which doesn't see what other multiprocessors write.
                total += tl.load(parts_ptr + other * M * N + at_out, mask, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + at_out, total + bias, mask)
            tl.store(counters_ptr + pid_n, 0)


def gemv(
    x: torch.Tensor, weight: GpuLinear, out: torch.Tensor, workspace: Workspace, config: LaunchConfig | None = None
) -> None:
    """The product of a low-bit matrix with one token, plus the bias: out = Ŵ x + b.

    Args:
        x: float16 [K], contiguous.
        weight: The matrix.
        out: float32 [N], written.
        workspace: Memory for the parts of a split product, of the stream that the product runs on.
        config: How to cut the matrix; `configure` chooses when None.

    Raises:
        BackendError: operands of another type or shape.
    """
    few_rows(x[None], weight, out[None], workspace, config)


def few_rows(
    x: torch.Tensor, weight: GpuLinear, out: torch.Tensor, workspace: Workspace, config: LaunchConfig | None = None
) -> None:
    """The same for a few tokens, which read the matrix once.

    Args:
        x: float16 [M, K], contiguous, M from 1 to `ROWS`.
        weight: The matrix.
        out: float32 [M, N], written.
        workspace: As in `gemv`.
        config: As in `gemv`.

    Raises:
        BackendError: operands of another type or shape, or too many tokens.
    """
    check_operands(x, weight, out)
    M, (N, K) = x.shape[0], weight.shape
    if M > ROWS:
        raise BackendError(f"{weight.name}: {M} rows at once; this kernel takes {ROWS}, use gemm")
    if config is None:
        config = configure(N, K, weight.bits, sm_count(x.device))
    across = -(-N // config.block_n)
    parts, counters = out, out
    if config.split > 1:
        parts, counters = workspace.scratch(config.split * M * N), workspace.counters(across)
    form = weight_form(weight)
    block_m = 1 if M == 1 else 8 if M <= 8 else ROWS
    tile = Tile(
        DOT=32 if M == 1 else form.SPAN, BLOCK_M=block_m, BLOCK_N=config.block_n, WARPS=WARPS, SPLIT=config.split
    )
    _gemv_kernel[across, config.split](
        x, matrix_of(weight, out), out, parts, counters, M, form=form, tile=tile, num_warps=WARPS,
        num_stages=config.stages,
    )  # fmt: skip


def check_operands(x: torch.Tensor, weight: GpuLinear, out: torch.Tensor) -> None:
    """Check a product's operands.

    Raises:
        BackendError: x is not float16 [M, K] and contiguous, or out not float32 [M, N] and contiguous.
    """
    N, K = weight.shape
    for name, tensor, dtype, width in (("x", x, torch.float16, K), ("out", out, torch.float32, N)):
        if tensor.dtype != dtype or tensor.ndim != 2 or tensor.shape[1] != width or not tensor.is_contiguous():
            raise BackendError(
                f"{weight.name}: {name} must be contiguous {dtype} with rows of {width}, "
                f"not {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
    if x.shape[0] != out.shape[0] or not x.shape[0]:
        raise BackendError(f"{weight.name}: {x.shape[0]} rows of activations for {out.shape[0]} rows of results")


def matrix_of(weight: GpuLinear, unused: torch.Tensor) -> Matrix:
    """A matrix as kernels take it; `unused` stands for the tensors that it doesn't have."""
    groups, book, bias = (unused if t is None else t for t in (weight.groups, weight.codebook, weight.bias))
    return Matrix(weight.codes, groups, book, bias, *weight.shape, EXPONENT[weight.bits])


def weight_form(weight: GpuLinear) -> Form:
    """What kernels are specialized for."""
    group_size = weight.group_size or 128
    return Form(
        GROUP_SIZE=group_size,
        BITS=weight.bits,
        CODEBOOK=weight.codebook is not None,
        SPAN=min(128, group_size & -group_size),
        HAS_BIAS=weight.bias is not None,
        EVEN_K=weight.shape[1] % BLOCK == 0,
    )


@cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a device; 1 under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


MATRIX_TYPES = Matrix("*i32", "*i32", "*fp16", "*fp32", "i32", "i32", "i32")
"""The types of a matrix, for `Ahead`."""


def common_form(bits: int, *, codebook: bool = False) -> Form:
    """The form of models' matrices: groups of 128, whole blocks, no bias."""
    return Form(GROUP_SIZE=128, BITS=bits, CODEBOOK=codebook, SPAN=128, HAS_BIAS=False, EVEN_K=True)


def ahead() -> tuple[Ahead, ...]:
    """Specializations for models: groups of 128 at 3 and 4 bits, a codebook, and a few tokens at once."""
    from runtime.backends.triton.ahead import Ahead

    one = Tile(DOT=32, BLOCK_M=1, BLOCK_N=64, WARPS=WARPS, SPLIT=8)
    rows = Tile(DOT=128, BLOCK_M=8, BLOCK_N=64, WARPS=WARPS, SPLIT=1)
    return tuple(
        Ahead(
            name=name,
            kernel=_gemv_kernel,
            signature={
                "x_ptr": "*fp16",
                "matrix": MATRIX_TYPES,
                "out_ptr": "*fp32",
                "parts_ptr": "*fp32",
                "counters_ptr": "*i32",
                "M": "i32",
                "form": "constexpr",
                "tile": "constexpr",
            },
            constants={"form": form, "tile": tile},
            num_warps=WARPS,
            num_stages=2 if form.BITS == 4 else 1,
        )
        for name, form, tile in (
            ("gemv b4", common_form(4), one),
            ("gemv b3", common_form(3), one),
            ("gemv b3 codebook", common_form(3, codebook=True), one),
            ("gemv b4 rows", common_form(4), rows),
        )
    )
