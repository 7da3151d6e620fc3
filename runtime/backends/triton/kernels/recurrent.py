"""Layers with a state: short convolutions, and the gated delta rule or Mamba-2 row by row.

A convolution has a few taps over a step's rows and the tokens before them. A row's earlier tokens are rows of the same
step, or are kept in a ring of recent tokens (`runtime.kv.states`). The step's own rows enter the ring, too. A row that
enters may take the place of a token that other rows still read, once a step has `ALONE` rows: they enter in a launch of
their own then.

The matrices of a delta rule absorb the tokens that wait in the ring and then meet the rows of a step, one after the
other in the order of their positions: a row has the same bits alone and among others. Rows that are absorbed at once,
more than `SMALL_STEP` of a sequence, are read in chunks instead (`runtime.backends.triton.kernels.delta_chunks`).
Programs divide a matrix by its columns, which do not depend on one another. Which tokens wait, and what matrices keep,
is read on the device.

Source: Yang et al. 2024 (Gated Delta Networks), equation 10; `models.recurrent` is the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from models.spec import DeltaSpec
from runtime.backends.triton.kernels.activations import (
    Projected,
    projected_at,
    sigmoid,
    softplus,
    store_left,
    to_half,
)
from runtime.backends.triton.kernels.cache import Rows
from runtime.backends.triton.kernels.delta_chunks import (
    BLOCK_V,
    Heads,
    Mixed,
    channels_of,
    delta_rule_chunked,
    heads_of,
    inputs_of,
    stride_of,
)
from runtime.backends.triton.sizes import RUNS_TOGETHER
from runtime.kv.states import LONGEST_TAPS, RING, SMALL_STEP

ALONE = RING - LONGEST_TAPS + 2
"""Rows of a step from which on they enter the ring in a launch of their own."""
BLOCK_C = 256
"""Channels of a program: 2 for each of its 128 threads."""
_COMPENSATED, _LEFT, _MIXES, _ENTERS = (tl.constexpr(1 << place) for place in range(4))
"""Bits of `given`: whether the projection has a compensation; whether `store_left` is wanted; whether rows are
mixed, and whether they enter the ring."""
_TINY = tl.constexpr(1e-6)
"""Added to the squared length of a query or key (`models.recurrent.normalized`)."""


class Recent(NamedTuple):
    """What is kept of recent tokens, as a kernel argument."""

    ring: Any  # float32 [slots, RING, WIDTH], the token at position p in row p % RING
    weight: Any  # float32 [taps, C], tap by tap; the last is the token's own
    bias: Any = None  # float32 [C]; None if there is none


class Taps(NamedTuple):
    """Compile-time parameters of a convolution."""

    NUMBER: int
    BLOCK_T: int  # Taps, padded to a power of two
    C: int
    RING: int
    WIDTH: int  # Numbers of such a row, at least as many as channels


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
    projected, rows, recent, x_ptr, left_ptr, M, given, taps: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Program (m, block) handles channels [block * BLOCK_C, ...) of row m. projected [M, 3 C], x [M, C].

    left as in `store_left`, where it is wanted.
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
        x = to_half(total * projected_at(projected, row * 3 * C + C + offs_c, mask_c, compensated))
        tl.store(x_ptr + row * C + offs_c, x, mask=mask_c)
        if (given & _LEFT) != 0:
            store_left(left_ptr, row, x, tl.program_id(1) * BLOCK_C, C, C, BLOCK_C)
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
    left: torch.Tensor | None = None,
) -> None:
    """Write G * conv(B * u) to x, rounded to half precision, where B, G and u are the thirds of y + dec.

    y is float32 [M, 3 C], output of the fused projection, x float16 [M, C], and `left` what `store_left` writes.
    Rows of a slot are adjacent, in consecutive positions; the products B * u enter the ring.
    """
    M, C = x.shape
    assert y.shape == (M, 3 * C)
    projected, to = Projected(y, y if dec is None else dec), y if left is None else left
    given = (dec is not None) | (left is not None) << 1
    both = _MIXES.value | _ENTERS.value
    for parts in (both,) if M < ALONE else (_MIXES.value, _ENTERS.value):
        _convolve_kernel[(M, triton.cdiv(C, BLOCK_C))](
            projected, rows, recent, x, to, M, given | parts, taps=taps_of(recent, C), BLOCK_C=BLOCK_C, num_warps=4
        )  # fmt: skip


class Rates(NamedTuple):
    """Numbers of value heads that make their decays, as a kernel argument."""

    decay: Any  # float32 [VALUES], factors of the logarithm of what is left of a matrix
    dt: Any  # float32 [VALUES], what is added to a token's own number
    skip: Any = None  # float32 [VALUES], Mamba-2's D


class Source(NamedTuple):
    """Where a step's rows and the tokens before them enter from, in kernels."""

    projected: Projected  # Of the step's rows
    compensated: Any
    rows: Rows  # Their slots and positions
    recent: Recent  # The tokens before them


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """A layer with a delta rule."""

    spec: DeltaSpec  # Its heads
    recent: Recent  # Its convolution and ring
    rates: Rates  # Of its decays
    gain: torch.Tensor | None
    """float32 [DV], weight of the norm of each head's outputs; in Mamba-2 [VALUES * DV]; None: they pass none."""
    eps: float
    matrices: torch.Tensor  # float32 [slots, VALUES, DK, COLUMNS]

    @property
    def heads(self) -> Heads:
        return heads_of(self.spec, self.matrices.shape[3])

    @property
    def taps(self) -> Taps:
        return taps_of(self.recent, self.spec.channels)


@triton.jit
def _entered(source, row, back, offs, mask, taps: tl.constexpr, STRIDE: tl.constexpr):
    """What has entered of the token that precedes a row by `back`, at some offsets; 0 before the sequence.

    Args (tensors): back, offsets and mask are of one shape, or broadcast to one.
    """
    here = is_here(source.rows, row, back)
    at, there = ring_of(source.recent, source.rows, row, back, taps)
    x = projected_at(source.projected, (row - back) * STRIDE + offs, mask & here, source.compensated)
    return x + tl.load(at + offs, mask=mask & there & (here == 0), other=0.0)


@triton.jit
def _convolved(source, row, back, offs, mask, taps: tl.constexpr, STRIDE: tl.constexpr):
    """Channels of such a token behind the convolution and SiLU."""
    x = _entered(source, row, seen_by(back, taps), offs[None, :], mask[None, :], taps, STRIDE)
    total = tl.sum(x * weights_of(source.recent, offs, mask, taps), axis=0)
    if source.recent.bias is not None:
        total += tl.load(source.recent.bias + offs, mask=mask, other=0.0)
    return total * sigmoid(total)


@triton.jit(do_not_specialize=["runs", "compensated"])
def _mix_kernel(
    projected, compensated, rows, recent, rates, runs_ptr, mixed, runs, taps: tl.constexpr, heads: tl.constexpr
):  # fmt: skip
    """Program (i, h): head h of the tokens that wait of run i, or where i >= runs of row i - runs; see `Mixed`.

    Heads are those of queries, keys and values, and the last program has beta and decay of all. projected [M, inputs +
    VALUES * DV]; runs [., 4] (`runtime.backends.triton.cache.RunTable`).
    """
    KEYS: tl.constexpr = heads.KEYS
    VALUES: tl.constexpr = heads.VALUES
    CHANNELS: tl.constexpr = channels_of(heads)
    INPUTS: tl.constexpr = inputs_of(heads)
    STRIDE: tl.constexpr = stride_of(heads)
    run = tl.program_id(0)
    head = tl.program_id(1)
    waits = run < runs
    at = runs_ptr + 4 * run
    first, count = tl.load(at, mask=waits, other=0), tl.load(at + 1, mask=waits, other=0)
    row = tl.where(waits, first, run - runs).to(tl.int64)
    tokens = tl.where(count > 0, tl.load(rows.positions + row) - tl.load(at + 2, mask=waits, other=0), 0)
    tokens = tl.where(head < KEYS, 0, tokens)  # queries of earlier tokens are not read again
    tokens = tl.where(waits, tokens, 1)
    out = mixed.rows + row * INPUTS
    if waits:
        out = mixed.waiting + run.to(tl.int64) * (heads.WAITING * INPUTS)
    source = Source(projected, compensated, rows, recent)
    for token in range(tokens):
        back = tl.where(waits, tokens - token, 0)
        if head < 2 * KEYS + VALUES:
            is_key = head < 2 * KEYS
            offs_d = tl.arange(0, heads.BLOCK_D)
            mask_d = offs_d < tl.where(is_key, heads.DK, heads.DV)
            begin = tl.where(is_key, head * heads.DK, 2 * KEYS * heads.DK + (head - 2 * KEYS) * heads.DV)
            x = _convolved(source, row, back, begin + offs_d, mask_d, taps, STRIDE)
            if not heads.MAMBA:
                factor = tl.rsqrt(tl.sum(x * x, axis=0) + _TINY) * tl.where(head < KEYS, heads.SCALE, 1.0)
                x *= tl.where(is_key, factor, 1.0)
            tl.store(out + begin + offs_d, x, mask=mask_d)
        else:
            offs_h = tl.arange(0, heads.BLOCK_H)
            mask_h = offs_h < VALUES
            a = _entered(source, row, back, CHANNELS + VALUES + offs_h, mask_h, taps, STRIDE)
            a += tl.load(rates.dt + offs_h, mask=mask_h, other=0.0)
            steps = softplus(a)
            log_decay = tl.load(rates.decay + offs_h, mask=mask_h, other=0.0) * steps
            if heads.MAMBA:
                beta = steps
            else:
                beta = heads.MOST * sigmoid(_entered(source, row, back, CHANNELS + offs_h, mask_h, taps, STRIDE))
            tl.store(out + CHANNELS + offs_h, beta, mask=mask_h)
            tl.store(out + CHANNELS + VALUES + offs_h, log_decay, mask=mask_h)
        out += INPUTS


@triton.jit
def _recur_kernel(mixed, matrices_ptr, rows, runs_ptr, rates, heads: tl.constexpr, BLOCK_V: tl.constexpr):
    """Program (i, h, block): columns [block * BLOCK_V, ...) of the matrix of value head h, for run i.

    Of rows that are absorbed at once, only the tokens that wait before them. matrices [slots, VALUES, DK, COLUMNS];
    mixed as `Mixed` says, runs as in `_mix_kernel`.
    """
    CHANNELS: tl.constexpr = channels_of(heads)
    INPUTS: tl.constexpr = inputs_of(heads)
    DK: tl.constexpr = heads.DK
    run = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(runs_ptr + 4 * run).to(tl.int64)
    count = tl.load(runs_ptr + 4 * run + 1)
    absorbs = tl.load(runs_ptr + 4 * run + 3)
    waiting = tl.where(count > 0, tl.load(rows.positions + first) - tl.load(runs_ptr + 4 * run + 2), 0)
    tokens = waiting + tl.where(absorbs == 2, 0, count)
    if tokens > 0:
        slot = tl.load(rows.slots + first).to(tl.int64)
        offs_k = tl.arange(0, heads.BLOCK_K)
        offs_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        mask_k = offs_k < DK
        mask_v = offs_v < heads.DV
        at = matrices_ptr + ((slot * heads.VALUES + head) * DK + offs_k[:, None]) * heads.COLUMNS + offs_v[None, :]
        matrix = tl.load(at, mask=mask_k[:, None], other=0.0)
        key = head // (heads.VALUES // heads.KEYS) * DK
        for token in range(tokens):
            if (token == waiting) & (absorbs == 1):
                tl.store(at, matrix, mask=mask_k[:, None])
            read = token >= waiting
            x = mixed.rows + (first + token - waiting) * INPUTS
            if token < waiting:
                x = mixed.waiting + (run.to(tl.int64) * heads.WAITING + token) * INPUTS
            q = tl.load(x + key + offs_k, mask=mask_k & read, other=0.0)
            k = tl.load(x + heads.KEYS * DK + key + offs_k, mask=mask_k, other=0.0)
            value = x + 2 * heads.KEYS * DK + head * heads.DV + offs_v
            v = tl.load(value, mask=mask_v, other=0.0)
            matrix *= tl.exp(tl.load(x + CHANNELS + heads.VALUES + head))
            new = v
            if not heads.MAMBA:
                new -= tl.sum(matrix * k[:, None], axis=0)
            matrix += k[:, None] * (new * tl.load(x + CHANNELS + head))[None, :]
            y = tl.sum(matrix * q[:, None], axis=0)
            if heads.MAMBA:
                y += tl.load(rates.skip + head) * v
            tl.store(value, y, mask=mask_v & read)
        if absorbs == 2:
            tl.store(at, matrix, mask=mask_k[:, None])


@triton.jit(do_not_specialize=["M", "given"])
def _finish_kernel(
    projected, rows, recent, gain_ptr, mixed, x_ptr, left_ptr, M, eps, given, taps: tl.constexpr, heads: tl.constexpr
):  # fmt: skip
    """Program (m, h): RMSNorm of the outputs of value head h of row m, times SiLU of its gate. x [M, VALUES * DV].

    In Mamba-2, of those of key head h, which have one norm, once they are multiplied by SiLU of their gates. Without a
    gain there is no norm, and h is a value head.
    left as in `store_left`, where it is wanted. A part of what enters the ring, too.
    """
    INPUTS: tl.constexpr = inputs_of(heads)
    STRIDE: tl.constexpr = stride_of(heads)
    DV: tl.constexpr = heads.DV
    BLOCK_V: tl.constexpr = triton.next_power_of_2(DV)
    NORMS: tl.constexpr = heads.KEYS if heads.MAMBA and gain_ptr is not None else heads.VALUES
    SHARED: tl.constexpr = heads.VALUES // NORMS
    PART: tl.constexpr = (INPUTS + NORMS - 1) // NORMS
    BLOCK_P: tl.constexpr = triton.next_power_of_2(PART)
    row = tl.program_id(0).to(tl.int64)
    norm = tl.program_id(1)
    compensated = given & _COMPENSATED
    offs_v = tl.arange(0, BLOCK_V)
    mask_v = offs_v < DV
    values = mixed.rows + row * INPUTS + 2 * heads.KEYS * heads.DK
    factor = 1.0
    if gain_ptr is not None:
        squares = tl.zeros([BLOCK_V], tl.float32)
        for head in range(norm * SHARED, (norm + 1) * SHARED):
            y = tl.load(values + head * DV + offs_v, mask=mask_v, other=0.0)
            if heads.MAMBA:
                gate = projected_at(projected, row * STRIDE + INPUTS + head * DV + offs_v, mask_v, compensated)
                y *= gate * sigmoid(gate)
            squares += y * y
        factor = tl.rsqrt(tl.sum(squares, axis=0) / (SHARED * DV) + eps)
    for head in range(norm * SHARED, (norm + 1) * SHARED):
        y = tl.load(values + head * DV + offs_v, mask=mask_v, other=0.0)
        if gain_ptr is not None:
            gain = gain_ptr + (head * DV if heads.MAMBA else 0) + offs_v
            y *= factor * tl.load(gain, mask=mask_v, other=0.0)
        gate = projected_at(projected, row * STRIDE + INPUTS + head * DV + offs_v, mask_v, compensated)
        x = to_half(y * gate * sigmoid(gate))
        tl.store(x_ptr + (row * heads.VALUES + head) * DV + offs_v, x, mask=mask_v)
        if DV % 32 == 0:  # noqa: SIM102 - a constant and a number of the device
            if (given & _LEFT) != 0:
                store_left(left_ptr, row, x, head * DV, (head + 1) * DV, heads.VALUES * DV, BLOCK_V)
    if enters(rows, row, M, taps):
        offs_p = norm * PART + tl.arange(0, BLOCK_P)
        mask_p = (tl.arange(0, BLOCK_P) < PART) & (offs_p < INPUTS)
        at, _ = ring_of(recent, rows, row, 0, taps)
        tl.store(at + offs_p, projected_at(projected, row * STRIDE + offs_p, mask_p, compensated), mask=mask_p)


def delta_rule(
    y: torch.Tensor,
    dec: torch.Tensor | None,
    rows: Rows,
    runs: torch.Tensor,
    layer: DeltaLayer,
    mixed: Mixed,
    x: torch.Tensor,
    left: torch.Tensor | None = None,
) -> None:
    """Write what the rule makes of y + dec to x, rounded to half precision; rows enter ring and matrices.

    Args:
        y: float32 [M, inputs + VALUES * DV], output of the fused projection: what enters the state, then gates.
        dec: float32, shaped like y, its compensation, or None.
        rows: Those of a slot adjacent, in consecutive positions.
        runs: int32 [slots, 4], `runtime.backends.triton.cache.RunTable.tensor`.
        layer: The layer; its ring and matrices are changed.
        mixed: Overwritten; its room for `RUNS_TOGETHER` runs, or for all if there are fewer, is used again and again.
        x: float16 [M, VALUES * DV]; overwritten.
        left: What products read of x; overwritten as `store_left` does. None: not needed.
    """
    M, heads, taps = len(x), layer.heads, layer.taps
    assert y.shape == (M, stride_of(heads))
    projected, most = Projected(y, y if dec is None else dec), min(M, len(runs))
    given = (dec is not None) | (left is not None) << 1
    for start in range(0, most, RUNS_TOGETHER):
        some, of = min(RUNS_TOGETHER, most - start), runs[start:]
        _mix_kernel[(some + (0 if start else M), 2 * heads.KEYS + heads.VALUES + 1)](
            projected, int(dec is not None), rows, layer.recent, layer.rates, of, mixed, some, taps=taps, heads=heads,
            num_warps=1,
        )  # fmt: skip
        _recur_kernel[(some, heads.VALUES, heads.COLUMNS // BLOCK_V)](
            mixed, layer.matrices, rows, of, layer.rates, heads=heads, BLOCK_V=BLOCK_V, num_warps=1
        )
    if long := min(most, M // (SMALL_STEP + 1)):
        delta_rule_chunked(mixed, layer.matrices, rows, runs[:long], heads, layer.rates.skip)
    _finish_kernel[(M, heads.KEYS if heads.MAMBA and layer.gain is not None else heads.VALUES)](
        projected, rows, layer.recent, layer.gain, mixed, x, y if left is None else left, M, layer.eps, given,
        taps=taps, heads=heads, num_warps=1,
    )  # fmt: skip
