"""Units: routines that are compiled on their own, kept on their own, and called by their address.

A model needs few of the kernels, and a change touches few of them, so each is compiled when a program first names it
(`runtime.backends.cpu.link`) and its machine code is kept under a digest of its own code and of all that it calls. A
unit is a C function of int64 arguments; `call` calls one from compiled code and costs nanoseconds.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import secrets
import shutil
import sys
import threading
import types as python
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.bytecode import FunctionIdentity
from numba.core.dispatcher import Dispatcher
from numba.core.typing.templates import Signature

from runtime.backends.cpu.machine import isa
from runtime.backends.cpu.machine.emit import I64, Builder, define
from runtime.errors import BackendError

logger = logging.getLogger(__name__)

_OWN: Final = ("runtime.", "models.")
"""Packages whose functions a digest covers; of the others, the versions of numba and llvmlite stand for all."""
_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.generic)
_FORMAT: Final = "1: names unique among processes"
"""How machine code is kept; older code is left alone."""
_lock = threading.RLock()


class Unit:
    """One routine with machine code of its own.

    Args:
        function: A function of integers that returns nothing, at the top level of its module.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._count = function.__code__.co_argcount
        self._compiled: Any = None
        self._call: Callable[..., None] | None = None
        self.name = function.__name__
        """What it is called."""

    @property
    def folder(self) -> Path:
        """Folder of its machine code."""
        return isa.KERNEL_CACHE / f"{self.name}-{digest(self._function)[:16]}"

    @property
    def is_compiled(self) -> bool:
        """Whether its machine code is there, so that its address can be had without compiling."""
        return self._compiled is not None or any(self.folder.glob("*/*.nbc"))

    @property
    def address(self) -> int:
        """Address of its machine code, compiled when it is first asked for.

        Raises:
            BackendError: it cannot be compiled here.
        """
        if self._compiled is None:
            with _lock:
                if self._compiled is None:
                    self._compiled = self._compile()
        return int(self._compiled.address)

    def __call__(self, *arguments: int) -> None:
        """Run it; other Python threads run meanwhile."""
        self.prepare()(*arguments)

    def prepare(self) -> Callable[..., None]:
        """Compile it, if that is still to be done. Returns what a call of it calls."""
        if self._call is None:
            self._call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self._count)(self.address)
        return self._call

    def _compile(self) -> Any:
        """Compile or load; a damaged folder is made anew, and where nothing can be kept it goes without."""
        folder, failure = self.folder, None
        for attempt in (folder, folder, None):
            try:
                return self._build(attempt)
            except Exception as error:  # noqa: BLE001 -- numba's, LLVM's, a damaged file's: no common base
                failure = error
                logger.debug("the kernel %s with %s: %s", self.name, attempt, error)
                shutil.rmtree(folder, ignore_errors=True)
        raise BackendError(f"the kernel {self.name!r} cannot be built here: {failure}") from failure

    def _build(self, folder: Path | None) -> Any:
        """Compile, or load what is kept in the folder; None = keep nothing."""
        signature = types.void(*[types.int64] * self._count)
        # numba numbers the functions of a process and names their code by it, and the linker takes the first of two
        # functions of one name: machine code of another process must not bear the same.
        FunctionIdentity._unique_ids = itertools.count(secrets.randbits(62))  # noqa: SLF001
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]  # made at run time
        return numba.cfunc(signature, cache=folder is not None, error_model="numpy")(self._function)


def compiled_unit(function: Callable[..., None]) -> Unit:
    """Make a function a unit."""
    return Unit(function)


def _caller(count: int) -> Any:
    def emit(b: Builder, address: Any, *values: Any) -> None:
        function = ir.FunctionType(ir.VoidType(), [I64] * count)
        b.call(b.inttoptr(address, function.as_pointer()), list(values))

    emit.__name__ = f"call_{count}"
    emit.__doc__ = f"Call the unit at an address with {count} arguments."
    return define(types.void, types.int64, *[types.int64] * count)(emit)


call_3, call_4, call_5 = (_caller(count) for count in (3, 4, 5))


def digest(function: Callable[..., Any]) -> str:
    """What a function compiles to depends on this: its code, that of all it calls, constants, and versions.

    Args:
        function: A Python function, compiled or not.

    Returns:
        Hexadecimal digits.
    """
    versions = f"{sys.version_info[:2]} {numba.__version__} {llvmlite.__version__} {isa.VARIANT} {_FORMAT}"
    found = hashlib.sha256(versions.encode())
    for part in _parts(function, set()):
        found.update(part.encode() + b"\n")
    return found.hexdigest()


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
