"""Stores of a KV cache: `PageStore`, by which a backend stores the numbers, and their export. Does not import torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from models.spec import HeadShape, ModelSpec
from runtime.errors import RequestError

Arrays = Mapping[str, npt.NDArray[Any]]
"""Named arrays in main memory, in the backend's own layout."""
_CHUNK_PAGES = 8
"""Pages read or written at a time."""


def layout_name(backend: str, places: object) -> str:
    """A name for `runtime.kv.stores.PageStore.saved_layout` that changes with the layout.

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


Int32Array = npt.NDArray[np.int32]


class PageStore(Protocol):
    """A backend's storage of a group's pages, and of windows. Every call covers all its layers, keys and values."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        ...

    def flush(self, slot: int, page: int, rest: int) -> None:
        """Quantize the page of tokens after the sinks of a slot's window; the `rest` tokens after them move up."""
        ...

    def restore(self, page: int, slot: int, count: int) -> None:
        """Write the first `count` tokens of a page, dequantized, after the sinks of a slot's window."""
        ...

    def copy_window(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` tokens of a window to another slot's."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page."""
        ...

    saved_layout: str
    """Name of the layout of what the following give: the backend, and a version that changes whenever an array does."""

    def read_pages(self, pages: Sequence[int]) -> Arrays:
        """Some pages, maybe none: all layers, keys and values, codes and scales. Shapes depend on len(pages) alone."""
        ...

    def write_pages(self, pages: Sequence[int], arrays: Arrays) -> None:
        """Set some pages to what `read_pages` gave for as many; a negative number skips a page."""
        ...

    def read_window(self, slot: int, count: int) -> Arrays:
        """The first `count` tokens of a window; no arrays where the kind has no window."""
        ...

    def write_window(self, slot: int, count: int, arrays: Arrays) -> None:
        """Set the first `count` tokens of a window to what `read_window` gave for as many."""
        ...


def kept_by(spec: ModelSpec, layers: Sequence[int] | None) -> tuple[tuple[int, ...], HeadShape]:
    """The layers that a store keeps, and the shape of their heads. None: all that have a cache."""
    own = spec.attention_layers if layers is None else tuple(layers)
    return own, spec.heads_of(own[0] if own else 0)


def joined(stores: Sequence[PageStore]) -> PageStore:
    """One store of several; a single one stays as it is."""
    return stores[0] if len(stores) == 1 else JointStore(tuple(stores))


class JointStore:
    """Several stores, whose pages and windows have the same numbers. Implements `PageStore`.

    An array of the second is named `1.keys`, and so on.
    """

    def __init__(self, stores: tuple[PageStore, ...]) -> None:
        self._stores = stores
        self.saved_layout = "+".join(store.saved_layout for store in stores)
        """See `PageStore.saved_layout`."""

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores)

    def flush(self, slot: int, page: int, rest: int) -> None:
        for store in self._stores:
            store.flush(slot, page, rest)

    def restore(self, page: int, slot: int, count: int) -> None:
        for store in self._stores:
            store.restore(page, slot, count)

    def copy_window(self, source: int, target: int, count: int) -> None:
        for store in self._stores:
            store.copy_window(source, target, count)

    def copy_page(self, source: int, target: int) -> None:
        for store in self._stores:
            store.copy_page(source, target)

    def read_pages(self, pages: Sequence[int]) -> Arrays:
        return _named([store.read_pages(pages) for store in self._stores])

    def write_pages(self, pages: Sequence[int], arrays: Arrays) -> None:
        for number, store in enumerate(self._stores):
            store.write_pages(pages, _own(arrays, number))

    def read_window(self, slot: int, count: int) -> Arrays:
        return _named([store.read_window(slot, count) for store in self._stores])

    def write_window(self, slot: int, count: int, arrays: Arrays) -> None:
        for number, store in enumerate(self._stores):
            store.write_window(slot, count, _own(arrays, number))


def _named(parts: Sequence[Arrays]) -> Arrays:
    return {f"{number}.{name}": array for number, part in enumerate(parts) for name, array in part.items()}


def _own(arrays: Arrays, number: int) -> Arrays:
    return {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"{number}.")}
