"""Rotates the inputs of trellises (`models.trellis.rotate`), and puts them into the order of their words.

Sums of 64 activations with signs are a product with a matrix of ones and minus ones, which tensor cores add up in
float32; it is made in registers from the channels' bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.backends.triton.sizes import BLOCK, PIECE, pieces

CHANNELS = 1024
"""Activations of a program: 16 runs of 64, the fewest rows of a product."""
WARPS = 4


@triton.jit
def _parity(bits):
    """Whether an odd number of the lowest 8 bits is set, 0 or 1."""
    bits ^= bits >> 4
    bits ^= bits >> 2
    return (bits ^ bits >> 1) & 1


@triton.jit(do_not_specialize=["blocks", "left"])
def _rotate_kernel(x_ptr, out_ptr, K, width, blocks, left):
    """Program (m, i): activations i * 1024 and up of row m. x float16 [M, K], out float16 [M, width].

    Rows have whole blocks of 512 channels, and `left` pieces of 32 behind them.
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * 1024
    run, place = tl.arange(0, 16), tl.arange(0, 64)
    channels = first + run[:, None] * 64 + place[None, :]
    x = tl.load(x_ptr + row * K + channels, mask=channels < K, other=0.0)
    ones = place & place >> 1
    sign = (ones ^ ones >> 2 ^ ones >> 4) & 1
    minus = sign[:, None] ^ _parity(place[:, None] & place[None, :])
    rotated = tl.dot(x, tl.where(minus != 0, -1.0, 1.0).to(tl.float16))
    short = width - first - run * 64 < 64  # the last 32 channels are rotated by themselves
    rotated *= tl.where(short, 0.17677669529663687, 0.125)[:, None]
    inside = channels < blocks * 512
    base = tl.where(inside, channels // 512, blocks) * 512
    each = tl.where(inside, 16, tl.maximum(left, 1))
    lane = (channels - base) // each  # twice the lane, plus the half
    column = lane // 4 % 2 * 16 + lane // 8 * 4 + lane // 2 % 2 * 2 + lane % 2
    to = base + (channels - base) % each * 32 + column
    tl.store(out_ptr + row * width + to, rotated.to(tl.float16), mask=channels < width)


def rotate(x: torch.Tensor, out: torch.Tensor) -> None:
    """Write x float16 [M, K], contiguous, rotated and in the order of a trellis's words, to out float16 [M, width].

    `width` is K filled up with zeros to a multiple of 32 (`runtime.backends.triton.layout`).
    """
    M, K = x.shape
    width = PIECE * pieces(K)
    assert out.shape == (M, width)
    blocks, left = divmod(pieces(K), BLOCK // PIECE)
    _rotate_kernel[M, triton.cdiv(width, CHANNELS)](x, out, K, width, blocks, left, num_warps=WARPS)
