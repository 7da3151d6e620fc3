"""Export and import of cached sequences, for saving them to disk. Does not import torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt

from runtime.errors import RequestError

Arrays = Mapping[str, npt.NDArray[Any]]
"""Named arrays in main memory, in the backend's own layout."""
_CHUNK_PAGES = 8
"""Pages read or written at a time."""


@runtime_checkable
class SavingStore(Protocol):
    """A `runtime.kv.control.PageStore` that can export and import its contents, in its own layout."""

    saved_layout: str
    """Name of the layout: the backend, and a version that changes with any array."""

    def read_pages(self, pages: Sequence[int]) -> Arrays:
        """Export some pages, maybe none: all layers, keys and values. Shapes depend on len(pages) only."""
        ...

    def write_pages(self, pages: Sequence[int], arrays: Arrays) -> None:
        """Import pages exported by `read_pages`."""
        ...

    def read_window(self, slot: int, count: int) -> Arrays:
        """Export the first `count` tokens of a window; no arrays if the kind has no window."""
        ...

    def write_window(self, slot: int, count: int, arrays: Arrays) -> None:
        """Import the first `count` tokens of a window, exported by `read_window`."""
        ...


def layout_name(backend: str, places: object) -> str:
    """A name for `SavingStore.saved_layout` that changes with the layout.

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
