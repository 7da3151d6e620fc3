"""KV cache of the GPU backend: pages and windows on the device, with the tables that kernels read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.spec import ModelSpec
from runtime.backends.torch_store import TorchStore
from runtime.backends.triton.kernels.cache import LayerPages, flush, low_rank
from runtime.kv.control import BackendCache, runs_of
from runtime.kv.kinds import CacheKind
from runtime.kv.states import Memory, States
from runtime.kv.stores import Int32Array


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


class GpuCache(BackendCache[GpuStore]):
    """The KV cache of the GPU backend.

    Slots share so many pages; None = enough for every slot.
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
        window = kind.window_capacity(max_rows)

        def make(pages: int, layers: tuple[int, ...]) -> GpuStore:
            return GpuStore(kind, spec, pages=pages, slots=slots, window=window, device=device, layers=layers)

        sizes: dict[str, Any] = {"context": context, "slots": slots, "max_rows": max_rows}
        super().__init__(kind, spec, make, **sizes, pages=pages, memory=DeviceMemory(device))
        pinned, shape = device.type == "cuda", self.table.tables.shape
        self._tables = tuple(torch.full(shape, -1, dtype=torch.int32, pin_memory=pinned) for _ in self.groups)
        self._paged = torch.zeros(slots, dtype=torch.int32, pin_memory=pinned)
        self._there = tuple(tables.to(device, copy=True) for tables in self._tables)
        self.paged = self._paged.to(device, copy=True)
        """int32 [slots], tokens in pages, on the device."""
        self.layers = {
            layer: store.layer(place, tables, self.paged)
            for stores, tables in zip(self.groups.values(), self._there, strict=True)
            for layers, store in stores.items()
            for place, layer in enumerate(layers)
        }
        """Each layer with a cache as kernels read it."""
        self.runs = None if self.states is None else RunTable(self.states, slots, device)
        """What a step does to states; None if all layers have a cache."""

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
            if (host.numpy() != now).any():
                host.numpy()[...] = now
                there.copy_(host, non_blocking=True)  # the following step completes before the next one begins

    def close(self) -> None:
        self.layers.clear()
        if self.states is not None:
            self.states.close()
        self.runs = None
        self._tables = self._there = ()
        self._paged = self.paged = torch.empty(0, dtype=torch.int32)
        for store in self.stores:
            store.close()


class DeviceMemory(Memory):
    """Tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=self._device)

    def read(self, array: torch.Tensor) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = array.cpu().numpy()
        return found

    def made(self, array: npt.NDArray[np.float32]) -> torch.Tensor:
        return torch.tensor(array, device=self._device)


class RunTable:
    """The runs of a step, which are the adjacent rows of one slot each, and what they do to its states.

    It is read when kernels run, so that a captured launch can be replayed for any step.

    Args:
        states: The states.
        slots: Most runs of a step.
        device: Of the table.
    """

    def __init__(self, states: States, slots: int, device: torch.device) -> None:
        self._states = states
        self._host = torch.zeros((slots, 4), dtype=torch.int32, pin_memory=device.type == "cuda")
        self.tensor = self._host.to(device, copy=True)
        """int32 [slots, 4], on the device: a run's first row, its number of rows, the tokens that the slot's matrices
        have absorbed, and what they do next (`States.absorbs`). Runs whose rows are absorbed at once come first. No
        rows: there is no such run."""

    def write(self, runs: Iterable[tuple[int, int, int]]) -> None:
        """Describe a step that has begun, by the slot, first position and end of each run."""
        table, row, found = self._host.numpy(), 0, []
        for slot, start, end in runs:
            found.append((row, end - start, self._states.absorbed[slot], self._states.absorbs[slot]))
            row += end - start
        found.sort(key=lambda run: -run[3])
        table[:] = 0
        table[: len(found)] = found
        self.tensor.copy_(self._host, non_blocking=True)  # the following step completes before the next one begins
