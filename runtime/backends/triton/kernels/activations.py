"""Activations as kernels read and write them: with a compensation, with sums of their pieces, or as INT8 tokens.

Low-bit products need the sums of every 32 adjacent activations: a code becomes the number 2^bits + code
(`runtime.backends.triton.kernels.gemv`), and its zero must be subtracted as well, in total (2^bits + zero) * sum of a
group's activations. Sums are those of the rounded activations.

Products with a trellis read activations that are rotated like its weights (`models.trellis.rotate`), in the order of
its words.

Kernels that write activations also leave one or the other (`store_left`); where they can't, a kernel here does it.

INT8 tokens have one scale per row. Norms and the MLP's gate process a whole row, so they know its largest magnitude
before writing: they store codes, scale and the sums of the codes of each group, which W4A8 products use to subtract
zero-points. Attention's output is quantized by a separate kernel.

Source: QServe §4.1, Fig. 11 (which kernels round activations).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.triton.sizes import PIECE, pieces, token_width

BLOCK_K = 1024
"""Activations per program: 8 for each of its 128 threads."""
CHANNELS_PER_WARP = 512
"""Channels quantized per warp: 16 a thread."""
MAX_WARPS = 16
"""Most warps of a program: 32 would leave a thread 64 registers, too few on sm_120."""
_TOP = tl.constexpr(127.0)
_TINY = tl.constexpr(1.1754943508222875e-38)
"""The smallest normal number of float32: rows with a smaller scale count as zero (`models.per_token`)."""
_WHOLE = tl.constexpr(12582912.0)
"""1.5 · 2^23: a number of float32 that is added to it and taken off again is rounded to even."""


@triton.jit
def to_half(x):
    """Float32 x in half precision. Finite numbers beyond its range, as some models have them, become its ends."""
    return limited(x, 65504.0).to(tl.float16)


@triton.jit
def limited(x, MOST: tl.constexpr):
    """Float32 x within ±MOST where it is finite."""
    return tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -MOST), MOST), x)


@triton.jit
def _parity(bits):
    """Whether an odd number of the lowest 8 bits is set, 0 or 1."""
    bits ^= bits >> 4
    bits ^= bits >> 2
    return (bits ^ bits >> 1) & 1


@triton.jit
def _store_rotated(out_ptr, x, first, end, width, BLOCK_K: tl.constexpr):
    """Rotate x float16 [BLOCK_K], and write it in the order of words to out float16 [width]; `store_left`.

    Rows have whole blocks of 512 channels, and pieces of 32 behind them. Sums of 64 activations with signs are a
    product with a matrix of ones and minus ones, made of the channels' bits; tensor cores add up in float32.
    """
    run, place = tl.arange(0, BLOCK_K // 64), tl.arange(0, 64)
    ones = place & place >> 1
    sign = (ones ^ ones >> 2 ^ ones >> 4) & 1
    minus = sign[:, None] ^ _parity(place[:, None] & place[None, :])
    rotated = tl.dot(tl.reshape(x, [BLOCK_K // 64, 64]), tl.where(minus != 0, -1.0, 1.0).to(tl.float16))
    short = width - first - run * 64 < 64  # the last 32 channels are rotated by themselves
    rotated *= tl.where(short, 0.17677669529663687, 0.125)[:, None]
    channels = first + run[:, None] * 64 + place[None, :]
    whole = width // 512 * 512
    inside = channels < whole
    left = tl.maximum((width - whole) // 32, 1)
    behind = channels - whole
    lane = tl.where(inside, channels % 512 // 16, behind // left)  # twice the lane, plus the half
    piece = tl.where(inside, channels // 512 * 16 + channels % 16, whole // 32 + behind % left)
    column = lane // 4 % 2 * 16 + lane // 8 * 4 + lane // 2 % 2 * 2 + lane % 2
    tl.store(out_ptr + piece * 32 + column, to_half(rotated), mask=channels < tl.cdiv(end, 32) * 32)


@triton.jit
def store_left(left_ptr, row, x, first, end, K, BLOCK_K: tl.constexpr):
    """Write what products read of x float16 [BLOCK_K], channels `first` to `end` of a row of K.

    As left is float32 [M, ceil(K / 32)], these are the sums of the pieces. As it is float16 [M, 32 ceil(K / 32)], it is
    the row rotated; heads are then multiples of 64. `first` is a multiple of 32, or of 64; behind `end` x is zero.
    """
    if left_ptr.dtype.element_ty == tl.float32:
        totals = tl.sum(tl.reshape(x.to(tl.float32), [BLOCK_K // 32, 32]), axis=1)
        offs = first // 32 + tl.arange(0, BLOCK_K // 32)
        tl.store(left_ptr + row * tl.cdiv(K, 32) + offs, totals, mask=offs * 32 < end)
    else:
        width = tl.cdiv(K, 32) * 32
        _store_rotated(left_ptr + row * width, x, first, end, width, BLOCK_K)


@triton.jit
def _left_kernel(x_ptr, left_ptr, K, BLOCK_K: tl.constexpr):
    """Program (m, block) handles activations [block * BLOCK_K, ...) of row m of x [M, K]; `store_left`."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_K
    offs = first + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + row * K + offs, mask=offs < K, other=0.0)
    store_left(left_ptr, row, x, first, K, K, BLOCK_K)


def piece_sums(x: torch.Tensor, sums: torch.Tensor) -> None:
    """Write the sums of every 32 adjacent activations of x float16 [M, K] to sums float32 [M, ceil(K / 32)]."""
    assert sums.shape == (len(x), pieces(x.shape[1]))
    _leave(x, sums)


def rotate(x: torch.Tensor, out: torch.Tensor) -> None:
    """Write x float16 [M, K], contiguous, rotated and in the order of a trellis's words, to out float16 [M, width].

    `width` is K filled up with zeros to a multiple of 32 (`runtime.backends.triton.layout`).
    """
    assert out.shape == (len(x), PIECE * pieces(x.shape[1]))
    _leave(x, out)


def _leave(x: torch.Tensor, left: torch.Tensor) -> None:
    M, K = x.shape
    _left_kernel[(M, triton.cdiv(K, BLOCK_K))](x, left, K, BLOCK_K=BLOCK_K, num_warps=4)


class TokenShape(NamedTuple):
    """Compile-time parameters of kernels that quantize."""

    BLOCK_K: int  # Channels of a program, a power of two: the whole row
    WIDTH: int  # Codes of a row
    GROUP_SIZE: int


class TokenOperands(NamedTuple):
    """INT8 tokens as a kernel argument."""

    codes: Any  # int8 [M, width], 0 from K on
    scales: Any  # float32 [M]
    sums: Any  # int32 [M, G]


@dataclass(frozen=True, slots=True)
class Tokens:
    """INT8 tokens on the device: x[m, k] is approximately codes[m, k] * scales[m]."""

    codes: torch.Tensor  # int8 [M, width], 0 from K on (`runtime.backends.triton.sizes.token_width`)
    scales: torch.Tensor  # float32 [M]
    sums: torch.Tensor  # int32 [M, G], the sums of the codes of every `group_size` channels, the last of fewer
    group_size: int  # 0 = one sum for the row

    @property
    def operands(self) -> TokenOperands:
        return TokenOperands(self.codes, self.scales, self.sums)


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
    """Quantize rows x float16 [M, K], contiguous."""
    M, K = x.shape
    shape, warps = rounding_shape(K, to.group_size)
    assert to.codes.shape == (M, shape.WIDTH)
    _round_kernel[(M,)](x, to.operands, K=K, shape=shape, num_warps=warps, enable_fp_fusion=False)


def rounding_shape(K: int, group_size: int) -> tuple[TokenShape, int]:
    """The compile-time parameters of kernels that quantize rows of K channels, and their warps."""
    width = token_width(K, group_size)
    block = max(256, triton.next_power_of_2(width))
    return TokenShape(block, width, group_size), max(1, min(MAX_WARPS, block // CHANNELS_PER_WARP))


class Projected(NamedTuple):
    """Output of the fused projection."""

    y: Any  # float32 [M, N], its output; of attention queries, keys, values, and maybe gates
    dec: Any  # float32, shaped like y, its compensation; or any tensor of that type, if there is none


@triton.jit
def projected_at(projected, offsets, mask, compensated):
    """Output of the projection at the offsets, with its compensation if any. float32."""
    y = tl.load(projected.y + offsets, mask=mask, other=0.0)
    return y + tl.load(projected.dec + offsets, mask=mask & (compensated != 0), other=0.0)


class Spaced(NamedTuple):
    """Some channels of such an output."""

    projected: Projected  # [M, channels], with rows further apart
    stride: Any  # Numbers from a row to the next, or runs, of which loads know that they are aligned


def spaced(y: torch.Tensor, dec: torch.Tensor | None, each: int = 1) -> Spaced:
    """Channels of an output and its compensation, of rows that are equally far apart, as a kernel argument.

    The distance is counted in runs of `each` number.
    """
    return Spaced(Projected(y, y if dec is None else dec), y.stride(0) // each)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), without an overflow."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without an overflow."""
    falling = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, falling) / (1.0 + falling)
