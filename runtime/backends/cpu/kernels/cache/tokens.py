"""Writing keys and values into the CPU's cache: half precision, or codes with a scale and a zero for each vector.

The layouts are `runtime.backends.cpu.data.pages`': in half precision, keys of 16 tokens stand together channel by
channel and values token by token; codes stand in the vectors that attention multiplies.
"""

from __future__ import annotations

import numba
import numpy as np

from runtime.backends.cpu.data import pages as page
from runtime.backends.cpu.data.operands import word
from runtime.backends.cpu.machine.codes import rounded_to_half
from runtime.backends.cpu.machine.vector import get_float, get_half, set_byte, set_half


@numba.njit(nogil=True)
def store_key(x: int, cache: int, record: int, place: int) -> None:
    """Write one key into a page of a kind that quantizes token by token.

    Args:
        x: Address of float32 [D].
        cache: Address of the cache's description.
        record: Address of what the page keeps of the key-value head.
        place: The token's place in the page.
    """
    dim, codes, form = word(cache, page.DIM), record + word(cache, page.KEY_CODES), word(cache, page.FORMAT)
    if form == page.HALF:
        store_half_key(x, dim, codes, place)
        return
    at = 2 * place
    scales, zeros = record + word(cache, page.KEY_SCALES) + at, record + word(cache, page.KEY_ZEROS) + at
    _scale_and_zero(x, dim, form, scales, zeros)
    scale, zero = get_half(scales), get_half(zeros)
    vectors = word(cache, page.KEY_VECTORS)
    if form == 8:
        codes += 128 * vectors * (place // 16) + 4 * (place % 16)
        for d in range(8 * vectors):
            set_byte(codes + 64 * (d // 4) + d % 4, numba.int8(_code(x, d, dim, form, scale, zero)))
        return
    codes += 64 * vectors * (place // 16) + 4 * (place % 16)
    for i in range(vectors):
        for c in range(8 * i, 8 * i + 4):
            byte = _code(x, c, dim, form, scale, zero) + 16 * _code(x, c + 4, dim, form, scale, zero)
            set_byte(codes + 64 * i + c % 4, numba.int8(byte))


@numba.njit(nogil=True)
def store_value(x: int, cache: int, record: int, place: int) -> None:
    """Write one value; arguments as `store_key`."""
    dim, codes, form = word(cache, page.DIM), record + word(cache, page.VALUE_CODES), word(cache, page.FORMAT)
    if form == page.HALF:
        store_half_value(x, dim, codes, place)
        return
    at = 2 * place
    scales, zeros = record + word(cache, page.VALUE_SCALES) + at, record + word(cache, page.VALUE_ZEROS) + at
    _scale_and_zero(x, dim, form, scales, zeros)
    scale, zero = get_half(scales), get_half(zeros)
    quad = 128 if form == 8 else 64
    codes += quad * (place // 4) + place % 4
    for start in range(0, word(cache, page.PADDED), 32):
        to = codes + start // 32 * word(cache, page.VALUE_BLOCK)
        for c in range(start, start + 16):
            low, high = _code(x, c, dim, form, scale, zero), _code(x, c + 16, dim, form, scale, zero)
            if form == 8:
                set_byte(to + 4 * (c - start), numba.int8(low))
                set_byte(to + 64 + 4 * (c - start), numba.int8(high))
            else:
                set_byte(to + 4 * (c - start), numba.int8(low + 16 * high))


@numba.njit(nogil=True)
def store_half_key(x: int, dim: int, keys: int, place: int) -> None:
    """Write one key in half precision into keys [T / 16, D, 16]."""
    for d in range(dim):
        set_half(keys + 2 * (16 * (place // 16 * dim + d) + place % 16), get_float(x + 4 * d))


@numba.njit(nogil=True)
def store_half_value(x: int, dim: int, values: int, place: int) -> None:
    """Write one value in half precision into values [T, D padded to 16]."""
    padded = (dim + 15) // 16 * 16
    for d in range(dim):
        set_half(values + 2 * (place * padded + d), get_float(x + 4 * d))


@numba.njit(nogil=True)
def _scale_and_zero(x: int, dim: int, bits: int, scale: int, zero: int) -> None:
    """Store zero = the least number and scale = (largest - least) / (2^bits - 1) in half precision.

    Rounding keeps the order, so the extremes of the rounded numbers are the rounded extremes.
    """
    least, largest = get_float(x), get_float(x)
    for d in range(1, dim):
        least, largest = min(least, get_float(x + 4 * d)), max(largest, get_float(x + 4 * d))
    set_half(zero, least)
    set_half(scale, largest)
    largest = get_half(scale)
    set_half(scale, numba.float32((largest - get_half(zero)) / numba.float32((1 << bits) - 1)))


@numba.njit(nogil=True)
def _code(x: int, d: int, dim: int, bits: int, scale: float, zero: float) -> int:
    """The code of a number, rounded to half precision first; 0 behind the last."""
    if d >= dim or not scale > numba.float32(0.0):
        return 0
    code = np.rint((rounded_to_half(get_float(x + 4 * d)) - zero) / scale)
    return numba.int64(max(numba.float32(0.0), min(numba.float32((1 << bits) - 1), code)))
