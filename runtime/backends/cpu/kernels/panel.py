"""Panels: a tile's weights with their residuals added, in 8 bits, unpacked once for all rows of a prompt.

The arithmetic is that of `runtime.backends.operations.panel`. A tile becomes the bytes that the products with decoded
entries read (`runtime.backends.cpu.kernels.lookup`): 16 output channels side by side, four input channels of each.

Residuals are stored input-channel-major: a tile's codes are a few bytes of every row, and rows lie pages apart. So a
cache line of every row, which holds the codes of several tiles, is copied to one place first. There, four rows of 16
codes are brought together, turned by one byte shuffle and shifted into their places. A channel without compensation
gets the code of zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
from llvmlite import ir
from numba import types

from runtime.backends.cpu.data.instructions import Residual
from runtime.backends.cpu.kernels.gemv import emit_unpack
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
    floats16,
    load,
    offset,
    pointer,
    splat,
    words16,
)
from runtime.backends.cpu.machine.kernel import kernel
from runtime.backends.cpu.machine.vector import add, div, fill, maximum, mul, prefetch, rounded, sub
from runtime.backends.operations.panel import ENTRY_TOP, MIN_STEP, STEPS

_SHORTS = ir.VectorType(I16, 32)
_ONE, _ROUNDING = 256, 128
"""The value 1 in the fixed-point format of a panel's factors, and half of it."""
ENTRIES = 8
"""Marks a base whose codes are decoded codebook entries."""


LINE = 64
"""Bytes of a row of residuals that are copied together."""
_AHEAD = 24
"""Rows that the prefetch runs ahead of the copy."""


class Factors(NamedTuple):
    """Factors that turn the codes of a group, sixteen output channels side by side, into a panel's."""

    base: Any
    """words16: A, twice in each word."""
    residual: Any
    """words16: B, likewise."""
    start: Any
    """words16: what is added before the shift, likewise."""
    step: Any
    """floats16."""
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


def _turned(b: Builder, rows: list[Any], bits: int) -> Any:
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
            found = rounded_halves(b, rows, inverse) if residual_bits == 16 else _turned(b, rows, residual_bits)
            mask = b.bitcast(splat(b, load(b, I32, offset(b, kept, 4 * j), 4), WORDS), BYTES)
            found = b.or_(b.and_(found, mask), b.and_(neutral, b.not_(mask)))
            b.store(_panel_codes(b, base, found, factors), pointer(b, offset(b, out, 64 * j)), align=64)

    emit.__name__ = f"panel_block{bits}x{residual_bits}"
    emit.__doc__ = "Write one block of a panel."
    addresses = (types.int64,) * 3
    return define(types.void, *addresses, words16, words16, words16, floats16, types.int64)(emit)
