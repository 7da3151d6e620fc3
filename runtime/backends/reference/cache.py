"""Cache of the reference backend: pages as byte records, windows in half precision, attention in float32."""

from __future__ import annotations

import torch

from models.spec import ModelSpec
from runtime.backends.operations.layers import attend
from runtime.backends.operations.pages import Stored, dequantize_page, quantize_page
from runtime.backends.torch_store import TorchStore
from runtime.kv.control import BackendCache
from runtime.kv.kinds import LARGEST, PARTS, CacheKind, Part


class ReferenceStore(TorchStore):
    """Storage of all pages and windows in main memory, readable layer by layer; see `TorchStore`."""

    backend = "reference-3"

    @property
    def head_dim(self) -> int:
        """D."""
        return self._D

    def records(self, part: Part) -> torch.Tensor:
        """All pages: uint8 [pages, layers, H_kv, bytes]."""
        return self.pools[part]

    def window(self, part: Part, slot: int) -> torch.Tensor:
        """A slot's window: float16 [layers, H_kv, tokens, D]."""
        return self.windows[part][slot]

    def stored(self, part: Part, layer: int, pages: list[int]) -> Stored:
        """Fields of some pages of a layer, each [pages, H_kv, ...]."""
        return {name: array[pages, layer] for name, array in self.fields(part, self.pools[part]).items()}

    def write_tokens(self, part: Part, layer: int, pages: torch.Tensor, places: torch.Tensor, x: torch.Tensor) -> None:
        """Quantize tokens one by one into pages. pages and places (in the page) int64 [M], x float32 [M, H_kv, D]."""
        fields = self.fields(part, self.pools[part])
        for name, array in quantize_page(self._kind, part, x.unsqueeze(-2)).items():
            fields[name][pages, layer, :, places] = array.squeeze(2)


class ReferenceCache(BackendCache[ReferenceStore]):
    """The KV cache of the reference backend.

    Args:
        kind: The kind of cache.
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
        window = kind.window_capacity(max_rows)

        def make(pages: int, layers: tuple[int, ...]) -> ReferenceStore:
            return ReferenceStore(kind, spec, pages=pages, slots=slots, window=window, layers=layers)

        super().__init__(kind, spec, make, context=context, slots=slots, max_rows=max_rows, pages=pages)
        self._places = {
            layer: (store, place)
            for stores in self.groups.values()
            for layers, store in stores.items()
            for place, layer in enumerate(layers)
        }
        self._cap = spec.score_cap

    def close(self) -> None:
        """Release the buffers. Safe to call twice."""
        for store in self.stores:
            store.close()

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
        tables = torch.from_numpy(self.table_of(layer).tables)
        store, layer = self._places[layer]
        for part, x in zip(PARTS, (k, v), strict=True):
            x = torch.where(x.isfinite(), x.clamp(-LARGEST, LARGEST), x)
            if self.kind.windowed:
                for slot in sorted(set(slots.tolist())):
                    rows = slots == slot
                    places = positions[rows] - self.paged_length(slot)
                    store.window(part, slot)[layer][:, places] = x[rows].transpose(0, 1).to(torch.float16)
            else:
                pages = tables[slots, positions // self.kind.page].long()
                store.write_tokens(part, layer, pages, positions % self.kind.page, x)

    def read(
        self, part: Part, layer: int, slot: int, length: int | None = None, *, draft: bool = False
    ) -> torch.Tensor:
        """Dequantized keys or values of a slot and layer; zeros where a page was released.

        Args:
            part: Keys or values.
            layer: The layer.
            slot: The slot.
            length: Number of tokens; None = all.
            draft: Whether to read as a draft does, if the kind supports that.

        Returns:
            float32 [length, H_kv, D].
        """
        pages = self.table_of(layer).entries(slot)
        store, layer = self._places[layer]
        stored = store.stored(part, layer, [page for page in pages if page >= 0])
        held = dequantize_page(self.kind, part, stored, store.head_dim, draft=draft)  # [pages held, H_kv, page, D]
        paged = held.new_zeros(len(pages), *held.shape[1:])
        paged[[index for index, page in enumerate(pages) if page >= 0]] = held
        paged = paged.transpose(1, 2).flatten(0, 1)[: self.paged_length(slot)]
        if self.kind.windowed:
            window = store.window(part, slot)[layer, :, : self.window_length(slot)].float().transpose(0, 1)
            paged = torch.cat([window[: self.kind.sinks], paged, window[self.kind.sinks :]])
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
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of a step's rows over their own slots, including the step's own tokens.

        Args:
            layer: The layer.
            q: float32 [M, H, D], rotated.
            slots: int64 [M].
            positions: int64 [M].
            window: Visible tokens, including the query's own; None = all before it.
            draft: As in `read`.
            sinks: float32 [H], of the layer; None where it has none.

        Returns:
            float32 [M, H, D].
        """
        out = torch.empty_like(q)
        for slot in sorted(set(slots.tolist())):
            rows = (slots == slot).nonzero().flatten()
            length = int(positions[rows].max()) + 1
            k, v = (self.read(part, layer, slot, length, draft=draft) for part in PARTS)
            out[rows] = attend(q[rows], k, v, positions[rows], window, self._cap, sinks)
        return out
