"""Page tables: block tables, reference counts and a free list, for the caches of all backends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.errors import OutOfMemoryError


class PageTable:
    """The pages of all slots.

    A slot's pages are in the order of its tokens. Several slots may share a page; it is freed when the last of them
    releases it. Allocation reuses the most recently freed page first.

    Args:
        slots: Number of slots.
        pages_per_slot: Most pages of one slot.
        pages: Total number of pages; None = enough for every slot.
    """

    def __init__(self, slots: int, pages_per_slot: int, pages: int | None = None) -> None:
        self.capacity = slots * pages_per_slot if pages is None else pages
        """Total number of pages."""
        self.tables: npt.NDArray[np.int32] = np.full((slots, pages_per_slot), -1, np.int32)
        """int32 [slots, pages_per_slot] page numbers in the order of tokens, -1 after the last and where a page was
        released (`runtime.kv.window_pages`): read by kernels. Changed in place."""
        self._counts = [0] * slots
        self._references = [0] * self.capacity
        self._free = list(range(self.capacity - 1, -1, -1))

    @property
    def used(self) -> int:
        """Allocated pages, shared ones counted once."""
        return self.capacity - len(self._free)

    @property
    def free(self) -> int:
        """Free pages."""
        return len(self._free)

    def count(self, slot: int) -> int:
        """Number of a slot's pages, released ones counted."""
        return self._counts[slot]

    def entries(self, slot: int) -> list[int]:
        """Page numbers of a slot in the order of its tokens, -1 where one was released."""
        pages: list[int] = self.tables[slot, : self._counts[slot]].tolist()
        return pages

    def held(self, slot: int) -> list[int]:
        """Page numbers of a slot in the order of its tokens, without those released."""
        return [page for page in self.entries(slot) if page >= 0]

    def references(self, page: int) -> int:
        """Number of slots that share a page."""
        return self._references[page]

    def append(self, slot: int) -> int:
        """Allocate one more page for a slot.

        Returns:
            The page's number.

        Raises:
            OutOfMemoryError: no page is free.
        """
        page = self._take()
        self.tables[slot, self._counts[slot]] = page
        self._counts[slot] += 1
        return page

    def truncate(self, slot: int, count: int) -> None:
        """Release a slot's pages after its first `count`."""
        while self._counts[slot] > count:
            self._counts[slot] -= 1
            page = int(self.tables[slot, self._counts[slot]])
            self.tables[slot, self._counts[slot]] = -1
            if page >= 0:
                self._release(page)

    def share(self, source: int, target: int, count: int) -> None:
        """Share the first `count` pages of a slot with a slot that has none."""
        pages = self.entries(source)[:count]
        self.tables[target, : len(pages)] = pages
        self._counts[target] = len(pages)
        for page in pages:
            if page >= 0:
                self._references[page] += 1

    def own(self, slot: int, index: int) -> tuple[int, int] | None:
        """Unshare a slot's page, so that it may be written.

        Args:
            slot: The slot.
            index: Which of its pages.

        Returns:
            (old, new) if the page was shared: the slot now has `new`, and the caller copies `old` to it; None
            otherwise.

        Raises:
            OutOfMemoryError: no page is free.
        """
        old = int(self.tables[slot, index])
        if self._references[old] == 1:
            return None
        new = self._take()
        self.tables[slot, index] = new
        self._release(old)
        return old, new

    def _take(self) -> int:
        """Allocate a page."""
        if not self._free:
            raise OutOfMemoryError(
                f"all {self.capacity} pages of the KV cache are in use: close a conversation, or load the model with a "
                "longer context or fewer slots"
            )
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _release(self, page: int) -> None:
        """Drop one reference."""
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)
