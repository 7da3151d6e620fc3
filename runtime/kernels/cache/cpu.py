"""Writing keys and values into the CPU's cache: half precision, or INT8 with a half-precision scale of its own.

The layout is `runtime.cpu.cache`'s: keys of 16 tokens stand together channel by channel, values token by token.
"""

from __future__ import annotations

import numba
import numpy as np

from runtime.cpu.vector import get_float, get_half, set_byte, set_half


@numba.njit(nogil=True)
def store_key(key: int, dim: int, keys: int, scales: int, position: int) -> None:
    """Write one key into its tile of 16 tokens, in half precision or as INT8 with a scale of its own."""
    tile, lane = position // 16, position % 16
    if scales == 0:
        for d in range(dim):
            set_half(keys + 2 * (16 * (tile * dim + d) + lane), get_float(key + 4 * d))
        return
    step = _int8_scale(key, dim, scales + 2 * position)
    for d in range(dim):
        set_byte(keys + 16 * (tile * dim + d) + lane, _int8_code(get_float(key + 4 * d), step))


@numba.njit(nogil=True)
def store_value(value: int, dim: int, values: int, scales: int, position: int) -> None:
    """Write one value vector, token by token."""
    padded = (dim + 15) // 16 * 16
    if scales == 0:
        for d in range(dim):
            set_half(values + 2 * (position * padded + d), get_float(value + 4 * d))
        return
    step = _int8_scale(value, dim, scales + 2 * position)
    for d in range(dim):
        set_byte(values + position * padded + d, _int8_code(get_float(value + 4 * d), step))


@numba.njit(nogil=True)
def _int8_scale(vector: int, dim: int, scale: int) -> float:
    """Store max |x| / 127 in half precision; returns the stored scale."""
    top = numba.float32(0.0)
    for d in range(dim):
        top = max(top, abs(get_float(vector + 4 * d)))
    set_half(scale, numba.float32(top / numba.float32(127.0)))
    return get_half(scale)


@numba.njit(nogil=True)
def _int8_code(value: float, scale: float) -> int:
    if scale == numba.float32(0.0):
        return numba.int8(0)
    return numba.int8(max(-127.0, min(127.0, np.rint(value / scale))))
