"""Units of LINEAR instructions: a matrix product, uniform or with codebooks, and the compensation of its outputs.

For one row, the salient channels are chosen concurrently with the product, which does not need them: whoever takes the
first part runs the preceding SELECT and sets a flag in it, which the other parts await before they compensate.

Each width of codes has a unit of its own, uniform and with codebooks. For each block of tiles they call a
unit that compensates a row by its own channels, one for each width of residuals. What that needs is in a note, so it
serves LINEAR and EXPERTS instructions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from models.recipe import SUPER_GROUP
from runtime.backends.cpu.data.instructions import WHOLE_BITS, Linear, Quantized, Residual, Weights
from runtime.backends.cpu.data.records import BLOCK, BLOCK_BYTES
from runtime.backends.cpu.kernels.activation import code_bytes, row_block
from runtime.backends.cpu.kernels.compensate import (
    Salient,
    compensate_tiles_2,
    compensate_tiles_4,
    compensate_tiles_8,
    compensate_tiles_16,
    fetch,
    note,
)
from runtime.backends.cpu.kernels.gemm import (
    Tile,
    gemm_5,
    gemm_entries_tile_4,
    gemm_entries_tile_8,
    gemm_entries_tile_16,
    gemm_floats,
    gemm_minimums_5,
    gemm_minimums_tile_4,
    gemm_minimums_tile_8,
    gemm_minimums_tile_16,
    gemm_planes,
    gemm_tile_3x4,
    gemm_tile_3x8,
    gemm_tile_3x16,
    gemm_tile_4x4,
    gemm_tile_4x8,
    gemm_tile_4x16,
    gemm_tile_8x4,
    gemm_tile_8x8,
    gemm_tile_8x16,
    gemm_two_levels_4,
    gemm_two_levels_6,
    gemv_codebook_tile_3,
    gemv_codebook_tile_4,
    gemv_floats_tile,
    gemv_minimums_tile_4,
    gemv_minimums_tile_5,
    gemv_planes_tile,
    gemv_tile_3,
    gemv_tile_4,
    gemv_tile_5,
    gemv_tile_8,
    gemv_two_levels_tile_4,
    gemv_two_levels_tile_6,
)
from runtime.backends.cpu.kernels.lookup import decode_tile_3, decode_tile_4
from runtime.backends.cpu.kernels.trellis import (
    decode_trellis_tile_2,
    decode_trellis_tile_3,
    decode_trellis_tile_4,
    gemv_trellis_tile_2,
    gemv_trellis_tile_3,
    gemv_trellis_tile_4,
)
from runtime.backends.cpu.kernels.views import (
    header_at,
    linear_at,
    parameters_at,
    rows_of,
    share_of,
    share_of_weights,
    tiles_of_line,
)
from runtime.backends.cpu.machine.kernel import call_3, call_5, kernel, routine
from runtime.backends.cpu.machine.sync import wait_for
from runtime.backends.cpu.machine.unit import Unit, compiled_unit, made_unit
from runtime.backends.cpu.machine.vector import add, load_floats, store_floats
from runtime.backends.cpu.scratch import BLOCK_TILES, TILE_BYTES
from runtime.backends.cpu.units.selection import MADE_BEFORE, Choice, choose, is_made


def _compensate(bits: int, compensate_tiles: Any) -> Unit:
    """The unit that compensates tiles first .. last - 1 of the row of a note, by residuals of so many bits."""

    def compensate(note: int, first: int, last: int) -> None:
        compensate_tiles(note, first, last)

    return made_unit(f"compensate_{bits}", compensate)


compensate_2, compensate_4 = _compensate(2, compensate_tiles_2), _compensate(4, compensate_tiles_4)
compensate_8, compensate_16 = _compensate(8, compensate_tiles_8), _compensate(16, compensate_tiles_16)


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
def row_block_at(x: Quantized, weights: Weights, row: int) -> Quantized:
    """The activations of the row block that begins at a row, of a product with a matrix."""
    groups = 4 * row * weights.groups
    codes = x.codes + row * code_bytes(BLOCK * weights.blocks)
    return Quantized(codes, x.scales + groups, x.shifts + groups, x.sums + groups)


@kernel
def share_rows(few: Any, linear: Linear, rows: int, first: int, last: int, scratch: int) -> None:
    """Compensate tiles first .. last - 1 of all rows by the channels that they share; `few` is of `few_rows`."""
    side = row_block(rows)
    for row in range(0, rows, side):
        x, out = row_block_at(linear.plain, linear.weights, row), linear.out.at + row * linear.out.stride
        few(linear, x, side, min(side, rows - row), out, first, last, scratch)


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
            x = row_block_at(of.x, of.weights, row)
            if side == 16:
                sixteen(own, x, scratch)
            elif side == 8:
                eight(own, x, scratch)
            else:
                four(own, x, scratch)
            write_rows(of, tile, row, min(side, rows - row), scratch)

    return all_rows


_PASSING = 1 << 20
"""Bytes of weights that may pass while residuals wait in the second-level cache."""
_LEAST_TILES = 32
"""Tiles that are compensated at a time even if more weights pass: memory is read in runs."""


class Compensation(NamedTuple):
    """How a row is compensated while it is multiplied."""

    unit: int  # address of the unit; 0: not compensated here
    choice: Choice  # announcement of its channels
    note: int  # address of scratch, `NOTE_BYTES`


NO_COMPENSATION = Compensation(0, MADE_BEFORE, 0)
"""Of rows that are multiplied only."""


@kernel
def _salient(linear: Linear, row: int) -> Salient:
    """The compensated channels of a row."""
    x, chosen = linear.values.at + row * linear.values.stride, linear.chosen.at + row * linear.chosen.stride
    return Salient(x, chosen, linear.total)


@kernel
def compensate_row(residual: Residual, salient: Salient, out: int, first: int, last: int, by: Compensation) -> None:
    """Compensate tiles first .. last - 1 of a row that has been multiplied, at an address."""
    note(residual, salient, out, by.note)
    for start in range(first, last, BLOCK_TILES):
        stop = min(start + BLOCK_TILES, last)
        fetch(by.note, residual.bits, start, stop)
        call_3(by.unit, by.note, start, stop)


def one_row_of(tile_of: Any, one: Any) -> Any:
    """The product with one row of activations.

    Args:
        tile_of: Takes the weights and a tile's number for what the kernel wants.
        one: The kernel.
    """

    @routine
    def one_row(linear: Linear, first: int, last: int, by: Compensation) -> None:
        asked, done, noted = first, first, False
        passing = _PASSING // (2 * BLOCK * linear.weights.bits * linear.weights.blocks)
        block = max(_LEAST_TILES, min(BLOCK_TILES, passing))
        for tile in range(first, last):
            if by.unit != 0 and asked <= tile and is_made(by.choice):
                if not noted:
                    note(linear.residual, _salient(linear, 0), linear.out.at, by.note)
                    noted = True
                asked = min(last, tile + block)
                fetch(by.note, linear.residual.bits, done, asked)
            write_tile(linear, 0, tile, one(tile_of(linear.weights, tile), linear.x))
            if tile + 1 == asked and noted:
                fetch(by.note, linear.residual.bits, done, asked)  # a burst drops some; most are there now
                for start in range(done, asked, BLOCK_TILES):
                    call_3(by.unit, by.note, start, min(start + BLOCK_TILES, asked))
                done = asked
        if by.unit != 0 and done < last:
            wait_for(by.choice.at, by.choice.number)
            compensate_row(linear.residual, _salient(linear, 0), linear.out.at, first, last, by)

    return one_row


def _product_of(tile_of: Any, prepare: Any, kernels: tuple[Any, Any, Any, Any]) -> tuple[Any, Any]:
    """The product with one row of activations, and with several.

    Args:
        tile_of: Takes the weights and a tile's number for the `Tile`.
        prepare: Takes it and the scratch for what the kernels of several rows want.
        kernels: Of one row, and of blocks of 4, 8 and 16.
    """
    all_rows = times_rows(*kernels[1:])

    @routine
    def several_rows(linear: Linear, first: int, last: int, rows: int, scratch: int) -> None:
        for tile in range(first, last):
            own = prepare(tile_of(linear.weights, tile), scratch + TILE_BYTES)
            all_rows(linear, own, tile, rows, scratch)

    return one_row_of(tile_of, kernels[0]), several_rows


def _uniform(bits: int, *kernels: Any, zero_bytes: int = 1, scale_bytes: int = 2) -> tuple[Any, Any]:
    """Products with uniform codes; a zero, or what stands in its place, and a scale have so many bytes."""
    block_bytes = BLOCK_BYTES[bits]

    @routine
    def tile_of(weights: Weights, tile: int) -> Tile:
        codes, groups = weights.codes + tile * weights.blocks * block_bytes, tile * weights.groups
        scales, zeros = weights.scales + 16 * scale_bytes * groups, weights.zeros + 16 * zero_bytes * groups
        return Tile(codes, scales, zeros, weights.blocks, weights.group_blocks)

    @routine
    def prepare(tile: Tile, _scratch: int) -> Tile:
        return tile

    return _product_of(tile_of, prepare, kernels)


def _two_levels(bits: int, *kernels: Any) -> tuple[Any, Any]:
    """Products with two levels of factors."""
    block_bytes, groups = BLOCK_BYTES[bits], SUPER_GROUP // BLOCK

    @routine
    def tile_of(weights: Weights, tile: int) -> Tile:
        codes, supers = weights.codes + tile * weights.blocks * block_bytes, weights.blocks // groups
        scales, levels = weights.scales + 64 * tile * supers, weights.zeros + 32 * tile * weights.groups
        return Tile(codes, scales, levels, weights.blocks, weights.group_blocks)

    @routine
    def prepare(tile: Tile, _scratch: int) -> Tile:
        return tile

    return _product_of(tile_of, prepare, kernels)


def _decoded(tile_of: Any, decode: Any, one: Any) -> tuple[Any, Any]:
    """Products whose several rows are multiplied with the entries of a tile, which a kernel decodes once."""

    @routine
    def prepare(tile: Tile, entries: int) -> Tile:
        decode(tile.codes, tile.levels, tile.blocks, entries)
        return Tile(entries, tile.scales, tile.levels, tile.blocks, tile.group_blocks)

    return _product_of(tile_of, prepare, (one, gemm_entries_tile_4, gemm_entries_tile_8, gemm_entries_tile_16))


def _codebook(bits: int, decode: Any, one: Any) -> tuple[Any, Any]:
    """Products with codebooks."""
    block_bytes, book_bytes = BLOCK_BYTES[bits], 16 << bits

    @routine
    def tile_of(weights: Weights, tile: int) -> Tile:
        codes, books = weights.codes + tile * weights.blocks * block_bytes, weights.codebooks + tile * book_bytes
        return Tile(codes, weights.scales + 32 * tile, books, weights.blocks, weights.group_blocks)

    return _decoded(tile_of, decode, one)


uniform_3 = _uniform(3, gemv_tile_3, gemm_tile_3x4, gemm_tile_3x8, gemm_tile_3x16)
uniform_4 = _uniform(4, gemv_tile_4, gemm_tile_4x4, gemm_tile_4x8, gemm_tile_4x16)
uniform_5 = _uniform(5, gemv_tile_5, *gemm_5)
minimums_5 = _uniform(5, gemv_minimums_tile_5, *gemm_minimums_5, zero_bytes=2)
uniform_8 = _uniform(8, gemv_tile_8, gemm_tile_8x4, gemm_tile_8x8, gemm_tile_8x16)
minimums_4 = _uniform(
    4, gemv_minimums_tile_4, gemm_minimums_tile_4, gemm_minimums_tile_8, gemm_minimums_tile_16, zero_bytes=2
)
floats = _uniform(4, gemv_floats_tile, *gemm_floats, scale_bytes=1)
floats_8 = _uniform(8, gemv_planes_tile, *gemm_planes, scale_bytes=4)
two_levels_4 = _two_levels(4, gemv_two_levels_tile_4, *gemm_two_levels_4)
two_levels_6 = _two_levels(6, gemv_two_levels_tile_6, *gemm_two_levels_6)
codebook_3 = _codebook(3, decode_tile_3, gemv_codebook_tile_3)
codebook_4 = _codebook(4, decode_tile_4, gemv_codebook_tile_4)


def _trellis(bits: int, decode: Any, one: Any) -> tuple[Any, Any]:
    """Products with a trellis."""
    block_bytes = BLOCK_BYTES[bits]

    @routine
    def tile_of(weights: Weights, tile: int) -> Tile:
        codes, scales = weights.codes + tile * weights.blocks * block_bytes, weights.scales + 32 * tile
        return Tile(codes, scales, weights.zeros, weights.blocks, weights.group_blocks)

    return _decoded(tile_of, decode, one)


trellis_2 = _trellis(2, decode_trellis_tile_2, gemv_trellis_tile_2)
trellis_3 = _trellis(3, decode_trellis_tile_3, gemv_trellis_tile_3)
trellis_4 = _trellis(4, decode_trellis_tile_4, gemv_trellis_tile_4)


@kernel
def _tiles(linear: Linear, rows: int, part: int, parts: int) -> tuple[int, int]:
    """Tiles of a part."""
    tiles = linear.weights.tiles
    if linear.kept == 0:
        return share_of_weights(tiles, part, parts) if rows == 1 else share_of(tiles, part, parts)
    side = tiles_of_line(linear.residual.bits)
    first, last = share_of((tiles + side - 1) // side, part, parts)
    return side * first, min(side * last, tiles)


@kernel
def multiply_linear(one_row: Any, several_rows: Any, i: int, control: int, part: int, parts: int, scratch: int) -> None:
    """Run a LINEAR instruction: a part is a range of whole tiles of 16 output channels."""
    linear = linear_at(i)
    rows = rows_of(control, linear.wanted)
    first, last = _tiles(linear, rows, part, parts)
    compensate, shared = parameters_at(control).compensate != 0, linear.kept != 0 or linear.whole.codes != 0
    if compensate and linear.exact.weights != 0:
        call_5(header_at(i).inner, i, rows, first, last, scratch)
        return
    by = NO_COMPENSATION
    if compensate and not shared and linear.total > 0:
        choice = choose(i, control, part, scratch) if rows == 1 else MADE_BEFORE
        by = Compensation(header_at(i).inner, choice, scratch + TILE_BYTES)
    if rows == 1:
        one_row(linear, first, last, by)
    else:
        several_rows(linear, first, last, rows, scratch)
        if by.unit != 0:
            for row in range(rows):
                out = linear.out.at + row * linear.out.stride
                compensate_row(linear.residual, _salient(linear, row), out, first, last, by)
    if compensate and shared and first < last:
        call_5(header_at(i).inner, i, rows, first, last, scratch + TILE_BYTES)


def _linear(name: str, products: tuple[Any, Any]) -> Unit:
    """A unit of LINEAR instructions, with the products of one form of matrices."""
    one_row, several_rows = products

    def multiply(i: int, control: int, part: int, parts: int, scratch: int) -> None:
        multiply_linear(one_row, several_rows, i, control, part, parts, scratch)

    return made_unit(name, multiply)


multiply_uniform_3 = _linear("multiply_uniform_3", uniform_3)
multiply_uniform_4 = _linear("multiply_uniform_4", uniform_4)
multiply_uniform_5 = _linear("multiply_uniform_5", uniform_5)
multiply_uniform_8 = _linear("multiply_uniform_8", uniform_8)
multiply_minimums_4 = _linear("multiply_minimums_4", minimums_4)
multiply_minimums_5 = _linear("multiply_minimums_5", minimums_5)
multiply_floats = _linear("multiply_floats", floats)
multiply_floats_8 = _linear("multiply_floats_8", floats_8)
multiply_two_levels_4 = _linear("multiply_two_levels_4", two_levels_4)
multiply_two_levels_6 = _linear("multiply_two_levels_6", two_levels_6)
multiply_codebook_3 = _linear("multiply_codebook_3", codebook_3)
multiply_codebook_4 = _linear("multiply_codebook_4", codebook_4)
multiply_trellis_2 = _linear("multiply_trellis_2", trellis_2)
multiply_trellis_3 = _linear("multiply_trellis_3", trellis_3)
multiply_trellis_4 = _linear("multiply_trellis_4", trellis_4)


_one_4, _several_4 = uniform_4


@compiled_unit
def add_whole(i: int, rows: int, first: int, last: int, scratch: int) -> None:
    """Add the products of tiles first .. last - 1 of the `whole` residuals of the LINEAR instruction at address i."""
    of = linear_at(i)
    own, by = of.weights, of.whole
    sizes = (WHOLE_BITS, own.tiles, by.blocks, (by.blocks + own.group_blocks - 1) // own.group_blocks, own.group_blocks)
    weights = Weights(by.codes, by.scales, by.zeros, 0, *sizes, 0, 0)
    linear = Linear(weights, of.plain, of.wanted, of.out, 0, 1, 0, of.residual, of.values, of.chosen, 0, by, of.plain)
    if rows == 1:
        _one_4(linear, first, last, NO_COMPENSATION)
    else:
        _several_4(linear, first, last, rows, scratch)
