"""RMSNorm on vectors of floats."""

from __future__ import annotations

import math

import numba

from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    add,
    fill,
    fma,
    get_float,
    load_floats,
    mul,
    set_float,
    store_floats,
    sum_lanes,
    zero_floats,
)


@kernel
def inverse_rms(x: int, width: int, eps: float) -> float:
    """1 / sqrt(mean of x² + eps).

    Args:
        x: Address of float32 [width], zero-padded to a multiple of 32.
        width: Channels.
        eps: Added to the mean.
    """
    even, odd = zero_floats(), zero_floats()
    for i in range(0, width, 32):
        low, high = load_floats(x + 4 * i), load_floats(x + 4 * i + 64)
        even, odd = fma(low, low, even), fma(high, high, odd)
    mean = sum_lanes(add(even, odd)) / numba.float32(width)
    return numba.float32(1.0 / math.sqrt(mean + eps))


@kernel
def scale_by(x: int, weight: int, out: int, start: int, stop: int, factor: float) -> None:
    """out[i] = x[i] * factor * weight[i] for start <= i < stop, both multiples of 16; addresses of float32."""
    factors = fill(numba.float32(factor))
    for i in range(start, stop, 16):
        store_floats(out + 4 * i, mul(mul(load_floats(x + 4 * i), factors), load_floats(weight + 4 * i)))


@kernel
def settle_row(x: int, width: int, weight: int, eps: float, out: int, accumulate: int) -> None:
    """RMSNorm of a row of any width, in place of another or added to it.

    Args:
        x: Address of float32 [width].
        width: Channels.
        weight: Address of float32 [width].
        eps: Added to the mean square.
        out: Address of float32 [width]; may be x.
        accumulate: Whether the result is added to `out`.
    """
    sums, whole = zero_floats(), width // 16 * 16
    for i in range(0, whole, 16):
        part = load_floats(x + 4 * i)
        sums = fma(part, part, sums)
    total = sum_lanes(sums)
    for i in range(whole, width):
        value = get_float(x + 4 * i)
        total += value * value
    factor = numba.float32(1.0 / math.sqrt(total / numba.float32(width) + eps))
    factors = fill(factor)
    for i in range(0, whole, 16):
        part = mul(mul(load_floats(x + 4 * i), factors), load_floats(weight + 4 * i))
        if accumulate != 0:
            part = add(part, load_floats(out + 4 * i))
        store_floats(out + 4 * i, part)
    for i in range(whole, width):
        value = get_float(x + 4 * i) * factor * get_float(weight + 4 * i)
        if accumulate != 0:
            value += get_float(out + 4 * i)
        set_float(out + 4 * i, value)


@kernel
def scale_row(x: int, width: int, factor: float) -> None:
    """Multiply float32 [width] at x by a number; any width."""
    factors, whole = fill(numba.float32(factor)), width // 16 * 16
    for i in range(0, whole, 16):
        store_floats(x + 4 * i, mul(load_floats(x + 4 * i), factors))
    for i in range(whole, width):
        set_float(x + 4 * i, get_float(x + 4 * i) * numba.float32(factor))


@kernel
def norm_head(x: int, weight: int, width: int, eps: float) -> None:
    """RMSNorm of one head in place: float32 [width] at x, weight float32 [width]; any width."""
    total = numba.float32(0.0)
    for i in range(width):
        value = get_float(x + 4 * i)
        total += value * value
    factor = numba.float32(1.0 / math.sqrt(total / numba.float32(width) + eps))
    for i in range(width):
        set_float(x + 4 * i, get_float(x + 4 * i) * factor * get_float(weight + 4 * i))
