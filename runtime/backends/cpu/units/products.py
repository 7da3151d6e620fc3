"""The LINEAR instruction: a matrix product, uniform or with codebooks, and the compensation of its outputs.

Each width of codes has a unit of its own, uniform and with codebooks, and so has compensation by the residuals' width.
"""

from __future__ import annotations

from typing import Any

import numba
from numba.extending import register_jitable

from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.operands import inner_of, operands, parameter, rows_of, share_of
from runtime.backends.cpu.kernels.compensate import compensate, compensate_halves, gather_2, gather_4, gather_8
from runtime.backends.cpu.kernels.gemm import (
    gemm_entries_tile_4,
    gemm_entries_tile_8,
    gemm_entries_tile_16,
    gemm_tile_3x4,
    gemm_tile_3x8,
    gemm_tile_3x16,
    gemm_tile_4x4,
    gemm_tile_4x8,
    gemm_tile_4x16,
    row_block,
)
from runtime.backends.cpu.kernels.gemv import (
    BLOCK_BYTES,
    gemv_codebook_tile_3,
    gemv_codebook_tile_4,
    gemv_tile_3,
    gemv_tile_4,
)
from runtime.backends.cpu.kernels.lookup import decode_tile_3, decode_tile_4
from runtime.backends.cpu.machine.unit import call_10, compiled_unit
from runtime.backends.cpu.machine.vector import add, load_floats, store_floats

TILE_SCRATCH = 16 * 64
"""Bytes at the start of a thread's scratch that hold a tile of 16 rows of outputs. After them, one after the other, a
tile's decoded entries and compensation's sums."""
_operands = operands(op.LINEAR)


@numba.njit(nogil=True)
def _write_tile(value: Any, bias: int, out: int, accumulate: int, tile: int) -> None:
    if bias != 0:
        value = add(value, load_floats(bias + 64 * tile))
    if accumulate != 0:
        value = add(value, load_floats(out + 64 * tile))
    store_floats(out + 64 * tile, value)


def _uniform(bits: int, one: Any, four: Any, eight: Any, sixteen: Any) -> tuple[Any, Any]:
    """The product with one row of activations, and with several, by the kernels of tiles and row blocks."""
    block_bytes = BLOCK_BYTES[bits]

    @register_jitable
    def one_row(i: int, first: int, last: int) -> None:
        codes, scales, zeros, x, x_scales, x_shifts, blocks, group_blocks, groups = _operands(i)[:9]
        bias, out, accumulate = _operands(i)[11], _operands(i)[12], _operands(i)[14]
        for tile in range(first, last):
            at, s, z = codes + tile * blocks * block_bytes, scales + tile * groups * 32, zeros + tile * groups * 16
            _write_tile(one(at, s, z, x, x_scales, x_shifts, blocks, group_blocks), bias, out, accumulate, tile)

    @register_jitable
    def several_rows(i: int, first: int, last: int, rows: int, scratch: int) -> None:
        codes, scales, zeros, x, x_scales, x_shifts, blocks, group_blocks, groups = _operands(i)[:9]
        bias, out, out_stride, accumulate = _operands(i)[11:15]
        side = row_block(rows)
        for tile in range(first, last):
            at, s, z = codes + tile * blocks * block_bytes, scales + tile * groups * 32, zeros + tile * groups * 16
            for row in range(0, rows, side):
                xc, xs, xz = x + row * blocks * 32, x_scales + 4 * row * groups, x_shifts + 4 * row * groups
                if side == 16:
                    sixteen(at, s, z, xc, xs, xz, blocks, group_blocks, scratch)
                elif side == 8:
                    eight(at, s, z, xc, xs, xz, blocks, group_blocks, scratch)
                else:
                    four(at, s, z, xc, xs, xz, blocks, group_blocks, scratch)
                _write_rows(scratch, min(side, rows - row), bias, out + row * out_stride, out_stride, accumulate, tile)

    return one_row, several_rows


def _codebook(bits: int, one: Any, decode: Any) -> tuple[Any, Any]:
    """Likewise with codebooks: several rows are multiplied with the entries of a tile, decoded once."""
    block_bytes, book_bytes = BLOCK_BYTES[bits], 16 << bits

    @register_jitable
    def one_row(i: int, first: int, last: int) -> None:
        codes, scales, _, x, x_scales, x_shifts, blocks, group_blocks, _ = _operands(i)[:9]
        bias, out, accumulate, codebooks = _operands(i)[11], _operands(i)[12], _operands(i)[14], _operands(i)[25]
        for tile in range(first, last):
            at, s, book = codes + tile * blocks * block_bytes, scales + tile * 32, codebooks + tile * book_bytes
            _write_tile(one(at, s, book, x, x_scales, x_shifts, blocks, group_blocks), bias, out, accumulate, tile)

    @register_jitable
    def several_rows(i: int, first: int, last: int, rows: int, scratch: int) -> None:
        codes, scales, _, x, x_scales, x_shifts, blocks, group_blocks, groups = _operands(i)[:9]
        bias, out, out_stride, accumulate = _operands(i)[11:15]
        side, entries, codebooks = row_block(rows), scratch + TILE_SCRATCH, _operands(i)[25]
        for tile in range(first, last):
            decode(codes + tile * blocks * block_bytes, codebooks + tile * book_bytes, blocks, entries)
            s = scales + tile * 32
            for row in range(0, rows, side):
                xc, xs, xz = x + row * blocks * 32, x_scales + 4 * row * groups, x_shifts + 4 * row * groups
                if side == 16:
                    gemm_entries_tile_16(entries, s, xc, xs, xz, blocks, group_blocks, scratch)
                elif side == 8:
                    gemm_entries_tile_8(entries, s, xc, xs, xz, blocks, group_blocks, scratch)
                else:
                    gemm_entries_tile_4(entries, s, xc, xs, xz, blocks, group_blocks, scratch)
                _write_rows(scratch, min(side, rows - row), bias, out + row * out_stride, out_stride, accumulate, tile)

    return one_row, several_rows


@numba.njit(nogil=True)
def _write_rows(tiles: int, count: int, bias: int, out: int, out_stride: int, accumulate: int, tile: int) -> None:
    """Write the outputs of a row block, float32 [count, 16] in the scratch."""
    for m in range(count):
        _write_tile(load_floats(tiles + 64 * m), bias, out + m * out_stride, accumulate, tile)


_one_3, _several_3 = _uniform(3, gemv_tile_3, gemm_tile_3x4, gemm_tile_3x8, gemm_tile_3x16)
_one_4, _several_4 = _uniform(4, gemv_tile_4, gemm_tile_4x4, gemm_tile_4x8, gemm_tile_4x16)
_one_codebook_3, _several_codebook_3 = _codebook(3, gemv_codebook_tile_3, decode_tile_3)
_one_codebook_4, _several_codebook_4 = _codebook(4, gemv_codebook_tile_4, decode_tile_4)


@numba.njit(nogil=True)
def _multiply(one_row: Any, several_rows: Any, i: int, control: int, thread: int, threads: int, scratch: int) -> None:
    """Run a LINEAR instruction: a thread takes whole tiles of 16 output channels."""
    tiles, out, out_stride, which = _operands(i)[9], _operands(i)[12], _operands(i)[13], _operands(i)[15]
    residual, residual_scales, _, residual_row, x, x_stride = _operands(i)[16:22]
    chosen, chosen_stride, total = _operands(i)[22:25]
    rows = rows_of(control, which)
    first, last = share_of(tiles, thread, threads)
    if rows == 1:
        one_row(i, first, last)
    else:
        several_rows(i, first, last, rows, scratch)
    if total > 0 and last > first and parameter(control, op.COMPENSATE) != 0:
        for row in range(rows):
            call_10(
                inner_of(i),
                residual,
                residual_scales,
                residual_row,
                x + row * x_stride,
                chosen + row * chosen_stride,
                total,
                16 * first,
                16 * last,
                out + row * out_stride,
                scratch + TILE_SCRATCH,
            )


@compiled_unit
def multiply_uniform_3(i: int, control: int, thread: int, threads: int, scratch: int) -> None:
    """Run the LINEAR instruction at address i: uniform codes of 3 bits."""
    _multiply(_one_3, _several_3, i, control, thread, threads, scratch)


@compiled_unit
def multiply_uniform_4(i: int, control: int, thread: int, threads: int, scratch: int) -> None:
    """Run the LINEAR instruction at address i: uniform codes of 4 bits."""
    _multiply(_one_4, _several_4, i, control, thread, threads, scratch)


@compiled_unit
def multiply_codebook_3(i: int, control: int, thread: int, threads: int, scratch: int) -> None:
    """Run the LINEAR instruction at address i: codebooks of 8 entries."""
    _multiply(_one_codebook_3, _several_codebook_3, i, control, thread, threads, scratch)


@compiled_unit
def multiply_codebook_4(i: int, control: int, thread: int, threads: int, scratch: int) -> None:
    """Run the LINEAR instruction at address i: codebooks of 16 entries."""
    _multiply(_one_codebook_4, _several_codebook_4, i, control, thread, threads, scratch)


@compiled_unit
def compensate_2(
    residual: int, scales: int, row: int, x: int, chosen: int, count: int, start: int, stop: int, out: int, sums: int
) -> None:
    """Add the compensation of one row by residuals of 2 bits."""
    compensate(gather_2, 2, residual, scales, row, x, chosen, count, start, stop, out, sums)


@compiled_unit
def compensate_4(
    residual: int, scales: int, row: int, x: int, chosen: int, count: int, start: int, stop: int, out: int, sums: int
) -> None:
    """Add the compensation of one row by residuals of 4 bits."""
    compensate(gather_4, 4, residual, scales, row, x, chosen, count, start, stop, out, sums)


@compiled_unit
def compensate_8(
    residual: int, scales: int, row: int, x: int, chosen: int, count: int, start: int, stop: int, out: int, sums: int
) -> None:
    """Add the compensation of one row by residuals of 8 bits."""
    compensate(gather_8, 8, residual, scales, row, x, chosen, count, start, stop, out, sums)


@compiled_unit
def compensate_16(
    residual: int, _scales: int, row: int, x: int, chosen: int, count: int, start: int, stop: int, out: int, sums: int
) -> None:
    """Add the compensation of one row by residuals in half precision."""
    compensate_halves(residual, row, x, chosen, count, start, stop, out, sums)
