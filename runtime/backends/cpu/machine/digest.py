"""Digests of everything a unit's machine code depends on: sources, versions, the processor.

The sources are the files of the unit's module and of all its imports within the program, as a whole, whether or not the
unit uses them. So a digest costs reading a few dozen small files, once per process, and an edit recompiles the units of
every module that imports the edited one.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import llvmlite
import llvmlite.binding as llvm
import numpy as np

from runtime.backends.cpu.machine import isa

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
