"""Integer products with the packed codes of a page: queries with its keys, softmax weights with its values.

Layouts (64-byte vectors; a 32-bit lane holds four bytes c = 0 .. 3):

    keys, 4 bits     [T / 16, ceil(D / 8)]   lane = token; low nibble channel 8 i + c, high nibble 8 i + 4 + c
    keys, 2 bits     [T / 16, ceil(D / 16)]  lane = token; bits 2 j, 2 j + 1 are channel 16 i + 4 j + c
    values, 4 bits   [ceil(D / 32), T / 4]   lane = channel 32 i + lane (low nibble), 32 i + 16 + lane (high nibble);
                                             byte c = token 4 j + c
    values, 2 bits   [ceil(D / 32), T / 16, 2]  lane = channel 32 i + 16 h + lane; bits 2 j, 2 j + 1 are token
                                             16 n + 4 j + c
    keys, 8 bits     [T / 16, ceil(D / 8), 2]  lane = token; vector h has channel 8 i + 4 h + c
    values, 8 bits   [ceil(D / 32), T / 4, 2]  lane = channel 32 i + 16 h + lane; byte c = token 4 j + c
    two planes       of 4 bits, 16 * upper + lower

Whatever is multiplied stands as rows of INT8: as many rows as there are query heads, or twice as many where each is two
planes (`runtime.backends.cpu.kernels.attention.page`). Products are written as floats; they are whole and exact.

All layouts are multiplied in one way: 32 results of a row at a time (two tiles of tokens, or 32 channels), by steps
that read some vectors, take them apart into *fields* and multiply each with four bytes of every row. What differs is
the *reader* of a step's fields. Code is emitted for blocks of up to eight rows, so that codes are taken apart once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from runtime.backends.cpu.machine import isa
from runtime.backends.cpu.machine.emit import (
    BYTES,
    FLOATS,
    I32,
    I64,
    WORDS,
    Builder,
    constant,
    define,
    emit_dot4,
    emit_prefetch,
    load,
    named,
    offset,
    parts,
    pointer,
    shift_right,
    splat,
)
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import emit_dot4_bytes, emit_join_high, emit_join_low

_ALONE = 2
"""Up to this many rows, every field has its own sum; otherwise each addition would wait for the one before."""
_EIGHT = isa.VECTORS == "avx512"
"""Whether there are registers for the sums of eight rows."""


class Rows(NamedTuple):
    """Rows of INT8 that are multiplied with codes."""

    at: int  # address
    step: int  # bytes from row to row
    count: int  # number of rows


class Codes(NamedTuple):
    """Codes of a page: addresses and bytes."""

    at: int  # address of the codes of the first 32 results
    lower: int  # offset of the lower plane, where there are two
    stride: int
    """Distance of the second output's vectors: of keys the next tile, of values of 2 bits the next 16 channels."""
    steps: int  # steps of 32 results
    ahead: int  # distance to codes that will be read next, and are fetched on the way; 0 = none


class Out(NamedTuple):
    """Destination of products, float32."""

    at: int  # address of the first row's
    step: int  # bytes from row to row


class _Field(NamedTuple):
    """Codes of one step that are multiplied with the same four bytes of a row."""

    output: int  # 0 for the first 16 results, 1 for the others
    place: int  # position of the row's four bytes within those of the step
    codes: Any  # LLVM value, 64 bytes


Reader = Callable[[Builder, Any, Any, Any], tuple[list[_Field], list[Any]]]
"""Emits a step's loads, from its address, the offset of the lower plane, and the distance of the second output's
vectors. Returns the fields and the addresses that were read."""


def _nibbles(b: Builder, address: Any) -> tuple[Any, Any]:
    x = load(b, BYTES, address, 64)
    return b.and_(x, constant(BYTES, 15)), b.and_(shift_right(b, x, 4), constant(BYTES, 15))


def _planes(b: Builder, address: Any, lower: Any) -> tuple[Any, Any]:
    x, y = load(b, BYTES, address, 64), load(b, BYTES, b.add(address, lower), 64)
    return emit_join_low(b, x, y), emit_join_high(b, x, y)


def _two_vectors(b: Builder, address: Any) -> tuple[Any, Any]:
    return load(b, BYTES, address, 64), load(b, BYTES, offset(b, address, 64), 64)


def _key_fields(first: tuple[Any, Any], second: tuple[Any, Any]) -> list[_Field]:
    """Fields of two tiles: four channels, then the next four."""
    return [_Field(tile, 4 * i, pair[i]) for i in range(2) for tile, pair in enumerate((first, second))]


def _value_fields(first: tuple[Any, Any], second: tuple[Any, Any]) -> list[_Field]:
    """Fields of four tokens, and the next four: 16 channels, then the other 16."""
    return [_Field(i, 4 * quad, pair[i]) for quad, pair in enumerate((first, second)) for i in range(2)]


def _keys_4(b: Builder, address: Any, _lower: Any, stride: Any) -> tuple[list[_Field], list[Any]]:
    second = b.add(address, stride)
    return _key_fields(_nibbles(b, address), _nibbles(b, second)), [address, second]


def _keys_8(b: Builder, address: Any, _lower: Any, stride: Any) -> tuple[list[_Field], list[Any]]:
    second = b.add(address, stride)
    lines = [address, offset(b, address, 64), second, offset(b, second, 64)]
    return _key_fields(_two_vectors(b, address), _two_vectors(b, second)), lines


def _keys_planes(b: Builder, address: Any, lower: Any, stride: Any) -> tuple[list[_Field], list[Any]]:
    second = b.add(address, stride)
    lines = [address, b.add(address, lower), second, b.add(second, lower)]
    return _key_fields(_planes(b, address, lower), _planes(b, second, lower)), lines


def _values_4(b: Builder, address: Any, _lower: Any, _stride: Any) -> tuple[list[_Field], list[Any]]:
    second = offset(b, address, 64)
    return _value_fields(_nibbles(b, address), _nibbles(b, second)), [address, second]


def _values_8(b: Builder, address: Any, _lower: Any, _stride: Any) -> tuple[list[_Field], list[Any]]:
    lines = [offset(b, address, 64 * i) for i in range(4)]
    return _value_fields(_two_vectors(b, address), _two_vectors(b, lines[2])), lines


def _values_planes(b: Builder, address: Any, lower: Any, _stride: Any) -> tuple[list[_Field], list[Any]]:
    second = offset(b, address, 64)
    lines = [address, b.add(address, lower), second, b.add(second, lower)]
    return _value_fields(_planes(b, address, lower), _planes(b, second, lower)), lines


def _pairs_2(b: Builder, address: Any, _lower: Any, stride: Any) -> tuple[list[_Field], list[Any]]:
    """Fields of keys or values: four of the first output's vector and four of the second's."""
    lines = [address, b.add(address, stride)]
    vectors = [load(b, BYTES, line, 64) for line in lines]
    return [
        _Field(output, 4 * i, b.and_(shift_right(b, x, 2 * i), constant(BYTES, 3)))
        for i in range(4)
        for output, x in enumerate(vectors)
    ], lines


def _block(rows: int, reader: Reader, size: int, places: range, dot: Any) -> Any:
    """Intrinsic that writes 32 products for each of `rows` rows: the rows' part of what `_products` gives."""
    chains = places if rows <= _ALONE else places[:1]

    def emit(b: Builder, x: Any, codes: Any, out: Any) -> None:
        x, codes, out = parts(b, x, Rows), parts(b, codes, Codes), parts(b, out, Out)
        starts, sums = [x.at], {}
        for _ in range(1, rows):
            starts.append(b.add(starts[-1], x.step))
        for key in itertools.product(range(rows), range(2), chains):
            sums[key] = cgutils.alloca_once(b, WORDS)
            b.store(constant(WORDS, 0), sums[key])
        with cgutils.for_range(b, codes.steps) as loop:
            at = b.add(codes.at, b.mul(loop.index, ir.Constant(I64, size)))
            fields, lines = reader(b, at, codes.lower, codes.stride)
            for line in lines:
                emit_prefetch(b, b.add(line, codes.ahead), 1)
            moved = b.mul(loop.index, ir.Constant(I64, 4 * len(places)))
            for place, row in itertools.product(places, range(rows)):
                four = b.bitcast(splat(b, load(b, I32, offset(b, b.add(starts[row], moved), place), 4), WORDS), BYTES)
                for field in (field for field in fields if field.place == place):
                    total = sums[row, field.output, place if rows <= _ALONE else chains[0]]
                    b.store(dot(b, b.load(total, typ=WORDS), field.codes, four), total)
        for row, output in itertools.product(range(rows), range(2)):
            chained = [b.load(sums[row, output, chain], typ=WORDS) for chain in chains]
            to = b.add(offset(b, out.at, 64 * output), b.mul(out.step, ir.Constant(I64, row)))
            b.store(b.sitofp(functools.reduce(b.add, chained), FLOATS), pointer(b, to), align=4)

    emit.__name__, emit.__doc__ = f"{reader.__name__}_{rows}", f"Products of {rows} rows."
    return define(types.void, named(Rows), named(Codes), named(Out))(emit)


@kernel
def _from(x: Rows, n: int) -> Rows:
    """The rows from row n on."""
    return Rows(x.at + n * x.step, x.step, x.count - n)


def _products(reader: Reader, size: int, places: range, dot: Any) -> Any:
    """Products of any number of rows.

    Args:
        reader: What emits a step's loads.
        size: Bytes from step to step.
        places: Where a step's fields find their four bytes in a row.
        dot: Emits the dot product of four bytes in each lane.
    """
    eight, four, two, one = (_block(rows, reader, size, places, dot) for rows in (8, 4, 2, 1))

    @kernel
    def products(x: Rows, codes: Codes, out: Out, number: int, distance: int) -> None:
        rows = x.count
        for i in range(number):
            n, own = 0, Codes(codes.at + i * distance, codes.lower, codes.stride, codes.steps, codes.ahead)
            while _EIGHT and n + 8 <= rows:
                eight(_from(x, n), own, Out(out.at + 128 * i + n * out.step, out.step))
                n, own = n + 8, Codes(own.at, own.lower, own.stride, own.steps, 0)
            while n + 4 <= rows:
                four(_from(x, n), own, Out(out.at + 128 * i + n * out.step, out.step))
                n, own = n + 4, Codes(own.at, own.lower, own.stride, own.steps, 0)
            if n + 2 <= rows:
                two(_from(x, n), own, Out(out.at + 128 * i + n * out.step, out.step))
                n, own = n + 2, Codes(own.at, own.lower, own.stride, own.steps, 0)
            if n < rows:
                one(_from(x, n), own, Out(out.at + 128 * i + n * out.step, out.step))

    return products


_TWO, _FOUR = range(0, 8, 4), range(0, 16, 4)
products_2 = _products(_pairs_2, 64, _FOUR, emit_dot4), _products(_pairs_2, 128, _FOUR, emit_dot4)
"""Products with keys, and with values, of 2 bits; likewise those of other codes.

Args: rows; codes of the first 32 results; where the products go; the number of times that there are 32 results, and the
distance in bytes of their codes.
"""
products_4 = _products(_keys_4, 64, _TWO, emit_dot4), _products(_values_4, 128, _TWO, emit_dot4)
products_8 = _products(_keys_8, 128, _TWO, emit_dot4_bytes), _products(_values_8, 256, _TWO, emit_dot4_bytes)
products_planes = (
    _products(_keys_planes, 64, _TWO, emit_dot4_bytes),
    _products(_values_planes, 128, _TWO, emit_dot4_bytes),
)
