"""What instructions say: reading their operands, the step's parameters, and a thread's share of the work."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types

from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.machine.emit import I64, Builder, define, load, offset
from runtime.backends.cpu.machine.vector import get_word


def operands(operation: int) -> Any:
    """Intrinsic that reads all operands of an instruction, in the order of `OPERANDS`."""
    count = len(op.OPERANDS[operation])

    def emit(b: Builder, address: Any) -> Any:
        result = ir.Constant(ir.ArrayType(I64, count), ir.Undefined)
        for i in range(count):
            result = b.insert_value(result, load(b, I64, offset(b, address, 8 * (i + 1)), 8), i)
        return result

    emit.__name__ = f"operands{operation}"
    emit.__doc__ = "Operands of the instruction at the address."
    return define(types.UniTuple(types.int64, count), types.int64)(emit)


@numba.njit(nogil=True)
def parameter(control: int, word: int) -> int:
    """A word of the control block."""
    return get_word(control + 8 * word)


@numba.njit(nogil=True)
def word(cache: int, index: int) -> int:
    """A word of a cache's description (`runtime.backends.cpu.data.pages`)."""
    return get_word(cache + 8 * index)


@numba.njit(nogil=True)
def rows_of(control: int, which: int) -> int:
    """Rows of the step, or with `which` 1 those whose logits are wanted."""
    return get_word(control + 8 * (op.R_ROWS if which == 1 else op.M_ROWS))


@numba.njit(nogil=True)
def share_of(count: int, thread: int, threads: int) -> tuple[int, int]:
    """The thread's range of `count` equal items."""
    return count * thread // threads, count * (thread + 1) // threads


@numba.njit(nogil=True)
def inner_of(i: int) -> int:
    """Address of the unit that the instruction's own unit calls."""
    return get_word(i + 8 * op.INNER)
