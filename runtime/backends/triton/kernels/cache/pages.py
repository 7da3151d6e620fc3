"""A layer of the paged cache as kernel arguments: buffers, tables, and the layout of a page's record.

A page has one record of bytes for each layer and key-value head, keys and values separately, in the order of
`runtime.kv.kinds.page_fields`: byte for byte as in the reference cache. Kernels take all of it as one tuple of tensors,
`LayerTensors`, and one constant, `PageLayout`.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.kv.kinds import KINDS, PARTS, CacheKind, Part, page_fields

if TYPE_CHECKING:
    import torch

_SIZES = {"float16": 2, "int16": 2, "uint8": 1}
"""Bytes of a number."""
_FIELDS = dict.fromkeys(
    field.name for kind in KINDS.values() for part in PARTS for field in page_fields(kind, part, 16)
)
Starts = namedtuple("Starts", _FIELDS, defaults=[0] * len(_FIELDS))
"""Offset of each field of `page_fields` in a record, in units of its own type; 0 = absent, or the first."""


class RecordLayout(NamedTuple):
    """Compile-time layout of a record of keys or values."""

    nbytes: int
    """Bytes of a record."""
    at: Any
    """`Starts`."""
    D: int
    """Channels of a head."""
    bits: int
    """Bits of a code, or of one plane of it; 16: half precision."""
    planes: int
    """Planes that are read, 0 if codes are not divided into planes."""
    channel: int
    """Whether a vector, whose numbers share scales, is a channel; otherwise a token."""
    vectors: int
    """Vectors: channels, or tokens of a page."""
    group: int
    """Numbers of a vector per scale."""
    groups: int
    """Groups of a vector."""
    rank: int
    """Rank of the low-rank correction; 0 = none."""
    outliers: int
    """Outliers of a vector; 0 = none."""
    exact_mean: int
    """Whether the zero is refitted, so that a vector keeps its mean."""


class PageLayout(NamedTuple):
    """Compile-time layout of a kind of cache."""

    page: int
    """Tokens of a page."""
    window: int
    """Capacity of a window in tokens; 0 if the kind has none."""
    sinks: int
    """Of these, the first tokens of the sequence, which precede the pages."""
    k: RecordLayout
    """Keys."""
    v: RecordLayout
    """Values."""


class Record(NamedTuple):
    """Records of keys or of values, as numbers of each type; in kernels, pointers to one."""

    codes: Any
    """uint8."""
    halves: Any
    """float16."""
    shorts: Any
    """int16."""


class LayerTensors(NamedTuple):
    """The tensors of `LayerPages`, as one kernel argument."""

    k: Record
    """Pages of keys."""
    v: Record
    """Pages of values."""
    k_window: Any
    """Windows of keys."""
    v_window: Any
    """Windows of values."""
    tables: Any
    """`LayerPages.tables`."""
    paged: Any
    """`LayerPages.paged`."""


class Rows(NamedTuple):
    """Positions and slots of a step's rows, as one kernel argument."""

    positions: Any
    """int32 [M], in its sequence."""
    slots: Any
    """int32 [M], the sequence's slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPages:
    """The cache of one layer on the device. Kernels get each buffer from this layer's first number on."""

    kind: CacheKind
    """The kind of cache."""
    head_dim: int
    """D."""
    kv_heads: int
    """H_kv."""
    layers: int
    """Layers of the model: pages and slots are layers * H_kv records or windows apart."""
    pools: Mapping[Part, torch.Tensor]
    """All pages: uint8 [pages, H_kv, record bytes]."""
    windows: Mapping[Part, torch.Tensor]
    """All windows: float16 [slots, H_kv, tokens, D]; no tokens if the kind has no window."""
    tables: torch.Tensor
    """int32 [slots, pages of a slot]: a slot's pages in the order of its tokens."""
    paged: torch.Tensor
    """int32 [slots]: tokens in pages, if the kind has a window, which contains the later ones."""

    @property
    def stride(self) -> int:
        """Distance between pages, in records, and between slots, in windows."""
        return self.layers * self.kv_heads

    @property
    def per_slot(self) -> int:
        """Most pages of a slot."""
        return self.tables.shape[1]

    @property
    def tensors(self) -> LayerTensors:
        """The kernel argument."""
        k, v = (record_views(self.pools[part]) for part in PARTS)
        return LayerTensors(k, v, self.windows["keys"], self.windows["values"], self.tables, self.paged)

    def layout(self, *, draft: bool = False) -> PageLayout:
        """The compile-time layout; see `page_layout`."""
        return page_layout(self.kind, self.head_dim, window=self.windows["keys"].shape[2], draft=draft)


def record_views(records: torch.Tensor) -> Record:
    """Records, uint8 [..., record bytes], viewed as numbers of each type."""
    import torch

    return Record(records, records.view(torch.float16), records.view(torch.int16))


def power_of_two(number: int) -> int:
    """The smallest power of two at or above a positive number."""
    return 1 << (number - 1).bit_length()


def record_bytes(kind: CacheKind, part: Part, head_dim: int) -> int:
    """Bytes of one record."""
    return sum(field.nbytes for field in page_fields(kind, part, head_dim))


def page_layout(kind: CacheKind, head_dim: int, *, window: int = 0, draft: bool = False) -> PageLayout:
    """The compile-time layout of a kind's pages and windows.

    Args:
        kind: The kind of cache.
        head_dim: D.
        window: Capacity of a window in tokens.
        draft: Whether only the upper plane is read, if there are two.
    """
    k, v = (record_layout(kind, part, head_dim, draft=draft) for part in PARTS)
    return PageLayout(kind.page, window, kind.sinks, k, v)


def record_layout(kind: CacheKind, part: Part, head_dim: int, *, draft: bool = False) -> RecordLayout:
    """The compile-time layout of a record of keys or values; arguments as in `page_layout`."""
    code, start, starts = kind.code(part), 0, {}
    for field in page_fields(kind, part, head_dim):
        starts[field.name] = start // _SIZES[field.dtype]
        start += field.nbytes
    vectors, length = (head_dim, kind.page) if code.axis == "channel" else (kind.page, head_dim)
    group = code.group or length
    return RecordLayout(
        nbytes=start,
        at=Starts(**starts),
        D=head_dim,
        bits=4 if kind.hierarchical else code.bits,
        planes=(1 if draft else 2) if kind.hierarchical else 0,
        channel=int(code.axis == "channel"),
        vectors=vectors,
        group=group,
        groups=-(-length // group),
        rank=min(kind.rank, head_dim),
        outliers=2 * kind.outliers(length),
        exact_mean=int(code.exact_mean),
    )
