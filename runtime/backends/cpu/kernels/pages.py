"""Keys and values into the cache: whole pages of a head for kinds with a window, otherwise token by token.

Vectors (what a scale spans) stand side by side in the lanes: number i of vector r is at [i, r] of float32 [n, R]. So
keys whose scales span tokens stand token by token (R = D padded to 32); values, and keys whose scales span channels,
stand channel by channel (R = tokens). Codes are bytes [n, R] first and are then joined into the vectors that attention
multiplies (`runtime.backends.cpu.kernels.attention.products`).

The oracle is `runtime.backends.operations.pages`: scales, zeros and codes are identical bit for bit, except zeros that
are means, whose sums are added in another order.

Layouts are those of `runtime.backends.cpu.data.pages`: in half precision, keys of 16 tokens are stored together channel
by channel, and values token by token; codes are stored in the vectors that attention multiplies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types

from runtime.backends.cpu.data.pages import HALF, Cache
from runtime.backends.cpu.machine.emit import (
    FLOATS,
    HALVES,
    I8,
    WORDS,
    Builder,
    call,
    constant,
    define,
    floats16,
    pointer,
)
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    add,
    div,
    fill,
    get_byte,
    get_float,
    get_half,
    get_int,
    larger,
    load_floats,
    load_halves,
    load_unsigned,
    mul,
    rounded,
    rounded_to_half,
    set_byte,
    set_float,
    set_half,
    set_int,
    store_floats,
    sub,
)

_INFINITY = float("inf")
_LARGEST = 65504.0
"""The largest half-precision number."""


class Vectors(NamedTuple):
    """The vectors of a page's keys, or values."""

    number: int  # number of vectors
    count: int  # n, numbers of each
    lanes: int  # R, vectors side by side: their number padded to whole lanes
    group: int  # numbers that share a scale
    bits: int  # bits of a plane's code: 2 or 4
    exact_mean: bool  # whether a group's zero is fitted once its codes are known


class Coded(NamedTuple):
    """Quantized form of sixteen vectors: addresses."""

    scales: int  # float16 [groups, R]
    zeros: int  # likewise
    codes: int  # bytes [n, R]
    lower: int  # likewise of the lower plane, with an offset of 8; 0 = there is none


class Extremes(NamedTuple):
    """Inputs for the minima and maxima of sixteen vectors."""

    low: int  # address of the numbers, or of a copy without outliers, for the least
    high: int  # the same for the largest
    step: int  # bytes from number to number


@define(types.void, types.int64, floats16)
def store_halves(b: Builder, address: Any, value: Any) -> None:
    """Round sixteen floats to half precision and store them."""
    b.store(b.fptrunc(value, HALVES), pointer(b, address), align=2)


@define(types.void, types.int64, floats16)
def _store_codes(b: Builder, address: Any, value: Any) -> None:
    """Store sixteen whole numbers below 256 as bytes."""
    b.store(b.trunc(b.fptosi(value, WORDS), ir.VectorType(I8, 16)), pointer(b, address), align=1)


@define(floats16, floats16, floats16)
def smaller(b: Builder, x: Any, y: Any) -> Any:
    """The smaller of both, lane by lane: y where either is a NaN."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


@define(floats16, floats16, floats16, floats16)
def where_at_most(b: Builder, x: Any, y: Any, value: Any) -> Any:
    """Per lane: the value where x <= y, else 0."""
    return b.select(b.fcmp_ordered("<=", x, y), value, constant(FLOATS, 0.0))


@define(floats16, floats16, floats16)
def _where_positive(b: Builder, x: Any, value: Any) -> Any:
    """Per lane: the value where x > 0, else 0."""
    return b.select(b.fcmp_ordered(">", x, constant(FLOATS, 0.0)), value, constant(FLOATS, 0.0))


@define(types.void, types.int64, types.int64, types.int64)
def move_bytes(b: Builder, to: Any, source: Any, count: Any) -> None:
    """Copy bytes; the places may overlap."""
    name = "llvm.memmove.p0.p0.i64"
    call(b, name, ir.VoidType(), pointer(b, to), pointer(b, source), count, ir.Constant(ir.IntType(1), 0))


@kernel
def load_keys(window: int, tokens: int, dim: int, padded: int, x: int) -> None:
    """Half-precision keys [tokens / 16, D, 16] as float32 [tokens, padded], zeros behind the last channel."""
    for tile in range(tokens // 16):
        for d in range(padded):
            for t in range(16):
                value = get_half(window + 2 * (16 * (tile * dim + d) + t)) if d < dim else numba.float32(0.0)
                set_float(x + 4 * ((16 * tile + t) * padded + d), value)


@kernel
def load_keys_by_channel(window: int, tokens: int, dim: int, x: int) -> None:
    """Half-precision keys [tokens / 16, D, 16] as float32 [D, tokens]."""
    for tile in range(tokens // 16):
        for d in range(dim):
            store_floats(x + 4 * (d * tokens + 16 * tile), load_halves(window + 32 * (tile * dim + d)))


@kernel
def load_values(window: int, tokens: int, dim: int, x: int) -> None:
    """Half-precision values [tokens, D padded to 16] as float32 [D, tokens]."""
    width = (dim + 15) // 16 * 16
    for t in range(tokens):
        for d in range(dim):
            set_float(x + 4 * (d * tokens + t), get_half(window + 2 * (t * width + d)))


@kernel
def encode_lanes(x: int, vectors: Vectors, extremes: Extremes, to: Coded) -> None:
    """Quantize sixteen vectors; `x` is the address of their first numbers, float32."""
    bits, step = vectors.bits, vectors.lanes
    levels, nothing = fill(numba.float32((1 << bits) - 1)), fill(numba.float32(0.0))
    for start in range(0, vectors.count, vectors.group):
        stop = min(start + vectors.group, vectors.count)
        least, largest = fill(numba.float32(_INFINITY)), fill(numba.float32(-_INFINITY))
        for i in range(start, stop):
            least = smaller(load_floats(extremes.low + extremes.step * i), least)
            largest = larger(load_floats(extremes.high + extremes.step * i), largest)
        zero, top = where_at_most(least, largest, least), where_at_most(least, largest, largest)
        at = 2 * step * (start // vectors.group)
        store_halves(to.scales + at, div(sub(top, zero), levels))
        store_halves(to.zeros + at, zero)
        scale, lost = load_halves(to.scales + at), nothing
        for i in range(start, stop):
            value = load_floats(x + 4 * step * i)
            code = rounded(_where_positive(scale, div(sub(value, zero), scale)))
            code = smaller(larger(code, nothing), levels)
            lost = add(lost, sub(value, mul(code, scale)))
            _store_codes(to.codes + step * i, code)
            if to.lower != 0:
                error = sub(value, add(mul(code, scale), zero))
                finer = rounded(_where_positive(scale, div(error, mul(scale, fill(numba.float32(1 / 16))))))
                finer = smaller(larger(finer, fill(numba.float32(-8.0))), fill(numba.float32(7.0)))
                _store_codes(to.lower + step * i, add(finer, fill(numba.float32(8.0))))
        if vectors.exact_mean:
            mean = div(lost, fill(numba.float32(stop - start)))
            mean = smaller(larger(mean, fill(numba.float32(-_LARGEST))), fill(numba.float32(_LARGEST)))
            store_halves(to.zeros + at, mean)


@kernel
def decode_lanes(coded: Coded, vectors: Vectors, x: int) -> None:
    """The reverse of `encode_lanes`: sixteen vectors from their codes."""
    step = vectors.lanes
    for start in range(0, vectors.count, vectors.group):
        at = 2 * step * (start // vectors.group)
        scale, zero = load_halves(coded.scales + at), load_halves(coded.zeros + at)
        for i in range(start, min(start + vectors.group, vectors.count)):
            code = load_unsigned(coded.codes + step * i)
            if coded.lower != 0:
                both = sub(load_unsigned(coded.lower + step * i), fill(numba.float32(8.0)))
                code = add(mul(fill(numba.float32(16.0)), code), both)
                value = add(mul(code, mul(scale, fill(numba.float32(1 / 16)))), zero)
            else:
                value = add(mul(code, scale), zero)
            store_floats(x + 4 * step * i, value)


@kernel
def clear_codes(codes: int, rows: int, start: int, stop: int, step: int) -> None:
    """Zero the codes start .. stop - 1 of some rows."""
    for i in range(rows):
        for r in range(start, stop):
            set_byte(codes + step * i + r, numba.int8(0))


@kernel
def turn_codes(codes: int, rows: int, columns: int, step: int, out: int, out_step: int) -> None:
    """Transpose codes [rows, columns]; steps from row to row."""
    for i in range(rows):
        for j in range(columns):
            set_byte(out + out_step * j + i, get_byte(codes + step * i + j))


@kernel
def join_keys(codes: int, tokens: int, padded: int, vectors: int, bits: int, out: int) -> None:
    """Codes [tokens, padded] as the vectors of keys."""
    fields = 8 // bits
    for tile in range(tokens // 16):
        for i in range(vectors):
            for t in range(16):
                source, joined = codes + (16 * tile + t) * padded + 4 * fields * i, 0
                for j in range(fields):
                    joined |= numba.int64(get_int(source + 4 * j)) << (bits * j)
                set_int(out + 64 * (tile * vectors + i) + 4 * t, numba.int32(joined))


@kernel
def split_keys(vectors_at: int, tokens: int, padded: int, vectors: int, bits: int, codes: int) -> None:
    """The reverse of `join_keys`."""
    fields, mask = 8 // bits, 0x01010101 * ((1 << bits) - 1)
    for tile in range(tokens // 16):
        for i in range(vectors):
            for t in range(16):
                joined = numba.int64(get_int(vectors_at + 64 * (tile * vectors + i) + 4 * t)) & 0xFFFFFFFF
                to = codes + (16 * tile + t) * padded + 4 * fields * i
                for j in range(fields):
                    set_int(to + 4 * j, numba.int32((joined >> (bits * j)) & mask))


@kernel
def join_values(codes: int, tokens: int, padded: int, block: int, bits: int, out: int) -> None:
    """Codes [padded, tokens] as the vectors of values; `block` bytes are a block of 32 channels."""
    for start in range(0, padded, 32):
        to = out + start // 32 * block
        for lane in range(16):
            first = codes + (start + lane) * tokens
            second = first + 16 * tokens
            if bits == 4:
                for j in range(tokens // 4):
                    joined = numba.int64(get_int(first + 4 * j)) | numba.int64(get_int(second + 4 * j)) << 4
                    set_int(to + 64 * j + 4 * lane, numba.int32(joined))
            else:
                for n in range(tokens // 16):
                    low, high = 0, 0
                    for j in range(4):
                        low |= numba.int64(get_int(first + 16 * n + 4 * j)) << (2 * j)
                        high |= numba.int64(get_int(second + 16 * n + 4 * j)) << (2 * j)
                    set_int(to + 128 * n + 4 * lane, numba.int32(low))
                    set_int(to + 128 * n + 64 + 4 * lane, numba.int32(high))


@kernel
def split_values(vectors_at: int, tokens: int, padded: int, block: int, bits: int, codes: int) -> None:
    """The reverse of `join_values`."""
    mask = 0x01010101 * ((1 << bits) - 1)
    for start in range(0, padded, 32):
        source = vectors_at + start // 32 * block
        for lane in range(16):
            first = codes + (start + lane) * tokens
            second = first + 16 * tokens
            if bits == 4:
                for j in range(tokens // 4):
                    joined = numba.int64(get_int(source + 64 * j + 4 * lane)) & 0xFFFFFFFF
                    set_int(first + 4 * j, numba.int32(joined & mask))
                    set_int(second + 4 * j, numba.int32((joined >> 4) & mask))
            else:
                for n in range(tokens // 16):
                    low = numba.int64(get_int(source + 128 * n + 4 * lane)) & 0xFFFFFFFF
                    high = numba.int64(get_int(source + 128 * n + 64 + 4 * lane)) & 0xFFFFFFFF
                    for j in range(4):
                        set_int(first + 16 * n + 4 * j, numba.int32((low >> (2 * j)) & mask))
                        set_int(second + 16 * n + 4 * j, numba.int32((high >> (2 * j)) & mask))


@kernel
def write_keys(x: int, dim: int, by_token: int, by_channel: int, count: int, window: int) -> None:
    """Float32 keys as the first `count` half-precision keys of a window.

    Args:
        x: Address of the first token's first channel.
        dim: D.
        by_token: Bytes from token to token.
        by_channel: Bytes from channel to channel.
        count: Tokens that are wanted.
        window: Address of float16 [tokens / 16, D, 16].
    """
    for t in range(count):
        for d in range(dim):
            to = window + 2 * (16 * (t // 16 * dim + d) + t % 16)
            set_half(to, get_float(x + by_token * t + by_channel * d))


@kernel
def write_values(x: int, tokens: int, dim: int, count: int, window: int) -> None:
    """Float32 [D, tokens] as the first `count` half-precision values of a window."""
    width = (dim + 15) // 16 * 16
    for t in range(count):
        for d in range(dim):
            set_half(window + 2 * (t * width + d), get_float(x + 4 * (d * tokens + t)))


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
