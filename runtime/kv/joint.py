"""Pages whose layers have heads of several shapes: a store for each shape, used as one. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from models.spec import HeadShape, ModelSpec
from runtime.kv.interfaces import PageStore
from runtime.kv.transfer import Arrays


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

    def flush(self, slot: int, page: int, rest: int) -> None:
        """See `PageStore.flush`."""
        for store in self._stores:
            store.flush(slot, page, rest)

    def restore(self, page: int, slot: int, count: int) -> None:
        """See `PageStore.restore`."""
        for store in self._stores:
            store.restore(page, slot, count)

    def copy_window(self, source: int, target: int, count: int) -> None:
        """See `PageStore.copy_window`."""
        for store in self._stores:
            store.copy_window(source, target, count)

    def copy_page(self, source: int, target: int) -> None:
        """See `PageStore.copy_page`."""
        for store in self._stores:
            store.copy_page(source, target)

    def read_pages(self, pages: Sequence[int]) -> Arrays:
        """See `PageStore.read_pages`."""
        return _named([store.read_pages(pages) for store in self._stores])

    def write_pages(self, pages: Sequence[int], arrays: Arrays) -> None:
        """See `PageStore.write_pages`."""
        for number, store in enumerate(self._stores):
            store.write_pages(pages, _own(arrays, number))

    def read_window(self, slot: int, count: int) -> Arrays:
        """See `PageStore.read_window`."""
        return _named([store.read_window(slot, count) for store in self._stores])

    def write_window(self, slot: int, count: int, arrays: Arrays) -> None:
        """See `PageStore.write_window`."""
        for number, store in enumerate(self._stores):
            store.write_window(slot, count, _own(arrays, number))


def _named(parts: Sequence[Arrays]) -> Arrays:
    return {f"{number}.{name}": array for number, part in enumerate(parts) for name, array in part.items()}


def _own(arrays: Arrays, number: int) -> Arrays:
    return {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"{number}.")}
