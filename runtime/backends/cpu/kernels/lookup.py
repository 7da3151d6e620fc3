"""Codebook entries on the CPU: a byte shuffle looks up 64 weights at once, in tables that stay in registers.

A shuffle picks among the 16 bytes of its own 128-bit lane. At 4 bits a lane belongs to one output channel, whose 16
entries fill the table's lane; at 3 bits it belongs to two, of 8 entries and 8 bytes of codes each. So a vector of
entries holds 4 or 8 output channels with 16 or 8 consecutive input channels of each, and meets that many activations
repeated along the vector; the order of the codes in memory is in `runtime.backends.cpu.tiles`.

For the products of several rows, `decode_tile_3` and `decode_tile_4` write a tile's entries down once, in the order of
the uniform kernels: 16 output channels side by side, four input channels of each.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from runtime.backends.cpu.data.records import BLOCK_BYTES, ENTRY_BYTES
from runtime.backends.cpu.machine.emit import (
    BYTES,
    I8,
    I32,
    WORDS,
    Builder,
    bytes64,
    constant,
    define,
    emit_lookup,
    emit_select,
    emit_table,
    load,
    offset,
    pointer,
    shift_left,
    shift_right,
)
from runtime.backends.cpu.machine.kernel import kernel

VECTORS = {3: 2, 4: 4}
"""Vectors that hold a tile's output channels side by side, by bits."""
SLICES = {3: 4, 4: 2}
"""Vectors of entries that the same output channels have in a block of 32 input channels."""
HIGH_BITS = ((2, 1, 6, 5), (4, 3, 7, 0))
"""At 3 bits, the bit of a byte of high bits that belongs to vector i, slice j: five shifts bring all into place."""
_TABLES = 4
"""Vectors of tables: at 4 bits one for each vector of output channels, at 3 bits one for its even slices and one for
its odd ones."""
tables_type = types.UniTuple(bytes64, _TABLES)
"""The codebooks of a tile in registers."""


def emit_entries(b: Builder, address: Any, books: Any, bits: int) -> list[list[Any]]:
    """Look up a block's entries: for each vector of output channels those of every slice of input channels."""
    tables = [b.extract_value(books, i) for i in range(_TABLES)]
    if bits == 4:
        pairs = [load(b, BYTES, offset(b, address, 64 * i), 64) for i in range(4)]
        return [
            [emit_lookup(b, table, b.and_(shift_right(b, pair, shift), constant(BYTES, 15))) for shift in (0, 4)]
            for pair, table in zip(pairs, tables, strict=True)
        ]
    high = load(b, BYTES, offset(b, address, 128), 64)
    entries = []
    for i in range(2):
        low = load(b, BYTES, offset(b, address, 64 * i), 64)
        places = [_place_3(b, low, high, i, j) for j in range(4)]
        entries.append([emit_lookup(b, tables[2 * i + j % 2], place) for j, place in enumerate(places)])
    return entries


def _place_3(b: Builder, low: Any, high: Any, i: int, j: int) -> Any:
    """Index of slice j of vector i in its table: in even slices, bits 0 to 2 of the index are the code.

    In odd slices bits 2 and 3 are the code's lower two, bit 1 its third, and bit 0 tells the lane's output channels
    apart, which bit 3 does in even ones. So two slices take their bits without a shift between them.
    """
    pair, top, second = (3, 2, 8) if j % 2 == 0 else (12, 1, 1)
    shift = HIGH_BITS[i][j] - top
    third = shift_right(b, high, shift) if shift >= 0 else shift_left(b, high, -shift)
    halves = ir.Constant(BYTES, [second if k % 16 >= 8 else 0 for k in range(64)])
    rest = emit_select(b, 1 << top, third, halves)
    return emit_select(b, pair, shift_right(b, low, j // 2 * 4), rest)


def _for_odd_slices(b: Builder, table: Any) -> Any:
    """The 3-bit table whose places are composed as in odd slices."""
    codes = [place >> 2 | (place & 2) << 1 for place in range(16)]
    mask = ir.Constant(ir.VectorType(I32, 64), [k // 16 * 16 + k % 2 * 8 + codes[k % 16] for k in range(64)])
    return b.shuffle_vector(table, ir.Constant(BYTES, ir.Undefined), mask)


def every_second(b: Builder, low: Any, high: Any, first: int) -> Any:
    """Lanes first, first + 2, ... of two vectors one after the other."""
    count = low.type.count
    mask = ir.Constant(ir.VectorType(I32, count), list(range(first, 2 * count, 2)))
    return b.shuffle_vector(low, high, mask)


def _by_input_channel(b: Builder, vectors: list[Any]) -> list[Any]:
    """Turn vectors that hold several quads of input channels of each output channel into one vector for each quad."""
    if len(vectors) == 1:
        return vectors
    pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
    parts = [_by_input_channel(b, [every_second(b, *pair, first) for pair in pairs]) for first in (0, 1)]
    return [vector for both in zip(*parts, strict=True) for vector in both]


def load_tables(bits: int) -> Any:
    """Intrinsic that loads the codebooks of a tile."""

    def emit(b: Builder, address: Any) -> Any:
        tables = []
        for i in range(VECTORS[bits]):
            tables.append(emit_table(b, load(b, BYTES, offset(b, address, 64 * i), 64)))
            if bits == 3:
                tables.append(_for_odd_slices(b, tables[-1]))
        result = ir.Constant(ir.ArrayType(BYTES, _TABLES), ir.Undefined)
        for i, table in enumerate(tables):
            result = b.insert_value(result, table, i)
        return result

    emit.__name__ = f"load_tables_{bits}"
    emit.__doc__ = "The codebooks of a tile, ready for lookups."
    return define(tables_type, types.int64)(emit)


def _decode(bits: int) -> Any:
    def emit(b: Builder, tables: Any, codes: Any, out: Any) -> None:
        entries = emit_entries(b, codes, tables, bits)
        quad = 0
        for j in range(SLICES[bits]):
            for vector in _by_input_channel(b, [b.bitcast(own[j], WORDS) for own in entries]):
                b.store(vector, pointer(b, offset(b, out, 64 * quad)), align=64)
                quad += 1

    emit.__name__ = f"decode_{bits}"
    emit.__doc__ = "Write down the entries of a block."
    return define(types.void, tables_type, types.int64, types.int64)(emit)


def _decode_tile(bits: int) -> Any:
    decode, tables_of = _decode(bits), load_tables(bits)
    block_bytes = BLOCK_BYTES[bits]

    @kernel
    def decode_tile(codes: int, tables: int, blocks: int, out: int) -> None:
        books = tables_of(tables)
        for block in range(blocks):
            decode(books, codes + block * block_bytes, out + block * ENTRY_BYTES)

    return decode_tile


decode_tile_3 = _decode_tile(3)
"""Write down the entries of a tile of a 3-bit matrix; arguments as `decode_tile_4`."""
decode_tile_4 = _decode_tile(4)
"""Write down the entries of a tile of a 4-bit matrix.

Args: addresses of the tile's codes and codebooks; K / 32; and the address of bytes [K / 4, 16, 4], aligned to 64 bytes.
"""


def repeated(b: Builder, address: Any, bits: int) -> Any:
    """The activations that a slice of entries meets, repeated for each of a vector's output channels."""
    if bits == 4:
        quads = load(b, ir.VectorType(I8, 16), address, 4)
        mask = ir.Constant(ir.VectorType(I32, 64), [i % 16 for i in range(64)])
    else:
        quads = load(b, ir.VectorType(I8, 8), address, 4)
        mask = ir.Constant(ir.VectorType(I32, 64), [i % 8 for i in range(64)])
    return b.shuffle_vector(quads, ir.Constant(quads.type, ir.Undefined), mask)
