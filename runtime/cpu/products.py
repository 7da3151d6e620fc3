"""The LINEAR instruction: a matrix product, uniform or with codebooks, and the compensation of its outputs."""

from __future__ import annotations

from typing import Any

import numba

from runtime.cpu import instructions as op
from runtime.cpu.operands import operands, parameter, rows_of, share_of
from runtime.cpu.vector import add, load_floats, store_floats
from runtime.kernels.compensate.cpu import compensate
from runtime.kernels.gemm.cpu import (
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
from runtime.kernels.gemv.cpu import (
    BLOCK_BYTES,
    gemv_codebook_tile_3,
    gemv_codebook_tile_4,
    gemv_tile_3,
    gemv_tile_4,
)
from runtime.kernels.lookup.cpu import decode_tile_3, decode_tile_4

TILE_SCRATCH = 16 * 64
"""Bytes at the start of a thread's scratch that hold a tile of 16 rows of outputs. After them, one after the other, a
tile's decoded entries and compensation's sums."""
_BYTES_3, _BYTES_4 = BLOCK_BYTES[3], BLOCK_BYTES[4]
_operands = operands(op.LINEAR)


@numba.njit(nogil=True)
def _write_tile(value: Any, bias: int, out: int, accumulate: int, tile: int) -> None:
    if bias != 0:
        value = add(value, load_floats(bias + 64 * tile))
    if accumulate != 0:
        value = add(value, load_floats(out + 64 * tile))
    store_floats(out + 64 * tile, value)


@numba.njit(nogil=True)
def _one_row(i: int, first: int, last: int) -> None:
    codes, scales, zeros, x, x_scales, x_shifts, blocks, group_blocks, groups = _operands(i)[:9]
    bits, bias, out = _operands(i)[10:13]
    accumulate, codebooks = _operands(i)[14], _operands(i)[25]
    step = blocks * (_BYTES_4 if bits == 4 else _BYTES_3)
    for tile in range(first, last):
        at = codes + tile * step
        if codebooks != 0:
            s, book = scales + tile * 32, codebooks + (tile * 16 << bits)
            if bits == 4:
                value = gemv_codebook_tile_4(at, s, book, x, x_scales, x_shifts, blocks, group_blocks)
            else:
                value = gemv_codebook_tile_3(at, s, book, x, x_scales, x_shifts, blocks, group_blocks)
        else:
            s, z = scales + tile * groups * 32, zeros + tile * groups * 16
            if bits == 4:
                value = gemv_tile_4(at, s, z, x, x_scales, x_shifts, blocks, group_blocks)
            else:
                value = gemv_tile_3(at, s, z, x, x_scales, x_shifts, blocks, group_blocks)
        _write_tile(value, bias, out, accumulate, tile)


@numba.njit(nogil=True)
def _uniform_block(
    at: int, s: int, z: int, x: int, xs: int, xz: int, blocks: int, group_blocks: int, bits: int, side: int, out: int
) -> None:
    """One tile times one row block."""
    if bits == 4:
        if side == 16:
            gemm_tile_4x16(at, s, z, x, xs, xz, blocks, group_blocks, out)
        elif side == 8:
            gemm_tile_4x8(at, s, z, x, xs, xz, blocks, group_blocks, out)
        else:
            gemm_tile_4x4(at, s, z, x, xs, xz, blocks, group_blocks, out)
    elif side == 16:
        gemm_tile_3x16(at, s, z, x, xs, xz, blocks, group_blocks, out)
    elif side == 8:
        gemm_tile_3x8(at, s, z, x, xs, xz, blocks, group_blocks, out)
    else:
        gemm_tile_3x4(at, s, z, x, xs, xz, blocks, group_blocks, out)


@numba.njit(nogil=True)
def _entry_block(
    entries: int, s: int, x: int, xs: int, xz: int, blocks: int, group_blocks: int, side: int, out: int
) -> None:
    """One decoded tile times one row block."""
    if side == 16:
        gemm_entries_tile_16(entries, s, x, xs, xz, blocks, group_blocks, out)
    elif side == 8:
        gemm_entries_tile_8(entries, s, x, xs, xz, blocks, group_blocks, out)
    else:
        gemm_entries_tile_4(entries, s, x, xs, xz, blocks, group_blocks, out)


@numba.njit(nogil=True)
def _several_rows(i: int, first: int, last: int, rows: int, scratch: int) -> None:
    codes, scales, zeros, x, x_scales, x_shifts, blocks, group_blocks, groups = _operands(i)[:9]
    bits, bias, out, out_stride, accumulate = _operands(i)[10:15]
    codebooks = _operands(i)[25]
    step = blocks * (_BYTES_4 if bits == 4 else _BYTES_3)
    side, entries = row_block(rows), scratch + TILE_SCRATCH
    for tile in range(first, last):
        at = codes + tile * step
        if codebooks != 0:
            if bits == 4:
                decode_tile_4(at, codebooks + tile * 256, blocks, entries)
            else:
                decode_tile_3(at, codebooks + tile * 128, blocks, entries)
        for row in range(0, rows, side):
            xc, xs, xz = x + row * blocks * 32, x_scales + 4 * row * groups, x_shifts + 4 * row * groups
            if codebooks != 0:
                _entry_block(entries, scales + tile * 32, xc, xs, xz, blocks, group_blocks, side, scratch)
            else:
                s, z = scales + tile * groups * 32, zeros + tile * groups * 16
                _uniform_block(at, s, z, xc, xs, xz, blocks, group_blocks, bits, side, scratch)
            for m in range(min(side, rows - row)):
                _write_tile(load_floats(scratch + 64 * m), bias, out + (row + m) * out_stride, accumulate, tile)


@numba.njit(nogil=True)
def multiply(i: int, control: int, thread: int, threads: int, scratch: int) -> None:
    """Run the LINEAR instruction at address i: a thread takes whole tiles of 16 output channels."""
    tiles, out, out_stride, which = _operands(i)[9], _operands(i)[12], _operands(i)[13], _operands(i)[15]
    residual, residual_scales, residual_bits, residual_row, x, x_stride = _operands(i)[16:22]
    chosen, chosen_stride, total = _operands(i)[22:25]
    rows = rows_of(control, which)
    first, last = share_of(tiles, thread, threads)
    if rows == 1:
        _one_row(i, first, last)
    else:
        _several_rows(i, first, last, rows, scratch)
    if total > 0 and last > first and parameter(control, op.COMPENSATE) != 0:
        for row in range(rows):
            compensate(
                residual,
                residual_scales,
                residual_bits,
                residual_row,
                x + row * x_stride,
                chosen + row * chosen_stride,
                total,
                16 * first,
                16 * last,
                out + row * out_stride,
                scratch + TILE_SCRATCH,
            )
