"""The MLP's gate: silu(gate) * up."""

from __future__ import annotations

import numba

from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import add, div, exp, fill, load_floats, mul, store_floats, sub, zero_floats


@kernel
def gate(gates: int, ups: int, out: int, start: int, stop: int) -> None:
    """out[i] = gates[i] / (1 + exp(-gates[i])) * ups[i] for start <= i < stop, multiples of 16; float32."""
    one = fill(numba.float32(1.0))
    for i in range(start, stop, 16):
        x = load_floats(gates + 4 * i)
        silu = div(x, add(one, exp(sub(zero_floats(), x))))
        store_floats(out + 4 * i, mul(silu, load_floats(ups + 4 * i)))
