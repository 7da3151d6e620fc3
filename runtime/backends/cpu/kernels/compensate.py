"""Error compensation on the CPU: a gather of residual rows from RAM, in float32.

Residuals stay in the canonical packing of the file (input-channel-major, so one salient channel is one contiguous row),
copied once into huge pages (`runtime.backends.cpu.tiles`): a row is short and lies anywhere.

Tiles are compensated a block at a time. What a block reads is asked for before its product, row by row; afterwards rows
are added a few at a time, and the sums of four tiles stay in registers meanwhile.

At 4 bits, 16 outputs of a residual row are two words, which are loaded into all pairs of lanes. Lanes 2 i and 2 i + 1
keep field i of theirs where it is: a number times 2^4i is as exact as the number, and the sum is divided once.

Source: QDEC §4.1, steps 2 to 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba import types

from runtime.backends.cpu.data.instructions import Residual
from runtime.backends.cpu.data.records import LANES, LINE
from runtime.backends.cpu.machine.emit import (
    FLOATS,
    I32,
    I64,
    WORDS,
    Builder,
    constant,
    define,
    emit_fma,
    floats16,
    load,
    splat,
)
from runtime.backends.cpu.machine.kernel import kernel, routine
from runtime.backends.cpu.machine.vector import (
    add,
    as_float,
    broadcast,
    fma,
    get_float,
    get_int,
    get_word,
    load_floats,
    load_halves,
    load_unsigned,
    mul,
    prefetch_2,
    set_float,
    set_word,
    store_floats,
    zero_floats,
)

_ROWS = 12
"""Residual rows that are added at a time: the processor follows a few at once."""


class Salient(NamedTuple):
    """The channels of a row that are compensated."""

    x: int  # address of the row, float32 [K]
    chosen: int  # address of int32 [count], the salient channels, ascending
    count: int  # k


class Note(NamedTuple):
    """What a row is compensated with: words in scratch, before the sums between two groups of residual rows."""

    out: int  # address of float32 [N], the products
    codes: int  # address of the residuals [K, N]
    stride: int  # bytes of one of their rows
    scales: int  # address of float16 [N]; 0: none
    x: int  # address of float32 [K]
    chosen: int  # address of int32 [k], the salient channels
    count: int  # k
    total: int  # sum of the salient activations: the bits of a float32


_SUMS = 8 * len(Note._fields)


@kernel
def _note_at(at: int) -> Note:
    """The note at an address."""
    return Note(
        get_word(at),
        get_word(at + 8),
        get_word(at + 16),
        get_word(at + 24),
        get_word(at + 32),
        get_word(at + 40),
        get_word(at + 48),
        get_word(at + 56),
    )


@kernel
def _channel(chosen: int, i: int) -> int:
    """The i-th chosen channel."""
    return numba.int64(get_int(chosen + 4 * i))


@kernel
def note(residual: Residual, salient: Salient, out: int, at: int) -> None:
    """Note in scratch what a row is compensated with.

    Args:
        residual: The residuals [K, N].
        salient: The channels.
        out: Address of the products, float32 [N].
        at: Address of the scratch, `NOTE_BYTES`.
    """
    set_word(at, out)
    set_word(at + 8, residual.codes)
    set_word(at + 16, residual.stride)
    set_word(at + 24, residual.scales)
    set_word(at + 32, salient.x)
    set_word(at + 40, salient.chosen)
    set_word(at + 48, salient.count)
    even, odd = numba.float32(0.0), numba.float32(0.0)
    for i in range(0, salient.count - 1, 2):
        even += get_float(salient.x + 4 * _channel(salient.chosen, i))
        odd += get_float(salient.x + 4 * _channel(salient.chosen, i + 1))
    if salient.count % 2 != 0:
        even += get_float(salient.x + 4 * _channel(salient.chosen, salient.count - 1))
    set_float(at + 56, even + odd)


@kernel
def fetch(at: int, bits: int, first: int, last: int) -> None:
    """Ask for what tiles first .. last - 1 are compensated with, row by row.

    Args:
        at: Address of the note.
        bits: Of the residuals.
        first: The first tile.
        last: The tile behind the last one.
    """
    own = _note_at(at)
    start, stop = own.codes + (2 * bits * first & -LINE), own.codes + 2 * bits * last
    for i in range(own.count):
        row = own.stride * _channel(own.chosen, i)
        for line in range(row + start, row + stop, LINE):
            prefetch_2(line)
    if own.scales != 0:
        for line in range(own.scales + 32 * first, own.scales + 32 * last, LINE):
            prefetch_2(line)


@define(floats16, types.int64)
def _codes_2(b: Builder, address: Any) -> Any:
    """Sixteen 2-bit codes of one word as floats."""
    shifts = ir.Constant(WORDS, [2 * i for i in range(16)])
    word = splat(b, load(b, I32, address, 4), WORDS)
    return b.sitofp(b.and_(b.lshr(word, shifts), constant(WORDS, 3)), FLOATS)


@define(floats16, types.int64)
def _codes_4(b: Builder, address: Any) -> Any:
    """Sixteen 4-bit codes of two words, lane 2 i + w times 2^4i being that of output 8 w + i; the last pair, 8 less."""
    words = b.bitcast(splat(b, load(b, I64, address, 8), ir.VectorType(I64, 8)), WORDS)
    fields = b.and_(words, ir.Constant(WORDS, [_word(15 << 4 * (lane // 2)) for lane in range(LANES)]))
    # A word whose top bit is set would be negative: the other value of that bit makes it the code less 8.
    turned = b.xor(fields, ir.Constant(WORDS, [0] * (LANES - 2) + [_word(1 << 31)] * 2))
    return b.sitofp(turned, FLOATS)


def _word(bits: int) -> int:
    """A 32-bit word as a signed number."""
    return bits - (1 << 32) if bits >> 31 else bits


@define(floats16, floats16, types.float32)
def _outputs_4(b: Builder, sums: Any, total: Any) -> Any:
    """Sums of `_codes_4` times activations, whose sum is `total`, as outputs in their order."""
    divisors = ir.Constant(FLOATS, [2.0 ** (-4 * (lane // 2)) for lane in range(LANES)])
    offsets = ir.Constant(FLOATS, [-8.0] * (LANES - 2) + [0.0] * 2)
    sums = emit_fma(b, sums, divisors, b.fmul(splat(b, total, FLOATS), offsets))
    order = ir.Constant(ir.VectorType(I32, LANES), [2 * (n % 8) + n // 8 for n in range(LANES)])
    return b.shuffle_vector(sums, ir.Constant(FLOATS, ir.Undefined), order)


def _outputs_of(bits: int) -> Any:
    offset = -(2.0 ** (bits - 1))

    def emit(b: Builder, sums: Any, total: Any) -> Any:
        return b.fadd(sums, b.fmul(splat(b, total, FLOATS), constant(FLOATS, offset)))

    emit.__name__ = f"outputs{bits}"
    emit.__doc__ = "Sums of codes times activations, whose sum is `total`, as outputs."
    return define(floats16, floats16, types.float32)(emit)


@routine
def _scaled(value: Any, scales: int) -> Any:
    return mul(value, load_halves(scales))


@routine
def _plain(value: Any, _scales: int) -> Any:
    return value


@routine
def _no_offset(sums: Any, _total: Any) -> Any:
    return sums


def _adder(bits: int, codes: Any, outputs: Any, scaled: Any) -> Any:
    step = 2 * bits

    @routine
    def begun(sums: int, start: int) -> Any:
        return load_floats(sums) if start > 0 else zero_floats()

    @routine
    def put(own: Note, sums: int, value: Any, tile: int, ended: bool) -> None:
        if ended:
            out = own.out + 64 * tile
            value = scaled(outputs(value, as_float(own.total)), own.scales + 32 * tile)
            store_floats(out, add(load_floats(out), value))
        else:
            store_floats(sums, value)

    @kernel
    def compensate(at: int, first: int, last: int) -> None:
        own = _note_at(at)
        for start in range(0, own.count, _ROWS):
            stop = min(start + _ROWS, own.count)
            ended = stop == own.count
            sums, tile = at + _SUMS, first
            while tile + 4 <= last:
                codes_at = own.codes + step * tile
                s0, s1, s2, s3 = (
                    begun(sums, start),
                    begun(sums + 64, start),
                    begun(sums + 128, start),
                    begun(sums + 192, start),
                )
                for i in range(start, stop):
                    channel = _channel(own.chosen, i)
                    row, value = codes_at + own.stride * channel, broadcast(own.x + 4 * channel)
                    s0 = fma(codes(row), value, s0)
                    s1 = fma(codes(row + step), value, s1)
                    s2 = fma(codes(row + 2 * step), value, s2)
                    s3 = fma(codes(row + 3 * step), value, s3)
                put(own, sums, s0, tile, ended)
                put(own, sums + 64, s1, tile + 1, ended)
                put(own, sums + 128, s2, tile + 2, ended)
                put(own, sums + 192, s3, tile + 3, ended)
                tile, sums = tile + 4, sums + 256
            while tile < last:
                total = begun(sums, start)
                for i in range(start, stop):
                    channel = _channel(own.chosen, i)
                    row = own.codes + own.stride * channel + step * tile
                    total = fma(codes(row), broadcast(own.x + 4 * channel), total)
                put(own, sums, total, tile, ended)
                tile, sums = tile + 1, sums + 64

    return compensate


compensate_tiles_2 = _adder(2, _codes_2, _outputs_of(2), _scaled)
compensate_tiles_4 = _adder(4, _codes_4, _outputs_4, _scaled)
"""Adds to tiles first .. last - 1 of a row what its salient channels' residuals, of 4 bits, give.

Args: the address of the note, first and last.
"""
compensate_tiles_8 = _adder(8, load_unsigned, _outputs_of(8), _scaled)
compensate_tiles_16 = _adder(16, load_halves, _no_offset, _plain)
