"""The cache of the reference backend: pages as records of bytes, windows in half precision, attention in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.spec import ModelSpec
from runtime.kernels.attention.reference import attend
from runtime.kv.control import PagedCache
from runtime.kv.kinds import PARTS, CacheKind, Part, page_fields
from runtime.kv.reference.page import Stored, dequantize, quantize
from runtime.kv.transfer import Arrays


class ReferenceStore:
    """The numbers of all pages and windows. Implements `PageStore` and `SavingStore` of `runtime.kv`.

    A page is one record of bytes for each layer, head and half: codes first, scales and zeros behind them.

    Args:
        kind: What is stored.
        spec: The model.
        pages: Number of pages.
        slots: Number of windows.
        window: Tokens that a window has room for.
    """

    saved_layout = "reference-1"

    def __init__(self, kind: CacheKind, spec: ModelSpec, *, pages: int, slots: int, window: int) -> None:
        self._kind, self._D = kind, spec.head_dim
        self._pools: dict[Part, torch.Tensor] = {}
        self._fields: dict[Part, dict[str, torch.Tensor]] = {}
        self._windows: dict[Part, torch.Tensor] = {}
        L, H_kv = spec.num_layers, spec.num_kv_heads
        for part in PARTS:
            record = sum(field.nbytes for field in page_fields(kind, part, self._D))
            self._pools[part] = torch.zeros(pages, L, H_kv, record, dtype=torch.uint8)
            self._fields[part] = self._views(part)
            self._windows[part] = torch.zeros(slots, L, H_kv, window, self._D, dtype=torch.float16)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(array.nbytes for buffers in (self._pools, self._windows) for array in buffers.values())

    def close(self) -> None:
        """Release the buffers. Safe to call twice."""
        for buffers in (self._pools, self._fields, self._windows):
            buffers.clear()

    def records(self, part: Part) -> torch.Tensor:
        """All pages: uint8 [pages, layers, H_kv, bytes]."""
        return self._pools[part]

    def window(self, part: Part, slot: int) -> torch.Tensor:
        """A slot's window: float16 [layers, H_kv, tokens, D]."""
        return self._windows[part][slot]

    def stored(self, part: Part, layer: int, pages: list[int]) -> Stored:
        """The fields of some pages of a layer, each [pages, H_kv, ...]."""
        return {name: array[pages, layer] for name, array in self._fields[part].items()}

    def write_tokens(self, part: Part, layer: int, pages: torch.Tensor, places: torch.Tensor, x: torch.Tensor) -> None:
        """Quantize tokens one by one into pages. pages and places (in the page) int64 [M], x float32 [M, H_kv, D]."""
        for name, array in quantize(self._kind, part, x.unsqueeze(-2)).items():
            self._fields[part][name][pages, layer, :, places] = array.squeeze(2)

    def flush(self, slot: int, page: int, rest: int) -> None:
        """See `PageStore.flush`."""
        for part in PARTS:
            window = self._windows[part][slot]  # [L, H_kv, tokens, D]
            for name, array in quantize(self._kind, part, window[:, :, : self._kind.page].float()).items():
                self._fields[part][name][page] = array
            window[:, :, :rest] = window[:, :, self._kind.page : self._kind.page + rest].clone()

    def restore(self, page: int, slot: int, count: int) -> None:
        """See `PageStore.restore`."""
        for part in PARTS:
            stored = {name: array[page] for name, array in self._fields[part].items()}
            tokens = dequantize(self._kind, part, stored, self._D)[..., :count, :]
            self._windows[part][slot, :, :, :count] = tokens.to(torch.float16)

    def copy_window(self, source: int, target: int, count: int) -> None:
        """See `PageStore.copy_window`."""
        for windows in self._windows.values():
            windows[target, :, :, :count] = windows[source, :, :, :count]

    def copy_page(self, source: int, target: int) -> None:
        """See `PageStore.copy_page`."""
        for pool in self._pools.values():
            pool[target] = pool[source]

    def read_pages(self, pages: Sequence[int]) -> Arrays:
        """See `runtime.kv.transfer.SavingStore.read_pages`: records uint8 [pages, layers, H_kv, bytes]."""
        return {part: pool[list(pages)].numpy() for part, pool in self._pools.items()}

    def write_pages(self, pages: Sequence[int], arrays: Arrays) -> None:
        """See `runtime.kv.transfer.SavingStore.write_pages`."""
        for part, pool in self._pools.items():
            pool[list(pages)] = torch.tensor(arrays[part])

    def read_window(self, slot: int, count: int) -> Arrays:
        """See `runtime.kv.transfer.SavingStore.read_window`: float16 [layers, H_kv, count, D]."""
        if not self._kind.windowed:
            return {}
        return {part: windows[slot, :, :, :count].contiguous().numpy() for part, windows in self._windows.items()}

    def write_window(self, slot: int, count: int, arrays: Arrays) -> None:
        """See `runtime.kv.transfer.SavingStore.write_window`."""
        for part, array in arrays.items():
            self.window("keys" if part == "keys" else "values", slot)[:, :, :count] = torch.tensor(array)

    def _views(self, part: Part) -> dict[str, torch.Tensor]:
        """The fields of all records, each [pages, L, H_kv, ...], in the records' own memory."""
        views, at = {}, 0
        for field in page_fields(self._kind, part, self._D):
            raw = self._pools[part][..., at : at + field.nbytes]
            views[field.name] = raw.view(getattr(torch, field.dtype)).view(*raw.shape[:-1], *field.shape)
            at += field.nbytes
        return views


class ReferenceCache(PagedCache):
    """The KV cache of the reference backend. Implements `runtime.kv.control.KVCache`.

    Args:
        kind: What is stored.
        spec: The model.
        context: Tokens of a slot.
        slots: Sequences kept at the same time.
        max_rows: Most rows of a step.
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
        pages: int | None = None,
    ) -> None:
        self.store = ReferenceStore(
            kind,
            spec,
            pages=slots * kind.max_pages(context) if pages is None else pages,
            slots=slots,
            window=kind.window_capacity(max_rows),
        )
        """The buffers."""
        super().__init__(kind, spec, self.store, context=context, slots=slots, max_rows=max_rows, pages=pages)
        self._D = spec.head_dim

    def close(self) -> None:
        """Release the buffers. Safe to call twice."""
        self.store.close()

    def append(
        self, layer: int, slots: torch.Tensor, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write a layer's keys and values of a step that `begin` has prepared.

        Args:
            layer: The layer.
            slots: int64 [M].
            positions: int64 [M].
            k: float32 [M, H_kv, D], rotated.
            v: float32 [M, H_kv, D].
        """
        for part, x in zip(PARTS, (k, v), strict=True):
            if self.kind.windowed:
                for slot in sorted(set(slots.tolist())):
                    rows = slots == slot
                    places = positions[rows] - self.paged_length(slot)
                    self.store.window(part, slot)[layer][:, places] = x[rows].transpose(0, 1).to(torch.float16)
            else:
                tables = torch.from_numpy(self.table.tables)
                pages = tables[slots, positions // self.kind.page].long()
                self.store.write_tokens(part, layer, pages, positions % self.kind.page, x)

    def read(
        self, part: Part, layer: int, slot: int, length: int | None = None, *, draft: bool = False
    ) -> torch.Tensor:
        """What a slot's keys or values of a layer read back as.

        Args:
            part: Keys or values.
            layer: The layer.
            slot: The slot.
            length: How many tokens; None = all.
            draft: Whether to read as a draft does, where the kind has that.

        Returns:
            float32 [length, H_kv, D].
        """
        stored = self.store.stored(part, layer, self.table.held(slot))
        paged = dequantize(self.kind, part, stored, self._D, draft=draft)  # [pages, H_kv, page, D]
        paged = paged.transpose(1, 2).flatten(0, 1)[: self.paged_length(slot)]
        if self.kind.windowed:
            window = self.store.window(part, slot)[layer, :, : self.window_length(slot)]
            paged = torch.cat([paged, window.float().transpose(0, 1)])
        return paged[:length]

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        window: int | None,
        *,
        draft: bool = False,
    ) -> torch.Tensor:
        """Causal attention of a step's rows over their own slots, the step's own tokens included.

        Args:
            layer: The layer.
            q: float32 [M, H, D], rotated.
            slots: int64 [M].
            positions: int64 [M].
            window: Tokens that a query sees, itself included; None = all before it.
            draft: As in `read`.

        Returns:
            float32 [M, H, D].
        """
        out = torch.empty_like(q)
        for slot in sorted(set(slots.tolist())):
            rows = (slots == slot).nonzero().flatten()
            length = int(positions[rows].max()) + 1
            k, v = (self.read(part, layer, slot, length, draft=draft) for part in PARTS)
            out[rows] = attend(q[rows], k, v, positions[rows], window)
        return out
