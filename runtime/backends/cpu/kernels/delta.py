"""The gated delta rule on sixteen columns of a matrix, which do not depend on the others."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba

from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    absolute,
    add,
    broadcast,
    div,
    exp,
    fill,
    fma,
    get_float,
    load_floats,
    log,
    maximum,
    mul,
    store_floats,
    sub,
    zero_floats,
)


@kernel
def shares_of(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    one = fill(numba.float32(1.0))
    return div(one, add(one, exp(sub(zero_floats(), x))))


@kernel
def decays_of(x: Any, rate: Any) -> Any:
    """exp(rate * log(1 + exp(x)))."""
    falling = exp(sub(zero_floats(), absolute(x)))
    softplus = add(maximum(x, zero_floats()), log(add(fill(numba.float32(1.0)), falling)))
    return exp(mul(rate, softplus))


@kernel
def inverse_length(x: int, width: int) -> float:
    """1 / sqrt(sum of squares + 1e-6) of float32 [width] at an address."""
    total = numba.float32(1e-6)
    for i in range(0, 4 * width, 4):
        total += get_float(x + i) * get_float(x + i)
    return numba.float32(1.0 / math.sqrt(total))


@kernel
def copy_columns(source: int, stride: int, target: int, rows: int) -> None:
    """Copy sixteen columns float32 [rows], `stride` bytes apart, side by side."""
    for i in range(rows):
        store_floats(target + 64 * i, load_floats(source + stride * i))


class Columns(NamedTuple):
    """Sixteen columns of a head's matrix."""

    at: int
    """Address of float32 [rows, 16]."""
    stride: int
    """Bytes between rows."""
    rows: int
    """Dk."""


class Scaled(NamedTuple):
    """A query or key of a head, Dk channels."""

    at: int
    """Address of float32 [Dk]."""
    factor: float
    """What they are to be multiplied by."""


@kernel
def learn(columns: Columns, k: Scaled, v: Any, beta: float, decay: float, q: Scaled) -> Any:
    """Sixteen columns S become decay S + k beta (v - decay Sᵀk), in place.

    Args:
        columns: S.
        k: The key.
        v: Sixteen values.
        beta: How much of the old values they replace.
        decay: How much of S is left.
        q: The query.

    Returns:
        Sᵀq afterwards.
    """
    at, stride, rows = columns
    even, odd = zero_floats(), zero_floats()
    for i in range(0, rows - 1, 2):
        even = fma(load_floats(at + stride * i), broadcast(k.at + 4 * i), even)
        odd = fma(load_floats(at + stride * (i + 1)), broadcast(k.at + 4 * i + 4), odd)
    if rows % 2 != 0:
        even = fma(load_floats(at + stride * (rows - 1)), broadcast(k.at + 4 * rows - 4), even)
    left = fill(numba.float32(decay))
    known = mul(add(even, odd), fill(numba.float32(decay * k.factor)))
    change = mul(sub(v, known), fill(numba.float32(beta * k.factor)))
    even, odd = zero_floats(), zero_floats()
    for i in range(0, rows - 1, 2):
        one = fma(broadcast(k.at + 4 * i), change, mul(left, load_floats(at + stride * i)))
        other = fma(broadcast(k.at + 4 * i + 4), change, mul(left, load_floats(at + stride * (i + 1))))
        store_floats(at + stride * i, one)
        store_floats(at + stride * (i + 1), other)
        even, odd = fma(one, broadcast(q.at + 4 * i), even), fma(other, broadcast(q.at + 4 * i + 4), odd)
    if rows % 2 != 0:
        last = at + stride * (rows - 1)
        one = fma(broadcast(k.at + 4 * rows - 4), change, mul(left, load_floats(last)))
        store_floats(last, one)
        even = fma(one, broadcast(q.at + 4 * rows - 4), even)
    return mul(add(even, odd), fill(numba.float32(q.factor)))
