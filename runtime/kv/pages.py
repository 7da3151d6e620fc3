"""Page tables: block tables, reference counts and a free list, for the caches of all backends.

Layers with a sliding window (`WindowTable`) keep the pages that a slot's next rows read, and those that earlier prompts
began with. Entry i of a slot's table holds the same tokens as in the table of all tokens, or is released: then no row
that may come reads it. A slot can be cut back to every length at which the pages that the next row would read are
there. That is so a few tokens back (`runtime.kv.groups.SLACK`), and at the slot's *snapshots*: lengths whose pages stay
although the slot has moved on. Snapshots only use pages that would otherwise be free: when none is, they are dropped.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.errors import OutOfMemoryError, RequestError
from runtime.kv import groups
from runtime.kv.kinds import CacheKind
from runtime.kv.states import MOST_SNAPSHOTS, SMALL_STEP, is_due, least_needed
from runtime.kv.stores import Arrays


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
        released (`WindowTable`): read by kernels. Changed in place."""
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


class WindowTable(PageTable):
    """The pages of all slots, in layers with a window.

    Args:
        kind: The kind of cache.
        window: Tokens that a row sees at most, its own included.
        slots: Number of slots.
        pages_per_slot: Most pages of one slot, released ones counted.
        pages: Total number of pages: at least `runtime.kv.groups.live_pages` for each slot, so that a step always finds
            one.
    """

    def __init__(self, kind: CacheKind, window: int, slots: int, pages_per_slot: int, pages: int) -> None:
        super().__init__(slots, pages_per_slot, pages)
        self._kind, self._window = kind, window
        self._starts = [0] * slots  # the first row of the latest step, or where the slot was cut back since
        self._snapshots: list[set[int]] = [set() for _ in range(slots)]

    def snapshots(self, slot: int) -> list[int]:
        """The lengths whose pages are kept, in order."""
        return sorted(self._snapshots[slot])

    def reach(self, slot: int, length: int) -> int:
        """Most tokens, at most `length`, to which a slot of at least as many can be cut back."""
        while True:
            first, end = self._read_at(slot, length)
            released = np.flatnonzero(self.tables[slot, first:end] < 0)
            if not released.size:
                return length
            length = self._kind.sinks + self._kind.page * (first + int(released[-1]))

    def advance(self, slot: int, start: int, rows: int) -> None:
        """Release what a step no longer reads. A snapshot is taken before a step of many rows, if it is due.

        Args:
            slot: The slot, cut back to the first row.
            start: Position of the first row.
            rows: Number of rows.
        """
        own, before = self._snapshots[slot], self._first_live(slot)
        due = rows > SMALL_STEP and is_due(own, start)
        if due:
            while len(own) >= MOST_SNAPSHOTS:
                own.remove(least_needed(own, start))
            own.add(start)
        self._starts[slot] = start
        if due or self._first_live(slot) != before:
            self._sweep(slot)

    def settle(self, slot: int) -> None:
        """Release a page that was flushed just now, if the step does not read it."""
        if self.count(slot) <= self._first_live(slot):
            self._sweep(slot)

    def cut(self, slot: int, length: int) -> None:
        """Forget what is behind the first `length` tokens of a slot, whose pages were truncated."""
        self._starts[slot] = min(self._starts[slot], length)
        self._snapshots[slot] = {at for at in self._snapshots[slot] if at <= length}
        self._sweep(slot)

    def inherit(self, source: int, target: int, length: int) -> None:
        """Take over the snapshots of the first `length` tokens of a slot, whose pages another now shares."""
        self._starts[target], self._snapshots[target] = length, set(self._snapshots[source])
        self.cut(target, length)

    def lengthen(self, slot: int, count: int, length: int) -> list[tuple[int, int]]:
        """Lengthen a slot before its pages, which move on; what would be read before them is allocated.

        Args:
            slot: The slot; it has a page.
            count: Resulting pages, released ones counted.
            length: Resulting tokens.

        Returns:
            Pairs of pages (old, new): the caller copies `old` to `new`.
        """
        own, before = self.tables[slot], self._counts[slot]
        own[:count] = np.concatenate([np.full(count - before, -1, np.int32), own[:before]])
        self._counts[slot], self._starts[slot] = count, length
        self._snapshots[slot].clear()
        self._sweep(slot)
        held, copied = self.held(slot), []
        for index in range(self._first_live(slot), count):
            if own[index] < 0:
                own[index] = self._take()
                copied.append((held[index % len(held)], int(own[index])))
        return copied

    def described(self, slot: int) -> Arrays:
        """Which pages a slot has, for `rebuild`: int32 `held`, indices of pages, and `snapshots`, lengths."""
        held = np.flatnonzero(self.tables[slot] >= 0)
        return {"held": held.astype(np.int32), "snapshots": np.array(self.snapshots(slot), np.int32)}

    def rebuild(self, slot: int, count: int, length: int, described: Arrays) -> list[int]:
        """Allocate the pages of an empty slot again: those read next, and for snapshots, latest first, what is free.

        Args:
            slot: The slot.
            count: Its pages, released ones counted.
            length: Its tokens.
            described: What `described` gave.

        Returns:
            A page for each of `described`, -1 where none was allocated.

        Raises:
            RequestError: the description is malformed, or a page is missing.
        """
        held, snapshots = _ordered(described, "held", count - 1), _ordered(described, "snapshots", length)
        self._counts[slot], self._starts[slot] = count, length
        for index in (index for index in held if index >= self._first_live(slot)):
            self.tables[slot, index] = self._take()
        for at in reversed(snapshots):
            first, end = self._read_at(slot, at)
            lacking = [index for index in held if first <= index < end and self.tables[slot, index] < 0]
            if len(lacking) <= self.free:
                self._snapshots[slot].add(at)
                for index in lacking:
                    self.tables[slot, index] = self._take()
        if self.reach(slot, length) != length:
            raise RequestError("saved pages do not hold what the next token reads in layers with a window")
        pages: list[int] = self.tables[slot, held].tolist()
        return pages

    def _read_at(self, slot: int, length: int) -> tuple[int, int]:
        """The pages of a slot, first and end, that a row behind its first `length` tokens reads."""
        page, sinks = self._kind.page, self._kind.sinks
        behind = -(-max(0, length - sinks) // page)
        return max(0, length - self._window + 1 - sinks) // page, min(self._counts[slot], behind)

    def _first_live(self, slot: int) -> int:
        """The first page that a step reads or may read once the slot is cut back by a few tokens."""
        return self._read_at(slot, max(0, self._starts[slot] - groups.SLACK))[0]

    def _sweep(self, slot: int) -> None:
        """Release the pages before the first live one that no snapshot keeps."""
        own = self.tables[slot, : self._first_live(slot)]
        released = own >= 0
        for at in self._snapshots[slot]:
            first, end = self._read_at(slot, at)
            released[first:end] = False
        for index in np.flatnonzero(released).tolist():
            self._release(int(own[index]))
            own[index] = -1

    def _take(self) -> int:
        """Allocate a page; drops snapshots if none is free."""
        while not self._free and any(self._snapshots):
            slot = max(range(len(self._snapshots)), key=lambda each: len(self._snapshots[each]))
            self._snapshots[slot].remove(least_needed(self._snapshots[slot], self._starts[slot]))
            self._sweep(slot)
        return super()._take()


def _ordered(described: Arrays, name: str, most: int) -> list[int]:
    """Ascending numbers from 0 to `most`.

    Raises:
        RequestError: there are none, or they are something else.
    """
    found = described.get(name)
    if found is None or found.dtype != np.int32 or found.ndim != 1:
        raise RequestError(f"saved arrays do not say which pages they hold: {name!r} is missing or malformed")
    numbers: list[int] = found.tolist()
    if sorted(set(numbers)) != numbers or not all(0 <= number <= most for number in numbers):
        raise RequestError(f"saved arrays do not say which pages they hold: {name!r} is {numbers}")
    return numbers
