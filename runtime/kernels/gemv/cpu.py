"""Low-bit matrix times one vector of INT8 activations: sixteen output channels side by side in the vector lanes.

Weights stand in tiles of 16 output channels (`runtime.cpu.layout`); each 32-bit lane of the dot product collects four
input channels of one output channel, so nothing has to be summed across lanes and a group's scale is one vector. Per
64 bytes of 4-bit codes this is 3 operations to unpack and 2 dot products: memory is the limit, not arithmetic.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types

from runtime.cpu.emit import BYTES, Builder, bytes64, constant, define, load, offset, shift_left, shift_right
from runtime.cpu.vector import (
    add_words,
    broadcast,
    broadcast_word,
    dot4,
    fma,
    load_halves,
    load_unsigned,
    mul,
    prefetch,
    to_floats,
    zero_floats,
    zero_words,
)

BLOCK = 32
"""Input channels unpacked at a time."""
BLOCK_BYTES = {3: 192, 4: 256}
"""Bytes of a block of 16 output by 32 input channels, by bits."""
_AHEAD = 1536
"""Bytes that the prefetch runs ahead of the loads."""


def emit_unpack(b: Builder, address: Any, bits: int) -> list[Any]:
    """Unpack a block: eight byte vectors, vector j with input channels 4j .. 4j + 3 of all 16 output channels."""
    if bits == 4:
        vectors = []
        for i in range(4):
            pair = load(b, BYTES, offset(b, address, 64 * i), 64)
            vectors += [b.and_(shift_right(b, pair, shift), constant(BYTES, 15)) for shift in (0, 4)]
        return vectors
    high = load(b, BYTES, offset(b, address, 128), 64)
    vectors = []
    for j in range(8):
        if j % 4 == 0:
            low = load(b, BYTES, offset(b, address, 64 * (j // 4)), 64)
        top = shift_right(b, high, j - 2) if j >= 2 else shift_left(b, high, 2 - j)
        code = b.and_(shift_right(b, low, 2 * (j % 4)), constant(BYTES, 3))
        vectors.append(b.or_(code, b.and_(top, constant(BYTES, 4))))
    return vectors


def _unpack(bits: int) -> Any:
    def emit(b: Builder, address: Any) -> Any:
        vectors = emit_unpack(b, address, bits)
        result = ir.Constant(ir.ArrayType(BYTES, 8), ir.Undefined)
        for j, vector in enumerate(vectors):
            result = b.insert_value(result, vector, j)
        return result

    emit.__name__ = f"unpack{bits}"
    emit.__doc__ = f"Eight byte vectors of {bits}-bit codes."
    return define(types.UniTuple(bytes64, 8), types.int64)(emit)


def _tile(bits: int) -> Any:
    unpack = _unpack(bits)
    block_bytes = BLOCK_BYTES[bits]

    @numba.njit(nogil=True)
    def tile(
        codes: int, scales: int, zeros: int, x: int, x_scales: int, x_shifts: int, blocks: int, group_blocks: int
    ) -> Any:
        total = zero_floats()
        start, group = 0, 0
        while start < blocks:
            stop = min(start + group_blocks, blocks)
            a0, a1, a2, a3 = zero_words(), zero_words(), zero_words(), zero_words()
            for block in range(start, stop):
                base = codes + block * block_bytes
                for line in range(0, block_bytes, 64):
                    prefetch(base + _AHEAD + line)
                quad = x + BLOCK * block
                u = unpack(base)
                a0 = dot4(a0, u[0], broadcast_word(quad))
                a1 = dot4(a1, u[1], broadcast_word(quad + 4))
                a2 = dot4(a2, u[2], broadcast_word(quad + 8))
                a3 = dot4(a3, u[3], broadcast_word(quad + 12))
                a0 = dot4(a0, u[4], broadcast_word(quad + 16))
                a1 = dot4(a1, u[5], broadcast_word(quad + 20))
                a2 = dot4(a2, u[6], broadcast_word(quad + 24))
                a3 = dot4(a3, u[7], broadcast_word(quad + 28))
            products = to_floats(add_words(add_words(a0, a1), add_words(a2, a3)))
            scale = load_halves(scales + 32 * group)
            zero = load_unsigned(zeros + 16 * group)
            total = fma(products, mul(scale, broadcast(x_scales + 4 * group)), total)
            total = fma(mul(scale, zero), broadcast(x_shifts + 4 * group), total)
            start, group = stop, group + 1
        return total

    return tile


gemv_tile_3 = _tile(3)
"""Sixteen outputs of a 3-bit matrix; arguments as `gemv_tile_4`."""
gemv_tile_4 = _tile(4)
"""Sixteen outputs of a 4-bit matrix.

Args (addresses): codes of the tile, its scales fp16 [G, 16], its zeros uint8 [G, 16], and the vector's codes int8 [K],
scales fp32 [G] and shifts fp32 [G]; then K / 32 and group_size / 32.

Returns: floats16, the outputs.
"""
