"""One layer of a paged cache as the GPU's kernels read it: buffers, tables, and where in a page's record what stands.

A page keeps one record of bytes for each layer and key-value head, keys and values apart, in the order of
`runtime.kv.kinds.page_fields`: the same bytes as the reference cache's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.kv.kinds import PARTS, CacheKind, Field, Part, page_fields

if TYPE_CHECKING:
    import torch

_HALF = 2
_BEHIND = ("scales", "a", "b", "indices", "outliers")
"""Fields of a record whose numbers take two bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPages:
    """The cache of one layer on the device. Kernels see each buffer from this layer's first number on."""

    kind: CacheKind
    """What is stored."""
    head_dim: int
    """D."""
    kv_heads: int
    """H_kv."""
    layers: int
    """Layers of the model: from page to page, and from slot to slot, lie layers * H_kv records or windows."""
    pools: Mapping[Part, torch.Tensor]
    """All pages: uint8 [pages, H_kv, record bytes]."""
    windows: Mapping[Part, torch.Tensor]
    """All windows: float16 [slots, H_kv, tokens, D]; no tokens where the kind has no window."""
    tables: torch.Tensor
    """int32 [slots, pages of a slot]: a slot's pages in the order of its tokens."""
    paged: torch.Tensor
    """int32 [slots]: tokens that are in pages, where the kind has a window; what comes behind them is in the window."""

    @property
    def stride(self) -> int:
        """Records from page to page, and windows from slot to slot."""
        return self.layers * self.kv_heads

    @property
    def window_tokens(self) -> int:
        """Tokens that a window has room for; 0 where the kind has none."""
        return self.windows["keys"].shape[2]

    def views(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The pool as bytes, as halves (float16) and as indices (int16)."""
        import torch

        pool = self.pools[part]
        return pool, pool.view(torch.float16), pool.view(torch.int16)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def record_bytes(kind: CacheKind, part: Part, head_dim: int) -> int:
    """Bytes of one record."""
    return sum(field.nbytes for field in page_fields(kind, part, head_dim))


def record_sizes(kind: CacheKind, head_dim: int, *, draft: bool = False) -> dict[str, int]:
    """What kernels have to know about the records of a kind, as constants.

    Args:
        kind: The kind of cache.
        head_dim: D.
        draft: Whether the upper plane alone is read, where there are two.

    Returns:
        `PAGE` tokens; `BITS` of a code, or of one plane of it; `PLANES` that are read, 0 where codes are not cut into
        planes; `CHANNEL`: whether a key's scale spans tokens; `RANK`; and, each with K_ for keys and V_ for values,
        `RECORD` bytes, `LOWER` (where the lower plane begins, in bytes), `SCALES`, `A`, `B`, `INDICES` and `OUTLIERS`
        (where they begin, in units of two bytes, 0 = absent), `GROUP` (numbers that share a scale), `GROUPS` (of a
        vector) and `COUNT` (outliers of a vector).
    """
    bits = 4 if kind.hierarchical else kind.keys.bits
    sizes = {
        "PAGE": kind.page,
        "BITS": bits,
        "PLANES": (1 if draft else 2) if kind.hierarchical else 0,
        "CHANNEL": int(kind.windowed),
        "RANK": min(kind.rank, head_dim),
    }
    for part, prefix in zip(PARTS, ("K", "V"), strict=True):
        fields = page_fields(kind, part, head_dim)
        length = kind.page if kind.code(part).axis == "channel" else head_dim
        group = kind.code(part).group or length
        sizes |= {
            f"{prefix}_RECORD": record_bytes(kind, part, head_dim),
            f"{prefix}_LOWER": _start(fields, "lower"),
            **{f"{prefix}_{name.upper()}": _start(fields, name) // _HALF for name in _BEHIND},
            f"{prefix}_GROUP": group,
            f"{prefix}_GROUPS": -(-length // group),
            f"{prefix}_COUNT": 2 * kind.outliers(length),
        }
    return sizes


def _start(fields: tuple[Field, ...], name: str) -> int:
    """Byte at which a field of a record begins; 0 where there is none."""
    start = 0
    for field in fields:
        if field.name == name:
            return start
        start += field.nbytes
    return 0
