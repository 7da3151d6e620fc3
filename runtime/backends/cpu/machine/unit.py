"""Units: routines that are compiled, stored and called separately.

A model needs few of the kernels, and a change affects few of them, so each is compiled when a program first refers to
it (`runtime.backends.cpu.link`). Its machine code is stored (`runtime.backends.cpu.machine.code_cache`) under a digest
of its sources. A unit is a C function of int64 arguments; `runtime.backends.cpu.machine.calls` calls one from compiled
code.

A unit is identified by its function's name. The module, numba and its kernels are only imported for compiling: if all
machine code is stored, importing them would take most of the start-up time.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from runtime.backends.cpu.machine import code_cache, isa
from runtime.backends.cpu.machine.digest import ROOT, Sources, digest
from runtime.backends.cpu.machine.loader import LoadedCode, load_code
from runtime.errors import BackendError
from runtime.system.private_files import is_private

logger = logging.getLogger(__name__)

_lock = threading.RLock()


class Unit:
    """A separately compiled routine.

    Args:
        module: Dotted name of the module with its top-level function.
        name: Name of the function, which takes integers and returns nothing.
        source: File of the module.

    Raises:
        OSError: its sources can't be read.
    """

    def __init__(self, module: str, name: str, source: Path) -> None:
        self._function: Callable[..., None] | None = None
        self._loaded: LoadedCode | None = None
        self._call: Callable[..., None] | None = None
        self.module, self.name, self.source = module, name, source
        """Name and module."""
        # Computed now: later the sources may be those of another version, installed under a running program.
        self._digest = digest(module, name, source)
        self.symbol = f"{name}-{self._digest[:16]}"
        """Symbol of its machine code, unique to the unit and its sources."""

    @property
    def function(self) -> Callable[..., None]:
        """The Python function; imports its module if necessary.

        Raises:
            BackendError: the sources have changed since it was created.
        """
        if self._function is None:
            if digest(self.module, self.name, self.source, Sources(ROOT)) != self._digest:
                raise BackendError("the program was updated while it ran: start it again")
            importlib.import_module(self.module)
        assert self._function is not None, f"{self.module} has a unit {self.name}"
        return self._function

    def define(self, function: Callable[..., None]) -> None:
        """Set the function; called when its module is imported."""
        self._function = function

    @property
    def file(self) -> Path:
        """Path of its machine code."""
        return code_cache.file_of(isa.KERNEL_CACHE, self.symbol)

    @property
    def is_compiled(self) -> bool:
        """Whether its machine code is stored, so that getting its address needs no compiling."""
        return self._loaded is not None or is_private(self.file)

    @property
    def address(self) -> int:
        """Address of its machine code, compiled on first use.

        Raises:
            BackendError: it cannot be compiled here.
        """
        if self._loaded is None:
            with _lock:
                if self._loaded is None:
                    self._loaded = self._load()
        return self._loaded.address

    def __call__(self, *arguments: int) -> None:
        """Call it; releases the interpreter's lock."""
        if self._call is None:
            self._call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(self.address)
        self._call(*arguments)

    def prepare(self) -> None:
        """Compile it if necessary.

        Raises:
            BackendError: it cannot be compiled here.
        """
        assert self.address

    def keep(self) -> bytes:
        """Compile it and store its machine code for other processes, if storing is possible.

        Waits for other processes that are compiling the same unit, and uses their result.

        Returns:
            The machine code.

        Raises:
            BackendError: it cannot be compiled here.
        """
        with code_cache.one_at_a_time(self.file):
            code = code_cache.read(self.file)
            return self._made() if code is None else code

    def _made(self) -> bytes:
        """Compile and store. Raises as `keep`."""
        from runtime.backends.cpu.machine.compiler import machine_code  # with numba: a fifth of a second

        function = self.function
        try:
            code = machine_code(function, self.symbol)
        except Exception as error:  # numba's and LLVM's: no common base class
            raise BackendError(f"the kernel {self.name!r} cannot be built here: {error}") from error
        try:
            code_cache.write(self.file, code)
        except OSError as error:
            logger.debug("the machine code of %s is not kept: %s", self.name, error)
        return code

    def _load(self) -> LoadedCode:
        """Load the stored code; recompiles if it is missing or damaged."""
        return load_code(code_cache.read(self.file) or self.keep(), self.symbol)


@functools.cache
def unit(module: str, name: str) -> Unit:
    """The unique unit of a name; does not import its module.

    Args:
        module: As of `Unit`.
        name: As of `Unit`.
    """
    return Unit(module, name, ROOT.joinpath(*module.split(".")).with_suffix(".py"))


def compiled_unit(function: Callable[..., None]) -> Unit:
    """Decorator that makes a function a unit."""
    assert function.__qualname__ == function.__name__, "what encloses a function can make two of one source"
    found = unit(function.__module__, function.__name__)
    found.define(function)
    return found
