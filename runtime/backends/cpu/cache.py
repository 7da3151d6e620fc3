"""KV cache of the CPU backend: pages of records (`runtime.backends.cpu.data.pages`), and windows of recent tokens.

Per page and layer: records [H_kv, bytes]. Kinds with a window also have, per slot, layer and head and in half
precision, keys [tokens / 16, D, 16] (16 tokens side by side) and values [tokens, D padded to 16].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from models.spec import ModelSpec
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.pages import PageLayout
from runtime.backends.cpu.data.records import CONTROL_WORDS, LANES, SPAN, padded, parameters_of
from runtime.backends.cpu.link import link
from runtime.backends.cpu.pool import Pool
from runtime.backends.cpu.scratch import scratch_of
from runtime.backends.cpu.tiles import aligned_zeros
from runtime.backends.decoder import DecoderOptions
from runtime.kv.basis import low_rank_start
from runtime.kv.control import BackendCache
from runtime.kv.kinds import KINDS, PARTS, CacheKind, Part
from runtime.kv.states import RING
from runtime.kv.stores import Arrays, Int32Array, kept_by

_DITHER_BITS = 8


class CpuStore:
    """The numbers of all pages and windows. Implements `runtime.kv.stores.PageStore`.

    Args:
        kind: The kind of cache.
        spec: The model.
        pages: Number of pages.
        slots: Number of windows.
        window: Capacity of a window in tokens, a multiple of SPAN.
        layers: The layers that it keeps, whose heads are alike; by default all that have a cache.
    """

    def __init__(
        self,
        kind: CacheKind,
        spec: ModelSpec,
        *,
        pages: int,
        slots: int,
        window: int,
        layers: Sequence[int] | None = None,
    ) -> None:
        own, shape = kept_by(spec, layers)
        self._kind, self.layers = kind, own
        """The layers, in their order."""
        self.layout = PageLayout(kind, shape.dim)
        """The layout of a record."""
        self.saved_layout = f"cpu-3-{self.layout.name}"
        """Version of the byte format; increase it when bytes change their meaning. The name also covers their
        positions."""
        count, heads, dim = len(own), shape.kv_heads, shape.dim
        self.records = _by_layer((pages, count, heads, self.layout.record), np.uint8)
        """uint8 [layers, pages, H_kv, bytes]."""
        self._keys = _by_layer((slots, count, heads, window // LANES, dim, LANES), np.float16)
        self._values = _by_layer((slots, count, heads, window, padded(dim, LANES)), np.float16)
        self._description = self.layout.description(layers=count, window=window)
        self.scratch_bytes = 0
        """Bytes of scratch per thread for flushing and restoring pages."""
        if kind.windowed:
            self._prepare_paging(dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, in all layers."""
        return self.records[:, :1].nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.records.nbytes + self._keys.nbytes + self._values.nbytes

    def addresses(self, layer: int) -> tuple[int, int, int]:
        """Addresses of the records of a layer with a cache, counted among those, and of keys and values in windows."""
        records, keys, values = (array[layer].ctypes.data for array in (self.records, self._keys, self._values))
        return int(records), int(keys), int(values)

    def window(self, part: Part, slot: int, count: int) -> npt.NDArray[np.float16]:
        """The first `count` tokens of a slot's window: float16 [layers, H_kv, count, D], a copy."""
        if part == "values":
            return self._values[:, slot, :, :count, : self.layout.head_dim].copy()
        tiles = self._keys[:, slot, :, : -(-count // LANES)]
        L, H_kv, _, D, _ = tiles.shape
        turned: npt.NDArray[np.float16] = np.swapaxes(tiles, -1, -2).reshape(L, H_kv, -1, D)[:, :, :count]
        return turned

    def fields(self, part: Part, pages: list[int]) -> Mapping[str, npt.NDArray[Any]]:
        """Fields of some pages, by the names of `runtime.kv.kinds.page_fields`: each [layers, pages, H_kv, ...]."""
        return self.layout.read(self.records[:, pages], part)

    def _prepare_paging(self, head_dim: int) -> None:
        """Prepare flushing and restoring of pages: initial factors, scratch, a program and a pool."""
        wide, rank = self.layout.padded, min(self._kind.rank, head_dim)
        self._start = aligned_zeros((max(1, rank), wide), np.float32)
        if rank:
            self._start[:, :head_dim] = low_rank_start(head_dim, rank).T
        self._program = aligned_zeros((1, op.WIDTH), np.int64)
        self.scratch_bytes = scratch_of(self._flush(0, 0, 0))
        self._scratch = aligned_zeros((self.scratch_bytes,), np.uint8)
        control = aligned_zeros((CONTROL_WORDS,), np.int64)
        parameters = parameters_of(control)
        parameters["scratch"], parameters["scratch_stride"] = self._scratch.ctypes.data, self.scratch_bytes
        self._pool = Pool(control, 1)

    def _page(self, slot: int, page: int) -> op.Page:
        """A slot's window and a page in all layers."""
        records, keys, values = (
            op.Matrix(int(array.ctypes.data), array.strides[0]) for array in (self.records, self._keys, self._values)
        )
        layers, _, heads = self.records.shape[:3]
        return op.Page(int(self._description.ctypes.data), layers, heads, records, page, keys, values, slot)

    def _flush(self, slot: int, page: int, rest: int) -> op.Flush:
        return op.Flush(self._page(slot, page), rest, int(self._start.ctypes.data))

    def _run(self, instruction: op.Instruction) -> None:
        """Run FLUSH or RESTORE, in all layers."""
        op.write(self._program[0], instruction)
        link(self._program, self._pool.threads)
        self._pool.step(self._program)

    def use(self, pool: Pool) -> None:
        """Flush and restore pages with a pool's threads, each with `scratch_bytes`, instead of the caller's thread."""
        if self._kind.windowed:
            self._pool = pool

    def flush(self, slot: int, page: int, rest: int) -> None:
        self._run(self._flush(slot, page, rest))

    def restore(self, page: int, slot: int, count: int) -> None:
        self._run(op.Restore(self._page(slot, page), count))

    def copy_window(self, source: int, target: int, count: int) -> None:
        tiles = -(-count // LANES)
        self._keys[:, target, :, :tiles] = self._keys[:, source, :, :tiles]
        self._values[:, target, :, :count] = self._values[:, source, :, :count]

    def copy_page(self, source: int, target: int) -> None:
        self.records[:, target] = self.records[:, source]

    def read_pages(self, pages: Sequence[int]) -> Arrays:
        """See `runtime.kv.stores.PageStore.read_pages`: records uint8 [layers, pages, H_kv, bytes]."""
        return {"records": self.records[:, list(pages)]}

    def write_pages(self, pages: Sequence[int], arrays: Arrays) -> None:
        kept = [place for place, page in enumerate(pages) if page >= 0]
        self.records[:, [pages[place] for place in kept]] = arrays["records"][:, kept]

    def read_window(self, slot: int, count: int) -> Arrays:
        """See `runtime.kv.stores.PageStore.read_window`: float16 [layers, H_kv, count, D]."""
        return {part: self.window(part, slot, count) for part in PARTS} if self._kind.windowed else {}

    def write_window(self, slot: int, count: int, arrays: Arrays) -> None:
        if count:
            for part in PARTS:
                self._write_window(part, slot, arrays[part])

    def _write_window(self, part: Part, slot: int, x: npt.NDArray[np.float16]) -> None:
        """Write float16 [layers, H_kv, count, D] at the front of a slot's window."""
        count, D = x.shape[-2:]
        if part == "values":
            self._values[:, slot, :, :count, :D] = x
            return
        wide = np.zeros((*x.shape[:2], padded(count, LANES), D), np.float16)
        wide[:, :, :count] = x
        tiles = np.swapaxes(wide.reshape(*x.shape[:2], -1, LANES, D), -1, -2)
        self._keys[:, slot, :, : tiles.shape[2]] = tiles


class CpuCache(BackendCache[CpuStore]):
    """The KV cache of the CPU backend."""

    def __init__(self, spec: ModelSpec, options: DecoderOptions, threads: int) -> None:
        kind = KINDS[options.kv]
        window = padded(kind.window_capacity(options.max_rows), SPAN)
        sizes: dict[str, Any] = {"context": options.context, "slots": options.slots, "max_rows": options.max_rows}

        def make(pages: int, layers: tuple[int, ...]) -> CpuStore:
            return CpuStore(kind, spec, pages=pages, slots=options.slots, window=window, layers=layers)

        super().__init__(kind, spec, make, **sizes, pages=options.pages)
        self.max_splits = max(1, min(8, 2 * threads))
        """Most splits of one head's context."""
        self._windows = {spec.windows[layer] for layer in spec.attention_layers}
        self._paged = aligned_zeros((options.slots,), np.int32)
        self._exact = aligned_zeros((spec.num_layers,), np.int32)
        self.read_exactly(options.sensitive_layers)
        self._dither = aligned_zeros((kind.page,), np.float32)
        self._dither[:] = _dither(kind.page)
        self._descriptions = [
            store.layout.description(
                layers=len(store.layers),
                dither=int(self._dither.ctypes.data),
                tables=int(table.tables.ctypes.data),
                table_step=table.tables.strides[0],
                paged=int(self._paged.ctypes.data),
                window=window,
            )
            for table, stores in zip(self.tables, self.groups.values(), strict=True)
            for store in stores.values()
        ]
        self._stored = {
            layer: op.Stored(int(description.ctypes.data), *store.addresses(place))
            for store, description in zip(self.stores, self._descriptions, strict=True)
            for place, layer in enumerate(store.layers)
        }

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch per thread for flushing and restoring pages."""
        return max(store.scratch_bytes for store in self.stores)

    def use(self, pool: Pool) -> None:
        for store in self.stores:
            store.use(pool)

    def stored(self, layer: int) -> op.Stored:
        """The addresses of a layer with a cache, for instructions."""
        return self._stored[layer]

    def exact(self, layer: int) -> int:
        """Address of int32: whether drafts read both planes of a layer's pages; for instructions."""
        return int(self._exact[layer:].ctypes.data)

    def read_exactly(self, layers: Sequence[int]) -> None:
        """Let drafts read both planes in these layers, and only the upper one in all others."""
        self._exact[:] = 0
        self._exact[list(layers)] = 1

    def state(self, layer: int) -> op.State:
        """The addresses of the states of a layer that has them, for instructions."""
        assert self.states is not None
        own = self.states
        arrays = (own.matrices[layer], own.absorbed, own.absorbs)
        addresses = (int(array.ctypes.data) for array in arrays)
        return op.State(int(own.recent[layer].ctypes.data), RING, own.shapes[layer].inputs, *addresses)

    def begin(self, slots: Int32Array, positions: Int32Array, *, flush: bool = True, draft: bool = False) -> None:
        super().begin(slots, positions, flush=flush, draft=draft)
        for slot in set(slots.tolist()):
            self._paged[slot] = self.paged_length(slot)

    def batch_invariant_rows(self, slot: int) -> int:
        """See `runtime.kv.control.KVCache.batch_invariant_rows`: attention is split by the units that rows see."""
        length, paged, kind = self.length(slot), self.paged_length(slot), self.kind
        if kind.windowed:
            paged += max(0, length - paged - kind.unpaged) // kind.page * kind.page  # flushed first in the step
        firsts = [max(0, length + 1 - window) for window in self._windows if window]
        return min(super().batch_invariant_rows(slot), *(self._rest_of_unit(at, paged) for at in (length, *firsts)))

    def _rest_of_unit(self, position: int, paged: int) -> int:
        """Tokens from a position to the end of its page, or of its span in the window."""
        if not self.kind.windowed:
            return self.kind.page - position % self.kind.page
        sinks = self.kind.sinks if paged else 0
        if sinks <= position < sinks + paged:
            return self.kind.page - (position - sinks) % self.kind.page
        behind = position if position < sinks else position - sinks - paged
        return SPAN - behind % SPAN


def _by_layer(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros of a shape [pages or slots, layers, ...], viewed as [layers, pages or slots, ...].

    All layers of a page are adjacent, so that a short conversation touches little memory: the system maps huge pages of
    2 MiB, and with separate layers each would need at least one.
    """
    return np.swapaxes(aligned_zeros(shape, dtype), 0, 1)


def _dither(count: int) -> npt.NDArray[np.float32]:
    """Evenly spread numbers in [0, 1), neighbours far apart: the bits of 0, 1, 2, ... reversed."""
    numbers = np.arange(count) % 2**_DITHER_BITS
    reverse = sum(((numbers >> bit) & 1) << (_DITHER_BITS - 1 - bit) for bit in range(_DITHER_BITS))
    return (np.asarray(reverse, np.float32) + np.float32(0.5)) / np.float32(2**_DITHER_BITS)
