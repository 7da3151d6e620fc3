"""SIMD operations on packed codes of 2, 4 and 8 bits, for kernels that read a packed KV cache."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from runtime.backends.cpu.machine import isa
from runtime.backends.cpu.machine.emit import (
    BYTES,
    FLOAT,
    FLOATS,
    HALF,
    I8,
    I32,
    WORDS,
    Builder,
    call,
    constant,
    define,
    emit_dot4,
    emit_dot4_i8mm,
    emit_fma,
    floats16,
    pointer,
    shift_left,
    shift_right,
)

_FEW_BITS = 15
_EXP2_TERMS = (1.0, 0.69314718, 0.24022651, 0.05550411, 0.00961813, 0.00133336)


def emit_join_low(b: Builder, upper: Any, lower: Any) -> Any:
    """Bytes of the low nibbles of both: 16 * upper + lower."""
    high = b.and_(shift_left(b, upper, 4), constant(BYTES, 0xF0))
    return b.or_(high, b.and_(lower, constant(BYTES, 15)))


def emit_join_high(b: Builder, upper: Any, lower: Any) -> Any:
    """Bytes of the high nibbles of both: 16 * upper + lower."""
    low = b.and_(shift_right(b, lower, 4), constant(BYTES, 15))
    return b.or_(b.and_(upper, constant(BYTES, 0xF0)), low)


def emit_dot4_bytes(b: Builder, total: Any, unsigned: Any, signed: Any) -> Any:
    """Per lane: total + four products of unsigned bytes, up to 255, and signed bytes."""
    if isa.VARIANT == "neon-i8mm":
        return emit_dot4_i8mm(b, total, unsigned, signed)
    if isa.VECTORS not in ("avx2", "neon"):
        return emit_dot4(b, total, unsigned, signed)
    # Products of whole bytes overflow the 16-bit step of AVX2, and Neon's bytes are signed: by halves, one by one.
    high = b.and_(shift_right(b, unsigned, 4), constant(BYTES, _FEW_BITS))
    upper = emit_dot4(b, constant(WORDS, 0), high, signed)
    total = emit_dot4(b, total, b.and_(unsigned, constant(BYTES, _FEW_BITS)), signed)
    return b.add(total, b.shl(upper, constant(WORDS, 4)))


@define(types.void, types.int64, floats16)
def store_bytes(b: Builder, address: Any, value: Any) -> None:
    """Store sixteen floats as signed bytes, truncated."""
    b.store(b.trunc(b.fptosi(value, WORDS), ir.VectorType(I8, 16)), pointer(b, address), align=1)


@define(floats16, floats16)
def truncated(b: Builder, x: Any) -> Any:
    """Truncate towards zero."""
    return call(b, "llvm.trunc.v16f32", FLOATS, x)


def _larger(b: Builder, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@define(floats16, floats16, floats16)
def larger(b: Builder, x: Any, y: Any) -> Any:
    """The larger of both, lane by lane, in one instruction: y where either is a NaN."""
    return _larger(b, x, y)


@define(types.float32, floats16)
def largest_lane(b: Builder, x: Any) -> Any:
    """The largest lane; not for NaNs."""
    for width in (8, 4, 2, 1):
        low = ir.Constant(ir.VectorType(I32, width), list(range(width)))
        high = ir.Constant(ir.VectorType(I32, width), list(range(width, 2 * width)))
        undefined = ir.Constant(x.type, ir.Undefined)
        x = _larger(b, b.shuffle_vector(x, undefined, low), b.shuffle_vector(x, undefined, high))
    return b.extract_element(x, ir.Constant(I32, 0))


@define(floats16, floats16)
def exp2(b: Builder, x: Any) -> Any:
    """2^x for x <= 0, relative error under 3e-6; clamped below -126."""
    x = _larger(b, x, constant(FLOATS, -126.0))
    near = call(b, "llvm.rint.v16f32", FLOATS, x)
    fraction = b.fsub(x, near)
    power = constant(FLOATS, _EXP2_TERMS[-1])
    for term in reversed(_EXP2_TERMS[:-1]):
        power = emit_fma(b, power, fraction, constant(FLOATS, term))
    exponent = b.shl(b.fptosi(near, WORDS), constant(WORDS, 23))
    return b.bitcast(b.add(b.bitcast(power, WORDS), exponent), FLOATS)


@define(types.float32, types.float32)
def rounded_to_half(b: Builder, x: Any) -> Any:
    """The nearest number of half precision."""
    return b.fpext(b.fptrunc(x, HALF), FLOAT)
