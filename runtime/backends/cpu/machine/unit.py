"""Units: routines that are compiled on their own, kept on their own, and called by their address.

A model needs few of the kernels, and a change touches few of them, so each is compiled when a program first names it
(`runtime.backends.cpu.link`) and its machine code is kept (`runtime.backends.cpu.machine.kept`) under a digest of its
own code and of all that it calls. A unit is a C function of int64 arguments; `call_N` calls one from compiled code and
costs nanoseconds.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import types

from runtime.backends.cpu.machine import isa, kept
from runtime.backends.cpu.machine.compiler import machine_code
from runtime.backends.cpu.machine.digest import digest
from runtime.backends.cpu.machine.emit import I64, Builder, define
from runtime.backends.cpu.machine.loader import LoadedCode, load_code
from runtime.errors import BackendError

logger = logging.getLogger(__name__)

_lock = threading.RLock()


class Unit:
    """One routine with machine code of its own.

    Args:
        function: A function of integers that returns nothing, at the top level of its module.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._count = function.__code__.co_argcount
        self._loaded: LoadedCode | None = None
        self._call: Callable[..., None] | None = None
        self.name = function.__name__
        """What it is called."""

    @property
    def function(self) -> Callable[..., None]:
        """The Python function that it is compiled from."""
        return self._function

    @property
    def symbol(self) -> str:
        """What its machine code is called: like no other unit's, whoever compiled them."""
        return f"{self.name}-{digest(self._function)[:16]}"

    @property
    def file(self) -> Path:
        """File of its machine code."""
        return kept.file_of(isa.KERNEL_CACHE, self.symbol)

    @property
    def is_compiled(self) -> bool:
        """Whether its machine code is there, so that its address can be had without compiling."""
        return self._loaded is not None or self.file.is_file()

    @property
    def address(self) -> int:
        """Address of its machine code, compiled when it is first asked for.

        Raises:
            BackendError: it cannot be compiled here.
        """
        if self._loaded is None:
            with _lock:
                if self._loaded is None:
                    self._loaded = self._load()
        return self._loaded.address

    def __call__(self, *arguments: int) -> None:
        """Run it; other Python threads run meanwhile."""
        self.prepare()(*arguments)

    def prepare(self) -> Callable[..., None]:
        """Compile it, if that is still to be done. Returns what a call of it calls."""
        if self._call is None:
            self._call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self._count)(self.address)
        return self._call

    def keep(self) -> bytes:
        """Compile it and keep its machine code for other processes; where nothing can be kept it goes without.

        What another process makes meanwhile is waited for and taken.

        Returns:
            The machine code.

        Raises:
            BackendError: it cannot be compiled here.
        """
        with kept.one_at_a_time(self.file):
            code = kept.read(self.file)
            return self._made() if code is None else code

    def _made(self) -> bytes:
        """Compile and keep. Raises as `keep`."""
        try:
            code = machine_code(self._function, self.symbol)
        except Exception as error:  # numba's, LLVM's: no common base
            raise BackendError(f"the kernel {self.name!r} cannot be built here: {error}") from error
        try:
            kept.write(self.file, code)
        except OSError as error:
            logger.debug("the machine code of %s is not kept: %s", self.name, error)
        return code

    def _load(self) -> LoadedCode:
        """Load what is kept; what is missing or damaged is made anew."""
        return load_code(kept.read(self.file) or self.keep(), self.symbol)


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
