"""Writes keys and values into the CPU's cache: half precision, or 8-bit codes with a scale and a zero per token.

Layouts are those of `runtime.backends.cpu.data.pages`: in half precision, keys of 16 tokens are stored together channel
by channel, and values token by token; codes are stored in the vectors that attention multiplies.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from runtime.backends.cpu.data.pages import HALF, Cache
from runtime.backends.cpu.machine.codes import rounded_to_half
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import get_float, get_half, set_byte, set_half


@kernel
def store_key(x: int, cache: Cache, record: int, place: int) -> None:
    """Write one key into a page of a kind that quantizes token by token.

    Args:
        x: Address of float32 [D].
        cache: The cache's description.
        record: Address of what the page keeps of the key-value head.
        place: The token's place in the page.
    """
    keys = cache.keys
    codes, vectors = record + keys.codes, keys.vectors
    if cache.form == HALF:
        store_half_key(x, cache.dim, codes, place)
        return
    scale = _store_scale(x, cache, record + keys.scales + 2 * place, record + keys.zeros + 2 * place)
    codes += 128 * vectors * (place // 16) + 4 * (place % 16)
    for d in range(8 * vectors):
        set_byte(codes + 64 * (d // 4) + d % 4, numba.int8(_code(x, d, scale)))


@kernel
def store_value(x: int, cache: Cache, record: int, place: int) -> None:
    """Write one value; arguments as `store_key`."""
    values = cache.values
    codes = record + values.codes
    if cache.form == HALF:
        store_half_value(x, cache.dim, codes, place)
        return
    scale = _store_scale(x, cache, record + values.scales + 2 * place, record + values.zeros + 2 * place)
    codes += 128 * (place // 4) + place % 4
    for start in range(0, cache.padded, 32):
        to = codes + start // 32 * values.block
        for c in range(start, start + 16):
            set_byte(to + 4 * (c - start), numba.int8(_code(x, c, scale)))
            set_byte(to + 64 + 4 * (c - start), numba.int8(_code(x, c + 16, scale)))


@kernel
def store_half_key(x: int, dim: int, keys: int, place: int) -> None:
    """Write one key in half precision into keys [T / 16, D, 16]."""
    for d in range(dim):
        set_half(keys + 2 * (16 * (place // 16 * dim + d) + place % 16), get_float(x + 4 * d))


@kernel
def store_half_value(x: int, dim: int, values: int, place: int) -> None:
    """Write one value in half precision into values [T, D padded to 16]."""
    padded = (dim + 15) // 16 * 16
    for d in range(dim):
        set_half(values + 2 * (place * padded + d), get_float(x + 4 * d))


class _Scale(NamedTuple):
    """Scale and zero of a vector of `dim` numbers."""

    dim: int
    scale: float
    zero: float


@kernel
def _store_scale(x: int, cache: Cache, scale: int, zero: int) -> _Scale:
    """Store zero = the least number and scale = (largest - least) / 255 in half precision.

    Rounding keeps the order, so the extremes of the rounded numbers are the rounded extremes.
    """
    least, largest = get_float(x), get_float(x)
    for d in range(1, cache.dim):
        least, largest = min(least, get_float(x + 4 * d)), max(largest, get_float(x + 4 * d))
    set_half(zero, least)
    set_half(scale, largest)
    largest = get_half(scale)
    set_half(scale, numba.float32((largest - get_half(zero)) / numba.float32(255)))
    return _Scale(cache.dim, get_half(scale), get_half(zero))


@kernel
def _code(x: int, d: int, of: _Scale) -> int:
    """The code of a number, rounded to half precision first; 0 behind the last."""
    if d >= of.dim or not of.scale > numba.float32(0.0):
        return 0
    code = np.rint((rounded_to_half(get_float(x + 4 * d)) - of.zero) / of.scale)
    return numba.int64(max(numba.float32(0.0), min(numba.float32(255), code)))
