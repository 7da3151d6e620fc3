"""What a function compiles to depends on its code, on that of all it calls, and on versions: a digest of them."""

from __future__ import annotations

import hashlib
import sys
import types as python
from collections.abc import Callable, Iterator
from typing import Any, Final

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.dispatcher import Dispatcher
from numba.core.typing.templates import Signature

from runtime.backends.cpu.machine import isa

_OWN: Final = ("runtime.", "models.")
"""Packages whose functions a digest covers; of the others, the versions of numba and llvmlite stand for all."""
_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.generic)
_FORMAT: Final = "2: one object for a unit"
"""How machine code is made and kept."""


def digest(function: Callable[..., Any]) -> str:
    """What a function compiles to depends on this: its code, that of all it calls, constants, and versions.

    Args:
        function: A Python function, compiled or not.

    Returns:
        Hexadecimal digits.
    """
    versions = f"{sys.version_info[:2]} {numba.__version__} {llvmlite.__version__} {isa.VARIANT} {_FORMAT}"
    processor = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
    found = hashlib.sha256(f"{versions} {processor}".encode())
    for part in _parts(function, set()):
        found.update(part.encode() + b"\n")
    return found.hexdigest()


def extent(function: Callable[..., Any]) -> int:
    """How much code a function and all that it calls have; compiling takes about as long."""
    return sum(len(part) for part in _parts(function, set()))


def _parts(value: Any, seen: set[int]) -> Iterator[str]:
    """What a value consists of, as text that is the same in every process."""
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, Dispatcher):
        yield from _parts(value.py_func, seen)
    elif isinstance(value, python.FunctionType):
        if value.__module__.startswith(_OWN) and id(value) not in seen:
            seen.add(id(value))
            yield f"{value.__module__} {value.__qualname__}"
            yield from _of_function(value, seen)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _parts(item, seen)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _parts((key, item), seen)
    elif isinstance(value, python.CodeType):
        yield from _of_code(value, seen)
    elif isinstance(value, types.Type | ir.Type | Signature):
        yield str(value)
    elif isinstance(value, type) and issubclass(value, tuple):
        yield f"{value.__name__} {getattr(value, '_fields', ())}"
    elif definition := getattr(value, "_defn", None):  # an intrinsic
        yield from _parts(definition, seen)
    else:
        yield f"{type(value).__module__} {type(value).__qualname__} {getattr(value, '__name__', '')}"


def _of_code(code: python.CodeType, seen: set[int]) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
    for constant in code.co_consts:
        yield from _parts(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant, seen)


def _of_function(function: python.FunctionType, seen: set[int]) -> Iterator[str]:
    """A function's code, defaults, closure, and what its names stand for in its module and in modules it names."""
    yield from _of_code(function.__code__, seen)
    yield from _parts(function.__defaults__, seen)
    for cell in function.__closure__ or ():
        yield from _parts(cell.cell_contents, seen)
    names = sorted(_names(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, python.ModuleType):
            if value.__name__.startswith(_OWN):
                for inner in names:
                    if hasattr(value, inner):
                        yield inner
                        yield from _parts(getattr(value, inner), seen)
        elif name in function.__globals__:
            yield name
            yield from _parts(value, seen)


def _names(code: python.CodeType) -> set[str]:
    """Names of globals and attributes in a code object and those nested in it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, python.CodeType):
            found |= _names(constant)
    return found
