"""KV cache of the GPU backend: pages and windows on the device, with the tables that kernels read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from models.spec import ModelSpec
from runtime.backends.triton.kernels.cache.kernel import flush
from runtime.backends.triton.kernels.cache.pages import LayerPages
from runtime.backends.triton.kernels.low_rank import low_rank
from runtime.backends.triton.states import DeviceMemory, RunTable
from runtime.kv.control import PagedCache, runs_of
from runtime.kv.groups import layers_alike, page_groups
from runtime.kv.interfaces import Int32Array
from runtime.kv.joint import joined
from runtime.kv.kinds import CacheKind
from runtime.kv.torch_store import TorchStore


class GpuStore(TorchStore):
    """Storage of all pages and windows on the device, byte for byte as in the reference cache; see `TorchStore`."""

    _low_rank = staticmethod(low_rank)
    backend = "triton-3"

    def layer(self, place: int, tables: torch.Tensor, paged: torch.Tensor) -> LayerPages:
        """One layer as kernels read it, by its place among those that have a cache; see `LayerPages`."""
        pools = {part: pool[:, place] for part, pool in self.pools.items()}
        windows = {part: window[:, place] for part, window in self.windows.items()}
        return LayerPages(
            kind=self._kind,
            head_dim=self._D,
            kv_heads=pools["keys"].shape[1],
            layers=self._layers,
            pools=pools,
            windows=windows,
            tables=tables,
            paged=paged,
        )

    def _quantize(self, slot: int, page: int) -> None:
        """Quantize the page of tokens after the sinks of a window; GEAR's with torch, except the factors."""
        if self._kind.rank:
            super()._quantize(slot, page)
            return
        windows = {part: window[slot] for part, window in self.windows.items()}
        flush(self._kind, windows, {part: pool[page] for part, pool in self.pools.items()})


class GpuCache(PagedCache):
    """The KV cache of the GPU backend. Implements `runtime.kv.interfaces.KVCache`.

    Args:
        kind: The kind of cache.
        spec: The model.
        context: Tokens of a slot.
        slots: Sequences kept at the same time.
        max_rows: Most rows of a step.
        device: Device of the buffers.
        pages: Pages that the slots share; None = enough for every slot.
    """

    def __init__(
        self,
        kind: CacheKind,
        spec: ModelSpec,
        *,
        context: int,
        slots: int,
        max_rows: int,
        device: torch.device,
        pages: int | None = None,
    ) -> None:
        sizes: dict[str, Any] = {"context": context, "slots": slots, "max_rows": max_rows}
        window = kind.window_capacity(max_rows)
        groups = {
            group: {
                layers: GpuStore(
                    kind, spec, pages=group.pages, slots=slots, window=window, device=device, layers=layers
                )
                for layers in layers_alike(spec, group.layers)
            }
            for group in page_groups(kind, spec, **sizes, pages=pages)
        }
        self.stores = tuple(store for stores in groups.values() for store in stores.values())
        """The buffers, for each group and each shape of heads."""
        super().__init__(
            kind,
            spec,
            {group: joined([*stores.values()]) for group, stores in groups.items()},
            **sizes,
            memory=DeviceMemory(device),
        )
        pinned, shape = device.type == "cuda", self.table.tables.shape
        self._tables = tuple(torch.full(shape, -1, dtype=torch.int32, pin_memory=pinned) for _ in groups)
        self._paged = torch.zeros(slots, dtype=torch.int32, pin_memory=pinned)
        self._there = tuple(tables.to(device, copy=True) for tables in self._tables)
        self.paged = self._paged.to(device, copy=True)
        """int32 [slots], tokens in pages, on the device."""
        self.layers = {
            layer: store.layer(place, tables, self.paged)
            for stores, tables in zip(groups.values(), self._there, strict=True)
            for layers, store in stores.items()
            for place, layer in enumerate(layers)
        }
        """Each layer with a cache as kernels read it."""
        self.runs = None if self.states is None else RunTable(self.states, slots, device)
        """What a step does to states; None if all layers have a cache."""

    @property
    def store(self) -> GpuStore:
        """The buffers of a model whose layers are all alike."""
        (store,) = self.stores
        return store

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers but the tables."""
        return sum(store.nbytes for store in self.stores) + (0 if self.states is None else self.states.nbytes)

    def begin(self, slots: Int32Array, positions: Int32Array, *, flush: bool = True, draft: bool = False) -> None:
        """See `KVCache.begin`. Afterwards the tables that the step's kernels read are on the device.

        Tables of pages only change when a page fills up; nothing is copied in other steps.
        """
        super().begin(slots, positions, flush=flush, draft=draft)
        if self.runs is not None:
            self.runs.write(runs_of(slots, positions))
        paged = [self.paged_length(slot) for slot in range(self._paged.numel())] if self.kind.windowed else [0]
        tables = zip(self._tables, self._there, (own.tables for own in self.tables), strict=True)
        for host, there, now in (*tables, (self._paged, self.paged, np.asarray(paged, np.int32))):
            if not np.array_equal(host.numpy(), np.broadcast_to(now, host.shape)):
                host.numpy()[...] = now
                there.copy_(host, non_blocking=True)  # the following step completes before the next one begins

    def close(self) -> None:
        """Release the buffers. Safe to call twice."""
        self.layers.clear()
        if self.states is not None:
            self.states.close()
        self.runs = None
        self._tables = self._there = ()
        self._paged = self.paged = torch.empty(0, dtype=torch.int32)
        for store in self.stores:
            store.close()
