"""The backends, best first. Adding one: a folder with a `backend.py`, and a line here.

Nothing outside this package imports anything of a backend's folder, and no backend imports another's.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from runtime.backend import AnyBackend
from runtime.errors import BackendError

AUTO = "auto"
"""Asks for the first backend that can run here and has room."""
NAMES = ("triton", "cpu", "reference")
"""The folders."""


def backend(name: str) -> AnyBackend:
    """A backend by its name.

    Raises:
        BackendError: there is none of that name.
    """
    if name not in NAMES:
        known = ", ".join((AUTO, *NAMES))
        raise BackendError(f"there is no backend {name!r} in this version; choose one of {known}")
    found: AnyBackend = import_module(f"{__name__}.{name}.backend").BACKEND
    return found


def backends() -> Iterator[AnyBackend]:
    """All of them, best first."""
    return map(backend, NAMES)
