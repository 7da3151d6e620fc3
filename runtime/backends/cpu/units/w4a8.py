"""Unit of LINEAR instructions with W4A8 matrices, in integer arithmetic."""

from __future__ import annotations

from runtime.backends.cpu.data.instructions import Linear, Weights
from runtime.backends.cpu.kernels.gemm import row_block
from runtime.backends.cpu.kernels.w4a8 import (
    BLOCK_BYTES_4,
    SIDE,
    W4A8Tile,
    gemm_w4a8_16,
    gemm_w4a8_many,
    gemm_w4a8_tile_4,
    gemm_w4a8_tile_8,
    gemv_w4a8_tile,
    write_entries,
)
from runtime.backends.cpu.machine.amx import close_registers, open_registers
from runtime.backends.cpu.machine.kernel import kernel, routine
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.scratch import MANY, TILE_BYTES
from runtime.backends.cpu.units.products import multiply_linear, one_row_of
from runtime.backends.cpu.units.rows import row_block_at, write_rows


@routine
def _tile_of(weights: Weights, tile: int) -> W4A8Tile:
    codes, groups = weights.codes + tile * weights.blocks * BLOCK_BYTES_4, 16 * tile * weights.groups
    scales, zeros = weights.group_scales + groups, weights.zeros + groups
    return W4A8Tile(codes, weights.scales + 32 * tile, scales, zeros, weights.blocks, weights.group_blocks)


_one_row = one_row_of(_tile_of, gemv_w4a8_tile)


@kernel
def _few_rows(linear: Linear, own: W4A8Tile, tile: int, rows: int, scratch: int) -> None:
    """Write a tile's outputs of at most 8 rows, one row block."""
    x = row_block_at(linear, 0)
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
        x, count = row_block_at(linear, row), MANY
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
