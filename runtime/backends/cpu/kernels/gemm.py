"""Low-bit matrix times INT8 activations: sixteen output channels side by side in the vector lanes.

Weights are stored in tiles of 16 output channels (`runtime.backends.cpu.tiles`); each 32-bit lane of the dot product
collects four input channels of one output channel, so nothing has to be summed across lanes and a group's scale is one
vector. Per 64 bytes of 4-bit codes this is 3 operations to unpack and 2 dot products: memory is the limit, not
arithmetic.

With codebooks, vectors hold several input channels of fewer output channels (`runtime.backends.cpu.kernels.lookup`).
Partial sums stay apart in the lanes, for a row has one scale, and are added up across lanes once at its end.

In a block of rows the codes are unpacked once and meet 4, 8 or 16 rows of INT8 activations. With 16 rows a vector of
unpacked codes serves 16 dot products, so the integer units are the limit. Of a matrix with codebooks the entries of a
whole tile are written down first (`runtime.backends.cpu.kernels.lookup`), once for all rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba import types

from models.packed import HALF_STEPS
from models.recipe import SUPER_GROUP
from runtime.backends.cpu.data.instructions import Quantized
from runtime.backends.cpu.data.records import BLOCK, BLOCK_BYTES, ENTRY_BYTES
from runtime.backends.cpu.kernels.activation import quad_at, quad_step, row_step
from runtime.backends.cpu.kernels.lookup import (
    SLICES,
    VECTORS,
    emit_entries,
    every_second,
    load_tables,
    repeated,
    tables_type,
)
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
    emit_lookup,
    floats16,
    load,
    offset,
    pointer,
    shift_left,
    shift_right,
    splat,
    words16,
)
from runtime.backends.cpu.machine.kernel import kernel, routine
from runtime.backends.cpu.machine.vector import (
    add,
    broadcast,
    fill,
    fma,
    load_floats,
    load_halves,
    load_powers,
    load_signed,
    load_unsigned,
    mul,
    prefetch,
    store_floats,
    to_floats,
    zero_floats,
)

AHEAD = 8192
"""Bytes that the prefetch runs ahead of the loads. On a core whose memory others use too, a tile's walk is a tenth to a
quarter faster with it than with 1536; on an idle machine distances cannot be told apart. Codebook tiles ask for nothing
ahead: at 4 bits they are a quarter faster without, at 3 bits it makes no difference."""


class Tile(NamedTuple):
    """Sixteen output channels of a matrix: addresses and sizes."""

    codes: int  # address of the first block, or of decoded entries if a kernel says so
    scales: int  # float16 [G, 16]; [16] with a codebook
    levels: int  # zeros uint8 [G, 16], or codebooks int8 [16, 2^bits]
    blocks: int  # K / 32
    group_blocks: int  # group_size / 32; 0: half a block is a group


def emit_unpack(b: Builder, address: Any, bits: int, count: int = 4) -> list[Any]:
    """Unpack a block: eight byte vectors, vector j with input channels 4j .. 4j + 3 of all 16 output channels.

    At 6 bits half a block, so four.
    """
    if bits == 6:
        high, low = load(b, BYTES, offset(b, address, 128), 64), emit_unpack(b, address, 4, 2)
        tops = [shift_left(b, high, 4), shift_left(b, high, 2), high, shift_right(b, high, 2)]
        pairs = zip(low, tops, strict=True)
        return [b.or_(code, b.and_(top, constant(BYTES, 48))) for code, top in pairs]
    if bits == 8:
        return [load(b, BYTES, offset(b, address, 64 * j), 64) for j in range(8)]
    if bits == 4:
        vectors = []
        for i in range(count):
            pair = load(b, BYTES, offset(b, address, 64 * i), 64)
            vectors += [b.and_(shift_right(b, pair, shift), constant(BYTES, 15)) for shift in (0, 4)]
        return vectors
    if bits == 5:
        high, vectors = load(b, BYTES, offset(b, address, 256), 64), emit_unpack(b, address, 4)
        for j, code in enumerate(vectors):
            top = shift_left(b, high, 4 - j) if j <= 4 else shift_right(b, high, j - 4)
            vectors[j] = b.or_(code, b.and_(top, constant(BYTES, 16)))
        return vectors
    high = load(b, BYTES, offset(b, address, 128), 64)
    vectors = []
    for j in range(8):
        if j % 4 == 0:
            low = load(b, BYTES, offset(b, address, 64 * (j // 4)), 64)
        top = shift_right(b, high, j - 2) if j >= 2 else shift_left(b, high, 2 - j)
        code = b.and_(shift_right(b, low, 2 * (j % 4)), constant(BYTES, 3))
        vectors.append(b.or_(code, b.and_(top, constant(BYTES, 4))))
    return vectors


_STEPS = tuple(12 + int(step) for step in HALF_STEPS)
"""Floating-point numbers of 4 bits by their codes, times two and 12 more, so that they have no sign."""


def emit_floats(b: Builder, address: Any, _bits: int) -> list[Any]:
    """The same with these numbers for codes of 4 bits."""
    table = ir.Constant(BYTES, [*_STEPS] * 4)
    return [emit_lookup(b, table, code) for code in emit_unpack(b, address, 4)]


def emit_planes(b: Builder, code: Any) -> tuple[list[Any], Any]:
    """Sizes of floating-point numbers of 8 bits (E4M3) in four planes, of which each number is in one; and signs.

    A plane has four exponents, so its numbers are whole and at most 120, in units of 2^(4 p - 10).

    Returns:
        The planes, and ones in all bits of negative numbers.
    """
    table = ir.Constant(BYTES, [(8 + place % 8) << place // 8 for place in range(16)] * 4)
    zero = constant(BYTES, 0)

    def at(mask: int, value: int) -> Any:
        return b.icmp_unsigned("==", b.and_(code, constant(BYTES, mask)), constant(BYTES, value))

    size = emit_lookup(b, table, b.and_(code, constant(BYTES, 15)))
    size = b.select(at(16, 0), size, b.shl(size, constant(BYTES, 2)))
    size = b.select(at(120, 0), b.shl(b.and_(code, constant(BYTES, 7)), constant(BYTES, 1)), size)
    planes = [b.select(at(96, plane << 5), size, zero) for plane in range(_PLANES)]
    return planes, b.ashr(code, constant(BYTES, 7))


_PLANES = 4


def emit_negated(b: Builder, x: Any, signs: Any) -> Any:
    """Activations with the signs of weights."""
    return b.sub(b.xor(x, signs), signs)


def emit_of_planes(b: Builder, sums: Any, row: int, rows: int) -> Any:
    """The sum of a row's planes, one in each chain, in units of the first."""
    total = constant(FLOATS, 0.0)
    for plane in range(_PLANES):
        whole = b.sitofp(b.extract_value(sums, row + rows * plane), FLOATS)
        total = emit_fma(b, whole, constant(FLOATS, 16.0**plane), total)
    return total


_CHAINS = 4
"""Sums of a tile that are independent of each other, so that dot products need not wait for each other."""
chains_type = types.UniTuple(words16, _CHAINS)


@define(chains_type)
def no_chains(_b: Builder) -> Any:
    """Zero in every chain."""
    return ir.Constant(ir.ArrayType(WORDS, _CHAINS), [constant(WORDS, 0)] * _CHAINS)


@define(words16, chains_type)
def whole_sum(b: Builder, sums: Any) -> Any:
    """The sum of the chains."""
    a0, a1, a2, a3 = (b.extract_value(sums, chain) for chain in range(_CHAINS))
    return b.add(b.add(a0, a1), b.add(a2, a3))


def emit_chains(
    b: Builder, sums: Any, vectors: Iterable[Any], x: Any, dot: Any = emit_dot4_entries, chains: range = range(_CHAINS)
) -> Any:
    """Add the products of a block's vectors, four input channels each, with one row's activations to some chains."""
    totals = [b.extract_value(sums, chain) for chain in chains]
    for j, vector in enumerate(vectors):
        word = splat(b, load(b, I32, offset(b, x, 4 * j), 4), WORDS)
        at = j % len(chains)
        totals[at] = dot(b, totals[at], vector, b.bitcast(word, BYTES))
    for chain, total in zip(chains, totals, strict=True):
        sums = b.insert_value(sums, total, chain)
    return sums


def _multiply(bits: int, unpack: Any = emit_unpack) -> Any:
    def emit(b: Builder, sums: Any, codes: Any, x: Any) -> Any:
        return emit_chains(b, sums, unpack(b, codes, bits), x, emit_dot4_entries if bits == 8 else emit_dot4)

    emit.__name__ = f"multiply{bits}{unpack.__name__}"
    emit.__doc__ = "Add the products of one block of codes with one row's activations."
    return define(chains_type, chains_type, types.int64, types.int64)(emit)


multiply_4 = _multiply(4)
"""Adds the products of a block of codes of 4 bits, at an address, with 32 activations, at another, to sums."""


@routine
def _whole(sums: Any) -> Any:
    """The sum of the chains, floats16."""
    return to_floats(whole_sum(sums))


@define(chains_type, chains_type, types.int64, types.int64)
def multiply_planes(b: Builder, sums: Any, codes: Any, x: Any) -> Any:
    """Add the products of one block of floating-point numbers with one row's activations, a plane to each chain."""
    totals = [b.extract_value(sums, plane) for plane in range(_PLANES)]
    for j, code in enumerate(emit_unpack(b, codes, 8)):
        planes, signs = emit_planes(b, code)
        word = splat(b, load(b, I32, offset(b, x, 4 * j), 4), WORDS)
        own = emit_negated(b, b.bitcast(word, BYTES), signs)
        totals = [emit_dot4(b, total, plane, own) for total, plane in zip(totals, planes, strict=True)]
    for plane, total in enumerate(totals):
        sums = b.insert_value(sums, total, plane)
    return sums


@define(floats16, chains_type)
def of_planes(b: Builder, sums: Any) -> Any:
    """The sum of the planes, in units of the first."""
    return emit_of_planes(b, sums, 0, 1)


def _gemv_tile(bits: int, factors: Any, unpack: Any = emit_unpack, *, by_planes: bool = False) -> Any:
    """The product of a tile with one row; arguments as of `_gemm_tile`. With floating-point numbers `by_planes`."""
    multiply = multiply_4 if bits == 4 and unpack is emit_unpack else _multiply(bits, unpack)
    multiply, whole = (multiply_planes, of_planes) if by_planes else (multiply, _whole)
    halves = 2 if bits == 6 else 1
    block_bytes = BLOCK_BYTES[bits] // halves

    @kernel
    def gemv(tile: Tile, x: Quantized) -> Any:
        total, blocks = zero_floats(), halves * tile.blocks
        start, group = 0, 0
        while start < blocks:
            stop = min(start + max(1, tile.group_blocks), blocks)
            sums = no_chains()
            for block in range(start, stop):
                base = tile.codes + block * block_bytes
                for line in range(0, block_bytes, 64):
                    prefetch(base + AHEAD + line)
                sums = multiply(sums, base, x.codes + BLOCK // halves * block)
            products = whole(sums)
            scale, scaled_zero = factors(tile, group)
            total = fma(products, mul(scale, broadcast(x.scales + 4 * group)), total)
            total = fma(scaled_zero, broadcast(x.shifts + 4 * group), total)
            start, group = stop, group + 1
        return total

    return gemv


@routine
def _uniform(tile: Tile, group: int) -> Any:
    """Scales in half precision, zeros of a byte."""
    scale = load_halves(tile.scales + 32 * group)
    return scale, mul(scale, load_unsigned(tile.levels + 16 * group))


@routine
def _minimums(tile: Tile, group: int) -> Any:
    """Scales and negative minimums in half precision."""
    return load_halves(tile.scales + 32 * group), load_halves(tile.levels + 32 * group)


def _two_levels(bits: int) -> Any:
    """Scales and negative minimums of super-groups in half precision, times those of groups in signed bytes."""
    groups = SUPER_GROUP // (16 if bits == 6 else 32)

    @routine
    def factors(tile: Tile, group: int) -> Any:
        halves, octets = tile.scales + 64 * (group // groups), tile.levels + 32 * group
        scale = mul(load_halves(halves), load_signed(octets))
        return scale, mul(load_halves(halves + 32), load_signed(octets + 16))

    return factors


@routine
def _powers(tile: Tile, group: int) -> Any:
    """Powers of two, and the offset of floating-point numbers."""
    scale = load_powers(tile.scales + 16 * group)
    return scale, mul(scale, fill(numba.float32(12.0)))


@routine
def _steps(tile: Tile, group: int) -> Any:
    """Scales in float32, of the units of `emit_planes`; no offset."""
    return mul(load_floats(tile.scales + 64 * group), fill(numba.float32(2.0**-10))), zero_floats()


@routine
def _bytes(tile: Tile, group: int) -> Any:
    """Scales in half precision, and the offset of bytes."""
    scale = load_halves(tile.scales + 32 * group)
    return scale, mul(scale, fill(numba.float32(ENTRY_OFFSET)))


gemv_tile_3 = _gemv_tile(3, _uniform)
"""Sixteen outputs of a 3-bit matrix; arguments as `gemv_tile_4`."""
gemv_minimums_tile_4, gemv_minimums_tile_5 = _gemv_tile(4, _minimums), _gemv_tile(5, _minimums)
"""Sixteen outputs of matrices of 4 and 5 bits with minimums; arguments as `gemv_tile_4`."""
gemv_tile_5, gemv_tile_8 = _gemv_tile(5, _uniform), _gemv_tile(8, _bytes)
"""Sixteen outputs of matrices of 5 and 8 bits; arguments as `gemv_tile_4`."""
gemv_two_levels_tile_4, gemv_two_levels_tile_6 = (_gemv_tile(bits, _two_levels(bits)) for bits in (4, 6))
"""Sixteen outputs of matrices with two levels of factors; arguments as `gemv_tile_4`."""
gemv_floats_tile = _gemv_tile(4, _powers, emit_floats)
"""Sixteen outputs of a matrix of floating-point numbers; arguments as `gemv_tile_4`."""
gemv_planes_tile = _gemv_tile(8, _steps, by_planes=True)
"""Sixteen outputs of a matrix of floating-point numbers of 8 bits; arguments as `gemv_tile_4`."""
gemv_tile_4 = _gemv_tile(4, _uniform)
"""Sixteen outputs of a 4-bit matrix.

Args: the tile, and the vector: codes int8 [K], scales fp32 [G] and shifts fp32 [G].

Returns: floats16, the outputs.
"""


def _multiply_entries(bits: int) -> Any:
    each = _CHAINS // VECTORS[bits]

    def emit(b: Builder, sums: Any, tables: Any, codes: Any, x: Any) -> Any:
        totals = [b.extract_value(sums, chain) for chain in range(_CHAINS)]
        width = BLOCK // SLICES[bits]
        inputs = [repeated(b, offset(b, x, width * j), bits) for j in range(SLICES[bits])]
        for i, own in enumerate(emit_entries(b, codes, tables, bits)):
            for j, (entries, quads) in enumerate(zip(own, inputs, strict=True)):
                chain = each * i + j % each
                totals[chain] = emit_dot4_entries(b, totals[chain], entries, quads)
        for chain, total in enumerate(totals):
            sums = b.insert_value(sums, total, chain)
        return sums

    emit.__name__ = f"multiply_entries{bits}"
    emit.__doc__ = "Add the products of one block of codes with the activations."
    return define(chains_type, chains_type, tables_type, types.int64, types.int64)(emit)


def _no_totals(bits: int) -> Any:
    count = VECTORS[bits]

    def emit(_b: Builder) -> Any:
        return ir.Constant(ir.ArrayType(FLOATS, count), [constant(FLOATS, 0.0)] * count)

    emit.__name__ = f"no_totals{bits}"
    emit.__doc__ = "Zero in every lane."
    return define(types.UniTuple(floats16, count))(emit)


def _add_group(bits: int) -> Any:
    count, each = VECTORS[bits], _CHAINS // VECTORS[bits]
    totals_type = types.UniTuple(floats16, count)

    def emit(b: Builder, totals: Any, sums: Any, x_scale: Any, x_shift: Any) -> Any:
        scale = splat(b, load(b, FLOAT, x_scale, 4), FLOATS)
        # An offset of all entries is taken off again in every lane of a row, for its share of the row's sum.
        share = b.fmul(load(b, FLOAT, x_shift, 4), ir.Constant(FLOAT, ENTRY_OFFSET / count))
        for i in range(count):
            whole = b.extract_value(sums, each * i)
            for chain in range(each * i + 1, each * i + each):
                whole = b.add(whole, b.extract_value(sums, chain))
            total = emit_fma(b, b.sitofp(whole, FLOATS), scale, b.extract_value(totals, i))
            if ENTRY_OFFSET:
                total = b.fadd(total, splat(b, share, FLOATS))
            totals = b.insert_value(totals, total, i)
        return totals

    emit.__name__ = f"add_group{bits}"
    emit.__doc__ = "Scale a group's sums by the activations' scale and add them to the totals."
    return define(totals_type, totals_type, chains_type, types.int64, types.int64)(emit)


def _across(bits: int) -> Any:
    def emit(b: Builder, totals: Any) -> Any:
        parts = [b.extract_value(totals, i) for i in range(VECTORS[bits])]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [b.fadd(every_second(b, *pair, 0), every_second(b, *pair, 1)) for pair in pairs]
        return parts[0]

    emit.__name__ = f"across{bits}"
    emit.__doc__ = "Add up the lanes of each output channel: sixteen outputs."
    return define(floats16, types.UniTuple(floats16, VECTORS[bits]))(emit)


def _codebook_tile(bits: int) -> Any:
    multiply, add_group, across = _multiply_entries(bits), _add_group(bits), _across(bits)
    tables_of, no_totals = load_tables(bits), _no_totals(bits)
    block_bytes = BLOCK_BYTES[bits]

    @kernel
    def gemv(tile: Tile, x: Quantized) -> Any:
        books, totals, blocks = tables_of(tile.levels), no_totals(), tile.blocks
        start, group = 0, 0
        while start < blocks:
            stop = min(start + tile.group_blocks, blocks)
            sums = no_chains()
            for block in range(start, stop):
                sums = multiply(sums, books, tile.codes + block * block_bytes, x.codes + BLOCK * block)
            totals = add_group(totals, sums, x.scales + 4 * group, x.shifts + 4 * group)
            start, group = stop, group + 1
        return mul(across(totals), load_halves(tile.scales))

    return gemv


gemv_codebook_tile_3 = _codebook_tile(3)
"""Sixteen outputs of a 3-bit matrix with codebooks; arguments as `gemv_codebook_tile_4`."""
gemv_codebook_tile_4 = _codebook_tile(4)
"""Sixteen outputs of a 4-bit matrix with codebooks; arguments as of `gemv_tile_4`."""


CHAINS = 16
"""Independent sums, several per row for few rows: a dot product can only add to a sum when the previous one is done."""


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


def sums_of_block(bits: int, rows: int, unpack: Any = emit_unpack) -> Any:
    """Adds the products of one block of codes with every row to sums; 8 bits means decoded entries."""
    dot = emit_dot4_entries if bits == 8 else emit_dot4
    quad, row = quad_step(rows), row_step(rows)

    def emit(b: Builder, sums: Any, codes: Any, x: Any) -> Any:
        totals = [b.extract_value(sums, chain) for chain in range(CHAINS)]
        for j, vector in enumerate(unpack(b, codes, bits)):
            for m in range(rows):
                word = load(b, I32, offset(b, x, quad * j + row * m), 4)
                chain = (rows * j + m) % CHAINS
                totals[chain] = dot(b, totals[chain], vector, b.bitcast(splat(b, word, WORDS), BYTES))
        for chain, total in enumerate(totals):
            sums = b.insert_value(sums, total, chain)
        return sums

    emit.__name__ = f"multiply{bits}{unpack.__name__}x{rows}"
    emit.__doc__ = "Add the products of one block of codes with every row."
    tuple_type = types.UniTuple(words16, CHAINS)
    return define(tuple_type, tuple_type, types.int64, types.int64)(emit)


def _emit_whole(b: Builder, sums: Any, row: int, rows: int) -> Any:
    return b.sitofp(emit_whole_sum(b, sums, row, rows), FLOATS)


def _finish(rows: int, whole: Any = _emit_whole) -> Any:
    def emit(b: Builder, sums: Any, scale: Any, scaled_zero: Any, x_scales: Any, x_shifts: Any, out: Any) -> None:
        for m in range(rows):
            address = offset(b, out, 64 * m)
            x_scale = splat(b, load(b, FLOAT, offset(b, x_scales, 4 * m), 4), FLOATS)
            x_shift = splat(b, load(b, FLOAT, offset(b, x_shifts, 4 * m), 4), FLOATS)
            products = whole(b, sums, m, rows)
            total = emit_fma(b, products, b.fmul(scale, x_scale), load(b, FLOATS, address, 64))
            b.store(emit_fma(b, scaled_zero, x_shift, total), pointer(b, address), align=64)

    emit.__name__ = f"finish{rows}{whole.__name__}"
    emit.__doc__ = "Scale a group's sums and add them to the tile's totals, float32 [rows, 16] at `out`."
    sums_type = types.UniTuple(words16, CHAINS)
    return define(types.void, sums_type, floats16, floats16, types.int64, types.int64, types.int64)(emit)


def _gemm_tile(bits: int, rows: int, factors: Any, unpack: Any = emit_unpack) -> Any:
    """The product of a tile with a row block.

    Args:
        bits: Of the codes; 8 for entries of a byte.
        rows: Of the block.
        factors: Takes the tile and a group for the scales and the scaled zeros of its outputs.
        unpack: Of a block's codes.
    """
    multiply, finish = sums_of_block(bits, rows, unpack), _finish(rows)
    halves = 2 if bits == 6 else 1
    block_bytes = ENTRY_BYTES if bits == 8 else BLOCK_BYTES[bits] // halves
    lines = 0 if bits == 8 else block_bytes  # entries were written a moment ago

    @kernel
    def gemm(tile: Tile, x: Quantized, out: int) -> None:
        for m in range(rows):
            store_floats(out + 64 * m, zero_floats())
        start, group, blocks = 0, 0, halves * tile.blocks
        while start < blocks:
            stop = min(start + max(1, tile.group_blocks), blocks)
            sums = no_sums()
            for block in range(start, stop):
                codes = tile.codes + block * block_bytes
                for line in range(0, lines, 64):
                    prefetch(codes + AHEAD + line)
                sums = multiply(sums, codes, quad_at(x.codes, rows, BLOCK // halves * block))
            scale, scaled_zero = factors(tile, group)
            finish(sums, scale, scaled_zero, x.scales + 4 * rows * group, x.shifts + 4 * rows * group, out)
            start, group = stop, group + 1

    return gemm


def _gemm_entries(rows: int) -> Any:
    """The product of a tile of entries, whose outputs have one scale each, with a row block.

    Scales and the offset come last, for all groups at once; group by group only the activations' scales are applied.
    """
    multiply, lanes = sums_of_block(8, rows), ir.VectorType(ir.FloatType(), rows)
    places = ir.Constant(ir.VectorType(I32, 16), [m % rows for m in range(16)])

    def shifts(b: Builder, address: Any) -> Any:
        own = load(b, lanes, address, 4)
        return b.shuffle_vector(own, own, places)

    def add_group(b: Builder, sums: Any, x_scales: Any, out: Any) -> None:
        for m in range(rows):
            address = offset(b, out, 64 * m)
            x_scale = splat(b, load(b, FLOAT, offset(b, x_scales, 4 * m), 4), FLOATS)
            total = emit_fma(b, _emit_whole(b, sums, m, rows), x_scale, load(b, FLOATS, address, 64))
            b.store(total, pointer(b, address), align=64)

    def scale_all(b: Builder, scale: Any, shift: Any, out: Any) -> None:
        for m in range(rows):
            address = offset(b, out, 64 * m)
            own = splat(b, b.extract_element(shift, ir.Constant(I32, m)), FLOATS)
            total = emit_fma(b, constant(FLOATS, float(ENTRY_OFFSET)), own, load(b, FLOATS, address, 64))
            b.store(b.fmul(scale, total), pointer(b, address), align=64)

    for emit, doc in (
        (shifts, "The activations' shifts of a group, by row; repeated where there are fewer than 16."),
        (add_group, "Scale a group's sums by the activations' scales and add them to float32 [rows, 16] at `out`."),
        (scale_all, "Add the offset's share, and scale the outputs."),
    ):
        emit.__name__, emit.__doc__ = f"entries_{emit.__name__}x{rows}", doc
    sums_type = types.UniTuple(words16, CHAINS)
    shifts_of = define(floats16, types.int64)(shifts)
    add_sums = define(types.void, sums_type, types.int64, types.int64)(add_group)
    finish = define(types.void, floats16, floats16, types.int64)(scale_all)

    @kernel
    def gemm(tile: Tile, x: Quantized, out: int) -> None:
        for m in range(rows):
            store_floats(out + 64 * m, zero_floats())
        shift, start, group = zero_floats(), 0, 0
        while start < tile.blocks:
            stop = min(start + tile.group_blocks, tile.blocks)
            sums = no_sums()
            for block in range(start, stop):
                sums = multiply(sums, tile.codes + block * ENTRY_BYTES, quad_at(x.codes, rows, BLOCK * block))
            add_sums(sums, x.scales + 4 * rows * group, out)
            shift = add(shift, shifts_of(x.shifts + 4 * rows * group))
            start, group = stop, group + 1
        finish(load_halves(tile.scales), shift, out)

    return gemm


_FOUR = CHAINS // _PLANES
_finish_planes = _finish(_FOUR, emit_of_planes)


def _gemm_planes(rows: int) -> Any:
    """The product of a tile of floating-point numbers with a row block, four rows at a time."""
    quad, row = quad_step(rows), row_step(rows)

    def emit(b: Builder, sums: Any, codes: Any, x: Any) -> Any:
        totals = [b.extract_value(sums, chain) for chain in range(CHAINS)]
        for j, code in enumerate(emit_unpack(b, codes, 8)):
            planes, signs = emit_planes(b, code)
            for m in range(_FOUR):
                word = splat(b, load(b, I32, offset(b, x, quad * j + row * m), 4), WORDS)
                own = emit_negated(b, b.bitcast(word, BYTES), signs)
                for chain, plane in zip(range(m, CHAINS, _FOUR), planes, strict=True):
                    totals[chain] = emit_dot4(b, totals[chain], plane, own)
        for chain, total in enumerate(totals):
            sums = b.insert_value(sums, total, chain)
        return sums

    emit.__name__ = f"multiply_planes_x{rows}"
    emit.__doc__ = "Add the products of one block of codes with four rows of a row block."
    sums_type, block_bytes = types.UniTuple(words16, CHAINS), BLOCK_BYTES[8]
    multiply = define(sums_type, sums_type, types.int64, types.int64)(emit)

    @kernel
    def gemm(tile: Tile, x: Quantized, out: int) -> None:
        for m in range(rows):
            store_floats(out + 64 * m, zero_floats())
        for first in range(0, rows, _FOUR):
            start, group = 0, 0
            while start < tile.blocks:
                stop = min(start + tile.group_blocks, tile.blocks)
                sums = no_sums()
                for block in range(start, stop):
                    at = quad_at(x.codes, rows, BLOCK * block) + row * first
                    sums = multiply(sums, tile.codes + block * block_bytes, at)
                scale, scaled_zero = _steps(tile, group)
                own = 4 * (rows * group + first)
                _finish_planes(sums, scale, scaled_zero, x.scales + own, x.shifts + own, out + 64 * first)
                start, group = stop, group + 1

    return gemm


@routine
def _panel(tile: Tile, group: int) -> Any:
    """Steps and shifts in float32."""
    return load_floats(tile.scales + 64 * group), load_floats(tile.levels + 64 * group)


gemm_tile_3x4, gemm_tile_3x8, gemm_tile_3x16 = (_gemm_tile(3, rows, _uniform) for rows in (4, 8, 16))
"""Sixteen outputs of 4, 8 or 16 rows with a 3-bit matrix; arguments as `gemm_tile_4x16`."""
gemm_tile_4x4, gemm_tile_4x8, gemm_tile_4x16 = (_gemm_tile(4, rows, _uniform) for rows in (4, 8, 16))
"""Sixteen outputs of 4, 8 or 16 rows with a 4-bit matrix.

Args: the tile, the activations of a row block (see `runtime.backends.cpu.kernels.activation`), and the address of
float32 [rows, 16], aligned to 64 bytes, which is written.
"""


gemm_minimums_tile_4, gemm_minimums_tile_8, gemm_minimums_tile_16 = (
    _gemm_tile(4, rows, _minimums) for rows in (4, 8, 16)
)
gemm_tile_8x4, gemm_tile_8x8, gemm_tile_8x16 = (_gemm_tile(8, rows, _bytes) for rows in (4, 8, 16))
"""The same with a 4-bit matrix with minimums, and with one of 8 bits."""
gemm_5, gemm_minimums_5 = (
    tuple(_gemm_tile(5, rows, factors) for rows in (4, 8, 16)) for factors in (_uniform, _minimums)
)
"""Kernels of 4, 8 and 16 rows with matrices of 5 bits, without and with minimums."""
gemm_two_levels_4, gemm_two_levels_6 = (
    tuple(_gemm_tile(bits, rows, _two_levels(bits)) for rows in (4, 8, 16)) for bits in (4, 6)
)
"""Kernels of 4, 8 and 16 rows with two levels of factors."""
gemm_floats = tuple(_gemm_tile(4, rows, _powers, emit_floats) for rows in (4, 8, 16))
"""The same with floating-point numbers."""
gemm_planes = tuple(map(_gemm_planes, (4, 8, 16)))
"""The same with those of 8 bits."""
gemm_entries_tile_4, gemm_entries_tile_8 = _gemm_entries(4), _gemm_entries(8)
"""Sixteen outputs of 4 or 8 rows with decoded entries; arguments as `gemm_entries_tile_16`."""
gemm_entries_tile_16 = _gemm_entries(16)
"""Sixteen outputs of 16 rows with a tile whose codes are decoded entries (`runtime.backends.cpu.kernels.lookup`)."""


gemm_panel_tile_4, gemm_panel_tile_8 = _gemm_tile(8, 4, _panel), _gemm_tile(8, 8, _panel)
"""Sixteen outputs of 4 or 8 rows with a panel; arguments as `gemm_panel_tile_16`."""
gemm_panel_tile_16 = _gemm_tile(8, 16, _panel)
"""Sixteen outputs of 16 rows with a tile whose codes are a panel's (`runtime.backends.cpu.kernels.residual`);
its scales and levels are float32 [G, 16]."""
