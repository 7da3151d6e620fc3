"""The LINEAR instruction of W4A8 matrices, which are multiplied in whole numbers."""

from __future__ import annotations

from typing import Any

from numba.extending import register_jitable

from runtime.backends.cpu.data.instructions import Weights
from runtime.backends.cpu.kernels.w4a8 import (
    BLOCK_BYTES_4,
    W4A8Tile,
    gemm_w4a8_tile_4,
    gemm_w4a8_tile_8,
    gemm_w4a8_tile_16,
    gemv_w4a8_tile,
)
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.units.products import multiply_linear, product_of


def _w4a8() -> tuple[Any, Any]:
    """Products in whole numbers."""

    @register_jitable
    def tile_of(weights: Weights, tile: int) -> W4A8Tile:
        codes, groups = weights.codes + tile * weights.blocks * BLOCK_BYTES_4, 16 * tile * weights.groups
        scales, zeros = weights.group_scales + groups, weights.zeros + groups
        return W4A8Tile(codes, weights.scales + 32 * tile, scales, zeros, weights.blocks, weights.group_blocks)

    @register_jitable
    def prepare(tile: W4A8Tile, _scratch: int) -> W4A8Tile:
        return tile

    return product_of(tile_of, prepare, (gemv_w4a8_tile, gemm_w4a8_tile_4, gemm_w4a8_tile_8, gemm_w4a8_tile_16))


_one_row, _several_rows = _w4a8()


@compiled_unit
def multiply_w4a8(i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """Run the LINEAR instruction at address i: codes of 4 bits, in whole numbers."""
    multiply_linear(_one_row, _several_rows, i, control, part, parts, scratch)
