"""Who holds which page: block tables, reference counts and a list of free pages. Used by the caches of all backends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.errors import OutOfMemoryError


class PageTable:
    """The pages of all slots.

    A slot's pages stand in the order of its tokens. Several slots may hold the same page; it is free again when the
    last of them has let go. Freed pages are taken first, the latest first.

    Args:
        slots: Number of slots.
        pages_per_slot: Most pages of one slot.
        pages: Pages that there are in all; None = enough for every slot.
    """

    def __init__(self, slots: int, pages_per_slot: int, pages: int | None = None) -> None:
        self.capacity = slots * pages_per_slot if pages is None else pages
        """Pages that there are."""
        self.tables: npt.NDArray[np.int32] = np.full((slots, pages_per_slot), -1, np.int32)
        """int32 [slots, pages_per_slot] page numbers in the order of tokens, -1 behind the last: for kernels to read.
        Changed in place."""
        self._counts = [0] * slots
        self._references = [0] * self.capacity
        self._free = list(range(self.capacity - 1, -1, -1))

    @property
    def used(self) -> int:
        """Pages that somebody holds, each counted once."""
        return self.capacity - len(self._free)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def count(self, slot: int) -> int:
        """Pages that a slot holds."""
        return self._counts[slot]

    def held(self, slot: int) -> list[int]:
        """Page numbers of a slot in the order of its tokens."""
        pages: list[int] = self.tables[slot, : self._counts[slot]].tolist()
        return pages

    def references(self, page: int) -> int:
        """Slots that hold a page."""
        return self._references[page]

    def append(self, slot: int) -> int:
        """Give a slot one more page, its own.

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
        """Let go of a slot's pages behind its first `count`."""
        while self._counts[slot] > count:
            self._counts[slot] -= 1
            page = int(self.tables[slot, self._counts[slot]])
            self.tables[slot, self._counts[slot]] = -1
            self._release(page)

    def share(self, source: int, target: int, count: int) -> None:
        """Let a slot that has no pages hold the first `count` of another's."""
        pages = self.held(source)[:count]
        self.tables[target, : len(pages)] = pages
        self._counts[target] = len(pages)
        for page in pages:
            self._references[page] += 1

    def own(self, slot: int, index: int) -> tuple[int, int] | None:
        """Make sure that nobody else holds a slot's page, so that it may be written.

        Args:
            slot: The slot.
            index: Which of its pages.

        Returns:
            (old, new) where the page was shared: the slot now holds `new`, and the caller copies what `old` holds;
            None where nothing is to be done.

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
        """A free page, now held once."""
        if not self._free:
            raise OutOfMemoryError(
                f"all {self.capacity} pages of the KV cache are in use: close a conversation, or load the model with a "
                "longer context or fewer slots"
            )
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _release(self, page: int) -> None:
        """One holder less."""
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)
