"""Calls of units by their addresses, from compiled code; one costs nanoseconds."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from runtime.backends.cpu.machine.emit import I64, Builder, define


def _caller(count: int) -> Any:
    def emit(b: Builder, address: Any, *values: Any) -> None:
        function = ir.FunctionType(ir.VoidType(), [I64] * count)
        b.call(b.inttoptr(address, function.as_pointer()), list(values))

    emit.__name__ = f"call_{count}"
    emit.__doc__ = f"Call the unit at an address with {count} arguments."
    return define(types.void, types.int64, *[types.int64] * count)(emit)


call_3, call_4, call_5 = (_caller(count) for count in (3, 4, 5))
