"""Rotary position embedding of one head in place."""

from __future__ import annotations

from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    fma,
    get_float,
    load_floats,
    mul,
    set_float,
    store_floats,
    sub,
    zero_floats,
)


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
