"""Low-bit matrix times a block of rows: the codes are unpacked once and meet 4, 8 or 16 rows of INT8 activations.

The same tiles of weights as the matrix-vector product; with 16 rows a vector of unpacked codes serves 16 dot products,
so the integer units are the limit. Of a matrix with codebooks the entries of a whole tile are written down first
(`runtime.backends.cpu.kernels.lookup`), once for all rows.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types

from runtime.backends.cpu.data.instructions import Quantized
from runtime.backends.cpu.data.sizes import BLOCK, BLOCK_BYTES, ENTRY_BYTES
from runtime.backends.cpu.kernels.activation import quad_at, quad_step, row_step
from runtime.backends.cpu.kernels.gemv import AHEAD, Tile, emit_unpack
from runtime.backends.cpu.machine.emit import (
    BYTES,
    ENTRY_OFFSET,
    FLOAT,
    FLOATS,
    I32,
    WORDS,
    Builder,
    constant,
    define,
    emit_dot4,
    emit_dot4_entries,
    emit_fma,
    floats16,
    load,
    offset,
    pointer,
    splat,
    words16,
)
from runtime.backends.cpu.machine.kernel import kernel, routine
from runtime.backends.cpu.machine.vector import (
    fill,
    load_floats,
    load_halves,
    load_unsigned,
    mul,
    prefetch,
    store_floats,
    zero_floats,
)

CHAINS = 16
"""Independent sums, several per row for few rows: a dot product can only add to a sum when the previous one is done."""


@routine
def row_block(rows: int) -> int:
    """The row block for a step with this many rows."""
    if rows == 1:
        return 1
    if rows <= 4:
        return 4
    return 8 if rows <= 8 else 16


@define(types.UniTuple(words16, CHAINS))
def no_sums(_b: Builder) -> Any:
    """All sums, zero."""
    return ir.Constant(ir.ArrayType(WORDS, CHAINS), [constant(WORDS, 0)] * CHAINS)


def emit_whole_sum(b: Builder, sums: Any, row: int, rows: int) -> Any:
    """The sum of a row's chains."""
    whole = b.extract_value(sums, row)
    for chain in range(row + rows, CHAINS, rows):
        whole = b.add(whole, b.extract_value(sums, chain))
    return whole


def sums_of_block(bits: int, rows: int) -> Any:
    """Adds the products of one block of codes with every row to sums; 8 bits means decoded entries."""
    dot = emit_dot4_entries if bits == 8 else emit_dot4
    quad, row = quad_step(rows), row_step(rows)

    def emit(b: Builder, sums: Any, codes: Any, x: Any) -> Any:
        totals = [b.extract_value(sums, chain) for chain in range(CHAINS)]
        if bits == 8:
            vectors = [load(b, BYTES, offset(b, codes, 64 * j), 64) for j in range(8)]
        else:
            vectors = emit_unpack(b, codes, bits)
        for j, vector in enumerate(vectors):
            for m in range(rows):
                word = load(b, I32, offset(b, x, quad * j + row * m), 4)
                chain = (rows * j + m) % CHAINS
                totals[chain] = dot(b, totals[chain], vector, b.bitcast(splat(b, word, WORDS), BYTES))
        for chain, total in enumerate(totals):
            sums = b.insert_value(sums, total, chain)
        return sums

    emit.__name__ = f"multiply{bits}x{rows}"
    emit.__doc__ = "Add the products of one block of codes with every row."
    tuple_type = types.UniTuple(words16, CHAINS)
    return define(tuple_type, tuple_type, types.int64, types.int64)(emit)


def _finish(rows: int) -> Any:
    def emit(b: Builder, sums: Any, scale: Any, scaled_zero: Any, x_scales: Any, x_shifts: Any, out: Any) -> None:
        for m in range(rows):
            address = offset(b, out, 64 * m)
            x_scale = splat(b, load(b, FLOAT, offset(b, x_scales, 4 * m), 4), FLOATS)
            x_shift = splat(b, load(b, FLOAT, offset(b, x_shifts, 4 * m), 4), FLOATS)
            products = b.sitofp(emit_whole_sum(b, sums, m, rows), FLOATS)
            total = emit_fma(b, products, b.fmul(scale, x_scale), load(b, FLOATS, address, 64))
            b.store(emit_fma(b, scaled_zero, x_shift, total), pointer(b, address), align=64)

    emit.__name__ = f"finish{rows}"
    emit.__doc__ = "Scale a group's sums and add them to the tile's totals, float32 [rows, 16] at `out`."
    sums_type = types.UniTuple(words16, CHAINS)
    return define(types.void, sums_type, floats16, floats16, types.int64, types.int64, types.int64)(emit)


def _tile(bits: int, rows: int, factors: Any) -> Any:
    """The product of a tile with a row block.

    Args:
        bits: Of the codes; 8 for entries of a byte.
        rows: Of the block.
        factors: Takes the tile and a group for the scales and the scaled zeros of its outputs.
    """
    multiply, finish = sums_of_block(bits, rows), _finish(rows)
    block_bytes = ENTRY_BYTES if bits == 8 else BLOCK_BYTES[bits]
    lines = 0 if bits == 8 else block_bytes  # entries were written a moment ago

    @kernel
    def gemm(tile: Tile, x: Quantized, out: int) -> None:
        for m in range(rows):
            store_floats(out + 64 * m, zero_floats())
        start, group, blocks = 0, 0, tile.blocks
        while start < blocks:
            stop = min(start + tile.group_blocks, blocks)
            sums = no_sums()
            for block in range(start, stop):
                codes = tile.codes + block * block_bytes
                for line in range(0, lines, 64):
                    prefetch(codes + AHEAD + line)
                sums = multiply(sums, codes, quad_at(x.codes, rows, BLOCK * block))
            scale, scaled_zero = factors(tile, group)
            finish(sums, scale, scaled_zero, x.scales + 4 * rows * group, x.shifts + 4 * rows * group, out)
            start, group = stop, group + 1

    return gemm


@routine
def _uniform(tile: Tile, group: int) -> Any:
    """Scales in half precision, zeros of a byte."""
    scale = load_halves(tile.scales + 32 * group)
    return scale, mul(scale, load_unsigned(tile.levels + 16 * group))


@routine
def _entries(tile: Tile, _group: int) -> Any:
    """One scale for a row, and the offset of a codebook's entries."""
    scale = load_halves(tile.scales)
    return scale, mul(scale, fill(numba.float32(ENTRY_OFFSET)))


@routine
def _panel(tile: Tile, group: int) -> Any:
    """Steps and shifts in float32."""
    return load_floats(tile.scales + 64 * group), load_floats(tile.levels + 64 * group)


gemm_tile_3x4, gemm_tile_3x8, gemm_tile_3x16 = (_tile(3, rows, _uniform) for rows in (4, 8, 16))
"""Sixteen outputs of 4, 8 or 16 rows with a 3-bit matrix; arguments as `gemm_tile_4x16`."""
gemm_tile_4x4, gemm_tile_4x8, gemm_tile_4x16 = (_tile(4, rows, _uniform) for rows in (4, 8, 16))
"""Sixteen outputs of 4, 8 or 16 rows with a 4-bit matrix.

Args: the tile, the activations of a row block (see `runtime.backends.cpu.kernels.activation`), and the address of
float32 [rows, 16], aligned to 64 bytes, which is written.
"""


gemm_entries_tile_4, gemm_entries_tile_8 = _tile(8, 4, _entries), _tile(8, 8, _entries)
"""Sixteen outputs of 4 or 8 rows with decoded entries; arguments as `gemm_entries_tile_16`."""
gemm_entries_tile_16 = _tile(8, 16, _entries)
"""Sixteen outputs of 16 rows with a tile whose codes are decoded entries (`runtime.backends.cpu.kernels.lookup`)."""


gemm_panel_tile_4, gemm_panel_tile_8 = _tile(8, 4, _panel), _tile(8, 8, _panel)
"""Sixteen outputs of 4 or 8 rows with a panel; arguments as `gemm_panel_tile_16`."""
gemm_panel_tile_16 = _tile(8, 16, _panel)
"""Sixteen outputs of 16 rows with a tile whose codes are a panel's (`runtime.backends.cpu.kernels.panel`); its scales
and levels are float32 [G, 16]."""
