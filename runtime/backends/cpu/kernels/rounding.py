"""Quantization of a product's input, row by row and group by group, into the layout of row blocks."""

from __future__ import annotations

import numba

from runtime.backends.cpu.data.instructions import Input
from runtime.backends.cpu.kernels.activation import GroupPlace, code_bytes, quantize_group, step_of
from runtime.backends.cpu.kernels.gemm import row_block
from runtime.backends.cpu.machine.kernel import kernel


@kernel
def sizes_of(to: Input) -> tuple[int, int, int]:
    """Channels padded to whole blocks, channels of a group, and number of groups."""
    padded, group = (to.width + 31) // 32 * 32, 32 * to.group_blocks
    return padded, group, (padded + group - 1) // group


@kernel
def round_groups(to: Input, row: int, rows: int, start: int, stop: int) -> None:
    """Quantize groups start .. stop - 1 of a row of `to` into the layout of its row block.

    If groups share a scale, the whole row must be complete.
    """
    padded, group, groups = sizes_of(to)
    side, x = row_block(rows), to.out.at + row * to.out.stride
    block, lane = row // side, row % side
    codes = to.rounded.codes + block * side * code_bytes(padded)
    shared = step_of(x, padded) if to.per_token != 0 else numba.float32(0.0)
    for g in range(start, stop):
        at, factor = g * group, 4 * (side * (block * groups + g) + lane)
        own, width, total = to.rounded, min(group, padded - at), 0
        if own.sums != 0:
            total = own.sums + factor
        place = GroupPlace(codes, side, lane, at, own.scales + factor, own.shifts + factor, total)
        step = shared if to.per_token != 0 else step_of(x + 4 * at, width)
        quantize_group(x + 4 * at, width, step, place)
