"""The arrays in which a sequence leaves a cache and comes back. Nothing here imports torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy.typing as npt

from runtime.errors import RequestError

Arrays = Mapping[str, npt.NDArray[Any]]
"""Named arrays in main memory, in whatever layout a backend keeps them."""
_CHUNK_PAGES = 8
"""Pages that are read or written at once."""


def layout_name(backend: str, places: object) -> str:
    """A name for `runtime.kv.control.PageStore.saved_layout` that is another as soon as a place is another.

    Args:
        backend: Whose layout it is, with a version of how the bytes of a place are to be understood.
        places: What stands where; its `repr` counts.
    """
    return f"{backend}-{hashlib.sha256(repr(places).encode()).hexdigest()[:12]}"


def chunks(pages: list[int]) -> Iterator[list[int]]:
    """The pages of a slot, a few at a time."""
    for start in range(0, len(pages), _CHUNK_PAGES):
        yield pages[start : start + _CHUNK_PAGES]


def checked(arrays: Arrays, like: Arrays) -> Arrays:
    """Arrays that came from outside, with the names, types and shapes that they should have.

    Raises:
        RequestError: one has not.
    """
    found, wanted = ({name: (x.dtype, x.shape) for name, x in each.items()} for each in (arrays, like))
    if found != wanted:
        raise RequestError(f"saved arrays do not belong to this cache: {found} instead of {wanted}")
    return arrays
