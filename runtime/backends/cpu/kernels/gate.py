"""The MLP's gate: silu(gate) * up, gelu(gate) * up, or gpt-oss's."""

from __future__ import annotations

import math
from typing import Any

import numba

from models.spec import CLAMPED_GAIN
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    add,
    div,
    exp,
    fill,
    fma,
    load_floats,
    maximum,
    mul,
    store_floats,
    sub,
    zero_floats,
)

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
def shut(x: int, gates: int, width: int) -> None:
    """x[i] /= 1 + exp(-gates[i]) for i < width, in steps of 16; addresses of float32."""
    one = fill(numba.float32(1.0))
    for i in range(0, 4 * width, 64):
        shares = add(one, exp(sub(zero_floats(), load_floats(gates + i))))
        store_floats(x + i, div(load_floats(x + i), shares))


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
def gate_by(gelu: int, limit: float, gates: int, ups: int, out: int, start: int, stop: int) -> None:
    """One of the three, as GATE says."""
    if limit != 0:
        clamped_gate(gates, ups, out, start, stop, limit)
    elif gelu != 0:
        gelu_gate(gates, ups, out, start, stop)
    else:
        gate(gates, ups, out, start, stop)


@kernel
def _at_most(x: Any, most: Any) -> Any:
    """The smaller of two vectors, lane by lane."""
    return sub(zero_floats(), maximum(sub(zero_floats(), x), sub(zero_floats(), most)))
