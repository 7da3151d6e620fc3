"""Interfaces of a KV cache: `KVCache`, which its users call, and `PageStore`, by which a backend stores the numbers.

A model's memory of a sequence is a cache in layers with attention, and a state in others (`runtime.kv.states`). Both
begin steps, are cut back, forked, saved and loaded together, as one `KVCache`; its users don't know which it is. They
ask only how far a slot can be cut back: anywhere in pages that hold all tokens, and here and there in a state, and in
pages that hold only what a sliding window reads.

Every backend's cache is a `runtime.kv.control.PagedCache` over its own stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from runtime.kv.kinds import CacheKind
from runtime.kv.transfer import Arrays

Int32Array = npt.NDArray[np.int32]


class KVCache(Protocol):
    """The cache of a loaded model, used between steps."""

    @property
    def kind(self) -> CacheKind:
        """The kind of cache; `kind.has_draft` says whether a draft can read less."""
        ...

    def length(self, slot: int) -> int:
        """Tokens of a slot."""
        ...

    def slot_bytes(self, slot: int) -> int:
        """Bytes a slot uses, shared pages included."""
        ...

    def paged_length(self, slot: int) -> int:
        """Tokens of a slot that are in pages; during a step they precede the window's recent ones."""
        ...

    def reach(self, slot: int, length: int) -> int:
        """Most tokens, at most `length`, to which `trim` and `fork` can go, and at which a step can begin."""
        ...

    def exact_from(self, slot: int) -> int:
        """The shortest length to which `trim` and `fork` can go without loss; below it, a page is reopened."""
        ...

    def rows_until_flush(self, slot: int) -> int:
        """Most rows of the slot's next step for which all rows see what plain decoding would see."""
        ...

    def rows_alike(self, slot: int) -> int:
        """Most rows of the slot's next step for which each is computed as it would be alone.

        At most `rows_until_flush`, and fewer if a backend traverses the context differently for rows further on: sums
        are then added in another order, which the rounding of activations makes visible.
        """
        ...

    def has_room(self, slot: int, end: int) -> bool:
        """Whether enough pages are free for a slot to grow to `end` tokens, at most the context."""
        ...

    def has_room_beside(self, ends: Mapping[int, int], end: int, *, source: int, shared: int) -> bool:
        """Whether one more slot can grow to `end` tokens beside others if everything else is dropped.

        Args:
            ends: The length each of the others is to reach, in tokens, at most the context.
            end: The length it is to reach, at most the context.
            source: The slot from which it is to be forked.
            shared: Tokens it shares with that slot.
        """
        ...

    @property
    def layout(self) -> str:
        """Name of the layout of the arrays of `export`, which changes with it."""
        ...

    def export(self, slot: int) -> Iterator[Arrays]:
        """The contents of a slot in pieces: its window, then a few pages at a time.

        A piece may be a view of the cache: use it before the next.
        """
        ...

    def load(self, slot: int, length: int, paged: int, pieces: Iterable[Arrays]) -> None:
        """Replace a slot's contents by those from `export`. On failure the slot is empty.

        Args:
            slot: The slot.
            length: Tokens that were exported.
            paged: What `paged_length` was.
            pieces: Pieces from `export`, of a cache of the same kind, model and layout.

        Raises:
            RequestError: the pieces do not match the number of tokens.
            OutOfMemoryError: not enough pages are free.
        """
        ...

    def begin(self, slots: Int32Array, positions: Int32Array, *, flush: bool = True, draft: bool = False) -> None:
        """Prepare a step: truncate, flush due pages, allocate. The rows count as tokens from now on.

        A slot whose first row is below its length is truncated to there. Then, if `flush`, pages are cut off windows
        that hold sinks + keep + page tokens or more. The step's rows see pages and windows as they are after that.

        Args:
            slots: int32 [M] as in `runtime.backends.decoder.Step`.
            positions: int32 [M], consecutive in each slot.
            flush: Whether pages may be flushed. Speculation passes False from its second drafted token on, so that
                drafts and their verification see the same pages and no drafted token is quantized before it is
                verified.
            draft: Whether the rows are drafted, so that the slot is soon cut back to the first of them.

        Raises:
            RequestError: a gap before a slot's first row or between rows, more tokens than there is room for, or a
                slot cannot be cut back to its first row.
            OutOfMemoryError: no page is free.
        """
        ...

    def trim(self, slot: int, length: int) -> None:
        """Truncate a slot to its first `length` tokens.

        If that ends inside a quantized page, the remaining tokens of the page return to the window, dequantized.

        Raises:
            RequestError: the slot has fewer tokens, or `reach` is less.
        """
        ...

    def fork(self, source: int, target: int, length: int) -> None:
        """Start `target` from the first `length` tokens of `source`, replacing its contents. Pages are shared.

        Raises:
            RequestError: the source has fewer tokens, or its `reach` is less.
        """
        ...

    def lengthen(self, slot: int, length: int) -> None:
        """Lengthen a slot with copies of its pages, inserted after them and before its window.

        For measuring at a length without a prompt of that length; the contents are not meaningful text.

        Args:
            slot: The slot; it has at least one page.
            length: Resulting tokens; longer by a whole number of pages.

        Raises:
            RequestError: the slot has no whole page, the increase is not a whole number of pages, or the context is
                exceeded.
            OutOfMemoryError: not enough pages are free.
        """
        ...

    def clear(self, slot: int) -> None:
        """Drop all tokens of a slot."""
        ...


class PageStore(Protocol):
    """A backend's storage of a group's pages, and of windows. Every call covers all its layers, keys and values."""

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
