"""The GPU backend's KV cache: pages and windows on the device, tables that kernels read there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from models.spec import ModelSpec
from runtime.kernels.cache.pages import LayerPages, record_bytes
from runtime.kernels.cache.triton import flush
from runtime.kv.control import Arrays, Int32Array, PagedCache
from runtime.kv.kinds import PARTS, CacheKind, Part, page_fields
from runtime.kv.reference.page import dequantize, quantize


class GpuStore:
    """The numbers of all pages and windows, on the device. Implements `PageStore` and `SavingStore`.

    A page is one record of bytes for each layer, head and half, the same bytes as the reference cache's.

    Args:
        kind: What is stored.
        spec: The model.
        pages: Number of pages.
        slots: Number of windows.
        window: Tokens that a window has room for.
        device: Where the buffers lie.
    """

    saved_layout = "triton-1"

    def __init__(
        self, kind: CacheKind, spec: ModelSpec, *, pages: int, slots: int, window: int, device: torch.device
    ) -> None:
        self._kind, self._D, self._layers = kind, spec.head_dim, spec.num_layers
        L, H_kv, D = spec.num_layers, spec.num_kv_heads, spec.head_dim
        records = {part: record_bytes(kind, part, D) for part in PARTS}
        self.pools: dict[Part, torch.Tensor] = {
            part: torch.zeros((pages, L, H_kv, records[part]), dtype=torch.uint8, device=device) for part in PARTS
        }
        """uint8 [pages, layers, H_kv, record bytes]."""
        self.windows: dict[Part, torch.Tensor] = {
            part: torch.zeros((slots, L, H_kv, window, D), dtype=torch.float16, device=device) for part in PARTS
        }
        """float16 [slots, layers, H_kv, tokens, D]."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(array.nbytes for buffers in (self.pools, self.windows) for array in buffers.values())

    def layer(self, layer: int, tables: torch.Tensor, paged: torch.Tensor) -> LayerPages:
        """One layer as kernels read it; see `LayerPages`."""
        pools = {part: pool[:, layer] for part, pool in self.pools.items()}
        windows = {part: window[:, layer] for part, window in self.windows.items()}
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

    def flush(self, slot: int, page: int, rest: int) -> None:
        """See `PageStore.flush`."""
        windows = {part: window[slot] for part, window in self.windows.items()}
        records = {part: pool[page] for part, pool in self.pools.items()}
        if self._kind.rank:
            for part in PARTS:
                fields = quantize(self._kind, part, windows[part][:, :, : self._kind.page].float())
                for name, array in self._fields(part, records[part]).items():
                    array.copy_(fields[name])
        else:
            flush(self._kind, windows, records)
        for window in windows.values():
            window[:, :, :rest] = window[:, :, self._kind.page : self._kind.page + rest].clone()

    def restore(self, page: int, slot: int, count: int) -> None:
        """See `PageStore.restore`."""
        for part in PARTS:
            fields = self._fields(part, self.pools[part][page])
            tokens = dequantize(self._kind, part, fields, self._D)[..., :count, :]
            self.windows[part][slot, :, :, :count] = tokens.to(torch.float16)

    def copy_window(self, source: int, target: int, count: int) -> None:
        """See `PageStore.copy_window`."""
        for windows in self.windows.values():
            windows[target, :, :, :count] = windows[source, :, :, :count]

    def copy_page(self, source: int, target: int) -> None:
        """See `PageStore.copy_page`."""
        for pool in self.pools.values():
            pool[target] = pool[source]

    def read_pages(self, pages: Sequence[int]) -> Arrays:
        """See `SavingStore.read_pages`: records uint8 [pages, layers, H_kv, bytes]."""
        return {part: pool[list(pages)].cpu().numpy() for part, pool in self.pools.items()}

    def write_pages(self, pages: Sequence[int], arrays: Arrays) -> None:
        """See `SavingStore.write_pages`."""
        for part, pool in self.pools.items():
            pool[list(pages)] = torch.tensor(arrays[part], device=pool.device)

    def read_window(self, slot: int, count: int) -> Arrays:
        """See `SavingStore.read_window`: float16 [layers, H_kv, count, D]."""
        if not self._kind.windowed:
            return {}
        return {part: windows[slot, :, :, :count].cpu().contiguous().numpy() for part, windows in self.windows.items()}

    def write_window(self, slot: int, count: int, arrays: Arrays) -> None:
        """See `SavingStore.write_window`."""
        if self._kind.windowed:
            for part, windows in self.windows.items():
                windows[slot, :, :, :count] = torch.tensor(arrays[part], device=windows.device)

    def close(self) -> None:
        """Release the buffers. Safe to call twice."""
        self.pools.clear()
        self.windows.clear()

    def _fields(self, part: Part, records: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields of records [..., bytes], in their own memory."""
        views, at = {}, 0
        for field in page_fields(self._kind, part, self._D):
            raw = records[..., at : at + field.nbytes]
            views[field.name] = raw.view(getattr(torch, field.dtype)).view(*raw.shape[:-1], *field.shape)
            at += field.nbytes
        return views


class GpuCache(PagedCache):
    """The KV cache of the GPU backend. Implements `runtime.kv.control.KVCache`.

    Args:
        kind: What is stored.
        spec: The model.
        context: Tokens of a slot.
        slots: Sequences kept at the same time.
        max_rows: Most rows of a step.
        device: Where the buffers lie.
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
        self.store = GpuStore(
            kind,
            spec,
            pages=slots * kind.max_pages(context) if pages is None else pages,
            slots=slots,
            window=kind.window_capacity(max_rows),
            device=device,
        )
        """The buffers."""
        super().__init__(kind, spec, self.store, context=context, slots=slots, max_rows=max_rows, pages=pages)
        shape = self.table.tables.shape
        self._tables = torch.full(shape, -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._paged = torch.zeros(slots, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.tables = self._tables.to(device, copy=True)
        """int32 [slots, pages of a slot], on the device."""
        self.paged = self._paged.to(device, copy=True)
        """int32 [slots], tokens in pages, on the device."""
        self.layers = tuple(self.store.layer(layer, self.tables, self.paged) for layer in range(spec.num_layers))
        """Each layer as kernels read it."""

    def begin(self, slots: Int32Array, positions: Int32Array, *, flush: bool = True) -> None:
        """See `KVCache.begin`. Afterwards the device has the tables that the step's kernels read.

        Tables change where a page fills up: between such steps nothing is copied.
        """
        super().begin(slots, positions, flush=flush)
        paged = [self.paged_length(slot) for slot in range(self._paged.numel())] if self.kind.windowed else [0]
        for host, there, now in (
            (self._tables, self.tables, self.table.tables),
            (self._paged, self.paged, np.asarray(paged, np.int32)),
        ):
            if not np.array_equal(host.numpy(), np.broadcast_to(now, host.shape)):
                host.numpy()[...] = now
                there.copy_(host, non_blocking=True)  # the step that follows is waited for before the next one begins

    def close(self) -> None:
        """Release the buffers. Safe to call twice."""
        self.layers = ()
        self.store.close()
