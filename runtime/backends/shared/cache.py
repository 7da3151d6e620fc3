"""The caches of a model's parts as one cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

import numpy as np

from runtime.kv.control import KVCache
from runtime.kv.kinds import CacheKind
from runtime.kv.pages import PageTable
from runtime.kv.stores import Arrays, Int32Array

_END = "part_end"
"""Array of the piece behind a part's last one."""


class SharedCache(KVCache):
    """The caches of a model's parts, which hold the same tokens: each says what holds for its blocks.

    Steps begin the parts' caches themselves; everything else goes to all of them.

    Args:
        caches: Of the parts, in their order.
    """

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self._caches = tuple(caches)

    @property
    def kind(self) -> CacheKind:
        return self._caches[0].kind

    @property
    def table(self) -> PageTable:
        return self._caches[0].table

    def length(self, slot: int) -> int:
        """See `KVCache.length`. A step that failed in between may have left more tokens in a first part."""
        return min(cache.length(slot) for cache in self._caches)

    def slot_bytes(self, slot: int) -> int:
        return sum(cache.slot_bytes(slot) for cache in self._caches)

    def paged_length(self, slot: int) -> int:
        return min(cache.paged_length(slot) for cache in self._caches)

    def reach(self, slot: int, length: int) -> int:
        found, length = length, -1
        while found != length:
            length = found
            for cache in self._caches:
                found = cache.reach(slot, found)
        return found

    def exact_from(self, slot: int) -> int:
        return max(cache.exact_from(slot) for cache in self._caches)

    def rows_until_flush(self, slot: int) -> int:
        return min(cache.rows_until_flush(slot) for cache in self._caches)

    def batch_invariant_rows(self, slot: int) -> int:
        return min(cache.batch_invariant_rows(slot) for cache in self._caches)

    def has_room(self, slot: int, end: int) -> bool:
        return all(cache.has_room(slot, end) for cache in self._caches)

    def has_room_beside(self, ends: Mapping[int, int], end: int, *, source: int, shared: int) -> bool:
        return all(cache.has_room_beside(ends, end, source=source, shared=shared) for cache in self._caches)

    @property
    def layout(self) -> str:
        return " | ".join(cache.layout for cache in self._caches)

    def export(self, slot: int) -> Iterator[Arrays]:
        """See `KVCache.export`. Each part's pieces end with a piece that says so."""
        for number, cache in enumerate(self._caches):
            yield from cache.export(slot)
            yield {_END: np.array([number], np.int32)}

    def load(self, slot: int, length: int, paged: int, pieces: Iterable[Arrays]) -> None:
        incoming = iter(pieces)
        try:
            for cache in self._caches:
                own = takewhile(lambda piece: _END not in piece, incoming)
                cache.load(slot, length, paged, own)
                deque(own, maxlen=0)
        except BaseException:
            self.clear(slot)
            raise

    def begin(self, slots: Int32Array, positions: Int32Array, *, flush: bool = True, draft: bool = False) -> None:
        for cache in self._caches:
            cache.begin(slots, positions, flush=flush, draft=draft)

    def trim(self, slot: int, length: int) -> None:
        for cache in self._caches:
            cache.trim(slot, length)

    def fork(self, source: int, target: int, length: int) -> None:
        for cache in self._caches:
            cache.fork(source, target, length)

    def lengthen(self, slot: int, length: int) -> None:
        for cache in self._caches:
            cache.lengthen(slot, length)

    def clear(self, slot: int) -> None:
        for cache in self._caches:
            cache.clear(slot)
