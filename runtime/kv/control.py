"""KV cache control: the bookkeeping of lengths, pages and windows that all backends share.

A slot's tokens are stored in this order: its first `sinks` tokens in the window, whole pages, and the rest in the
window after the sinks. As long as there is no page, all of them are in the window.

Layers that keep the same tokens are a group (`runtime.kv.groups`) with pages and a table of its own. Entry i of every
table holds the same tokens, so what follows is one bookkeeping for all; "a page" is one in each group.

Each backend stores the numbers itself (`runtime.kv.stores.PageStore`). What is dropped, shared and copied when
tokens move from the window into a page is decided here, so it is the same on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

import numpy as np

from models.spec import ModelSpec
from runtime.errors import RequestError
from runtime.kv.groups import PageGroup, layers_alike, page_groups
from runtime.kv.kinds import CacheKind, page_bytes, window_token_bytes
from runtime.kv.pages import PageTable, WindowTable
from runtime.kv.states import SMALL_STEP, Memory, States
from runtime.kv.stores import Arrays, Int32Array, PageStore, checked, chunks, joined

Store = TypeVar("Store", bound=PageStore)
"""A backend's store."""


class KVCache:
    """The cache of a loaded model over a backend's stores, used between steps; backends subclass it.

    A model's memory of a sequence is a cache in layers with attention, and a state in others (`runtime.kv.states`).
    Both begin steps, are cut back, forked, saved and loaded together; users of the cache don't know which it is. They
    ask only how far a slot can be cut back: anywhere in pages that hold all tokens, and here and there in a state, and
    in pages that hold only what a sliding window reads.

    Args:
        kind: The kind of cache.
        spec: The model.
        stores: The groups from `runtime.kv.groups.page_groups` in their order, each with its storage by the backend.
        context: Tokens of a slot.
        slots: Sequences kept at the same time.
        max_rows: Most rows of a step.
        memory: Where the numbers of states are kept; None: in main memory.
    """

    states: States | None
    """The states of layers without a cache; None if all have one."""

    def __init__(
        self,
        kind: CacheKind,
        spec: ModelSpec,
        stores: Mapping[PageGroup, PageStore],
        *,
        context: int,
        slots: int,
        max_rows: int,
        memory: Memory | None = None,
    ) -> None:
        self._kind = kind
        self._context = context
        self._max_rows = max_rows
        self._token_bytes = window_token_bytes(kind, spec)
        self._lengths = [0] * slots
        self.states = States(spec, slots, memory) if spec.state_layers else None
        most = kind.max_pages(context)
        self.tables = tuple(
            PageTable(slots, most, group.pages)
            if group.window is None
            else WindowTable(kind, group.window, slots, most, group.pages)
            for group in stores
        )
        """The pages of each slot, for each group of layers."""
        self._windowed = [table for table in self.tables if isinstance(table, WindowTable)]
        self._parts = tuple(zip(self.tables, stores.values(), strict=True))
        self._page_bytes = [page_bytes(kind, spec, group.layers) for group in stores]
        self._table_of = {
            layer: table for group, table in zip(stores, self.tables, strict=True) for layer in group.layers
        }

    @property
    def kind(self) -> CacheKind:
        """The kind of cache; `kind.has_draft` says whether a draft can read less."""
        return self._kind

    @property
    def table(self) -> PageTable:
        """The pages of the first group: those of all tokens, if any layer keeps them."""
        return self.tables[0]

    def table_of(self, layer: int) -> PageTable:
        """The pages of a layer with a cache."""
        return self._table_of[layer]

    def length(self, slot: int) -> int:
        """Tokens of a slot."""
        return self._lengths[slot]

    def slot_bytes(self, slot: int) -> int:
        """Bytes a slot uses, shared pages included."""
        sizes = zip(self.tables, self._page_bytes, strict=True)
        paged = sum(len(table.held(slot)) * size for table, size in sizes)
        state = 0 if self.states is None else self.states.slot_bytes
        return paged + self.window_length(slot) * self._token_bytes + state

    def paged_length(self, slot: int) -> int:
        """Tokens of a slot that are in pages; during a step they precede the window's recent ones."""
        return min(self.table.count(slot) * self._kind.page, self._lengths[slot])

    def window_length(self, slot: int) -> int:
        """Tokens of a slot that are in its window, sinks included."""
        return self._lengths[slot] - self.paged_length(slot)

    def reach(self, slot: int, length: int) -> int:
        """Most tokens, at most `length`, to which `trim` and `fork` can go, and at which a step can begin."""
        found, length = min(length, self._lengths[slot]), -1
        while found != length:
            length = found
            for own in self._windowed:
                found = own.reach(slot, found)
            if self.states is not None:
                found = self.states.reach(slot, found)
        return found

    def exact_from(self, slot: int) -> int:
        """The shortest length to which `trim` and `fork` can go without loss; below it, a page is reopened."""
        paged = self.paged_length(slot)
        return self._kind.sinks + paged if self._kind.windowed and paged else 0

    def rows_until_flush(self, slot: int) -> int:
        """Most rows of the slot's next step for which all rows see what plain decoding would see."""
        if not self._kind.windowed:
            return self._context - self._lengths[slot]
        kept, page = self._kind.unpaged, self._kind.page
        window = self.window_length(slot)
        return kept + page - window if window < kept + page else page - (window - kept) % page

    def batch_invariant_rows(self, slot: int) -> int:
        """Most rows of the slot's next step for which each is computed as it would be alone.

        At most `rows_until_flush`, and fewer if a backend traverses the context differently for rows further on: sums
        are then added in another order, which the rounding of activations makes visible.
        """
        rows = self.rows_until_flush(slot)
        return rows if self.states is None else min(rows, SMALL_STEP)

    def has_room(self, slot: int, end: int) -> bool:
        """Whether enough pages are free for a slot to grow to `end` tokens, at most the context."""
        return self.table in self._windowed or self._lacking(slot, end) <= self.table.free

    def has_room_beside(self, ends: Mapping[int, int], end: int, *, source: int, shared: int) -> bool:
        """Whether one more slot can grow to `end` tokens beside others if everything else is dropped.

        Args:
            ends: The length each of the others is to reach, in tokens, at most the context.
            end: The length it is to reach, at most the context.
            source: The slot from which it is to be forked.
            shared: Tokens it shares with that slot.
        """
        if self.table in self._windowed:  # windows have pages for every slot
            return True
        held = {page for slot in ends for page in self.table.held(slot)}
        lacking = sum(max(0, self._lacking(slot, its_end)) for slot, its_end in ends.items())
        paged = self.paged_length(source) // self._kind.page if source in ends else 0
        own = self._kind.stored_pages(end) - min(paged, self._kind.whole_pages(shared))
        return len(held) + lacking + own <= self.table.capacity

    @property
    def layout(self) -> str:
        """Name of the layout of the arrays of `export`, which changes with it."""
        groups = "+".join(store.saved_layout for _, store in self._parts)
        return f"{groups}-windows{len(self._windowed)}" if self._windowed else groups

    def export(self, slot: int) -> Iterator[Arrays]:
        """The contents of a slot in pieces: its window, then a few pages at a time.

        Pages of a group with a window are preceded by which of the slot's they are.

        A piece may be a view of the cache: use it before the next.
        """
        for table, store in self._parts:
            yield store.read_window(slot, self.window_length(slot))
            if isinstance(table, WindowTable):
                yield table.described(slot)
            for pages in chunks(table.held(slot)):
                yield store.read_pages(pages)
        if self.states is not None:
            yield from self.states.export(slot)

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
        window, page = length - paged, self._kind.page
        self.clear(slot)
        fits = 0 <= window <= self._kind.window_capacity(self._max_rows) and (not window or paged % page == 0)
        if not (fits and 0 < length <= self._context):
            raise RequestError(f"a {self._kind.name} cache of {self._context} tokens cannot take {paged} + {window}")
        incoming = iter(pieces)
        try:
            for table, store in self._parts:
                store.write_window(slot, window, checked(next(incoming, {}), store.read_window(slot, window)))
                if isinstance(table, WindowTable):
                    _load_some(slot, -(-paged // page), length, table, store, incoming)
                    continue
                for _ in range(-(-paged // page)):
                    table.append(slot)
                for pages in chunks(table.held(slot)):
                    store.write_pages(pages, checked(next(incoming, {}), store.read_pages(pages)))
            if self.states is not None:
                self.states.load(slot, length, incoming)
        except BaseException:
            self.clear(slot)
            raise
        self._lengths[slot] = length

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
        runs = list(runs_of(slots, positions))
        for slot, start, end in runs:
            self._check_run(slot, start, end, flush=flush)
            if self.states is not None:
                self.states.check(slot, start, end, draft=draft)
        for slot, start, end in runs:
            if start < self._lengths[slot]:
                self.trim(slot, start)
            for table in self._windowed:
                table.advance(slot, start, end - start)
            if not self._kind.windowed:
                self._make_room(slot, start, end)
            elif flush:
                self._flush(slot)
            self._lengths[slot] = end
        if self.states is not None:  # last: nothing can fail any more, and rows that stay are absorbed once
            for slot, start, end in runs:
                self.states.begin(slot, start, end, draft=draft)

    def trim(self, slot: int, length: int) -> None:
        """Truncate a slot to its first `length` tokens.

        If that ends inside a quantized page, the remaining tokens of the page return to the window, dequantized.

        Raises:
            RequestError: the slot has fewer tokens, or `reach` is less.
        """
        self._check_length(slot, length)
        if self.states is not None:
            self.states.trim(slot, length)
        page = self._kind.page
        if not self._kind.windowed:
            for table in self.tables:
                table.truncate(slot, -(-length // page))
        elif length < self.exact_from(slot):
            whole, rest = divmod(max(0, length - self._kind.sinks), page)
            for table, store in self._parts:
                if rest:
                    store.restore(table.entries(slot)[whole], slot, rest)
                table.truncate(slot, whole)
        for own in self._windowed:
            own.cut(slot, length)
        self._lengths[slot] = length

    def fork(self, source: int, target: int, length: int) -> None:
        """Start `target` from the first `length` tokens of `source`, replacing its contents. Pages are shared.

        Raises:
            RequestError: the source has fewer tokens, or its `reach` is less.
        """
        self._check_length(source, length)
        if source == target:
            self.trim(source, length)
            return
        self.clear(target)
        if self.states is not None:
            self.states.fork(source, target, length)
        page, paged, sinks = self._kind.page, self.paged_length(source), self._kind.sinks
        exact = length >= self.exact_from(source)
        whole, rest = divmod(max(0, length - sinks), page)
        for table, store in self._parts:
            if not self._kind.windowed:
                table.share(source, target, -(-length // page))
            elif exact:
                table.share(source, target, paged // page)
                store.copy_window(source, target, length - paged)
            else:
                table.share(source, target, whole)
                store.copy_window(source, target, min(length, sinks))
                if rest:
                    store.restore(table.entries(source)[whole], target, rest)
        for own in self._windowed:
            own.inherit(source, target, length)
        self._lengths[target] = length

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
        page, paged = self._kind.page, self.paged_length(slot)
        added, rest = divmod(length - self._lengths[slot], page)
        if rest or added < 0 or paged == 0 or paged % page or length > self._context:
            raise RequestError(
                f"slot {slot} has {self._lengths[slot]} tokens, {paged} of them in pages of {page}, and a context of "
                f"{self._context}: it cannot be lengthened to {length}"
            )
        for table, store in self._parts:
            if isinstance(table, WindowTable):
                for old, new in table.lengthen(slot, table.count(slot) + added, length):
                    store.copy_page(old, new)
                continue
            copied = table.held(slot)
            try:
                for i in range(added):
                    store.copy_page(copied[i % len(copied)], table.append(slot))
            except BaseException:
                table.truncate(slot, len(copied))
                raise
        if self.states is not None:
            self.states.shift(slot, length - self._lengths[slot])
        self._lengths[slot] = length

    def clear(self, slot: int) -> None:
        """Drop all tokens of a slot."""
        for table in self.tables:
            table.truncate(slot, 0)
        for own in self._windowed:
            own.cut(slot, 0)
        self._lengths[slot] = 0
        if self.states is not None:
            self.states.clear(slot)

    def _lacking(self, slot: int, end: int) -> int:
        """Pages that a slot still needs to grow to `end` tokens."""
        page, count = self._kind.page, self.table.count(slot)
        needed = self._kind.stored_pages(end) - count
        last = self._lengths[slot] // page
        if not self._kind.windowed and last < count and self.table.references(self.table.held(slot)[last]) > 1:
            needed += 1  # a copy of the page that the next token is written to
        return needed

    def _flush(self, slot: int) -> None:
        """Flush pages from a slot's window while it holds sinks + keep + page tokens or more."""
        page, sinks = self._kind.page, self._kind.sinks
        while (window := self.window_length(slot)) >= self._kind.unpaged + page:
            for table, store in self._parts:
                store.flush(slot, table.append(slot), window - sinks - page)
            for own in self._windowed:
                own.settle(slot)

    def _make_room(self, slot: int, start: int, end: int) -> None:
        """Allocate unshared pages for the tokens start .. end - 1 of a slot."""
        page = self._kind.page
        for table, store in self._parts:
            if start % page and (copied := table.own(slot, start // page)):
                store.copy_page(*copied)
            while table.count(slot) * page < end:
                table.append(slot)

    def _check_run(self, slot: int, start: int, end: int, *, flush: bool) -> None:
        """Raise RequestError if a slot's rows do not continue its tokens, or do not fit."""
        length = self._lengths[slot]
        if start > length:
            raise RequestError(
                f"a step writes position {start} of slot {slot}, which has {length} tokens: positions must follow on"
            )
        if end > self._context:
            raise RequestError(f"a step writes position {end - 1} of slot {slot}; the context is {self._context}")
        if start < length:
            self._check_length(slot, start)
        window = start - min(self.paged_length(slot), start)
        if self._kind.windowed and not flush and window + end - start > self._kind.window_capacity(self._max_rows):
            raise RequestError(f"the window of slot {slot} is full: let a step flush it before drafting further")

    def _check_length(self, slot: int, length: int) -> None:
        """Raise RequestError if a slot has fewer tokens, or cannot be cut back to so many."""
        if not 0 <= length <= self._lengths[slot]:
            raise RequestError(f"slot {slot} has {self._lengths[slot]} tokens and cannot be cut back to {length}")
        if (reach := self.reach(slot, length)) != length:
            raise RequestError(
                f"slot {slot} can be cut back to {reach} tokens, not to {length}: its states, or the pages of layers "
                "with a window, were not kept there"
            )


class BackendCache(KVCache, Generic[Store]):
    """A cache over stores that a backend makes, one for each group of layers and each shape of heads.

    Args:
        kind: The kind of cache.
        spec: The model.
        make: Makes the store of some layers, from the number of its pages and the layers.
        context: Tokens of a slot.
        slots: Sequences kept at the same time.
        max_rows: Most rows of a step.
        pages: Pages that the slots share; None = enough for every slot.
        memory: Where the numbers of states are kept; None: in main memory.
    """

    def __init__(
        self,
        kind: CacheKind,
        spec: ModelSpec,
        make: Callable[[int, tuple[int, ...]], Store],
        *,
        context: int,
        slots: int,
        max_rows: int,
        pages: int | None = None,
        memory: Memory | None = None,
    ) -> None:
        found = page_groups(kind, spec, context=context, slots=slots, max_rows=max_rows, pages=pages)
        self.groups = {
            group: {layers: make(group.pages, layers) for layers in layers_alike(spec, group.layers)} for group in found
        }
        """The stores of each group, by their layers."""
        self.stores = tuple(store for stores in self.groups.values() for store in stores.values())
        """The buffers, for each group and each shape of heads."""
        together = {group: joined([*stores.values()]) for group, stores in self.groups.items()}
        super().__init__(kind, spec, together, context=context, slots=slots, max_rows=max_rows, memory=memory)

    @property
    def store(self) -> Store:
        """The buffers of a model whose layers are all alike."""
        (store,) = self.stores
        return store

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(store.nbytes for store in self.stores) + (0 if self.states is None else self.states.nbytes)


def _load_some(
    slot: int, count: int, length: int, table: WindowTable, store: PageStore, incoming: Iterator[Arrays]
) -> None:
    """Load the pages of a group with a window: of those that were exported, the ones for which there is room."""
    described = next(incoming, {})
    pages = table.rebuild(slot, count, length, described)
    for each in chunks(pages):
        store.write_pages(each, checked(next(incoming, {}), store.read_pages([0] * len(each))))


def runs_of(slots: Int32Array, positions: Int32Array) -> Iterator[tuple[int, int, int]]:
    """Slot, first position and end of every slot's rows in a step.

    Raises:
        RequestError: a slot's rows are not adjacent and in consecutive positions.
    """
    if slots.size == 1:  # a decoded token
        yield slots.item(), positions.item(), positions.item() + 1
        return
    ends = [*(np.flatnonzero(np.diff(slots)) + 1).tolist(), slots.size]
    start, seen = 0, set()
    for end in ends:
        slot, first = int(slots[start]), int(positions[start])
        if slot in seen or not np.array_equal(positions[start:end], np.arange(first, first + end - start)):
            raise RequestError(f"the rows of slot {slot} must be adjacent in a step, in consecutive positions")
        seen.add(slot)
        yield slot, first, first + end - start
        start = end
