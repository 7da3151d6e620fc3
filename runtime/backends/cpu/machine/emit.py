"""LLVM code generation from Python: types and building blocks for SIMD intrinsics.

All instruction-set variants share this code; they only differ in the byte dot products, `emit_dot4` and
`emit_dot4_entries`, and in the byte shuffle `emit_lookup`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from runtime.backends.cpu.data.records import LANES
from runtime.backends.cpu.machine import isa

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
HALF, FLOAT = ir.HalfType(), ir.FloatType()
POINTER = ir.PointerType()
BYTES = ir.VectorType(I8, 64)
WORDS = ir.VectorType(I32, 16)
FLOATS = ir.VectorType(FLOAT, 16)
HALVES = ir.VectorType(HALF, 16)


class VectorType(types.Type):
    """A numba type whose value is one LLVM vector."""

    def __init__(self, name: str, llvm_type: ir.VectorType) -> None:
        super().__init__(name=name)
        self.llvm_type = llvm_type


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: VectorType) -> None:
        super().__init__(manager, numba_type, numba_type.llvm_type)


bytes64 = VectorType("bytes64", BYTES)
words16 = VectorType("words16", WORDS)
floats16 = VectorType("floats16", FLOATS)

Builder = Any
Emit = Callable[..., Any]


def define(result: types.Type, *arguments: types.Type) -> Callable[[Emit], Any]:
    """Turn `emit(builder, *values)` into a numba intrinsic of the given signature."""

    def decorate(emit: Emit) -> Any:
        signature = result(*arguments)

        def codegen(_context: Any, builder: Builder, _signature: Any, values: Any) -> Any:
            value = emit(builder, *values)
            return _context.get_dummy_value() if value is None else value

        def typing_function(_typingctx: Any, *_arguments: Any) -> Any:
            return signature, codegen

        # numba reads the arity from the signature, so the declared one is put in place of `*_arguments`.
        names = ["_typingctx", *(f"a{i}" for i in range(len(arguments)))]
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typing_function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        typing_function.__name__ = emit.__name__
        typing_function.__qualname__ = emit.__name__
        typing_function.__doc__ = emit.__doc__
        typing_function.__module__ = emit.__module__
        return intrinsic(typing_function)

    return decorate


def named(declared: type) -> types.Type:
    """The numba type of a NamedTuple of integers, for the signature of an intrinsic."""
    return types.NamedUniTuple(types.int64, len(declared._fields), declared)  # type: ignore[attr-defined]


def parts(b: Builder, value: Any, declared: Any) -> Any:
    """The fields of a NamedTuple passed to an intrinsic, by name."""
    return declared(*(b.extract_value(value, i) for i in range(len(declared._fields))))


def pointer(b: Builder, address: Any) -> Any:
    """The address as an LLVM pointer."""
    return b.inttoptr(address, POINTER)


def offset(b: Builder, address: Any, count: int) -> Any:
    """The address `count` bytes further."""
    return b.add(address, ir.Constant(I64, count)) if count else address


def constant(vector: ir.VectorType, value: float) -> Any:
    """A vector with the same value in each lane."""
    return ir.Constant(vector, [value] * vector.count)


def splat(b: Builder, scalar: Any, vector: ir.VectorType) -> Any:
    """A vector with the scalar in each lane."""
    one = b.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    mask = ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    return b.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def load(b: Builder, vector: Any, address: Any, align: int) -> Any:
    """Load a value of LLVM type `vector`."""
    return b.load(pointer(b, address), typ=vector, align=align)


def call(b: Builder, name: str, result: Any, *values: Any) -> Any:
    """Call an LLVM intrinsic by name."""
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [v.type for v in values]), name)
    return b.call(function, list(values))


def shift_right(b: Builder, value: Any, bits: int) -> Any:
    """Shift the 16-bit lanes of a byte vector; bits cross from byte to byte, so mask afterwards."""
    if bits == 0:
        return value
    halves = ir.VectorType(I16, 32)
    return b.bitcast(b.lshr(b.bitcast(value, halves), constant(halves, bits)), BYTES)


def shift_left(b: Builder, value: Any, bits: int) -> Any:
    """Like `shift_right`, to the left."""
    halves = ir.VectorType(I16, 32)
    return b.bitcast(b.shl(b.bitcast(value, halves), constant(halves, bits)), BYTES)


def _half(b: Builder, value: Any, vector: ir.VectorType, part: int) -> Any:
    count = vector.count
    mask = ir.Constant(ir.VectorType(I32, count), [part * count + i for i in range(count)])
    return b.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)


def _joined(b: Builder, low: Any, high: Any) -> Any:
    mask = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES)))
    return b.shuffle_vector(low, high, mask)


def _dot4_avx512(b: Builder, total: Any, unsigned: Any, signed: Any) -> Any:
    operand = BYTES if llvm.llvm_version_info >= (22,) else WORDS
    return call(
        b, "llvm.x86.avx512.vpdpbusd.512", WORDS, total, b.bitcast(unsigned, operand), b.bitcast(signed, operand)
    )


def _dot4_halves(b: Builder, total: Any, unsigned: Any, signed: Any, dot: Emit) -> Any:
    bytes32, words8 = ir.VectorType(I8, 32), ir.VectorType(I32, 8)
    parts = [
        dot(b, _half(b, total, words8, i), _half(b, unsigned, bytes32, i), _half(b, signed, bytes32, i))
        for i in range(2)
    ]
    return _joined(b, *parts)


def _dot4_avxvnni(b: Builder, total: Any, unsigned: Any, signed: Any) -> Any:
    words8 = ir.VectorType(I32, 8)
    operand = ir.VectorType(I8, 32) if llvm.llvm_version_info >= (22,) else words8

    def dot(b: Builder, total: Any, unsigned: Any, signed: Any) -> Any:
        name = "llvm.x86.avx512.vpdpbusd.256"
        return call(b, name, words8, total, b.bitcast(unsigned, operand), b.bitcast(signed, operand))

    return _dot4_halves(b, total, unsigned, signed, dot)


def _dot4_avx2(b: Builder, total: Any, unsigned: Any, signed: Any) -> Any:
    # Sums of two products are at most 2 * 127 * 127, which fits the 16-bit step.
    shorts16, words8 = ir.VectorType(I16, 16), ir.VectorType(I32, 8)

    def dot(b: Builder, total: Any, unsigned: Any, signed: Any) -> Any:
        pairs = call(b, "llvm.x86.avx2.pmadd.ub.sw", shorts16, unsigned, signed)
        return b.add(total, call(b, "llvm.x86.avx2.pmadd.wd", words8, pairs, constant(shorts16, 1)))

    return _dot4_halves(b, total, unsigned, signed, dot)


def emit_dot4_plain(b: Builder, total: Any, unsigned: Any, signed: Any) -> Any:
    """The result of `emit_dot4`, for unsigned bytes up to 255."""
    # Byte i of each 32-bit lane is brought down by shifts: plain lane arithmetic that every target has.
    u, s = b.bitcast(unsigned, WORDS), b.bitcast(signed, WORDS)
    for byte in range(4):
        a = b.and_(b.lshr(u, constant(WORDS, 8 * byte)), constant(WORDS, 255))
        c = b.ashr(b.shl(s, constant(WORDS, 24 - 8 * byte)), constant(WORDS, 24))
        total = b.add(total, b.mul(a, c))
    return total


def _by_quarters(b: Builder, name: str, result: Any, *vectors: Any, more: tuple[int, ...] = ()) -> Any:
    """An intrinsic of 128-bit vectors, and perhaps constants, for each quarter of some vectors."""
    quarters, constants = [], [ir.Constant(I32, number) for number in more]
    for i in range(4):
        parts = [_half(b, vector, ir.VectorType(vector.type.element, vector.type.count // 4), i) for vector in vectors]
        quarters.append(call(b, name, result, *parts, *constants))
    while len(quarters) > 1:
        count = quarters[0].type.count
        mask = ir.Constant(ir.VectorType(I32, 2 * count), list(range(2 * count)))
        quarters = [b.shuffle_vector(*pair, mask) for pair in zip(quarters[::2], quarters[1::2], strict=True)]
    return quarters[0]


def _dot4_neon(b: Builder, total: Any, x: Any, y: Any) -> Any:
    # Of signed bytes: weights of up to 7 bits are the same in both forms.
    return _by_quarters(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", ir.VectorType(I32, 4), total, x, y)


def emit_dot4_i8mm(b: Builder, total: Any, unsigned: Any, signed: Any) -> Any:
    """The result of `emit_dot4`, for unsigned bytes up to 255, on a processor with i8mm."""
    return _by_quarters(b, "llvm.aarch64.neon.usdot.v4i32.v16i8", ir.VectorType(I32, 4), total, unsigned, signed)


emit_dot4: Emit = {
    "avx512": _dot4_avx512,
    "avxvnni": _dot4_avxvnni,
    "avx2": _dot4_avx2,
    "neon": _dot4_neon,
    "generic": emit_dot4_plain,
}[isa.VECTORS]
"""total[i] + sum of unsigned[4i + j] * signed[4i + j] over j in 0..3, for weights up to 7 bits."""


ENTRY_OFFSET = isa.ENTRY_OFFSET


def emit_table(b: Builder, codebook: Any) -> Any:
    """Codebook entries from memory as this variant multiplies them: with `ENTRY_OFFSET` added."""
    return b.xor(codebook, constant(BYTES, -128)) if ENTRY_OFFSET else codebook


def _entries_avx2(b: Builder, total: Any, entries: Any, x: Any) -> Any:
    # The sign moves over to the activation; sums of two products then stay under 2 * 128 * 127 and fit 16 bits.
    bytes32, shorts16, words8 = ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, 8)

    def dot(b: Builder, total: Any, entries: Any, x: Any) -> Any:
        size = call(b, "llvm.abs.v32i8", bytes32, entries, ir.Constant(ir.IntType(1), 0))
        signed = call(b, "llvm.x86.avx2.psign.b", bytes32, x, entries)
        pairs = call(b, "llvm.x86.avx2.pmadd.ub.sw", shorts16, size, signed)
        return b.add(total, call(b, "llvm.x86.avx2.pmadd.wd", words8, pairs, constant(shorts16, 1)))

    return _dot4_halves(b, total, entries, x, dot)


def _entries_generic(b: Builder, total: Any, entries: Any, x: Any) -> Any:
    w, a = b.bitcast(entries, WORDS), b.bitcast(x, WORDS)
    for byte in range(4):
        parts = [b.ashr(b.shl(v, constant(WORDS, 24 - 8 * byte)), constant(WORDS, 24)) for v in (w, a)]
        total = b.add(total, b.mul(*parts))
    return total


emit_dot4_entries: Emit = {
    "avx512": emit_dot4,
    "avxvnni": emit_dot4,
    "avx2": _entries_avx2,
    "neon": _dot4_neon,
    "generic": _entries_generic,
}[isa.VECTORS]
"""total[i] + sum of entries[4i + j] * x[4i + j] over j in 0..3: entries of a table of `emit_table`, x signed."""


def _lookup_avx512(b: Builder, table: Any, places: Any) -> Any:
    return call(b, "llvm.x86.avx512.pshuf.b.512", BYTES, table, places)


def _lookup_avx2(b: Builder, table: Any, places: Any) -> Any:
    bytes32 = ir.VectorType(I8, 32)
    parts = [
        call(b, "llvm.x86.avx2.pshuf.b", bytes32, _half(b, table, bytes32, i), _half(b, places, bytes32, i))
        for i in range(2)
    ]
    return b.shuffle_vector(*parts, ir.Constant(ir.VectorType(I32, 64), list(range(64))))


def _lookup_neon(b: Builder, table: Any, places: Any) -> Any:
    return _by_quarters(b, "llvm.aarch64.neon.tbl1.v16i8", ir.VectorType(I8, 16), table, places)


def _lookup_generic(b: Builder, table: Any, places: Any) -> Any:
    # A tree of selections, bit after bit of the place: plain lane arithmetic that every target has.
    undefined = ir.Constant(BYTES, ir.Undefined)
    masks = [ir.Constant(ir.VectorType(I32, 64), [i // 16 * 16 + place for i in range(64)]) for place in range(16)]
    values = [b.shuffle_vector(table, undefined, mask) for mask in masks]
    for bit in range(4):
        odd = b.icmp_signed("!=", b.and_(places, constant(BYTES, 1 << bit)), constant(BYTES, 0))
        values = [b.select(odd, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


emit_lookup: Emit = {
    "avx512": _lookup_avx512,
    "avxvnni": _lookup_avx2,
    "avx2": _lookup_avx2,
    "neon": _lookup_neon,
    "generic": _lookup_generic,
}[isa.VECTORS]
"""table[16 l + places[16 l + i]] for every byte i of every 128-bit lane l: places below 16."""


def emit_wrapped_lookup(b: Builder, table: Any, places: Any) -> Any:
    """The result of `emit_lookup` for places below 32, modulo 16, in a table whose lanes are the same."""
    if isa.VECTORS == "neon":  # which looks up among 32 as fast
        return _by_quarters(b, "llvm.aarch64.neon.tbl2.v16i8", ir.VectorType(I8, 16), table, table, places)
    if isa.VECTORS == "generic":
        places = b.and_(places, constant(BYTES, 15))
    return emit_lookup(b, table, places)  # AVX ignores bits 4 to 6


def emit_joined_bytes(b: Builder, low: Any, high: Any, start: int) -> Any:
    """Bits `start` to `start` + 7, from 1 to 7 on, of every byte of `low` with that of `high` above it."""
    found = b.lshr(low, constant(BYTES, start))
    if isa.VECTORS != "neon":
        return b.or_(found, b.shl(high, constant(BYTES, 8 - start)))
    return _by_quarters(b, "llvm.aarch64.neon.vsli.v16i8", ir.VectorType(I8, 16), found, high, more=(8 - start,))


def emit_select(b: Builder, mask: int, x: Any, y: Any) -> Any:
    """Per byte: the bits of x where the mask has ones, and those of y elsewhere."""
    if isa.VECTORS == "avx512":
        values = [b.bitcast(v, WORDS) for v in (constant(BYTES, mask), x, y)]
        table = ir.Constant(I32, 0xCA)  # of the three operands: the first chooses between the others
        return b.bitcast(call(b, "llvm.x86.avx512.pternlog.d.512", WORDS, *values, table), BYTES)
    return b.or_(b.and_(x, constant(BYTES, mask)), b.and_(y, constant(BYTES, ~mask)))


def emit_fma(b: Builder, x: Any, y: Any, z: Any) -> Any:
    """X * y + z with one rounding."""
    return call(b, "llvm.fma.v16f32", FLOATS, x, y, z)


def emit_prefetch(b: Builder, address: Any, level: int) -> None:
    """Prefetch the cache line at the address, which may be invalid, to a level of the caches."""
    values = (pointer(b, address), ir.Constant(I32, 0), ir.Constant(I32, 4 - level), ir.Constant(I32, 1))
    call(b, "llvm.prefetch.p0", ir.VoidType(), *values)
