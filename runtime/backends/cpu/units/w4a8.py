"""Unit of W4A8 products in whole numbers: 4-bit codes in groups with whole scales, tokens in INT8 with one scale each.

The tiles and codes are those of the other uniform matrices. A group's dot products of codes, at most 15, with
activations are summed in the lanes as they are; then the group's whole scale s multiplies the sum, and z · s times the
sum of the group's activations is subtracted:

    y[m, n] = float(sum over groups of s (sum of code · a) - z s (sum of a)) · (scale[n] · scale[m])

Everything inside the brackets is exact in 32 bits, so the result has the bits of
`runtime.backends.operations.linear.gemm_w4a8`.

With 16 tokens and more a tile's whole numbers (code - z) s, which fit in a byte, are written down first, once for all
tokens, as the entries of a tile with codebooks are (`runtime.backends.cpu.kernels.lookup`). Then groups are over, a
sum runs through all input channels, and tile registers, where there are any, hold four row blocks' sums.

Source: QServe §4.2.2 (subtraction after multiplication), for few tokens once for a group's sum rather than once for a
weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types

from runtime.backends.cpu.data.instructions import Linear, Quantized, Weights
from runtime.backends.cpu.data.records import BLOCK, BLOCK_BYTES, ENTRY_BYTES
from runtime.backends.cpu.kernels.activation import code_bytes, quad_at, row_block
from runtime.backends.cpu.kernels.gemm import (
    AHEAD,
    CHAINS,
    emit_unpack,
    emit_whole_sum,
    multiply_4,
    no_chains,
    no_sums,
    sums_of_block,
    whole_sum,
)
from runtime.backends.cpu.machine import amx
from runtime.backends.cpu.machine.amx import close_registers, open_registers
from runtime.backends.cpu.machine.emit import (
    BYTES,
    ENTRY_OFFSET,
    FLOAT,
    FLOATS,
    I8,
    I16,
    I32,
    WORDS,
    Builder,
    constant,
    define,
    floats16,
    load,
    offset,
    pointer,
    splat,
    words16,
)
from runtime.backends.cpu.machine.kernel import kernel, routine
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.machine.vector import (
    add_words,
    broadcast,
    broadcast_word,
    load_halves,
    load_words,
    mul,
    prefetch,
    store_words,
    to_floats,
    zero_words,
)
from runtime.backends.cpu.scratch import MANY, TILE_BYTES, entries_bytes
from runtime.backends.cpu.units.products import multiply_linear, one_row_of, row_block_at, write_rows

BLOCK_BYTES_4 = BLOCK_BYTES[4]
"""Bytes of a block of 16 output by 32 input channels."""
SIDE = 16
"""Tokens of a row block."""
_SHORTS = ir.VectorType(I16, 32)
_ENTRIES = amx.REGISTERS - 1
"""The tile register of the weights."""


class W4A8Tile(NamedTuple):
    """Sixteen output channels of a matrix: addresses and sizes."""

    codes: int  # of the first block
    scales: int  # float16 [16]
    group_scales: int  # uint8 [G, 16]
    shifts: int  # uint8 [G, 16]: zero-point times group scale
    blocks: int  # K / 32
    group_blocks: int  # group_size / 32


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


@kernel
def gemv_w4a8_tile(tile: W4A8Tile, x: Quantized) -> Any:
    """Sixteen outputs for one token: floats16."""
    total, blocks = zero_words(), tile.blocks
    start, group = 0, 0
    while start < blocks:
        stop = min(start + tile.group_blocks, blocks)
        chains = no_chains()
        for block in range(start, stop):
            base = tile.codes + block * BLOCK_BYTES_4
            for line in range(0, BLOCK_BYTES_4, 64):
                prefetch(base + AHEAD + line)
            chains = multiply_4(chains, base, x.codes + BLOCK * block)
        total = add_words(total, _mul_words(_load_bytes(tile.group_scales + 16 * group), whole_sum(chains)))
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

    @kernel
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
                sums = multiply(sums, codes, quad_at(x.codes, rows, BLOCK * block))
            scale, shift = _load_bytes(tile.group_scales + 16 * group), _load_bytes(tile.shifts + 16 * group)
            add_group(sums, scale, shift, x.sums + 4 * rows * group, out)
            start, group = stop, group + 1
        scale_rows(load_halves(tile.scales), x.scales, out)

    return gemm


gemm_w4a8_tile_4, gemm_w4a8_tile_8 = _tile(4), _tile(8)
"""Sixteen outputs of 4 or 8 tokens.

Args: the tile, the activations of a row block, and the address of float32 [rows, 16], aligned to 64 bytes, which is
written.
"""


@define(words16, words16)
def _twice(b: Builder, x: Any) -> Any:
    """Whole numbers below 2^16, twice in each word."""
    return b.or_(x, b.shl(x, constant(WORDS, 16)))


@define(words16, words16)
def _as_bytes(b: Builder, shift: Any) -> Any:
    """What is subtracted from bytes: a whole number less `ENTRY_OFFSET`, in each byte of its word."""
    less = b.and_(b.sub(shift, constant(WORDS, ENTRY_OFFSET)), constant(WORDS, 255))
    return b.mul(less, constant(WORDS, 0x01010101))


@define(types.void, types.int64, words16, words16, types.int64)
def _write_block(b: Builder, codes: Any, scales: Any, shifts: Any, out: Any) -> None:
    """Write down a block's entries: a code times its scale, at most 240, stays in its byte."""
    for j, vector in enumerate(emit_unpack(b, codes, 4)):
        products = b.mul(b.bitcast(vector, _SHORTS), b.bitcast(scales, _SHORTS))
        entries = b.sub(b.bitcast(products, BYTES), b.bitcast(shifts, BYTES))
        b.store(entries, pointer(b, offset(b, out, 64 * j)), align=64)


@define(types.void, types.int64)
def _clear_block(b: Builder, out: Any) -> None:
    """Write a block of zeros."""
    for j in range(ENTRY_BYTES // 64):
        b.store(constant(BYTES, 0), pointer(b, offset(b, out, 64 * j)), align=64)


_entries_bytes = routine(entries_bytes)


@kernel
def write_entries(tile: W4A8Tile, out: int) -> None:
    """Write down a tile's whole numbers as entries, and zeros behind them.

    Args:
        tile: The tile.
        out: Address of `entries_bytes`, aligned to 64 bytes: [K / 4, 16, 4] with `ENTRY_OFFSET`.
    """
    start, group, blocks = 0, 0, tile.blocks
    while start < blocks:
        stop = min(start + tile.group_blocks, blocks)
        scales = _twice(_load_bytes(tile.group_scales + 16 * group))
        shifts = _as_bytes(_load_bytes(tile.shifts + 16 * group))
        for block in range(start, stop):
            codes = tile.codes + block * BLOCK_BYTES_4
            for line in range(0, BLOCK_BYTES_4, 64):
                prefetch(codes + AHEAD + line)
            _write_block(codes, scales, shifts, out + block * ENTRY_BYTES)
        start, group = stop, group + 1
    if blocks % 2:
        _clear_block(out + blocks * ENTRY_BYTES)


@define(types.void, floats16, words16, types.int64, types.int64)
def _finish(b: Builder, scale: Any, x_sums: Any, x_scales: Any, out: Any) -> None:
    """Make the sums of 16 tokens, int32 [16, 16] at `out`, the outputs in float32."""
    undefined = ir.Constant(WORDS, ir.Undefined)
    excess = b.mul(x_sums, constant(WORDS, ENTRY_OFFSET))
    for m in range(SIDE):
        address = offset(b, out, 64 * m)
        own = b.shuffle_vector(excess, undefined, constant(WORDS, m))
        total = b.sitofp(b.sub(load(b, WORDS, address, 64), own), FLOATS)
        x_scale = splat(b, load(b, FLOAT, offset(b, x_scales, 4 * m), 4), FLOATS)
        b.store(b.fmul(total, b.fmul(scale, x_scale)), pointer(b, address), align=64)


@kernel
def _scale(tile: W4A8Tile, x: Quantized, row: int, out: int) -> None:
    """Make sums of a row block, which begins `row` tokens after x, outputs."""
    groups = (tile.blocks + tile.group_blocks - 1) // tile.group_blocks
    first, x_sums = 4 * row * groups, zero_words()
    for group in range(groups):
        x_sums = add_words(x_sums, load_words(x.sums + first + 64 * group))
    _finish(load_halves(tile.scales), x_sums, x.scales + first, out)


@define(types.void, types.UniTuple(words16, CHAINS), types.int64)
def store_sums(b: Builder, sums: Any, out: Any) -> None:
    """Write down the sums of 16 tokens."""
    for m in range(SIDE):
        b.store(b.extract_value(sums, m), pointer(b, offset(b, out, 64 * m)), align=64)


_multiply_entries = sums_of_block(8, SIDE)


@kernel
def _vectors(_registers: int, tile: W4A8Tile, entries: int, x: Quantized, out: int) -> None:
    """Sixteen outputs of 16 tokens, by vectors."""
    sums = no_sums()
    for block in range(tile.blocks):
        sums = _multiply_entries(sums, entries + ENTRY_BYTES * block, quad_at(x.codes, SIDE, BLOCK * block))
    store_sums(sums, out)
    _scale(tile, x, 0, out)


def _registers(count: int) -> Any:
    """Sixteen outputs of some row blocks of 16 tokens, by tile registers: one for the sums of each, at most 4."""

    @define(types.void, types.int64)
    def clear(b: Builder, registers: Any) -> None:
        """Begin sums."""
        for i in range(count):
            amx.emit_clear(b, registers, i)

    @define(types.void, types.int64, types.int64, types.int64, types.int64)
    def multiply(b: Builder, registers: Any, entries: Any, x: Any, stride: Any) -> None:
        """Add the products of 64 input channels to the sums of all tokens."""
        amx.emit_load(b, registers, _ENTRIES, entries)
        for i in range(count):
            own = count + i % (_ENTRIES - count)
            amx.emit_load(b, registers, own, x)
            amx.emit_multiply(b, registers, i, own, _ENTRIES)
            x = b.add(x, stride)

    @define(types.void, types.int64, types.int64)
    def store(b: Builder, registers: Any, out: Any) -> None:
        """Write down the sums."""
        for i in range(count):
            amx.emit_store(b, registers, i, offset(b, out, amx.REGISTER_BYTES * i))

    @kernel
    def gemm(registers: int, tile: W4A8Tile, entries: int, x: Quantized, out: int) -> None:
        stride = SIDE * code_bytes(BLOCK * tile.blocks)
        clear(registers)
        for at in range(0, _entries_bytes(tile.blocks), amx.REGISTER_BYTES):
            multiply(registers, entries + at, x.codes + at, stride)
        store(registers, out)
        for row in range(0, SIDE * count, SIDE):
            _scale(tile, x, row, out + 64 * row)

    return gemm


gemm_w4a8_16 = _registers(1) if amx.AVAILABLE else _vectors
"""Sixteen outputs of a row block of 16 tokens.

Args: the open tile registers; the tile and its entries; the activations from the row block on; and the address of
float32 [rows, 16], aligned to 64 bytes, which is written.
"""
gemm_w4a8_many = _registers(4) if amx.AVAILABLE else _vectors
"""Likewise of `MANY` tokens."""


@routine
def _tile_of(weights: Weights, tile: int) -> W4A8Tile:
    codes, groups = weights.codes + tile * weights.blocks * BLOCK_BYTES_4, 16 * tile * weights.groups
    scales, zeros = weights.group_scales + groups, weights.zeros + groups
    return W4A8Tile(codes, weights.scales + 32 * tile, scales, zeros, weights.blocks, weights.group_blocks)


_one_row = one_row_of(_tile_of, gemv_w4a8_tile)


@kernel
def _few_rows(linear: Linear, own: W4A8Tile, tile: int, rows: int, scratch: int) -> None:
    """Write a tile's outputs of at most 8 rows, one row block."""
    x = row_block_at(linear.x, linear.weights, 0)
    if row_block(rows) == 8:
        gemm_w4a8_tile_8(own, x, scratch)
    else:
        gemm_w4a8_tile_4(own, x, scratch)
    write_rows(linear, tile, 0, rows, scratch)


@kernel
def _many_rows(linear: Linear, own: W4A8Tile, tile: int, rows: int, scratch: int, registers: int) -> None:
    """Write a tile's outputs of all rows, in row blocks of 16."""
    entries = scratch + TILE_BYTES
    write_entries(own, entries)
    row = 0
    while row < rows:
        x, count = row_block_at(linear.x, linear.weights, row), MANY
        if rows - row > MANY - SIDE:
            gemm_w4a8_many(registers, own, entries, x, scratch)
        else:
            count = SIDE
            gemm_w4a8_16(registers, own, entries, x, scratch)
        write_rows(linear, tile, row, min(count, rows - row), scratch)
        row += count


@routine
def _several_rows(linear: Linear, first: int, last: int, rows: int, scratch: int) -> None:
    many = row_block(rows) == SIDE
    registers = open_registers() if many else 0
    for tile in range(first, last):
        own = _tile_of(linear.weights, tile)
        if many:
            _many_rows(linear, own, tile, rows, scratch, registers)
        else:
            _few_rows(linear, own, tile, rows, scratch)
    if many:
        close_registers(registers)


@compiled_unit
def multiply_w4a8(i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """Run the LINEAR instruction at address i: codes of 4 bits, in whole numbers."""
    multiply_linear(_one_row, _several_rows, i, control, part, parts, scratch)
