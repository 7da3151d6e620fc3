"""Storage of pages (packed records) and windows (half precision) in torch buffers on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.spec import ModelSpec
from runtime.backends.operations.pages import LowRank, Stored, dequantize_page, low_rank, quantize_page
from runtime.kv.kinds import PARTS, CacheKind, Part, page_fields, record_bytes
from runtime.kv.stores import Arrays, kept_by, layout_name


class TorchStore:
    """Storage of all pages and windows. Implements `PageStore`.

    A page has one record for each layer, head and half: codes first, then scales and zeros.

    Args:
        kind: The kind of cache.
        spec: The model.
        pages: Number of pages.
        slots: Number of windows.
        window: Capacity of a window in tokens.
        device: Device of the buffers.
        layers: The layers that it keeps, whose heads are alike; None: all that have a cache.
    """

    _low_rank: LowRank = staticmethod(low_rank)
    backend = "torch"
    """Prefix of a saved layout's name."""

    def __init__(
        self,
        kind: CacheKind,
        spec: ModelSpec,
        *,
        pages: int,
        slots: int,
        window: int,
        device: torch.device | str = "cpu",
        layers: Sequence[int] | None = None,
    ) -> None:
        own, heads = kept_by(spec, layers)
        self._kind, self._D, self._layers = kind, heads.dim, len(own)
        L, H_kv, D = self._layers, heads.kv_heads, heads.dim
        fields = {part: page_fields(kind, part, D) for part in PARTS}
        self.saved_layout = layout_name(self.backend, fields)
        self.pools: dict[Part, torch.Tensor] = {
            part: torch.zeros((pages, L, H_kv, record_bytes(kind, part, D)), dtype=torch.uint8, device=device)
            for part in PARTS
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

    def fields(self, part: Part, records: torch.Tensor) -> Stored:
        """Views of the fields of records uint8 [..., bytes]."""
        views, at = {}, 0
        for field in page_fields(self._kind, part, self._D):
            raw = records[..., at : at + field.nbytes]
            views[field.name] = raw.view(getattr(torch, field.dtype)).view(*raw.shape[:-1], *field.shape)
            at += field.nbytes
        return views

    def flush(self, slot: int, page: int, rest: int) -> None:
        self._quantize(slot, page)
        sinks, behind = self._kind.sinks, self._kind.sinks + self._kind.page
        for windows in self.windows.values():
            window = windows[slot]
            window[:, :, sinks : sinks + rest] = window[:, :, behind : behind + rest].clone()

    def restore(self, page: int, slot: int, count: int) -> None:
        for part in PARTS:
            stored = self.fields(part, self.pools[part][page])
            tokens = dequantize_page(self._kind, part, stored, self._D)[..., :count, :]
            sinks = self._kind.sinks
            self.windows[part][slot, :, :, sinks : sinks + count] = tokens.to(torch.float16)

    def copy_window(self, source: int, target: int, count: int) -> None:
        for windows in self.windows.values():
            windows[target, :, :, :count] = windows[source, :, :, :count]

    def copy_page(self, source: int, target: int) -> None:
        for pool in self.pools.values():
            pool[target] = pool[source]

    def read_pages(self, pages: Sequence[int]) -> Arrays:
        """See `PageStore.read_pages`: records uint8 [pages, layers, H_kv, bytes]."""
        return {part: pool[list(pages)].cpu().numpy() for part, pool in self.pools.items()}

    def write_pages(self, pages: Sequence[int], arrays: Arrays) -> None:
        kept = [place for place, page in enumerate(pages) if page >= 0]
        for part, pool in self.pools.items():
            pool[[pages[place] for place in kept]] = torch.tensor(arrays[part][kept], device=pool.device)

    def read_window(self, slot: int, count: int) -> Arrays:
        """See `PageStore.read_window`: float16 [layers, H_kv, count, D]."""
        if not self._kind.windowed:
            return {}
        return {part: windows[slot, :, :, :count].cpu().contiguous().numpy() for part, windows in self.windows.items()}

    def write_window(self, slot: int, count: int, arrays: Arrays) -> None:
        if self._kind.windowed:
            for part, windows in self.windows.items():
                windows[slot, :, :, :count] = torch.tensor(arrays[part], device=windows.device)

    def close(self) -> None:
        """Release the buffers. Safe to call twice."""
        self.pools.clear()
        self.windows.clear()

    def _quantize(self, slot: int, page: int) -> None:
        """Quantize the page of tokens after the sinks of a window."""
        for part in PARTS:
            sinks = self._kind.sinks
            tokens = self.windows[part][slot, :, :, sinks : sinks + self._kind.page].float()
            stored = self.fields(part, self.pools[part][page])
            for name, array in quantize_page(self._kind, part, tokens, low_rank=self._low_rank).items():
                stored[name].copy_(array)
