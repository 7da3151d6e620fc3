"""Units of prompt rows that share compensated channels: panels for many rows, products with residuals for few.

In a panel each tile of 16 output channels is unpacked once, residuals included, for all rows. So the cost of
compensation is proportional to the weights, not to weights times rows: negligible for a hundred rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba

from runtime.backends.cpu.data.instructions import Panel, Weights
from runtime.backends.cpu.data.records import BLOCK, BLOCK_BYTES, ENTRY_BYTES, LINE
from runtime.backends.cpu.kernels.gemm import Tile, gemm_panel_tile_4, gemm_panel_tile_8, gemm_panel_tile_16
from runtime.backends.cpu.kernels.lookup import decode_tile_3, decode_tile_4
from runtime.backends.cpu.kernels.residual import ENTRIES, block_of, copy_lines, factors_of, few_rows
from runtime.backends.cpu.kernels.views import header_at, linear_at, panel_at, rows_of, share_of
from runtime.backends.cpu.machine.kernel import call_4, kernel, routine
from runtime.backends.cpu.machine.unit import Unit, compiled_unit, made_unit
from runtime.backends.cpu.machine.vector import div, fill, load_halves, load_unsigned, maximum, store_floats
from runtime.backends.cpu.scratch import TILE_BYTES
from runtime.backends.cpu.units.products import share_rows, times_rows
from runtime.backends.operations.panel import ENTRY_TOP, MIN_STEP


class Areas(NamedTuple):
    """Positions in a thread's scratch, after the outputs of a row block."""

    codes: int  # address of a tile's panel, `ENTRY_BYTES` a block
    lines: int  # address of the residuals of some tiles, `LINE` bytes an input channel
    steps: int  # address of float32 [G, 16]
    shifts: int  # likewise


@kernel
def _areas(weights: Weights, scratch: int) -> Areas:
    codes = scratch + TILE_BYTES
    lines = codes + ENTRY_BYTES * weights.blocks
    steps = lines + LINE * BLOCK * weights.blocks
    return Areas(codes, lines, steps, steps + 64 * weights.groups)


_all_rows = times_rows(gemm_panel_tile_4, gemm_panel_tile_8, gemm_panel_tile_16)


@compiled_unit
def multiply_panel(i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """Run the PANEL instruction at address i: a part is a range of whole tiles of 16 output channels."""
    panel = panel_at(i)
    weights, rows = panel.weights, rows_of(control, 0)
    areas = _areas(weights, scratch)
    own = Tile(areas.codes, areas.steps, areas.shifts, weights.blocks, weights.group_blocks)
    first, last = share_of(weights.tiles, part, parts)
    for tile in range(first, last):
        call_4(header_at(i).inner, i, tile, tile == first, scratch)
        _all_rows(panel, own, tile, rows, scratch)


def _groups(bits: int, residual_bits: int) -> Any:
    """Writes the panel of a tile whose base has codes of some bits, or `ENTRIES`."""
    write_block, uniform = block_of(bits, residual_bits), bits != ENTRIES
    block_bytes, top = (BLOCK_BYTES[bits], (1 << bits) - 1) if uniform else (ENTRY_BYTES, ENTRY_TOP)
    residual_top = (1 << min(residual_bits, 8)) - 1

    @routine
    def write(panel: Panel, tile: int, base: int, lines: int, areas: Areas) -> None:
        weights = panel.weights
        own_scale = load_halves(panel.residual.scales + 32 * tile)
        inverse = div(fill(numba.float32(1.0)), maximum(own_scale, fill(numba.float32(MIN_STEP))))
        scale, zero = load_halves(weights.scales + 32 * tile), fill(numba.float32(ENTRY_TOP // 2))
        for group in range(weights.groups):
            if uniform:
                number = tile * weights.groups + group
                scale, zero = load_halves(weights.scales + 32 * number), load_unsigned(weights.zeros + 16 * number)
            factors = factors_of(scale, zero, own_scale, top, residual_top)
            store_floats(areas.steps + 64 * group, factors.step)
            store_floats(areas.shifts + 64 * group, factors.shift)
            start = group * weights.group_blocks
            for block in range(start, min(start + weights.group_blocks, weights.blocks)):
                write_block(
                    base + block * block_bytes,
                    lines + block * (LINE * BLOCK),
                    panel.kept + block * BLOCK,
                    factors.base,
                    factors.residual,
                    factors.start,
                    inverse,
                    areas.codes + block * ENTRY_BYTES,
                )

    return write


def _panel(residual_bits: int) -> Unit:
    """The unit that writes the panel of a tile of the PANEL instruction at address i, whatever its base is.

    Its arguments: the instruction's address; the tile; 1 where the scratch does not hold the residuals of the tile
    before it, else 0; and the scratch.
    """
    write_3, write_4, write_entries = (_groups(bits, residual_bits) for bits in (3, 4, ENTRIES))
    tile_bytes = 2 * residual_bits

    def build(i: int, tile: int, fresh: int, scratch: int) -> None:
        panel = panel_at(i)
        weights, areas = panel.weights, _areas(panel.weights, scratch)
        column = tile * tile_bytes
        if fresh != 0 or column % LINE == 0:
            copy_lines(panel.residual, column // LINE * LINE, BLOCK * weights.blocks, areas.lines)
        lines = areas.lines + column % LINE
        base = weights.codes + tile * weights.blocks * (64 * weights.bits)
        books = weights.codebooks + tile * (16 << weights.bits)
        if weights.codebooks != 0:
            if weights.bits == 3:
                decode_tile_3(base, books, weights.blocks, areas.codes)
            else:
                decode_tile_4(base, books, weights.blocks, areas.codes)
            write_entries(panel, tile, areas.codes, lines, areas)
        elif weights.bits == 3:
            write_3(panel, tile, base, lines, areas)
        else:
            write_4(panel, tile, base, lines, areas)

    return made_unit(f"panel_{residual_bits}", build)


panel_2, panel_4, panel_8, panel_16 = map(_panel, (2, 4, 8, 16))


def _share(bits: int) -> Unit:
    """The unit that compensates tiles first .. last - 1 of all rows of the LINEAR instruction at address i."""
    few = few_rows(bits)

    def share(i: int, rows: int, first: int, last: int, scratch: int) -> None:
        share_rows(few, linear_at(i), rows, first, last, scratch)

    return made_unit(f"share_{bits}", share)


share_2, share_4, share_8, share_16 = map(_share, (2, 4, 8, 16))
