"""One layer of a paged cache as the GPU's kernels read it: buffers, tables, and the layout of a page's record.

A page keeps one record of bytes for each layer and key-value head, keys and values apart, in the order of
`runtime.kv.kinds.page_fields`: the same bytes as the reference cache's. Kernels take all of that as one tuple of
tensors, `LayerTensors`, and one constant, `PageLayout`.
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
"""Where each field of `page_fields` begins in a record, counted in its own numbers; 0 = absent, or the first."""


class RecordLayout(NamedTuple):
    """A record of keys or of values, as a constant of kernels."""

    nbytes: int
    """Bytes of a record."""
    at: Any
    """`Starts`."""
    D: int
    """Channels of a head."""
    bits: int
    """Bits of a code, or of one plane of it; 16: half precision."""
    planes: int
    """Planes that are read, 0 where codes are not cut into planes."""
    channel: int
    """Whether a vector, whose numbers share scales, is a channel; else a token."""
    vectors: int
    """Vectors: channels, or tokens of a page."""
    group: int
    """Numbers of a vector that share a scale."""
    groups: int
    """Groups of a vector."""
    rank: int
    """Rank of the low-rank correction; 0 = none."""
    outliers: int
    """Outliers of a vector; 0 = none."""
    exact_mean: int
    """Whether the zero is fitted last, so that a vector keeps its mean."""


class PageLayout(NamedTuple):
    """What kernels have to know about a kind of cache, as one constant."""

    page: int
    """Tokens of a page."""
    window: int
    """Tokens that a window has room for; 0 where the kind has none."""
    sinks: int
    """Of them, first tokens of the sequence, before those in pages."""
    k: RecordLayout
    """Keys."""
    v: RecordLayout
    """Values."""


class Record(NamedTuple):
    """Records of keys or of values as numbers of each type; in kernels, pointers at one of them."""

    codes: Any
    """uint8."""
    halves: Any
    """float16."""
    shorts: Any
    """int16."""


class LayerTensors(NamedTuple):
    """The tensors of `LayerPages`, as one argument of kernels."""

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
    """Where the rows of a step belong, as one argument of kernels."""

    positions: Any
    """int32 [M], in its sequence."""
    slots: Any
    """int32 [M], the sequence's slot."""


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
    def per_slot(self) -> int:
        """Pages that a slot can hold."""
        return self.tables.shape[1]

    @property
    def tensors(self) -> LayerTensors:
        """What kernels read."""
        k, v = (record_views(self.pools[part]) for part in PARTS)
        return LayerTensors(k, v, self.windows["keys"], self.windows["values"], self.tables, self.paged)

    def layout(self, *, draft: bool = False) -> PageLayout:
        """What kernels know; see `page_layout`."""
        return page_layout(self.kind, self.head_dim, window=self.windows["keys"].shape[2], draft=draft)


def record_views(records: torch.Tensor) -> Record:
    """Records, uint8 [..., record bytes], as numbers of each type."""
    import torch

    return Record(records, records.view(torch.float16), records.view(torch.int16))


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def page_layout(kind: CacheKind, head_dim: int, *, window: int = 0, draft: bool = False) -> PageLayout:
    """What kernels have to know about the pages and windows of a kind.

    Args:
        kind: The kind of cache.
        head_dim: D.
        window: Tokens that a window has room for.
        draft: Whether the upper plane alone is read, where there are two.
    """
    k, v = (record_layout(kind, part, head_dim, draft=draft) for part in PARTS)
    return PageLayout(kind.page, window, kind.sinks, k, v)


def record_layout(kind: CacheKind, part: Part, head_dim: int, *, draft: bool = False) -> RecordLayout:
    """What kernels have to know about a record of keys or of values; arguments as in `page_layout`."""
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
