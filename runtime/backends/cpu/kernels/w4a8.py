"""W4A8 products in whole numbers: 4-bit codes in groups with whole scales, tokens in INT8 with one scale each.

The tiles and codes are those of the other uniform matrices. A group's dot products of codes, at most 15, with
activations are summed in the lanes as they are; then the group's whole scale s multiplies the sum, and z · s times the
sum of the group's activations is subtracted:

    y[m, n] = float(sum over groups of s (sum of code · a) - z s (sum of a)) · (scale[n] · scale[m])

Everything inside the brackets is exact in 32 bits, so the result has the bits of `runtime.operations.linear.gemm_w4a8`.

Source: QServe §4.2.2 (subtraction after multiplication), here once for a group's sum rather than once for a weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba import types

from runtime.backends.cpu.data.instructions import Quantized
from runtime.backends.cpu.kernels.gemm import CHAINS, emit_whole_sum, no_sums, sums_of_block
from runtime.backends.cpu.kernels.gemv import AHEAD, BLOCK, BLOCK_BYTES, unpack_4
from runtime.backends.cpu.machine.emit import (
    FLOAT,
    FLOATS,
    I8,
    I32,
    WORDS,
    Builder,
    define,
    floats16,
    load,
    offset,
    pointer,
    splat,
    words16,
)
from runtime.backends.cpu.machine.vector import (
    add_words,
    broadcast,
    broadcast_word,
    dot4,
    load_halves,
    mul,
    prefetch,
    store_words,
    to_floats,
    zero_words,
)

BLOCK_BYTES_4 = BLOCK_BYTES[4]
"""Bytes of a block of 16 output by 32 input channels."""


class W4A8Tile(NamedTuple):
    """Sixteen output channels of a matrix: addresses and sizes."""

    codes: int
    """Of the first block."""
    scales: int
    """float16 [16]."""
    group_scales: int
    """uint8 [G, 16]."""
    shifts: int
    """uint8 [G, 16]: zero-point times group scale."""
    blocks: int
    """K / 32."""
    group_blocks: int
    """group_size / 32."""


@define(words16, types.int64)
def _load_bytes(b: Builder, address: Any) -> Any:
    """Sixteen unsigned bytes as words."""
    return b.zext(load(b, ir.VectorType(I8, 16), address, 1), WORDS)


@define(words16, words16, words16)
def _mul_words(b: Builder, x: Any, y: Any) -> Any:
    """X * y."""
    return b.mul(x, y)


@define(words16, words16, words16)
def _sub_words(b: Builder, x: Any, y: Any) -> Any:
    """X - y."""
    return b.sub(x, y)


@numba.njit(nogil=True)
def gemv_w4a8_tile(tile: W4A8Tile, x: Quantized) -> Any:
    """Sixteen outputs for one token: floats16."""
    total, blocks = zero_words(), tile.blocks
    start, group = 0, 0
    while start < blocks:
        stop = min(start + tile.group_blocks, blocks)
        a0, a1, a2, a3 = zero_words(), zero_words(), zero_words(), zero_words()
        for block in range(start, stop):
            base = tile.codes + block * BLOCK_BYTES_4
            for line in range(0, BLOCK_BYTES_4, 64):
                prefetch(base + AHEAD + line)
            quad = x.codes + BLOCK * block
            u = unpack_4(base)
            a0 = dot4(a0, u[0], broadcast_word(quad))
            a1 = dot4(a1, u[1], broadcast_word(quad + 4))
            a2 = dot4(a2, u[2], broadcast_word(quad + 8))
            a3 = dot4(a3, u[3], broadcast_word(quad + 12))
            a0 = dot4(a0, u[4], broadcast_word(quad + 16))
            a1 = dot4(a1, u[5], broadcast_word(quad + 20))
            a2 = dot4(a2, u[6], broadcast_word(quad + 24))
            a3 = dot4(a3, u[7], broadcast_word(quad + 28))
        products = add_words(add_words(a0, a1), add_words(a2, a3))
        total = add_words(total, _mul_words(_load_bytes(tile.group_scales + 16 * group), products))
        shift = _mul_words(_load_bytes(tile.shifts + 16 * group), broadcast_word(x.sums + 4 * group))
        total = _sub_words(total, shift)
        start, group = stop, group + 1
    return mul(to_floats(total), mul(load_halves(tile.scales), broadcast(x.scales)))


def _add_group(rows: int) -> Any:
    def emit(b: Builder, sums: Any, scale: Any, shift: Any, x_sums: Any, out: Any) -> None:
        for m in range(rows):
            address = offset(b, out, 64 * m)
            x_sum = splat(b, load(b, I32, offset(b, x_sums, 4 * m), 4), WORDS)
            products = b.mul(emit_whole_sum(b, sums, m, rows), scale)
            total = b.sub(b.add(load(b, WORDS, address, 64), products), b.mul(shift, x_sum))
            b.store(total, pointer(b, address), align=64)

    emit.__name__ = f"add_group{rows}"
    emit.__doc__ = "Add a group to the tile's totals, int32 [rows, 16] at `out`."
    sums_type = types.UniTuple(words16, CHAINS)
    return define(types.void, sums_type, words16, words16, types.int64, types.int64)(emit)


def _scale_rows(rows: int) -> Any:
    def emit(b: Builder, scale: Any, x_scales: Any, out: Any) -> None:
        for m in range(rows):
            address = offset(b, out, 64 * m)
            x_scale = splat(b, load(b, FLOAT, offset(b, x_scales, 4 * m), 4), FLOATS)
            total = b.sitofp(load(b, WORDS, address, 64), FLOATS)
            b.store(b.fmul(total, b.fmul(scale, x_scale)), pointer(b, address), align=64)

    emit.__name__ = f"scale_rows{rows}"
    emit.__doc__ = "Make the totals, int32 [rows, 16] at `out`, the outputs in float32."
    return define(types.void, floats16, types.int64, types.int64)(emit)


def _tile(rows: int) -> Any:
    multiply, add_group, scale_rows = sums_of_block(4, rows), _add_group(rows), _scale_rows(rows)

    @numba.njit(nogil=True)
    def gemm(tile: W4A8Tile, x: Quantized, out: int) -> None:
        for m in range(rows):
            store_words(out + 64 * m, zero_words())
        start, group, blocks = 0, 0, tile.blocks
        while start < blocks:
            stop = min(start + tile.group_blocks, blocks)
            sums = no_sums()
            for block in range(start, stop):
                codes = tile.codes + block * BLOCK_BYTES_4
                for line in range(0, BLOCK_BYTES_4, 64):
                    prefetch(codes + AHEAD + line)
                sums = multiply(sums, codes, x.codes + BLOCK * rows * block)
            scale, shift = _load_bytes(tile.group_scales + 16 * group), _load_bytes(tile.shifts + 16 * group)
            add_group(sums, scale, shift, x.sums + 4 * rows * group, out)
            start, group = stop, group + 1
        scale_rows(load_halves(tile.scales), x.scales, out)

    return gemm


gemm_w4a8_tile_4, gemm_w4a8_tile_8, gemm_w4a8_tile_16 = (_tile(rows) for rows in (4, 8, 16))
"""Sixteen outputs of 4, 8 or 16 tokens.

Args: the tile, the activations of a row block, and the address of float32 [rows, 16], aligned to 64 bytes, which is
written.
"""
