"""Residuals of many rows: panels, which are a tile's weights with residuals added; for few rows, products of their own.

A panel has 8 bits and is unpacked once for all rows of a prompt. The arithmetic is that of
`runtime.backends.operations.panel`. A tile becomes the bytes that the products with decoded entries read
(`runtime.backends.cpu.kernels.lookup`): 16 output channels side by side, four input channels of each.

Residuals are stored input-channel-major: a tile's codes are a few bytes of every row, and rows lie pages apart. So a
cache line of every row, which holds the codes of several tiles, is copied to one place first. There, four rows of 16
codes are brought together, turned by one byte shuffle and shifted into their places. A channel without compensation
gets the code of zero.

A panel costs as much for two rows as for a hundred. For few rows, of a short prompt or the last piece of one, a second
product beside the base's is cheaper: residuals of all channels times the same INT8 activations,

    y += t (sum of r x  -  2^(bits-1) sum of x),

which are integers up to the scales of a group of activations. Nothing is rounded to 8 bits on the way.

Sixteen bytes of four rows are brought together and turned by one byte
shuffle: lane i then holds byte i of all four, and each field of its bits is four input channels of one output channel,
as the dot product wants them. The sums are permuted, and reordered once per group.

The outer loop runs over groups, the inner one over a part's columns, so that a row's bytes are read contiguously. The
next line of each row is prefetched while the current one is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba import types

from runtime.backends.cpu.data.instructions import Linear, Quantized, Residual
from runtime.backends.cpu.data.records import BLOCK, LINE
from runtime.backends.cpu.kernels.activation import quad_at, row_step
from runtime.backends.cpu.kernels.gemm import emit_unpack
from runtime.backends.cpu.machine.emit import (
    BYTES,
    ENTRY_OFFSET,
    FLOATS,
    HALVES,
    I8,
    I16,
    I32,
    WORDS,
    Builder,
    call,
    constant,
    define,
    emit_dot4,
    emit_dot4_entries,
    floats16,
    load,
    offset,
    pointer,
    splat,
    words16,
)
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import (
    add,
    broadcast,
    div,
    fill,
    fma,
    load_floats,
    load_halves,
    maximum,
    mul,
    prefetch,
    rounded,
    store_floats,
    sub,
)
from runtime.backends.cpu.scratch import SUMS
from runtime.backends.operations.panel import ENTRY_TOP, MIN_STEP, STEPS

_SHORTS = ir.VectorType(I16, 32)
_ONE, _ROUNDING = 256, 128
"""The value 1 in the fixed-point format of a panel's factors, and half of it."""
ENTRIES = 8
"""Marks a base whose codes are decoded codebook entries."""


_AHEAD = 24
"""Rows that the prefetch runs ahead of the copy."""


class Factors(NamedTuple):
    """Factors that turn the codes of a group, sixteen output channels side by side, into a panel's."""

    base: Any  # words16: A, twice in each word
    residual: Any  # words16: B, likewise
    start: Any  # words16: what is added before the shift, likewise
    step: Any  # floats16
    shift: Any
    """floats16: the number that a group's sum of activations is multiplied with, negative, as that of a zero-point."""


@define(words16, floats16)
def _paired(b: Builder, value: Any) -> Any:
    """Whole numbers below 2^16, twice in each word."""
    words = b.and_(b.fptosi(value, WORDS), constant(WORDS, 0xFFFF))
    return b.or_(words, b.shl(words, constant(WORDS, 16)))


@kernel
def factors_of(scale: Any, zero: Any, residual_scale: Any, top: int, residual_top: int) -> Factors:
    """The factors of a group.

    Args:
        scale: floats16, s.
        zero: floats16, z.
        residual_scale: floats16, t.
        top: Largest code of the base; that of `runtime.backends.operations.panel.ENTRY_TOP` where it has codebooks.
        residual_top: Largest code of a residual.
    """
    whole = add(mul(fill(numba.float32(top)), scale), mul(fill(numba.float32(residual_top)), residual_scale))
    step = maximum(div(whole, fill(numba.float32(STEPS))), fill(numba.float32(MIN_STEP)))
    one = fill(numba.float32(_ONE))
    base, residual = rounded(div(mul(one, scale), step)), rounded(div(mul(one, residual_scale), step))
    # A code of 1 stands for -127; entries are stored one higher than their codes.
    start = fill(numba.float32(_ROUNDING + _ONE))
    if top == ENTRY_TOP:
        start = sub(start, base)
    half = fill(numba.float32(0.5))
    middle = sub(mul(sub(fill(numba.float32(top * 0.5)), zero), scale), mul(half, residual_scale))
    shift = sub(mul(step, fill(numba.float32(ENTRY_OFFSET))), middle)
    return Factors(_paired(base), _paired(residual), _paired(start), step, shift)


@define(types.void, types.int64, types.int64, types.int64)
def _copy_words(b: Builder, source: Any, to: Any, count: Any) -> None:
    """Copy the first `count` of sixteen words, and zeros for the rest."""
    mask = b.icmp_signed("<", ir.Constant(WORDS, list(range(16))), splat(b, b.trunc(count, I32), WORDS))
    operands = (pointer(b, source), ir.Constant(I32, 4), mask, constant(WORDS, 0))
    b.store(call(b, "llvm.masked.load.v16i32.p0", WORDS, *operands), pointer(b, to), align=64)


@kernel
def copy_lines(residual: Residual, column: int, channels: int, to: int) -> None:
    """Copy a line of every row of residuals contiguously, without reading beyond a row's end.

    Args:
        residual: The residuals.
        column: Bytes from a row's start to the line, a multiple of 64.
        channels: Rows to write, a multiple of 32; those beyond the last input channel's are zeros.
        to: Address of `LINE` bytes a row, aligned to 64.
    """
    words, stride = min(LINE, residual.stride - column) // 4, residual.stride
    for k in range(channels):
        row = residual.codes + k * stride + column
        prefetch(row + _AHEAD * stride)
        _copy_words(row, to + LINE * k, words if k < residual.rows else 0)


def _rows_turned(b: Builder, rows: list[Any], bits: int) -> Any:
    """Four rows of sixteen codes of 2, 4 or 8 bits as a vector of bytes: lane r, byte c is code r of row c."""
    row = ir.IntType(16 * bits)
    joined = ir.Constant(ir.VectorType(row, 4), ir.Undefined)
    for c, address in enumerate(rows):
        joined = b.insert_element(joined, load(b, row, address, 1), ir.Constant(I32, c))
    source = ir.VectorType(I8, 8 * bits)
    joined, each = b.bitcast(joined, source), 8 // bits
    places = [2 * bits * c + r // each for r in range(16) for c in range(4)]
    spread = b.shuffle_vector(joined, ir.Constant(source, ir.Undefined), ir.Constant(ir.VectorType(I32, 64), places))
    if bits == 8:
        return spread
    shifts = ir.Constant(WORDS, [bits * (r % each) for r in range(16)])
    return b.and_(b.bitcast(b.lshr(b.bitcast(spread, WORDS), shifts), BYTES), constant(BYTES, (1 << bits) - 1))


def rounded_halves(b: Builder, rows: list[Any], inverse: Any) -> Any:
    """Four rows of sixteen halves as codes of 8 bits, likewise."""
    words = constant(WORDS, 0)
    for c, address in enumerate(rows):
        values = b.fmul(b.fpext(load(b, HALVES, address, 2), FLOATS), inverse)
        code = b.add(b.fptosi(call(b, "llvm.rint.v16f32", FLOATS, values), WORDS), constant(WORDS, 128))
        words = b.or_(words, b.shl(b.and_(code, constant(WORDS, 255)), constant(WORDS, 8 * c)))
    return b.bitcast(words, BYTES)


def _panel_codes(b: Builder, base: Any, residual: Any, factors: list[Any]) -> Any:
    """A vector of 64 codes of a panel, of those of the base and of the residuals."""
    scale, residual_scale, start = (b.bitcast(words, _SHORTS) for words in factors)
    eight, low = constant(_SHORTS, 8), constant(_SHORTS, 0xFF)
    c, r = b.bitcast(base, _SHORTS), b.bitcast(residual, _SHORTS)

    def total(c: Any, r: Any) -> Any:
        return b.add(b.add(b.mul(c, scale), b.mul(r, residual_scale)), start)

    even = b.lshr(total(b.and_(c, low), b.and_(r, low)), eight)
    odd = b.and_(total(b.lshr(c, eight), b.lshr(r, eight)), constant(_SHORTS, 0xFF00))
    codes = b.bitcast(b.or_(even, odd), BYTES)
    return codes if ENTRY_OFFSET else b.xor(codes, constant(BYTES, -128))


def _base(b: Builder, address: Any, bits: int) -> list[Any]:
    """The codes of a block, eight vectors."""
    if bits != ENTRIES:
        return emit_unpack(b, address, bits)
    entries = [load(b, BYTES, offset(b, address, 64 * j), 64) for j in range(8)]
    return entries if ENTRY_OFFSET else [b.xor(entry, constant(BYTES, -128)) for entry in entries]


def block_of(bits: int, residual_bits: int) -> Any:
    """Intrinsic that writes one block of a panel, 16 output by 32 input channels.

    Args:
        bits: Of the base; `ENTRIES` where entries were decoded.
        residual_bits: 2, 4, 8 or 16.

    Returns:
        A function of: the address of the block's codes; that of the residuals of its first input channel, a `LINE`
        before the next one's; the address of 32 bytes, 255 for each channel that is compensated, else 0; the factors'
        `base`, `residual` and `start`; floats16, 1 / t, of residuals in half precision; and the address of 512 bytes
        that are written.
    """

    def emit(b: Builder, codes: Any, residual: Any, kept: Any, *rest: Any) -> None:
        *factors, inverse, out = rest
        neutral = constant(BYTES, 1 << (min(residual_bits, 8) - 1))
        for j, base in enumerate(_base(b, codes, bits)):
            rows = [offset(b, residual, LINE * (4 * j + c)) for c in range(4)]
            found = rounded_halves(b, rows, inverse) if residual_bits == 16 else _rows_turned(b, rows, residual_bits)
            mask = b.bitcast(splat(b, load(b, I32, offset(b, kept, 4 * j), 4), WORDS), BYTES)
            found = b.or_(b.and_(found, mask), b.and_(neutral, b.not_(mask)))
            b.store(_panel_codes(b, base, found, factors), pointer(b, offset(b, out, 64 * j)), align=64)

    emit.__name__ = f"panel_block{bits}x{residual_bits}"
    emit.__doc__ = "Write one block of a panel."
    addresses = (types.int64,) * 3
    return define(types.void, *addresses, words16, words16, words16, floats16, types.int64)(emit)


_SLICE = 16
"""Bytes of a row of residuals that are turned at once; of those in half precision twice as many."""


def fields(bits: int) -> int:
    """Tiles of 16 output channels that a slice of residuals covers."""
    return max(1, 8 // bits)


def _neutral(bits: int) -> int:
    """A byte of codes that stand for zero."""
    return sum(1 << (shift + bits - 1) for shift in range(0, 8, bits)) if bits < 8 else 128


def _turned(b: Builder, rows: list[Any]) -> Any:
    """Sixteen bytes of each of four rows as a vector of bytes: lane i holds byte i of all four."""
    parts = [load(b, ir.VectorType(I8, _SLICE), row, 1) for row in rows]
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        mask = ir.Constant(ir.VectorType(I32, count), list(range(count)))
        parts = [b.shuffle_vector(low, high, mask) for low, high in zip(parts[::2], parts[1::2], strict=True)]
    places = [_SLICE * c + i for i in range(_SLICE) for c in range(4)]
    undefined = ir.Constant(BYTES, ir.Undefined)
    return b.shuffle_vector(parts[0], undefined, ir.Constant(ir.VectorType(I32, 64), places))


def _multiply(bits: int, side: int, rows: int) -> Any:
    count, low = fields(bits), (1 << min(bits, 8)) - 1
    dot = emit_dot4 if bits < 8 else emit_dot4_entries

    def emit(b: Builder, sums: Any, *operands: Any) -> Any:
        *channels, kept, x, inverse = operands
        found = rounded_halves(b, channels, inverse) if bits == 16 else _turned(b, channels)
        mask = b.bitcast(splat(b, load(b, I32, kept, 4), WORDS), BYTES)
        found = b.or_(b.and_(found, mask), b.and_(constant(BYTES, _neutral(bits)), b.not_(mask)))
        if bits >= 8 and not ENTRY_OFFSET:
            found = b.xor(found, constant(BYTES, -128))
        totals = [b.extract_value(sums, i) for i in range(count * rows)]
        for field in range(count):
            codes = found
            if count > 1:
                shifted = b.lshr(b.bitcast(found, WORDS), constant(WORDS, bits * field))
                codes = b.and_(b.bitcast(shifted, BYTES), constant(BYTES, low))
            for m in range(rows):
                word = splat(b, load(b, I32, offset(b, x, row_step(side) * m), 4), WORDS)
                at = count * m + field
                totals[at] = dot(b, totals[at], codes, b.bitcast(word, BYTES))
        for at, total in enumerate(totals):
            sums = b.insert_value(sums, total, at)
        return sums

    emit.__name__ = f"multiply_residuals{bits}x{side}x{rows}"
    emit.__doc__ = "Add the products of four input channels' residuals with some rows."
    sums_type = types.UniTuple(words16, count * rows)
    return define(sums_type, sums_type, *(types.int64,) * 6, floats16)(emit)


class Outputs(NamedTuple):
    """Destination rows."""

    rows: int  # number of rows, at most a row block
    at: int  # address of the first one's first output


def _no_sums(count: int) -> Any:
    def emit(_b: Builder) -> Any:
        return ir.Constant(ir.ArrayType(WORDS, count), [constant(WORDS, 0)] * count)

    emit.__name__ = f"no_sums{count}"
    emit.__doc__ = "Zero for every row."
    return define(types.UniTuple(words16, count))(emit)


def _store(bits: int, rows: int) -> Any:
    count = fields(bits)

    def emit(b: Builder, sums: Any, out: Any) -> None:
        for m in range(rows):
            parts = [b.sitofp(b.extract_value(sums, count * m + field), FLOATS) for field in range(count)]
            for tile in range(count):
                value = _in_order(b, parts, tile)
                b.store(value, pointer(b, offset(b, out, 64 * (count * m + tile))), align=64)

    emit.__name__ = f"store_sums{bits}x{rows}"
    emit.__doc__ = "Write sums as float32 [rows, tiles, 16], output channels in order."
    return define(types.void, types.UniTuple(words16, count * rows), types.int64)(emit)


def _in_order(b: Builder, parts: list[Any], tile: int) -> Any:
    """Sixteen neighbours: output channel n is in lane n // fields of vector n % fields."""
    width = 16 // len(parts)
    lanes = [ir.Constant(ir.VectorType(I32, width), [width * tile + i for i in range(width)])] * len(parts)
    few = [
        b.shuffle_vector(part, ir.Constant(FLOATS, ir.Undefined), own) for part, own in zip(parts, lanes, strict=True)
    ]
    while len(few) > 1:
        half, count = len(few) // 2, few[0].type.count
        mask = ir.Constant(ir.VectorType(I32, 2 * count), [i // 2 + i % 2 * count for i in range(2 * count)])
        few = [b.shuffle_vector(few[i], few[i + half], mask) for i in range(half)]
    return few[0]


def _add(bits: int, side: int) -> Any:
    """Adds the products of a slice's columns with a group's channels to the outputs of a row block."""
    count = fields(bits)
    rows = min(side, SUMS // count)
    multiply, none, store = _multiply(bits, side, rows), _no_sums(count * rows), _store(bits, rows)
    step = row_step(side)
    neutral = float(ENTRY_OFFSET if bits >= 8 else 1 << (bits - 1))

    @kernel
    def add_slice(
        linear: Linear, x: Quantized, group: int, tile: int, tiles: int, ahead: int, to: Outputs, scratch: int
    ) -> None:
        residual, size = linear.residual, BLOCK * linear.weights.group_blocks
        stride, last = residual.stride, residual.rows - 1
        column = residual.codes + 2 * bits * tile
        scales, inverse = residual.scales + 32 * tile, fill(numba.float32(0.0))
        if bits == 16:
            inverse = div(fill(numba.float32(1.0)), maximum(load_halves(scales), fill(numba.float32(MIN_STEP))))
        phase = (column >> 4) & 3  # of the four slices of a line
        for first in range(0, to.rows, rows):
            sums = none()
            for k in range(group * size, min(group * size + size, last + 1), 4):
                r0 = column + k * stride
                r1, r2, r3 = r0 + stride, r0 + 2 * stride, r0 + 3 * stride
                if k + 3 > last:  # activations beyond the last channel are zero
                    r1, r2, r3 = min(r1, column + last * stride), column + min(k + 2, last) * stride, r0
                if first == 0 and (k >> 2) & 3 == phase:
                    prefetch(r0 + ahead)
                    prefetch(r1 + ahead)
                    prefetch(r2 + ahead)
                    prefetch(r3 + ahead)
                at = quad_at(x.codes, side, k) + step * first
                sums = multiply(sums, r0, r1, r2, r3, linear.kept + k, at, inverse)
            store(sums, scratch)
            for m in range(first, min(first + rows, to.rows)):
                factor = 4 * (side * group + m)
                scale, shift = (
                    broadcast(x.scales + factor),
                    mul(broadcast(x.shifts + factor), fill(numba.float32(neutral))),
                )
                for t in range(min(count, tiles)):
                    at = to.at + m * linear.out.stride + 64 * t
                    dots = load_floats(scratch + 64 * (count * (m - first) + t))
                    own = fma(dots, scale, shift)
                    store_floats(at, fma(load_halves(scales + 32 * t), own, load_floats(at)))

    return add_slice


def few_rows(bits: int) -> Any:
    """Adds the products of the residuals of some tiles with all rows to their outputs.

    Args:
        bits: Of the residuals; 2, 4, 8 or 16.

    Returns:
        A function of: a LINEAR instruction with `kept`; its activations from a row on, a multiple of the row block; the
        row block; the rows from there on, at most a row block; the address of the first one's outputs; the first tile,
        a multiple of `fields`, and the one behind the last; and the address of scratch, `SUMS_BYTES`.
    """
    count = fields(bits)
    add_1, add_4, add_8, add_16 = (_add(bits, side) for side in (1, 4, 8, 16))

    @kernel
    def add_tiles(
        linear: Linear, x: Quantized, side: int, valid: int, out: int, first: int, last: int, scratch: int
    ) -> None:
        weights, first_line, last_line = linear.weights, 2 * bits * first // LINE, (2 * bits * last - 1) // LINE
        onward = BLOCK * weights.group_blocks * linear.residual.stride - LINE * (last_line - first_line)
        for group in range(weights.groups):
            for tile in range(first, last, count):
                ahead = onward if 2 * bits * tile // LINE == last_line else LINE
                to = Outputs(valid, out + 64 * tile)
                if side == 1:
                    add_1(linear, x, group, tile, last - tile, ahead, to, scratch)
                elif side == 16:
                    add_16(linear, x, group, tile, last - tile, ahead, to, scratch)
                elif side == 8:
                    add_8(linear, x, group, tile, last - tile, ahead, to, scratch)
                else:
                    add_4(linear, x, group, tile, last - tile, ahead, to, scratch)

    return add_tiles
