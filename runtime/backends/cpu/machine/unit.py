"""Units: routines that are compiled on their own, kept on their own, and called by their address.

A model needs few of the kernels, and a change touches few of them, so each is compiled when a program first names it
(`runtime.backends.cpu.link`) and its machine code is kept (`runtime.backends.cpu.machine.kept`) under a digest of the
sources that it is made from. A unit is a C function of int64 arguments; `runtime.backends.cpu.machine.calls` calls one
from compiled code.

A unit is known by the name of its function. The module that has it, numba and all kernels behind it are imported when
it is compiled: where all machine code is there they would be most of a start.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from runtime.backends.cpu.machine import isa, kept
from runtime.backends.cpu.machine.digest import ROOT, Sources, digest
from runtime.backends.cpu.machine.loader import LoadedCode, load_code
from runtime.errors import BackendError
from runtime.system.own_files import is_own

logger = logging.getLogger(__name__)

_lock = threading.RLock()


class Unit:
    """One routine with machine code of its own.

    Args:
        module: Dotted name of the module that has its function, at the top level: by its name and its sources it is
            known.
        name: Of the function, which takes integers and returns nothing.
        source: File of the module.

    Raises:
        OSError: its sources can't be read.
    """

    def __init__(self, module: str, name: str, source: Path) -> None:
        self._function: Callable[..., None] | None = None
        self._loaded: LoadedCode | None = None
        self._call: Callable[..., None] | None = None
        self.module, self.name, self.source = module, name, source
        """What it is called, and where it stands."""
        # Asked for now: later the sources may be those of another version, installed under a running program.
        self._digest = digest(module, name, source)
        self.symbol = f"{name}-{self._digest[:16]}"
        """What its machine code is called: like no other unit's, whoever compiled them."""

    @property
    def function(self) -> Callable[..., None]:
        """The Python function that it is compiled from; its module is imported where that is still to be done.

        Raises:
            BackendError: the sources are not those any more that it was named after.
        """
        if self._function is None:
            if digest(self.module, self.name, self.source, Sources(ROOT)) != self._digest:
                raise BackendError("the program was updated while it ran: start it again")
            importlib.import_module(self.module)
        assert self._function is not None, f"{self.module} has a unit {self.name}"
        return self._function

    def define(self, function: Callable[..., None]) -> None:
        """Say what it is compiled from: its module does as soon as it is imported."""
        self._function = function

    @property
    def file(self) -> Path:
        """File of its machine code."""
        return kept.file_of(isa.KERNEL_CACHE, self.symbol)

    @property
    def is_compiled(self) -> bool:
        """Whether its machine code is there, so that its address can be had without compiling."""
        return self._loaded is not None or is_own(self.file)

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
        if self._call is None:
            self._call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(self.address)
        self._call(*arguments)

    def prepare(self) -> None:
        """Compile it, if that is still to be done.

        Raises:
            BackendError: it cannot be compiled here.
        """
        assert self.address

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
        from runtime.backends.cpu.machine.compiler import machine_code  # with numba: a fifth of a second

        function = self.function
        try:
            code = machine_code(function, self.symbol)
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


@functools.cache
def unit(module: str, name: str) -> Unit:
    """The unit of a name, of which there is one; its module need not be imported.

    Args:
        module: As of `Unit`.
        name: As of `Unit`.
    """
    return Unit(module, name, ROOT.joinpath(*module.split(".")).with_suffix(".py"))


def compiled_unit(function: Callable[..., None]) -> Unit:
    """Make a function a unit."""
    assert function.__qualname__ == function.__name__, "what encloses a function can make two of one source"
    found = unit(function.__module__, function.__name__)
    found.define(function)
    return found
