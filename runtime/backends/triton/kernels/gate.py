"""The gate of the MLP on the GPU, or its activation without one; and the gate of a block's own embeddings of tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from models.spec import CLAMPED_GAIN, UNGATED, XIELU_LINEAR, XIELU_MOST, Activation
from runtime.backends.triton.kernels.activations import (
    Projected,
    Tokens,
    projected_at,
    rounding_shape,
    store_left,
    store_tokens,
    to_half,
)
from runtime.backends.triton.kernels.norm import normalized

BLOCK_I = 512
"""Channels per program: 4 for each of its 128 threads, so that one row already occupies many multiprocessors."""


_COMPENSATED, _LEFT, _BOTH = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
"""Bits of `given`: whether dec is added, and whether `store_left` is wanted; whether the context has a compensation.
See `_add_norm_kernel`."""
_GAIN, _LINEAR, _MOST = (tl.constexpr(number) for number in (CLAMPED_GAIN, XIELU_LINEAR, XIELU_MOST))


class Slopes(NamedTuple):
    """Those of xIELU on either side, each float32 [1]."""

    rising: Any
    falling: Any


class How(NamedTuple):
    """An activation."""

    kind: Activation = "silu"
    limit: float = 0.0  # Most of a gate and of what it lets through, whose least is its negative; 0: there is none
    slopes: Slopes | None = None  # Of xIELU


_SILU = How()


@triton.constexpr_function
def _parts(kind):
    """How often as many numbers as it gives an activation reads (`models.spec.ModelSpec.mlp_parts`)."""
    return 1 if kind in UNGATED else 2


@triton.jit(do_not_specialize=["given"])
def _gate_kernel(
    y_ptr, dec_ptr, x_ptr, left_ptr, factors_ptr, slopes, given,
    WIDTH: tl.constexpr, BLOCK_I: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Program (m, block) handles channels [block * BLOCK_I, ...) of row m. y, dec [M, parts * WIDTH], x [M, WIDTH].

    left as in `store_left`, factors [M] or None.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_i = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    x = _inner(Projected(y_ptr, dec_ptr), row, offs_i, slopes, given, WIDTH, KIND, LIMIT)
    if factors_ptr is not None:
        x *= tl.load(factors_ptr + row)
    x = to_half(x)
    tl.store(x_ptr + row * WIDTH + offs_i, x, mask=offs_i < WIDTH)
    if (given & _LEFT) != 0:
        store_left(left_ptr, row, x, tl.program_id(1) * BLOCK_I, WIDTH, WIDTH, BLOCK_I)


@triton.jit(do_not_specialize=["given"])
def _gate_round_kernel(
    y_ptr, dec_ptr, x_ptr, tokens, slopes, given,
    WIDTH: tl.constexpr, shape: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Program m handles row m, which is also quantized to INT8."""
    row = tl.program_id(0).to(tl.int64)
    offs_i = tl.arange(0, shape.BLOCK_K)
    x = _inner(Projected(y_ptr, dec_ptr), row, offs_i, slopes, given, WIDTH, KIND, LIMIT)
    tl.store(x_ptr + row * WIDTH + offs_i, to_half(x), mask=offs_i < WIDTH)
    store_tokens(tokens, row, x, shape)


@triton.jit
def _inner(projected, row, offs_i, slopes, given, WIDTH: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """Channels of a row, float32 [BLOCK]; 0 from WIDTH on."""
    PARTS: tl.constexpr = _parts(KIND)
    mask_i = offs_i < WIDTH
    offs = row * PARTS * WIDTH + offs_i
    x = projected_at(projected, offs, mask_i, given & _COMPENSATED)
    if PARTS == 2:
        x = _activated(x, projected_at(projected, offs + WIDTH, mask_i, given & _COMPENSATED), KIND, LIMIT)
    elif KIND == "relu2":
        x = tl.where(x < 0, 0.0, x)  # leaves NaN alone
        x *= x
    else:
        x = tl.where(mask_i, _xielu(x, slopes), 0.0)
    return x


@triton.jit
def _xielu(x, slopes):
    """The activation of two slopes, float32; NaN stays."""
    most = tl.where(x < _MOST, x, _MOST)
    curve = tl.exp(most) - 1.0 - most  # of which too few digits are left near 0
    series = most * most * (0.5 + most * (0.16666666666666666 + most * (0.041666666666666664 + most * 0.008333333333)))
    curve = tl.where(most > -0.25, series, curve) + (most - x)
    return tl.where(x > 0, tl.load(slopes.rising) * x * x, tl.load(slopes.falling) * curve) + _LINEAR * x


@triton.jit
def _activated(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """The activation of a gate times what it lets through, float32; see `gate`."""
    if LIMIT > 0:  # by comparisons, which leave NaN alone
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    slope = gate * _GAIN if LIMIT > 0 else gate
    if KIND == "gelu_tanh":  # x / 2 * (1 + tanh(t)) is x times the sigmoid of 2 t, t = sqrt(2 / pi) * (x + 0.044715 x³)
        slope = gate * (1.5957691216057308 + 0.07135481282925037 * gate * gate)
    falling = tl.exp(-tl.abs(slope))  # never overflows
    sigmoid = tl.where(slope >= 0, 1.0, falling) / (1.0 + falling)
    return gate * sigmoid * up


def gate(
    y: torch.Tensor,
    dec: torch.Tensor | None,
    x: torch.Tensor,
    left: torch.Tensor | Tokens | None = None,
    *,
    how: How = _SILU,
    factors: torch.Tensor | None = None,
) -> None:
    """Write silu(g) * u, or one of the other gates, to x, rounded to half precision; g and u are the halves of y + dec.

    The others are gelu(g) * u, and (u + 1) * g * sigmoid(1.702 g) within limits
    (`runtime.backends.operations.layers.clamped_gate`); or, without a gate, what is of u = y + dec alone.

    Args:
        y: float32 [M, 2 * intermediate_size], output of the fused projection: gate, then up; or [M, intermediate_size].
        dec: float32, shaped like y, its compensation, or None.
        x: float16 [M, intermediate_size]; overwritten.
        left: What products read of the same rows; overwritten. As `store_left` writes it, or INT8 tokens [M,
            intermediate_size], quantized before half precision: a program then handles a whole row, for its scale.
            None: not needed.
        how: Which of them. GELU is by its tanh form.
        factors: float32 [M], a factor of each row before it is rounded: an expert's share. None: 1; none with tokens.
    """
    M, width = x.shape
    assert y.shape == (M, _parts(how.kind) * width)
    if isinstance(left, Tokens):
        assert factors is None
        shape, warps = rounding_shape(width, left.group_size)
        given = int(dec is not None)
        _gate_round_kernel[(M,)](
            y, y if dec is None else dec, x, left.operands, how.slopes, given, WIDTH=width, shape=shape,
            KIND=how.kind, LIMIT=how.limit, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
        return
    grid = (M, triton.cdiv(width, BLOCK_I))
    given = (dec is not None) | (left is not None) << 1
    dec, left = y if dec is None else dec, y if left is None else left
    _gate_kernel[grid](
        y, dec, x, left, factors, how.slopes, given, WIDTH=width, BLOCK_I=BLOCK_I, KIND=how.kind, LIMIT=how.limit,
        num_warps=4,
    )  # fmt: skip


class OwnTokens(NamedTuple):
    """A block's own embeddings of a step's tokens."""

    rows: Any  # float16 [M, P], with rows further apart
    stride: Any  # Numbers from a row to the next
    weight: Any  # float32 [P], weight of the norm of what is added to them
    eps: Any


@triton.jit(do_not_specialize=["given"])
def _token_gate_kernel(
    gates, context, tokens, x_ptr, left_ptr, given,
    WIDTH: tl.constexpr, BLOCK_I: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Program m handles row m. Projected gates and context [M, WIDTH], x the same; `store_left`."""
    row = tl.program_id(0).to(tl.int64)
    offs_i = tl.arange(0, BLOCK_I)
    mask_i = offs_i < WIDTH
    offs = row * WIDTH + offs_i
    gate = projected_at(gates, offs, mask_i, given & _COMPENSATED)
    up = normalized(projected_at(context, offs, mask_i, given & _BOTH), tokens.weight, tokens.eps, WIDTH, BLOCK_I)
    up += tl.load(tokens.rows + row * tokens.stride + offs_i, mask=mask_i, other=0.0).to(tl.float32)
    x = to_half(tl.where(mask_i, _activated(gate, up, KIND, LIMIT), 0.0))
    tl.store(x_ptr + offs, x, mask=mask_i)
    if (given & _LEFT) != 0:
        store_left(left_ptr, row, x, 0, WIDTH, WIDTH, BLOCK_I)


def token_gate(
    gates: Projected,
    context: Projected,
    tokens: OwnTokens,
    x: torch.Tensor,
    left: torch.Tensor | None = None,
    *,
    how: How = _SILU,
) -> None:
    """Write f(g) * (e + norm(c)), as `gate` does, where e is a block's own embedding of a row's token.

    gates g and context c are float32 [M, P] with their compensations, or None; x is float16 [M, P].
    `left` is as in `store_left`; None: not needed.
    """
    M, width = x.shape
    given = (gates.dec is not None) | (left is not None) << 1 | (context.dec is not None) << 2
    both = (Projected(one.y, one.y if one.dec is None else one.dec) for one in (gates, context))
    block = max(64, triton.next_power_of_2(width))
    _token_gate_kernel[(M,)](
        *both, tokens, x, gates.y if left is None else left, given, WIDTH=width, BLOCK_I=block, KIND=how.kind,
        LIMIT=how.limit, num_warps=token_warps(block),
    )  # fmt: skip


def token_warps(block: int) -> int:
    """Warps of a program of `token_gate`, by its channels: 4 for each of their threads."""
    return max(1, min(4, block // 128))
