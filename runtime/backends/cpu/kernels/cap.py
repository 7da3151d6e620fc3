"""Soft caps of scores and logits: c * tanh(x / c)."""

from __future__ import annotations

import numba

from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import add, div, exp, fill, fma, load_floats, mul, store_floats


@kernel
def cap_floats(x: int, count: int, cap: float) -> None:
    """Cap float32 [count] at address x in place; a multiple of 16. tanh(t) = 1 - 2 / (1 + exp(2 t))."""
    one, top, fall = fill(numba.float32(1.0)), fill(numba.float32(cap)), fill(numba.float32(-2.0 * cap))
    twice = fill(numba.float32(2.0 / cap))
    for i in range(0, 4 * count, 64):
        growing = exp(mul(load_floats(x + i), twice))
        store_floats(x + i, fma(fall, div(one, add(one, growing)), top))
