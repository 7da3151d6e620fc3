"""Error compensation on the CPU: a gather of residual rows from RAM, in float32.

Residuals stay in the canonical packing of the file (input-channel-major, so one salient channel is one contiguous row),
copied once into huge pages (`runtime.backends.cpu.arena`): a row is short and lies anywhere.

Rows are added four at a time while the next four come into the cache. At 4 bits, the usual width, 128 outputs of a row
are a vector of 16 words: field j of all of them, shifted to the top of a float's mantissa under the exponent of 1, is
the number 1 + code / 16 without any conversion, three operations for 16 products.

Source: QDEC §4.1, steps 2 to 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba import types

from runtime.backends.cpu.arena import LINE
from runtime.backends.cpu.data.instructions import Residual
from runtime.backends.cpu.machine.emit import (
    FLOATS,
    I32,
    WORDS,
    Builder,
    call,
    constant,
    define,
    emit_fma,
    floats16,
    load,
    offset,
    pointer,
    splat,
    words16,
)
from runtime.backends.cpu.machine.kernel import kernel, routine
from runtime.backends.cpu.machine.vector import (
    add,
    fill,
    fma,
    get_float,
    get_int,
    load_floats,
    load_halves,
    load_unsigned,
    mul,
    prefetch,
    store_floats,
    zero_floats,
)

_MANTISSA_TOP, _ONE = 23, 0x3F800000
"""Bits of a float32's mantissa, and the bits of 1.0."""


class Salient(NamedTuple):
    """The channels of a row that are compensated."""

    x: int
    """Address of the row, float32 [K]."""
    chosen: int
    """Address of int32 [count], the salient channels, ascending."""
    count: int
    """k."""


class Columns(NamedTuple):
    """A range of output channels, multiples of 16."""

    start: int
    stop: int


class Ahead(NamedTuple):
    """What compensation will read, to be asked for while the product runs, whose time hides that of memory.

    Rows lie apart in main memory: read one by one they cost more than they weigh, and asked for all at once they hold
    up the weights.
    """

    residual: Residual
    salient: Salient
    first: int
    """Byte of a row that its part begins at."""
    lines: int
    """Cache lines of a row's part."""


@kernel
def ahead_of(residual: Residual, salient: Salient, columns: Columns) -> Ahead:
    """What compensation will read for some columns."""
    first, last = columns.start * residual.bits // 8 & -LINE, columns.stop * residual.bits // 8
    return Ahead(residual, salient, first, (last - first + LINE - 1) // LINE)


@kernel
def fetch(ahead: Ahead, start: int, stop: int) -> None:
    """Ask for lines start .. stop - 1, counted row by row."""
    row, line = start // ahead.lines, start % ahead.lines
    at = _row(ahead, row) + LINE * line
    for _ in range(start, stop):
        prefetch(at)
        line, at = line + 1, at + LINE
        if line == ahead.lines:
            row, line = row + 1, 0
            at = _row(ahead, row)


@kernel
def fetch_scales(residual: Residual, columns: Columns) -> None:
    """Ask for the scales of some columns."""
    if residual.scales != 0:
        for at in range(2 * columns.start, 2 * columns.stop, LINE):
            prefetch(residual.scales + at)


@kernel
def _row(ahead: Ahead, row: int) -> int:
    return ahead.residual.codes + ahead.first + ahead.residual.stride * _channel(ahead.salient, row)


@define(floats16, types.int64)
def _codes_2(b: Builder, address: Any) -> Any:
    """Sixteen 2-bit codes of one word as floats."""
    shifts = ir.Constant(WORDS, [2 * i for i in range(16)])
    word = splat(b, load(b, I32, address, 4), WORDS)
    return b.sitofp(b.and_(b.lshr(word, shifts), constant(WORDS, 3)), FLOATS)


def _emit_field(b: Builder, words: Any, j: int) -> Any:
    """Field j of sixteen words of eight 4-bit codes, as 1 + code / 16."""
    up = _MANTISSA_TOP - 4 * (j + 1)
    moved = b.shl(words, constant(WORDS, up)) if up >= 0 else b.lshr(words, constant(WORDS, -up))
    code = b.and_(moved, constant(WORDS, 15 << (_MANTISSA_TOP - 4)))
    return b.bitcast(b.or_(code, constant(WORDS, _ONE)), FLOATS)


@define(words16, types.int64, types.int64)
def _load_words(b: Builder, address: Any, count: Any) -> Any:
    """The first `count` of sixteen words, zeros for the rest."""
    wide = splat(b, b.trunc(count, I32), WORDS)
    mask = b.icmp_signed("<", ir.Constant(WORDS, list(range(16))), wide)
    return call(
        b, "llvm.masked.load.v16i32.p0", WORDS, pointer(b, address), ir.Constant(I32, 4), mask, constant(WORDS, 0)
    )


@define(types.void, types.int64, *[words16] * 4, *[floats16] * 4)
def _add_rows(b: Builder, sums: Any, *rows: Any) -> None:
    """Add four rows of a block to its eight sums: value * (1 + code / 16), row after row."""
    for j in range(8):
        at = pointer(b, offset(b, sums, 64 * j))
        total = b.load(at, typ=FLOATS, align=4)
        for words, value in zip(rows[:4], rows[4:], strict=True):
            total = emit_fma(b, _emit_field(b, words, j), value, total)
        b.store(total, at, align=4)


@define(types.void, types.int64)
def _order_fields(b: Builder, sums: Any) -> None:
    """Bring the sums of a block, lane w of sum j belonging to output 8 w + j, into the outputs' order."""
    parts = [load(b, FLOATS, offset(b, sums, 64 * j), 4) for j in range(8)]
    while len(parts) > 1:  # interleave what stands half the list apart: the last round has all in place
        half, lanes = len(parts) // 2, parts[0].type.count
        mask = ir.Constant(ir.VectorType(I32, 2 * lanes), [i // 2 + i % 2 * lanes for i in range(2 * lanes)])
        parts = [b.shuffle_vector(parts[i], parts[i + half], mask) for i in range(half)]
    b.store(parts[0], pointer(b, sums), align=4)


@kernel
def _channel(salient: Salient, i: int) -> int:
    """The i-th chosen channel; the last one beyond the end."""
    return numba.int64(get_int(salient.chosen + 4 * min(i, salient.count - 1)))


@kernel
def _value(salient: Salient, i: int) -> Any:
    """The activation of the i-th chosen channel."""
    return get_float(salient.x + 4 * _channel(salient, i))


@routine
def gather_4(residual: Residual, salient: Salient, columns: Columns, sums: int) -> None:
    """As the others, but sums[n] = sum over chosen channels c of 16 x[c] (1 + code[c, n] / 16)."""
    width, count, stride = columns.stop - columns.start, salient.count, residual.stride
    first, blocks = residual.codes + columns.start // 2, (width + 127) // 128
    for t in range(8 * blocks):
        store_floats(sums + 64 * t, zero_floats())
    for i in range(0, count, 4):
        rows = min(4, count - i)
        sixteen, none = numba.float32(16.0), numba.float32(0.0)
        x0, x1 = fill(sixteen * _value(salient, i)), fill(sixteen * _value(salient, i + 1) if rows > 1 else none)
        x2 = fill(sixteen * _value(salient, i + 2) if rows > 2 else none)
        x3 = fill(sixteen * _value(salient, i + 3) if rows > 3 else none)
        r0, r1 = first + _channel(salient, i) * stride, first + _channel(salient, i + 1) * stride
        r2, r3 = first + _channel(salient, i + 2) * stride, first + _channel(salient, i + 3) * stride
        n0, n1 = first + _channel(salient, i + 4) * stride, first + _channel(salient, i + 5) * stride
        n2, n3 = first + _channel(salient, i + 6) * stride, first + _channel(salient, i + 7) * stride
        for t in range(blocks):
            at, words = 64 * t, min(16, width // 8 - 16 * t)
            prefetch(n0 + at)  # the next four rows come in while these are added
            prefetch(n1 + at)
            prefetch(n2 + at)
            prefetch(n3 + at)
            _add_rows(
                sums + 512 * t,
                _load_words(r0 + at, words),
                _load_words(r1 + at, words),
                _load_words(r2 + at, words),
                _load_words(r3 + at, words),
                x0,
                x1,
                x2,
                x3,
            )
    for t in range(blocks):
        _order_fields(sums + 512 * t)


def _gather(load_codes: Any, bits: int) -> Any:
    step = 2 * bits
    """Bytes of 16 columns."""

    @routine
    def gather(residual: Residual, salient: Salient, columns: Columns, sums: int) -> None:
        first, last = residual.codes + columns.start // 16 * step, (columns.stop - columns.start) // 16
        count, stride = salient.count, residual.stride
        for t in range(last):
            store_floats(sums + 64 * t, zero_floats())
        i = 0
        while i + 4 <= count:
            x0, x1 = fill(_value(salient, i)), fill(_value(salient, i + 1))
            x2, x3 = fill(_value(salient, i + 2)), fill(_value(salient, i + 3))
            r0, r1 = first + _channel(salient, i) * stride, first + _channel(salient, i + 1) * stride
            r2, r3 = first + _channel(salient, i + 2) * stride, first + _channel(salient, i + 3) * stride
            n0, n1, n2, n3 = r0, r1, r2, r3
            if i + 8 <= count:  # the next four rows come in while these are added
                n0, n1 = first + _channel(salient, i + 4) * stride, first + _channel(salient, i + 5) * stride
                n2, n3 = first + _channel(salient, i + 6) * stride, first + _channel(salient, i + 7) * stride
            for t in range(last):
                at = t * step
                if at % 64 == 0:
                    prefetch(n0 + at)
                    prefetch(n1 + at)
                    prefetch(n2 + at)
                    prefetch(n3 + at)
                total = fma(load_codes(r0 + at), x0, load_floats(sums + 64 * t))
                total = fma(load_codes(r1 + at), x1, total)
                total = fma(load_codes(r2 + at), x2, total)
                store_floats(sums + 64 * t, fma(load_codes(r3 + at), x3, total))
            i += 4
        while i < count:
            value, row = fill(_value(salient, i)), first + _channel(salient, i) * stride
            for t in range(last):
                store_floats(sums + 64 * t, fma(load_codes(row + t * step), value, load_floats(sums + 64 * t)))
            i += 1

    return gather


gather_2, gather_8, _gather_16 = _gather(_codes_2, 2), _gather(load_unsigned, 8), _gather(load_halves, 16)
"""Sums of 2-bit, of 8-bit codes and of halves, times the activations of their channels."""


@kernel
def compensate(
    gather: Any, bits: int, residual: Residual, salient: Salient, columns: Columns, out: int, sums: int
) -> None:
    """out[n] += sum over chosen channels c of x[c] * R̂[c, n] for the columns n.

    Args:
        gather: `gather_2`, `gather_4` or `gather_8`.
        bits: 2, 4 or 8.
        residual: The residuals [K, N].
        salient: The channels.
        columns: The output channels.
        out: Address of the output row, float32.
        sums: Address of scratch, `sums_bytes`.
    """
    gather(residual, salient, columns, sums)
    # Codes are stored with an offset of 2^(bits-1), the same for every channel: its share is subtracted once, and that
    # of the 1 beside a 4-bit code / 16.
    total = numba.float32(0.0)
    for i in range(salient.count):
        total += _value(salient, i)
    shift = fill(numba.float32(-total * numba.float32(24 if bits == 4 else 1 << (bits - 1))))
    for n in range(columns.start, columns.stop, 16):
        value = mul(add(load_floats(sums + 4 * (n - columns.start)), shift), load_halves(residual.scales + 2 * n))
        store_floats(out + 4 * n, add(load_floats(out + 4 * n), value))


@kernel
def compensate_halves(residual: Residual, salient: Salient, columns: Columns, out: int, sums: int) -> None:
    """As `compensate`, with residuals float16 [K, N'] and no scales."""
    _gather_16(residual, salient, columns, sums)
    for n in range(columns.start, columns.stop, 16):
        store_floats(out + 4 * n, add(load_floats(out + 4 * n), load_floats(sums + 4 * (n - columns.start))))
