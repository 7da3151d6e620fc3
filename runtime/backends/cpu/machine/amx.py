"""AMX tile registers: eight matrices of 16 rows of 64 bytes, and their byte products.

A product adds to 16 x 16 sums of 32 bits what 16 rows of 64 signed bytes give with 64 rows of 16 unsigned ones, which
stand as the dot products of `runtime.backends.cpu.machine.vector` have them: four rows' bytes side by side in a word.

The variant `amx` uses the processor's registers. `amx-emulated` keeps them in memory and computes the same with plain
vectors, for tests on any processor with AVX-512. A thread opens the registers before use and closes them afterwards, so
that the kernel need not save them; the result of `open_registers` is passed to every operation.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils

from runtime.backends.cpu.machine import isa
from runtime.backends.cpu.machine.emit import (
    BYTES,
    I8,
    I32,
    I64,
    WORDS,
    Builder,
    Emit,
    call,
    constant,
    define,
    emit_dot4_plain,
    load,
    offset,
    pointer,
    splat,
)

AVAILABLE: Final = isa.VARIANT.startswith("amx")
"""Whether this variant has tile registers."""
REGISTERS: Final = 8
SIDE: Final = 16
"""Rows of a register, and words of a row."""
WIDTH: Final = 64
"""Bytes of a row."""
REGISTER_BYTES: Final = SIDE * WIDTH

_VOID = ir.VoidType()
_POISON = 0xA5
"""Initial contents of emulated registers."""


def _number(register: int) -> Any:
    return ir.Constant(I8, register)


def _configuration() -> bytes:
    """The operand of LDTILECFG: palette 1, and the bytes per row and the rows of each register."""
    return (
        bytes([1])
        + bytes(15)
        + (WIDTH.to_bytes(2, "little") * REGISTERS).ljust(32, b"\0")
        + bytes([SIDE] * 8 + [0] * 8)
    )


def _open(b: Builder) -> Any:
    value = ir.Constant(ir.ArrayType(I8, 64), bytearray(_configuration()))
    call(b, "llvm.x86.ldtilecfg", _VOID, cgutils.global_constant(b, "tile_configuration", value))
    return ir.Constant(I64, 0)


def _close(b: Builder, _registers: Any) -> None:
    call(b, "llvm.x86.tilerelease", _VOID)


def _clear(b: Builder, _registers: Any, register: int) -> None:
    call(b, "llvm.x86.tilezero", _VOID, _number(register))


def _load(b: Builder, _registers: Any, register: int, address: Any) -> None:
    call(b, "llvm.x86.tileloadd64", _VOID, _number(register), pointer(b, address), ir.Constant(I64, WIDTH))


def _multiply(b: Builder, _registers: Any, sums: int, signed: int, unsigned: int) -> None:
    call(b, "llvm.x86.tdpbsud", _VOID, *map(_number, (sums, signed, unsigned)))


def _store(b: Builder, _registers: Any, register: int, address: Any) -> None:
    call(b, "llvm.x86.tilestored64", _VOID, _number(register), pointer(b, address), ir.Constant(I64, WIDTH))


def _open_emulated(b: Builder) -> Any:
    memory = cgutils.alloca_once(b, ir.ArrayType(I8, REGISTERS * REGISTER_BYTES))
    size = ir.Constant(I64, REGISTERS * REGISTER_BYTES)
    call(b, "llvm.memset.p0.i64", _VOID, memory, ir.Constant(I8, _POISON), size, ir.Constant(ir.IntType(1), 0))
    return b.ptrtoint(memory, I64)


def _close_emulated(_b: Builder, _registers: Any) -> None:
    """Nothing to release."""


def _copy(b: Builder, to: Any, source: Any) -> None:
    size = ir.Constant(I64, REGISTER_BYTES)
    call(b, "llvm.memmove.p0.p0.i64", _VOID, pointer(b, to), pointer(b, source), size, ir.Constant(ir.IntType(1), 0))


def _clear_emulated(b: Builder, registers: Any, register: int) -> None:
    for row in range(SIDE):
        address = offset(b, registers, REGISTER_BYTES * register + WIDTH * row)
        b.store(constant(WORDS, 0), pointer(b, address), align=1)


def _load_emulated(b: Builder, registers: Any, register: int, address: Any) -> None:
    _copy(b, offset(b, registers, REGISTER_BYTES * register), address)


def _store_emulated(b: Builder, registers: Any, register: int, address: Any) -> None:
    _copy(b, address, offset(b, registers, REGISTER_BYTES * register))


def _multiply_emulated(b: Builder, registers: Any, sums: int, signed: int, unsigned: int) -> None:
    sums_at, signed_at, unsigned_at = (offset(b, registers, REGISTER_BYTES * own) for own in (sums, signed, unsigned))
    width, count = ir.Constant(I64, WIDTH), ir.Constant(I64, SIDE)
    with cgutils.for_range(b, count) as rows:
        row = b.mul(rows.index, width)
        own = b.add(sums_at, row)
        with cgutils.for_range(b, count) as quads:
            word = load(b, I32, b.add(b.add(signed_at, row), b.mul(quads.index, ir.Constant(I64, 4))), 1)
            codes = load(b, BYTES, b.add(unsigned_at, b.mul(quads.index, width)), 1)
            total = emit_dot4_plain(b, load(b, WORDS, own, 1), codes, b.bitcast(splat(b, word, WORDS), BYTES))
            b.store(total, pointer(b, own), align=1)


_PROCESSOR: dict[str, Emit] = {
    "open": _open,
    "close": _close,
    "clear": _clear,
    "load": _load,
    "multiply": _multiply,
    "store": _store,
}
_EMULATED: dict[str, Emit] = {
    "open": _open_emulated,
    "close": _close_emulated,
    "clear": _clear_emulated,
    "load": _load_emulated,
    "multiply": _multiply_emulated,
    "store": _store_emulated,
}
_OPERATIONS = _EMULATED if isa.VARIANT == "amx-emulated" else _PROCESSOR

emit_clear = _OPERATIONS["clear"]
"""Fill a register, by number, with zeros."""
emit_load = _OPERATIONS["load"]
"""Load a register with `REGISTER_BYTES` from an address."""
emit_multiply = _OPERATIONS["multiply"]
"""Add to the register of sums the products of that of signed bytes with that of unsigned ones."""
emit_store = _OPERATIONS["store"]
"""Store a register at an address."""


@define(types.int64)
def open_registers(b: Builder) -> Any:
    """Open the tile registers in this thread, if there are any. Returns the value that operations take."""
    return _OPERATIONS["open"](b) if AVAILABLE else ir.Constant(I64, 0)


@define(types.void, types.int64)
def close_registers(b: Builder, registers: Any) -> None:
    """Close the tile registers."""
    if AVAILABLE:
        _OPERATIONS["close"](b, registers)
