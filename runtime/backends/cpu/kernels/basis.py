"""One query or key rotated into the basis of the cache, in place; the oracle is `runtime.backends.operations.basis`."""

from __future__ import annotations

import math

import numba

from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    add,
    fill,
    get_float,
    hadamard,
    load_floats,
    mul,
    set_float,
    store_floats,
    sub,
)


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
