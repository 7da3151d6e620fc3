"""Export and import of cached sequences, for saving them to disk. Does not import torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy.typing as npt

from runtime.errors import RequestError

Arrays = Mapping[str, npt.NDArray[Any]]
"""Named arrays in main memory, in the backend's own layout."""
_CHUNK_PAGES = 8
"""Pages read or written at a time."""


def layout_name(backend: str, places: object) -> str:
    """A name for `runtime.kv.interfaces.PageStore.saved_layout` that changes with the layout.

    Args:
        backend: The backend, with a version of its byte format.
        places: The layout; its `repr` is hashed.
    """
    return f"{backend}-{hashlib.sha256(repr(places).encode()).hexdigest()[:12]}"


def chunks(pages: list[int]) -> Iterator[list[int]]:
    """A slot's pages in small batches."""
    for start in range(0, len(pages), _CHUNK_PAGES):
        yield pages[start : start + _CHUNK_PAGES]


def checked(arrays: Arrays, like: Arrays) -> Arrays:
    """Check untrusted arrays against the expected names, dtypes and shapes.

    Raises:
        RequestError: they differ.
    """
    found, wanted = ({name: (x.dtype, x.shape) for name, x in each.items()} for each in (arrays, like))
    if found != wanted:
        raise RequestError(f"saved arrays do not belong to this cache: {found} instead of {wanted}")
    return arrays
