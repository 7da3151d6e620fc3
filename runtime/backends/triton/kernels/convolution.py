"""Short convolutions on the GPU: a few taps over a step's rows and the tokens before them.

A row's earlier tokens are rows of the same step, or are kept in a ring of recent tokens (`runtime.kv.states`). The
step's own rows enter the ring, too. A row that enters may take the place of a token that other rows still read, once a
step has `ALONE` rows: they enter in a launch of their own then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from runtime.backends.triton.kernels.cache.pages import Rows
from runtime.backends.triton.kernels.rope import Projected, projected_at
from runtime.backends.triton.kernels.sums import store_sums
from runtime.kv.states import LONGEST_TAPS, RING

ALONE = RING - LONGEST_TAPS + 2
"""Rows of a step from which on they enter the ring in a launch of their own."""
BLOCK_C = 256
"""Channels of a program: 2 for each of its 128 threads."""
_COMPENSATED, _SUMMED, _MIXES, _ENTERS = (tl.constexpr(1 << place) for place in range(4))
"""Bits of `given`: whether the projection has a compensation; whether sums are wanted; whether rows are mixed, and
whether they enter the ring."""


class Recent(NamedTuple):
    """What is kept of recent tokens, as a kernel argument."""

    ring: Any
    """float32 [slots, RING, WIDTH], the token at position p in row p % RING."""
    weight: Any
    """float32 [taps, C], tap by tap; the last is the token's own."""
    bias: Any = None
    """float32 [C]; None if there is none."""


class Taps(NamedTuple):
    """Compile-time parameters of a convolution."""

    NUMBER: int
    """Taps."""
    BLOCK_T: int
    """Taps, padded to a power of two."""
    C: int
    """Channels."""
    RING: int
    """Rows of a ring."""
    WIDTH: int
    """Numbers of such a row, at least as many as channels."""


def taps_of(recent: Recent, C: int) -> Taps:
    """The compile-time parameters of a convolution of C channels."""
    _, ring, width = recent.ring.shape
    number = recent.weight.numel() // C
    return Taps(number, triton.next_power_of_2(number), C, ring, width)


@triton.jit
def seen_by(back, taps: tl.constexpr):
    """How far before a row the tokens of all taps are, for the token that precedes it by `back`. [BLOCK_T, 1]."""
    tap = tl.arange(0, taps.BLOCK_T)[:, None]
    return back + tl.maximum(taps.NUMBER - 1 - tap, 0)


@triton.jit
def weights_of(recent, offs_c, mask_c, taps: tl.constexpr):
    """Weights of some channels for all taps, 0 behind the last. float32 [BLOCK_T, BLOCK_C]."""
    tap = tl.arange(0, taps.BLOCK_T)[:, None]
    mask = (tap < taps.NUMBER) & mask_c[None, :]
    return tl.load(recent.weight + tap * taps.C + offs_c[None, :], mask=mask, other=0.0)


@triton.jit
def is_here(rows, row, back):
    """Whether the token that precedes a row by `back` is a row of the step, too."""
    return (row >= back) & (tl.load(rows.slots + tl.maximum(row - back, 0)) == tl.load(rows.slots + row))


@triton.jit
def ring_of(recent, rows, row, back, taps: tl.constexpr):
    """Where the token that precedes a row by `back` is in the ring, and whether there is such a token."""
    slot, position = tl.load(rows.slots + row).to(tl.int64), tl.load(rows.positions + row).to(tl.int64) - back
    there = position >= 0
    return recent.ring + (slot * taps.RING + tl.where(there, position, 0) % taps.RING) * taps.WIDTH, there


@triton.jit
def enters(rows, row, M, taps: tl.constexpr):
    """Whether a row is among the last of its slot's in a step, which have room in the ring."""
    later = row + taps.RING
    return (later >= M) | (tl.load(rows.slots + tl.minimum(later, M - 1)) != tl.load(rows.slots + row))


@triton.jit
def _gated(projected, row, offs_c, mask_c, compensated, C: tl.constexpr):
    """What enters the ring of a row, or of several [., 1]: the product of its first and its last third. float32."""
    offs = row * 3 * C + offs_c
    gate = projected_at(projected, offs, mask_c, compensated)
    return gate * projected_at(projected, offs + 2 * C, mask_c, compensated)


@triton.jit(do_not_specialize=["M", "given"])
def _convolve_kernel(
    projected, rows, recent, x_ptr, sums_ptr, M, given, taps: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Program (m, block) handles channels [block * BLOCK_C, ...) of row m. projected [M, 3 C], x [M, C].

    sums [M, ceil(C / 32)], where they are asked for.
    """
    C: tl.constexpr = taps.C
    row = tl.program_id(0).to(tl.int64)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_c = offs_c < C
    compensated = given & _COMPENSATED
    if (given & _MIXES) != 0:
        back = seen_by(0, taps)
        here = is_here(rows, row, back)
        at, there = ring_of(recent, rows, row, back, taps)
        entered = _gated(projected, row - back, offs_c[None, :], mask_c[None, :] & here, compensated, C)
        entered += tl.load(at + offs_c[None, :], mask=mask_c[None, :] & there & (here == 0), other=0.0)
        total = tl.sum(entered * weights_of(recent, offs_c, mask_c, taps), axis=0)
        if recent.bias is not None:
            total += tl.load(recent.bias + offs_c, mask=mask_c, other=0.0)
        x = (total * projected_at(projected, row * 3 * C + C + offs_c, mask_c, compensated)).to(tl.float16)
        tl.store(x_ptr + row * C + offs_c, x, mask=mask_c)
        if (given & _SUMMED) != 0:
            store_sums(sums_ptr + row * ((C + 31) // 32), x, tl.program_id(1) * (BLOCK_C // 32), C, BLOCK_C)
    if (given & _ENTERS) != 0:
        at, _ = ring_of(recent, rows, row, 0, taps)
        entering = mask_c & enters(rows, row, M, taps)
        tl.store(at + offs_c, _gated(projected, row, offs_c, entering, compensated, C), mask=entering)


def convolve(
    y: torch.Tensor,
    dec: torch.Tensor | None,
    rows: Rows,
    recent: Recent,
    x: torch.Tensor,
    sums: torch.Tensor | None = None,
) -> None:
    """Write G * conv(B * u) to x, rounded to half precision, where B, G and u are the thirds of y + dec.

    The products B * u of the rows enter the ring.

    Args:
        y: float32 [M, 3 C], output of the fused projection.
        dec: float32, shaped like y, its compensation, or None.
        rows: Those of a slot adjacent, in consecutive positions.
        recent: The layer's; the ring is changed.
        x: float16 [M, C]; overwritten.
        sums: float32 [M, ceil(C / 32)]; overwritten with the sums of the pieces of x
            (`runtime.backends.triton.kernels.sums`). None: not needed.
    """
    M, C = x.shape
    assert y.shape == (M, 3 * C)
    projected, unused = Projected(y, y if dec is None else dec), y if sums is None else sums
    given = (dec is not None) | (sums is not None) << 1
    both = _MIXES.value | _ENTERS.value
    for parts in (both,) if M < ALONE else (_MIXES.value, _ENTERS.value):
        _convolve_kernel[(M, triton.cdiv(C, BLOCK_C))](
            projected, rows, recent, x, unused, M, given | parts, taps=taps_of(recent, C), BLOCK_C=BLOCK_C, num_warps=4
        )  # fmt: skip
