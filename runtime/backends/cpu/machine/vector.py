"""SIMD values for numba kernels: vectors of 16 floats, 16 integers and 64 bytes, and their operations.

Kernels take plain integer addresses and read and write through these functions, so no array descriptors are built and
nothing is allocated. They are implemented with `runtime.backends.cpu.machine.emit`.

Every function is an intrinsic for use inside `numba.njit` code. Addresses are int64; unless a function says otherwise
they need only the alignment of their element.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from runtime.backends.cpu.data.records import LANES
from runtime.backends.cpu.machine import isa
from runtime.backends.cpu.machine.emit import (
    BYTES,
    FLOAT,
    FLOATS,
    HALF,
    HALVES,
    I8,
    I16,
    I32,
    I64,
    WORDS,
    Builder,
    call,
    constant,
    define,
    emit_dot4,
    emit_dot4_i8mm,
    emit_fma,
    emit_prefetch,
    floats16,
    load,
    pointer,
    shift_left,
    shift_right,
    splat,
    words16,
)


@define(words16)
def zero_words(_b: Builder) -> Any:
    """Sixteen zeros."""
    return constant(WORDS, 0)


@define(floats16)
def zero_floats(_b: Builder) -> Any:
    """Sixteen zeros."""
    return constant(FLOATS, 0.0)


@define(words16, words16, words16)
def add_words(b: Builder, x: Any, y: Any) -> Any:
    """X + y."""
    return b.add(x, y)


@define(floats16, words16)
def to_floats(b: Builder, x: Any) -> Any:
    """Signed integers to floats."""
    return b.sitofp(x, FLOATS)


@define(words16, types.int64)
def broadcast_word(b: Builder, address: Any) -> Any:
    """The 32-bit word at the address in every lane."""
    return splat(b, load(b, I32, address, 4), WORDS)


@define(floats16, types.int64)
def broadcast(b: Builder, address: Any) -> Any:
    """The float at the address in every lane."""
    return splat(b, load(b, FLOAT, address, 4), FLOATS)


@define(floats16, types.float32)
def fill(b: Builder, value: Any) -> Any:
    """The value in every lane."""
    return splat(b, value, FLOATS)


@define(floats16, types.int64)
def load_floats(b: Builder, address: Any) -> Any:
    """Sixteen floats."""
    return load(b, FLOATS, address, 4)


@define(words16, types.int64)
def load_words(b: Builder, address: Any) -> Any:
    """Sixteen integers."""
    return load(b, WORDS, address, 4)


@define(floats16, types.int64)
def load_halves(b: Builder, address: Any) -> Any:
    """Sixteen half-precision numbers as floats."""
    return b.fpext(load(b, HALVES, address, 2), FLOATS)


@define(floats16, types.int64)
def load_unsigned(b: Builder, address: Any) -> Any:
    """Sixteen unsigned bytes as floats."""
    return b.sitofp(b.zext(load(b, ir.VectorType(I8, 16), address, 1), WORDS), FLOATS)


@define(floats16, types.int64)
def load_signed(b: Builder, address: Any) -> Any:
    """Sixteen signed bytes as floats."""
    return b.sitofp(load(b, ir.VectorType(I8, 16), address, 1), FLOATS)


@define(floats16, types.int64)
def load_powers(b: Builder, address: Any) -> Any:
    """Powers of two by sixteen bytes, their exponents plus 128; 2^-128 is 0."""
    exponents = b.zext(load(b, ir.VectorType(I8, 16), address, 1), WORDS)
    twice = b.bitcast(b.shl(exponents, constant(WORDS, 23)), FLOATS)
    return b.fmul(twice, constant(FLOATS, 0.5))


@define(types.void, types.int64, floats16)
def store_floats(b: Builder, address: Any, value: Any) -> None:
    """Store sixteen floats."""
    b.store(value, pointer(b, address), align=4)


@define(floats16, floats16, floats16)
def add(b: Builder, x: Any, y: Any) -> Any:
    """X + y."""
    return b.fadd(x, y)


@define(floats16, floats16, floats16)
def sub(b: Builder, x: Any, y: Any) -> Any:
    """X - y."""
    return b.fsub(x, y)


@define(floats16, floats16, floats16)
def mul(b: Builder, x: Any, y: Any) -> Any:
    """X * y."""
    return b.fmul(x, y)


@define(floats16, floats16, floats16)
def div(b: Builder, x: Any, y: Any) -> Any:
    """X / y."""
    return b.fdiv(x, y)


@define(floats16, floats16, floats16, floats16)
def fma(b: Builder, x: Any, y: Any, z: Any) -> Any:
    """X * y + z with one rounding."""
    return emit_fma(b, x, y, z)


@define(floats16, floats16, types.int64, types.int64)
def keep_lanes(b: Builder, x: Any, first: Any, end: Any) -> Any:
    """X in lanes first .. end - 1, a very negative number in the others (which `exp` turns into 0)."""
    numbers = ir.Constant(WORDS, list(range(LANES)))
    low = b.icmp_signed(">=", numbers, splat(b, b.trunc(first, I32), WORDS))
    high = b.icmp_signed("<", numbers, splat(b, b.trunc(end, I32), WORDS))
    return b.select(b.and_(low, high), x, constant(FLOATS, -1e30))


@define(floats16, floats16)
def rounded(b: Builder, x: Any) -> Any:
    """Nearest integers, ties to even."""
    return call(b, "llvm.rint.v16f32", FLOATS, x)


@define(types.void, types.int64, types.int64, floats16)
def store_quads(b: Builder, address: Any, stride: Any, value: Any) -> None:
    """Store sixteen whole numbers as signed bytes: four words of four bytes, `stride` bytes apart."""
    quads = b.bitcast(b.trunc(b.fptosi(value, WORDS), ir.VectorType(I8, 16)), ir.VectorType(I32, 4))
    for i in range(4):
        b.store(b.extract_element(quads, ir.Constant(I32, i)), pointer(b, address), align=4)
        address = b.add(address, stride)


@define(floats16, floats16, floats16)
def maximum(b: Builder, x: Any, y: Any) -> Any:
    """The larger of both, lane by lane."""
    return call(b, "llvm.maxnum.v16f32", FLOATS, x, y)


@define(floats16, floats16)
def absolute(b: Builder, x: Any) -> Any:
    """|x|."""
    return call(b, "llvm.fabs.v16f32", FLOATS, x)


@define(types.float32, floats16)
def sum_lanes(b: Builder, x: Any) -> Any:
    """Sum of the lanes, in a fixed tree order."""
    for width in (8, 4, 2, 1):
        vector = ir.VectorType(FLOAT, width)
        low = ir.Constant(ir.VectorType(I32, width), list(range(width)))
        high = ir.Constant(ir.VectorType(I32, width), list(range(width, 2 * width)))
        undefined = ir.Constant(x.type, ir.Undefined)
        x = b.fadd(b.shuffle_vector(x, undefined, low), b.shuffle_vector(x, undefined, high))
        assert x.type == vector
    return b.extract_element(x, ir.Constant(I32, 0))


@define(types.float32, floats16)
def max_lanes(b: Builder, x: Any) -> Any:
    """Largest lane."""
    return call(b, "llvm.vector.reduce.fmax.v16f32", FLOAT, x)


_EXP_TERMS = [1 / math.factorial(n) * math.log(2) ** n for n in range(7)]


@define(floats16, floats16)
def exp(b: Builder, x: Any) -> Any:
    """e^x, clamped to the range of normal floats. Relative error under 3e-7: 2^n times a Taylor polynomial of 2^f."""
    scaled = b.fmul(x, constant(FLOATS, math.log2(math.e)))
    scaled = call(b, "llvm.maxnum.v16f32", FLOATS, scaled, constant(FLOATS, -126.0))
    scaled = call(b, "llvm.minnum.v16f32", FLOATS, scaled, constant(FLOATS, 127.0))
    whole = call(b, "llvm.rint.v16f32", FLOATS, scaled)
    fraction = b.fsub(scaled, whole)
    power = constant(FLOATS, _EXP_TERMS[-1])
    for term in reversed(_EXP_TERMS[:-1]):
        power = emit_fma(b, power, fraction, constant(FLOATS, term))
    bits = b.shl(b.add(b.fptosi(whole, WORDS), constant(WORDS, 127)), constant(WORDS, 23))
    return b.fmul(power, b.bitcast(bits, FLOATS))


@define(floats16, floats16)
def log(b: Builder, x: Any) -> Any:
    """Logarithm of positive normal floats, off by less than 2e-7 of itself or 1e-8.

    x = 2^n m with m from 0.71 to 1.41, and log m = 2 artanh s = 2 (s + s³ / 3 + s⁵ / 5 ...), s = (m - 1) / (m + 1).
    """
    bits = b.bitcast(x, WORDS)
    whole = b.ashr(b.sub(bits, constant(WORDS, 0x3F3504F3)), constant(WORDS, 23))
    mantissa, one = b.bitcast(b.sub(bits, b.shl(whole, constant(WORDS, 23))), FLOATS), constant(FLOATS, 1.0)
    share = b.fdiv(b.fsub(mantissa, one), b.fadd(mantissa, one))
    square = b.fmul(share, share)
    series = constant(FLOATS, 2 / 9)
    for n in (7, 5, 3, 1):
        series = emit_fma(b, series, square, constant(FLOATS, 2 / n))
    return emit_fma(b, b.sitofp(whole, FLOATS), constant(FLOATS, math.log(2)), b.fmul(series, share))


@define(words16, floats16, types.int32)
def steps_down(b: Builder, x: Any, top: Any) -> Any:
    """Per lane: top - trunc(x), kept within top - 15 .. top; a NaN gives something in there."""
    limited = call(b, "llvm.minnum.v16f32", FLOATS, x, constant(FLOATS, 15.0))
    limited = call(b, "llvm.maxnum.v16f32", FLOATS, limited, constant(FLOATS, 0.0))
    return b.sub(splat(b, top, WORDS), b.fptosi(limited, WORDS))


@define(words16, floats16, types.float32, words16, words16)
def where_at_least(b: Builder, x: Any, limit: Any, at_least: Any, below: Any) -> Any:
    """Per lane: `at_least` where x >= limit, else `below`."""
    return b.select(b.fcmp_ordered(">=", x, splat(b, limit, FLOATS)), at_least, below)


@define(words16, types.int32)
def fill_words(b: Builder, value: Any) -> Any:
    """The integer in every lane."""
    return splat(b, value, WORDS)


@define(words16, words16, types.int64, types.int32)
def fill_from(b: Builder, x: Any, first: Any, value: Any) -> Any:
    """X with `value` in lane `first` and all lanes after it."""
    numbers = ir.Constant(WORDS, list(range(LANES)))
    inside = b.icmp_signed("<", numbers, splat(b, b.trunc(first, I32), WORDS))
    return b.select(inside, x, splat(b, value, WORDS))


@define(types.void, types.int64, words16)
def store_words(b: Builder, address: Any, value: Any) -> None:
    """Store sixteen integers."""
    b.store(value, pointer(b, address), align=4)


def _lane_mask(b: Builder, truth: Any) -> Any:
    return b.zext(b.bitcast(truth, I16), I64)


@define(types.void, types.int64, words16)
def store_bytes(b: Builder, address: Any, value: Any) -> None:
    """Store sixteen integers from -128 to 127 as a byte each."""
    b.store(b.trunc(value, ir.VectorType(I8, 16)), pointer(b, address), align=1)


@define(types.int64, types.int64, types.int32)
def bytes_at_most(b: Builder, address: Any, limit: Any) -> Any:
    """Bit i is set where the i-th of the 64 signed bytes at the address is <= limit, from -128 to 127."""
    bytes64 = ir.VectorType(I8, 64)
    return b.bitcast(b.icmp_signed("<=", load(b, bytes64, address, 1), splat(b, b.trunc(limit, I8), bytes64)), I64)


@define(types.int64, floats16, types.float32)
def lanes_below(b: Builder, x: Any, limit: Any) -> Any:
    """Bit i is set where lane i is <= limit (so not where it is a NaN)."""
    return _lane_mask(b, b.fcmp_ordered("<=", x, splat(b, limit, FLOATS)))


@define(types.int64, types.int64)
def count_bits(b: Builder, x: Any) -> Any:
    """Number of set bits."""
    return call(b, "llvm.ctpop.i64", I64, x)


@define(types.int64, types.int64)
def lowest_bit(b: Builder, x: Any) -> Any:
    """Index of the lowest set bit."""
    return call(b, "llvm.cttz.i64", I64, x, ir.Constant(ir.IntType(1), 0))


@define(types.void, types.int64)
def prefetch(b: Builder, address: Any) -> None:
    """Prefetch the cache line at the address."""
    emit_prefetch(b, address, 1)


@define(types.void, types.int64)
def prefetch_2(b: Builder, address: Any) -> None:
    """The same to the second-level cache, for many lines that are needed in a while."""
    emit_prefetch(b, address, 2)


@define(floats16, floats16)
def hadamard(b: Builder, x: Any) -> Any:
    """The 16-row Hadamard matrix, not divided by 4, times x."""
    for distance in (1, 2, 4, 8):
        other = b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, LANES), [i ^ distance for i in range(LANES)]))
        signs = ir.Constant(FLOATS, [-1.0 if lane & distance else 1.0 for lane in range(LANES)])
        x = emit_fma(b, x, signs, other)
    return x


def _scalar_load(numba_type: types.Type, llvm_type: Any, align: int, name: str, doc: str) -> Any:
    def emit(b: Builder, address: Any) -> Any:
        return load(b, llvm_type, address, align)

    emit.__name__ = name
    emit.__doc__ = doc
    return define(numba_type, types.int64)(emit)


def _scalar_store(numba_type: types.Type, align: int, name: str, doc: str) -> Any:
    def emit(b: Builder, address: Any, value: Any) -> None:
        b.store(value, pointer(b, address), align=align)

    emit.__name__ = name
    emit.__doc__ = doc
    return define(types.void, types.int64, numba_type)(emit)


get_float = _scalar_load(types.float32, FLOAT, 4, "get_float", "The float at the address.")
get_int = _scalar_load(types.int32, I32, 4, "get_int", "The 32-bit integer at the address.")
get_word = _scalar_load(types.int64, I64, 8, "get_word", "The 64-bit integer at the address.")
set_float = _scalar_store(types.float32, 4, "set_float", "Store a float.")
set_int = _scalar_store(types.int32, 4, "set_int", "Store a 32-bit integer.")
set_word = _scalar_store(types.int64, 8, "set_word", "Store a 64-bit integer.")
set_byte = _scalar_store(types.int8, 1, "set_byte", "Store a signed byte.")


@define(types.int8, types.int64)
def get_byte(b: Builder, address: Any) -> Any:
    """The signed byte at the address."""
    return load(b, I8, address, 1)


@define(types.float32, types.int64)
def get_half(b: Builder, address: Any) -> Any:
    """The half-precision number at the address, as a float."""
    return b.fpext(load(b, HALF, address, 2), FLOAT)


@define(types.void, types.int64, types.float32)
def set_half(b: Builder, address: Any, value: Any) -> None:
    """Round to half precision and store."""
    b.store(b.fptrunc(value, HALF), pointer(b, address), align=2)


@define(types.float32, types.int64)
def as_float(b: Builder, word: Any) -> Any:
    """The float whose bits are the low half of the word."""
    return b.bitcast(b.trunc(word, I32), FLOAT)


@define(types.int64, types.int64)
def magnitude_bits(b: Builder, address: Any) -> Any:
    """Bits of |x| of the float at the address: non-negative, and ordered like the magnitudes."""
    return b.zext(b.and_(load(b, I32, address, 4), ir.Constant(I32, 0x7FFFFFFF)), I64)


def _stack(count: int) -> Any:
    def emit(b: Builder) -> Any:
        return b.ptrtoint(cgutils.alloca_once(b, ir.ArrayType(I64, count)), I64)

    emit.__name__ = f"stack_words_{count}"
    emit.__doc__ = f"Address of {count} uninitialized words on the stack of the calling function."
    return define(types.int64)(emit)


stack_words_128, stack_words_1024 = _stack(128), _stack(1024)


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
def store_truncated(b: Builder, address: Any, value: Any) -> None:
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
