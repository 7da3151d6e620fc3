"""Units: routines that are compiled, stored and called separately.

A model needs few of the kernels, and a change affects few of them, so each is compiled when a program first refers to
it (`runtime.backends.cpu.link`). Its machine code is stored (`runtime.backends.cpu.machine.code_cache`) under a digest
of its sources. A unit is a C function of int64 arguments; `runtime.backends.cpu.machine.kernel` calls one from compiled
code.

A unit is identified by its function's name. The module, numba and its kernels are only imported for compiling: if all
machine code is stored, importing them would take most of the start-up time.

A digest covers all that machine code depends on: sources, versions, the processor. The sources are the files of the
unit's module and of all its imports within the program, as a whole, whether or not the unit uses them. So a digest
costs reading a few dozen small files, once per process, and an edit recompiles the units of every module that imports
the edited one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import llvmlite
import llvmlite.binding as llvm
import numpy as np

from runtime.backends.cpu.machine import code_cache, isa
from runtime.backends.cpu.machine.loader import LoadedCode, load_code
from runtime.errors import BackendError
from runtime.system.private_files import is_private

_FORMAT: Final = "4: code linked once"
"""Version of the compilation and storage format."""
ROOT: Final = Path(__file__).parents[4]
"""Folder of the program's packages."""
_IMPORT: Final = re.compile(r"from ((?:runtime|tuner|models)\b[\w.]*) import (\([^)]*\)|.+)")
"""An import from the packages that contain kernels."""
_NAME: Final = re.compile(r"\w+")


def digest(module: str, name: str, source: Path, sources: Sources | None = None) -> str:
    """Digest of everything that a top-level function compiles to depends on.

    Args:
        module: Dotted name of the module.
        name: Name of the function.
        source: The module's file.
        sources: Source reader; None: the process's shared one.

    Returns:
        Hexadecimal digits.

    Raises:
        OSError: the sources cannot be read.
    """
    found = hashlib.sha256(f"{_circumstances()} {module} {name} ".encode())
    found.update((sources or _SOURCES).digest(source))
    return found.hexdigest()


def extent(source: Path) -> int:
    """Bytes of source that a module's functions may use; a measure of compile time."""
    return _SOURCES.size(source)


@functools.cache
def _circumstances() -> str:
    """Inputs of machine code other than its sources."""
    versions = f"{sys.version_info[:2]} {version('numba')} {llvmlite.__version__} {np.__version__}"
    processor = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
    return f"{versions} {processor} {isa.VARIANT} {_FORMAT}"


@dataclass(frozen=True, slots=True)
class _Source:
    """A file of source code."""

    digest: bytes
    """Digest of its text."""
    size: int
    """Bytes."""
    imports: frozenset[Path]
    """The program's files that it names in imports."""


class Sources:
    """The program's sources, each as it was when first read.

    Args:
        root: Folder of the program's packages.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[Path, _Source] = {}
        self._digests: dict[Path, bytes] = {}
        self._found: dict[str, list[Path]] = {}
        self._packages: dict[str, bool] = {}

    def behind(self, file: Path) -> list[Path]:
        """A file and its direct and indirect imports within the program, in a fixed order.

        Raises:
            OSError: one of them can't be read.
        """
        found, waiting = {file}, [file]
        while waiting:
            fresh = self._source(waiting.pop()).imports - found
            found |= fresh
            waiting += fresh
        return sorted(found)

    def digest(self, file: Path) -> bytes:
        """The digest of a file and its imports. Raises as `behind`."""
        if file not in self._digests:
            found = hashlib.sha256()
            for path in self.behind(file):
                found.update(path.name.encode() + b"\0" + self._source(path).digest)
            self._digests[file] = found.digest()
        return self._digests[file]

    def size(self, file: Path) -> int:
        """Bytes of a file and its imports. Raises as `behind`."""
        return sum(self._source(path).size for path in self.behind(file))

    def _source(self, file: Path) -> _Source:
        if file not in self._known:
            text = file.read_bytes()
            imports = frozenset(self._imported(text.decode()))
            self._known[file] = _Source(hashlib.sha256(text).digest(), len(text), imports)
        return self._known[file]

    def _imported(self, text: str) -> Iterator[Path]:
        """The program's files named in a text's imports; a name imported from a package may be a module."""
        for module, names in _IMPORT.findall(text):
            yield from self._files(module)
            if self._is_package(module):
                for name in _NAME.findall(names):
                    yield from self._files(f"{module}.{name}")

    def _files(self, dotted: str) -> list[Path]:
        """Existing files of a module or a package."""
        if dotted not in self._found:
            place = self._root.joinpath(*dotted.split("."))
            self._found[dotted] = [own for own in (place.with_suffix(".py"), place / "__init__.py") if own.is_file()]
        return self._found[dotted]

    def _is_package(self, dotted: str) -> bool:
        if dotted not in self._packages:
            self._packages[dotted] = self._root.joinpath(*dotted.split(".")).is_dir()
        return self._packages[dotted]


_SOURCES: Final = Sources(ROOT)


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
        from runtime.backends.cpu.machine.kernel import machine_code  # with numba: a fifth of a second

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
    return made_unit(function.__name__, function)


def made_unit(name: str, function: Callable[..., None]) -> Unit:
    """A unit of a function that another one made, under a name that tells it from others of the same source."""
    found = unit(function.__module__, name)
    found.define(function)
    return found
