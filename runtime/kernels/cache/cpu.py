"""Writing keys and values into the CPU's cache: half precision, INT8 or 4 bits, with scales for each token and head.

The layouts are `runtime.cpu.pages`': of half precision and INT8, keys of 16 tokens stand together channel by channel
and values token by token; codes of 4 bits stand in the vectors that attention multiplies.
"""

from __future__ import annotations

import numba
import numpy as np

from runtime.cpu import pages as page
from runtime.cpu.codes import rounded_to_half
from runtime.cpu.vector import get_float, get_half, get_word, set_byte, set_half


@numba.njit(nogil=True)
def _word(cache: int, index: int) -> int:
    return get_word(cache + 8 * index)


@numba.njit(nogil=True)
def store_key(x: int, cache: int, record: int, place: int) -> None:
    """Write one key into a page of a kind that quantizes token by token.

    Args:
        x: Address of float32 [D].
        cache: Address of the cache's description.
        record: Address of what the page keeps of the key-value head.
        place: The token's place in the page.
    """
    dim, codes = _word(cache, page.DIM), record + _word(cache, page.KEY_CODES)
    if _word(cache, page.FORMAT) == 4:
        _store_key_4(x, cache, record, place)
    elif _word(cache, page.FORMAT) == 16:
        store_half_key(x, dim, codes, place)
    else:
        step = _int8_scale(x, dim, record + _word(cache, page.KEY_SCALES) + 2 * place)
        for d in range(dim):
            set_byte(codes + 16 * (place // 16 * dim + d) + place % 16, _int8_code(get_float(x + 4 * d), step))


@numba.njit(nogil=True)
def store_value(x: int, cache: int, record: int, place: int) -> None:
    """Write one value; arguments as `store_key`."""
    dim, codes = _word(cache, page.DIM), record + _word(cache, page.VALUE_CODES)
    if _word(cache, page.FORMAT) == 4:
        _store_value_4(x, cache, record, place)
    elif _word(cache, page.FORMAT) == 16:
        store_half_value(x, dim, codes, place)
    else:
        step = _int8_scale(x, dim, record + _word(cache, page.VALUE_SCALES) + 2 * place)
        for d in range(dim):
            set_byte(codes + place * _word(cache, page.PADDED) + d, _int8_code(get_float(x + 4 * d), step))


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
def _store_key_4(x: int, cache: int, record: int, place: int) -> None:
    at, dim = 2 * place, _word(cache, page.DIM)
    scales, zeros = record + _word(cache, page.KEY_SCALES) + at, record + _word(cache, page.KEY_ZEROS) + at
    _scale_and_zero(x, dim, scales, zeros)
    scale, zero = get_half(scales), get_half(zeros)
    vectors = _word(cache, page.KEY_VECTORS)
    codes = record + _word(cache, page.KEY_CODES) + 64 * vectors * (place // 16) + 4 * (place % 16)
    for i in range(vectors):
        for c in range(8 * i, 8 * i + 4):
            byte = _code_4(x, c, dim, scale, zero) + 16 * _code_4(x, c + 4, dim, scale, zero)
            set_byte(codes + 64 * i + c % 4, numba.int8(byte))


@numba.njit(nogil=True)
def _store_value_4(x: int, cache: int, record: int, place: int) -> None:
    at, dim = 2 * place, _word(cache, page.DIM)
    scales, zeros = record + _word(cache, page.VALUE_SCALES) + at, record + _word(cache, page.VALUE_ZEROS) + at
    _scale_and_zero(x, dim, scales, zeros)
    scale, zero = get_half(scales), get_half(zeros)
    codes = record + _word(cache, page.VALUE_CODES) + 64 * (place // 4) + place % 4
    block = _word(cache, page.VALUE_BLOCK)
    for start in range(0, _word(cache, page.PADDED), 32):
        for c in range(16):
            low, high = _code_4(x, start + c, dim, scale, zero), _code_4(x, start + 16 + c, dim, scale, zero)
            set_byte(codes + start // 32 * block + 4 * c, numba.int8(low + 16 * high))


@numba.njit(nogil=True)
def _scale_and_zero(x: int, dim: int, scale: int, zero: int) -> None:
    """Store zero = the least number and scale = (largest - least) / 15 in half precision.

    Rounding keeps the order, so the extremes of the rounded numbers are the rounded extremes.
    """
    least, largest = get_float(x), get_float(x)
    for d in range(1, dim):
        least, largest = min(least, get_float(x + 4 * d)), max(largest, get_float(x + 4 * d))
    set_half(zero, least)
    set_half(scale, largest)
    largest = get_half(scale)
    set_half(scale, numba.float32((largest - get_half(zero)) / numba.float32(15.0)))


@numba.njit(nogil=True)
def _code_4(x: int, d: int, dim: int, scale: float, zero: float) -> int:
    """The 4-bit code of a number, rounded to half precision first; 0 behind the last."""
    if d >= dim or not scale > numba.float32(0.0):
        return 0
    code = np.rint((rounded_to_half(get_float(x + 4 * d)) - zero) / scale)
    return numba.int64(max(numba.float32(0.0), min(numba.float32(15.0), code)))


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
