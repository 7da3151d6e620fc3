"""Rows and heads in float32: RMSNorm, rotary embedding, the basis of the cache, the MLP's gates, and soft caps."""

from __future__ import annotations

import math
from typing import Any

import numba

from models.spec import CLAMPED_GAIN, XIELU_LINEAR
from runtime.backends.cpu.data.instructions import FORMS
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    absolute,
    add,
    div,
    exp,
    fill,
    fma,
    get_float,
    hadamard,
    load_floats,
    log,
    max_lanes,
    maximum,
    mul,
    set_float,
    store_floats,
    sub,
    sum_lanes,
    zero_floats,
)


@kernel
def mean_square(x: int, width: int) -> float:
    """Mean of x², float32 [width] at an address; what follows may be others."""
    even, odd, whole = zero_floats(), zero_floats(), width // 32 * 32
    for i in range(0, whole, 32):
        low, high = load_floats(x + 4 * i), load_floats(x + 4 * i + 64)
        even, odd = fma(low, low, even), fma(high, high, odd)
    total = sum_lanes(add(even, odd))
    for i in range(whole, width):
        value = get_float(x + 4 * i)
        total += value * value
    return numba.float32(total / numba.float32(width))


@kernel
def inverse_rms(x: int, width: int, eps: float) -> float:
    """1 / sqrt(mean of x² + eps).

    Args:
        x: Address of float32 [width].
        width: Channels; what follows may be others.
        eps: Added to the mean.
    """
    return numba.float32(1.0 / math.sqrt(mean_square(x, width) + eps))


@kernel
def scale_by(x: int, weight: int, out: int, start: int, stop: int, factor: float) -> None:
    """out[i] = x[i] * factor * weight[i] for start <= i < stop, both multiples of 16; addresses of float32."""
    factors = fill(numba.float32(factor))
    for i in range(start, stop, 16):
        store_floats(out + 4 * i, mul(mul(load_floats(x + 4 * i), factors), load_floats(weight + 4 * i)))


@kernel
def norm_inplace_row(x: int, width: int, weight: int, eps: float, out: int, accumulate: int) -> None:
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


@kernel
def rotate_head(x: int, cos: int, sin: int, half: int) -> None:
    """Rotate dimensions i and i + half of a head by the angle of frequency i.

    Args:
        x: Address of float32 [D]; dimensions from 2 * half on stay as they are.
        cos: Address of float32 [half], the position's row of the table.
        sin: Likewise.
        half: rotary_dim / 2.
    """
    if half % 16 == 0:
        for i in range(0, 4 * half, 64):
            low, high = load_floats(x + i), load_floats(x + 4 * half + i)
            c, s = load_floats(cos + i), load_floats(sin + i)
            store_floats(x + i, fma(low, c, sub(zero_floats(), mul(high, s))))
            store_floats(x + 4 * half + i, fma(high, c, mul(low, s)))
        return
    for i in range(half):
        a, b = get_float(x + 4 * i), get_float(x + 4 * (half + i))
        c, s = get_float(cos + 4 * i), get_float(sin + 4 * i)
        set_float(x + 4 * i, a * c - b * s)
        set_float(x + 4 * (half + i), b * c + a * s)


@kernel
def turn_head(x: int, dim: int, reflection: int) -> None:
    """Multiply a head with Hadamard's matrix, then reflect it.

    Args:
        x: Address of float32 [D].
        dim: D.
        reflection: Address of float32 [D].
    """
    block = dim & -dim
    width = 16 if block >= 16 else 1
    if block >= 16:
        for i in range(0, 4 * dim, 64):
            store_floats(x + i, hadamard(load_floats(x + i)))
    while width < block:
        _add_and_subtract(x, dim, width)
        width *= 2
    factor = numba.float32(1.0 / math.sqrt(numba.float32(block)))
    if block >= 16:
        for i in range(0, 4 * dim, 64):
            store_floats(x + i, mul(load_floats(x + i), fill(factor)))
    else:
        for i in range(0, 4 * dim, 4):
            set_float(x + i, get_float(x + i) * factor)
    share = numba.float32(0.0)
    for i in range(0, 4 * dim, 4):
        share += get_float(x + i) * get_float(reflection + i)
    for i in range(0, 4 * dim, 4):
        set_float(x + i, get_float(x + i) - share * get_float(reflection + i))


@kernel
def _add_and_subtract(x: int, dim: int, width: int) -> None:
    """Replace neighbouring runs of `width` numbers, two by two, by their sum and their difference."""
    for start in range(0, dim, 2 * width):
        first, second = x + 4 * start, x + 4 * (start + width)
        if width >= 16:
            for i in range(0, 4 * width, 64):
                a, b = load_floats(first + i), load_floats(second + i)
                store_floats(first + i, add(a, b))
                store_floats(second + i, sub(a, b))
        else:
            for i in range(0, 4 * width, 4):
                p, q = get_float(first + i), get_float(second + i)
                set_float(first + i, p + q)
                set_float(second + i, p - q)


_GELU, _CLAMPED, _SQUARED_RELU, _XIELU = (FORMS[of] for of in ("gelu_tanh", "clamped_silu", "relu2", "xielu"))
_TWICE, _CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


@kernel
def gate(gates: int, ups: int, out: int, start: int, stop: int) -> None:
    """out[i] = gates[i] / (1 + exp(-gates[i])) * ups[i] for start <= i < stop, multiples of 16; float32."""
    one = fill(numba.float32(1.0))
    for i in range(start, stop, 16):
        x = load_floats(gates + 4 * i)
        silu = div(x, add(one, exp(sub(zero_floats(), x))))
        store_floats(out + 4 * i, mul(silu, load_floats(ups + 4 * i)))


@kernel
def softplus(x: Any) -> Any:
    """log(1 + exp(x))."""
    falling = exp(sub(zero_floats(), absolute(x)))
    return add(maximum(x, zero_floats()), log(add(fill(numba.float32(1.0)), falling)))


@kernel
def _opened(gates: Any, soft: int) -> Any:
    """log(1 + exp(x)) of each, or 1 / (1 + exp(-x)) if not `soft`."""
    if soft != 0:
        return softplus(gates)
    one = fill(numba.float32(1.0))
    return div(one, add(one, exp(sub(zero_floats(), gates))))


@kernel
def output_gate(x: int, gates: int, width: int, each: int, soft: int) -> None:
    """x[i] *= f(gates[i // each]) for i < width, f as of `_opened`; addresses of float32."""
    if each == 1:
        for i in range(0, 4 * width, 64):
            store_floats(x + i, mul(load_floats(x + i), _opened(load_floats(gates + i), soft)))
        return
    for i in range(width // each):
        scale_row(x + 4 * i * each, each, max_lanes(_opened(fill(get_float(gates + 4 * i)), soft)))


@kernel
def gelu_gate(gates: int, ups: int, out: int, start: int, stop: int) -> None:
    """The same for x / 2 * (1 + tanh(t)) = x / (1 + exp(-2 t)), where t = sqrt(2 / pi) * (x + 0.044715 x³)."""
    one, linear, cubic = fill(numba.float32(1.0)), fill(numba.float32(-_TWICE)), fill(numba.float32(-_TWICE * _CUBIC))
    for i in range(start, stop, 16):
        x = load_floats(gates + 4 * i)
        falling = exp(mul(x, fma(mul(x, x), cubic, linear)))
        store_floats(out + 4 * i, mul(div(x, add(one, falling)), load_floats(ups + 4 * i)))


@kernel
def clamped_gate(gates: int, ups: int, out: int, start: int, stop: int, limit: float) -> None:
    """The same for (u + 1) * g / (1 + exp(-1.702 g)), g being at most `limit`, and u within -limit and limit."""
    one, gain, most = fill(numba.float32(1.0)), fill(numba.float32(-CLAMPED_GAIN)), fill(numba.float32(limit))
    least = sub(zero_floats(), most)
    for i in range(start, stop, 16):
        x = _at_most(load_floats(gates + 4 * i), most)
        up = add(one, maximum(_at_most(load_floats(ups + 4 * i), most), least))
        store_floats(out + 4 * i, mul(div(x, add(one, exp(mul(x, gain)))), up))


@kernel
def squared_relu(x: int, out: int, start: int, stop: int) -> None:
    """out[i] = max(x[i], 0)² for start <= i < stop, multiples of 16; float32."""
    for i in range(start, stop, 16):
        own = load_floats(x + 4 * i)
        store_floats(out + 4 * i, mul(maximum(own, zero_floats()), own))  # which leaves NaN alone


@kernel
def xielu(x: int, out: int, start: int, stop: int, slopes: int) -> None:
    """The same for xIELU (`models.spec.XIELU_LINEAR`).

    What either side adds to x / 2 is computed of max(x, 0) and of min(x, 0), so that it is 0 on the other.
    """
    rising, falling = fill(get_float(slopes)), fill(get_float(slopes + 4))
    linear, one = fill(numba.float32(XIELU_LINEAR)), fill(numba.float32(1.0))
    for i in range(start, stop, 16):
        own = load_floats(x + 4 * i)
        above, below = maximum(own, zero_floats()), _at_most(own, zero_floats())
        bend = sub(sub(exp(below), one), below)
        y = add(mul(mul(above, above), rising), mul(bend, falling))
        store_floats(out + 4 * i, fma(own, linear, y))


@kernel
def gate_by(form: int, limit: float, slopes: int, gates: int, ups: int, out: int, start: int, stop: int) -> None:
    """One of them, as GATE says."""
    if form == _CLAMPED:
        clamped_gate(gates, ups, out, start, stop, limit)
    elif form == _GELU:
        gelu_gate(gates, ups, out, start, stop)
    elif form == _SQUARED_RELU:
        squared_relu(gates, out, start, stop)
    elif form == _XIELU:
        xielu(gates, out, start, stop, slopes)
    else:
        gate(gates, ups, out, start, stop)


@kernel
def _at_most(x: Any, most: Any) -> Any:
    """The smaller of two vectors, lane by lane."""
    return sub(zero_floats(), maximum(sub(zero_floats(), x), sub(zero_floats(), most)))


@kernel
def cap_floats(x: int, count: int, cap: float) -> None:
    """Cap float32 [count] at address x in place; a multiple of 16. tanh(t) = 1 - 2 / (1 + exp(2 t))."""
    one, top, fall = fill(numba.float32(1.0)), fill(numba.float32(cap)), fill(numba.float32(-2.0 * cap))
    twice = fill(numba.float32(2.0 / cap))
    for i in range(0, 4 * count, 64):
        growing = exp(mul(load_floats(x + i), twice))
        store_floats(x + i, fma(fall, div(one, add(one, growing)), top))
