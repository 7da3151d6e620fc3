"""Shared code of products of several rows: the activations of a row block, and the outputs of a tile."""

from __future__ import annotations

from typing import Any

from runtime.backends.cpu.data.instructions import Linear, Quantized
from runtime.backends.cpu.data.sizes import BLOCK
from runtime.backends.cpu.kernels.activation import code_bytes
from runtime.backends.cpu.kernels.gemm import row_block
from runtime.backends.cpu.kernels.gemv import Tile
from runtime.backends.cpu.machine.kernel import kernel, routine
from runtime.backends.cpu.machine.vector import add, load_floats, store_floats


@kernel
def write_tile(linear: Linear, row: int, tile: int, value: Any) -> None:
    """Write, or add, sixteen outputs of a row."""
    out = linear.out.at + row * linear.out.stride + 64 * tile
    if linear.bias != 0:
        value = add(value, load_floats(linear.bias + 64 * tile))
    if linear.accumulate != 0:
        value = add(value, load_floats(out))
    store_floats(out, value)


@kernel
def write_rows(linear: Linear, tile: int, row: int, count: int, outputs: int) -> None:
    """Write, or add, a tile's outputs of some rows, from float32 [count, 16] at an address."""
    for m in range(count):
        write_tile(linear, row + m, tile, load_floats(outputs + 64 * m))


@kernel
def row_block_at(linear: Linear, row: int) -> Quantized:
    """The activations of the row block that begins at a row."""
    x, weights = linear.x, linear.weights
    groups = 4 * row * weights.groups
    codes = x.codes + row * code_bytes(BLOCK * weights.blocks)
    return Quantized(codes, x.scales + groups, x.shifts + groups, x.sums + groups)


def times_rows(four: Any, eight: Any, sixteen: Any) -> Any:
    """Writes a tile's outputs of several rows, for a Linear or a Panel.

    Args:
        four: The kernel of blocks of 4 rows; the others' likewise.
        eight: Of 8.
        sixteen: Of 16.
    """

    @routine
    def all_rows(of: Any, own: Tile, tile: int, rows: int, scratch: int) -> None:
        side = row_block(rows)
        for row in range(0, rows, side):
            x = row_block_at(of, row)
            if side == 16:
                sixteen(own, x, scratch)
            elif side == 8:
                eight(own, x, scratch)
            else:
                four(own, x, scratch)
            write_rows(of, tile, row, min(side, rows - row), scratch)

    return all_rows
