"""Page layout: one record of bytes for each layer and key-value head of a page of the KV cache.

A record holds keys and values: first the codes, in the vectors that `runtime.backends.cpu.kernels.attention.products`
multiplies (or float16 values in those of `runtime.backends.cpu.kernels.attention.span`), then scales, zeros and GEAR's
corrections. Channels are padded to whole vectors.

The fields of a page are declared in `runtime.kv.kinds.page_fields`. Each has one or two *places* in the record, in an
order of its own if kernels need one (`runtime.backends.cpu.data.arrangements`). The table of places defines how records
are written and read, how compiled code sees them (`cache_at`, then `cache.keys.scales`) and their size: a new field
needs no change here.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from runtime.backends.cpu.data.arrangements import Arrangement, Array, arrangement_of, padded
from runtime.kv.kinds import KINDS, PARTS, CacheKind, Part, page_fields

TWO_PLANES, HALF = 44, 16
"""Forms of a page besides 2, 4 and 8, the bits of a code: two planes of 4 bits, and half precision."""
_STORED: Final = tuple(
    dict.fromkeys(
        name
        for kind in KINDS.values()
        for part in PARTS
        for field in page_fields(kind, part, 64)
        for name in arrangement_of(kind, part, field, 64).names
    )
)
"""All places of all kinds."""
_PART: Final = np.dtype(
    [
        *((name, np.int64) for name in _STORED),  # bytes from the record's start; 0 if a kind has no such place
        ("vectors", np.int64),  # of keys: vectors of 16 tokens
        ("block", np.int64),  # of values: bytes of the codes of 32 channels
        ("group", np.int64),  # numbers per scale: tokens of keys by channel, else channels
        ("tokenwise", np.int64),  # 1: a scale per token; 0: a scale per channel
        ("kept", np.int64),  # outliers of a vector
        ("alike", np.int64),  # extra weight of an error that all channels share
        ("exact_mean", np.int64),  # 1: the zero is refitted, so that a vector keeps its mean
    ]
)
CACHE: Final = np.dtype(
    [
        ("form", np.int64),  # bits of a code, TWO_PLANES or HALF
        ("tokens", np.int64),  # of a page, T
        ("dim", np.int64),  # D
        ("padded", np.int64),  # D padded to whole vectors
        ("record", np.int64),  # bytes
        ("rank", np.int64),  # of GEAR's corrections; 0 = none
        ("layers", np.int64),  # heads whose records and windows are adjacent in every page and slot
        ("keys", _PART),
        ("values", _PART),
        ("dither", np.int64),  # address of float32 [T] in [0, 1)
        ("tables", np.int64),  # address of the block tables, int32 [slots, pages]
        ("table_step", np.int64),  # bytes of one
        ("paged", np.int64),  # address of int32 [slots], tokens in pages
        ("window", np.int64),  # capacity of a window in tokens
        ("sinks", np.int64),  # of these, the first tokens of the sequence
    ]
)
Cache = Any
"""In compiled code: view of a cache's description."""


def cache_of(address: int) -> Any:
    """The description at an address, as a record."""
    raw = (ctypes.c_char * CACHE.itemsize).from_address(address)
    return np.frombuffer(memoryview(raw), CACHE)[0]


def form_of(kind: CacheKind) -> int:
    """A kind's form."""
    return TWO_PLANES if kind.hierarchical else kind.keys.bits


@dataclass(frozen=True, slots=True)
class _Place:
    """One array of a record."""

    name: str
    """Name in compiled code."""
    offset: int
    """Bytes from the record's start."""
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def view(self, records: npt.NDArray[np.uint8]) -> Array:
        """A view of this array in all records, uint8 [..., record]."""
        raw = records[..., self.offset : self.offset + self.nbytes]
        return raw.view(self.dtype).reshape(*records.shape[:-1], *self.shape)


class PageLayout:
    """Positions of all fields in a record.

    Args:
        kind: The kind of cache.
        head_dim: D.
    """

    def __init__(self, kind: CacheKind, head_dim: int) -> None:
        self.kind, self.head_dim = kind, head_dim
        self.padded = padded(head_dim, 16 if form_of(kind) == HALF else 32)
        """Channels, padded to whole vectors."""
        self._arrangements: dict[Part, dict[str, Arrangement]] = {
            part: {
                field.name: arrangement_of(kind, part, field, head_dim) for field in page_fields(kind, part, head_dim)
            }
            for part in PARTS
        }
        self._places: dict[Part, dict[str, _Place]] = {part: {} for part in PARTS}
        size = 0
        for part, arrangement in sorted(self._all(), key=lambda own: not own[1].aligned):
            for name in arrangement.names:
                place = _Place(name, size, arrangement.dtype, arrangement.shape)
                self._places[part][name] = place
                size += padded(place.nbytes, 64 if arrangement.aligned else 2)
        self.record = padded(size, 64)
        """Bytes of a record."""

    def _all(self) -> Iterator[tuple[Part, Arrangement]]:
        return ((part, own) for part in PARTS for own in self._arrangements[part].values())

    @property
    def name(self) -> str:
        """Hexadecimal hash that changes with any place."""
        return hashlib.sha256(repr(self._places).encode()).hexdigest()[:12]

    def description(
        self, *, layers: int = 1, dither: int = 0, tables: int = 0, table_step: int = 0, paged: int = 0, window: int = 0
    ) -> Array:
        """The cache's description for compiled code; the arguments are addresses and sizes outside the layout.

        Returns:
            A structured array [1].
        """
        found = np.zeros(1, CACHE)
        cache, kind = found[0], self.kind
        cache["form"], cache["tokens"], cache["dim"] = form_of(kind), kind.page, self.head_dim
        cache["padded"], cache["record"], cache["rank"] = self.padded, self.record, kind.rank
        cache["layers"] = layers
        cache["dither"], cache["tables"], cache["table_step"] = dither, tables, table_step
        cache["paged"], cache["window"], cache["sinks"] = paged, window, kind.sinks
        for part in PARTS:
            own, places, code = cache[part], self._places[part], kind.code(part)
            for name, place in places.items():
                own[name] = place.offset
            longest = kind.page if part == "keys" else self.padded
            own["group"] = min(code.group or longest, longest)
            own["alike"] = kind.alike(part)
            own["tokenwise"], own["exact_mean"] = code.axis == "token", code.exact_mean
            own["vectors"] = places["codes"].shape[1]
            own["block"] = places["codes"].nbytes // places["codes"].shape[0]
            own["kept"] = places["indices"].shape[1] if "indices" in places else 0
        return found

    def write(self, records: npt.NDArray[np.uint8], part: Part, fields: Mapping[str, Array]) -> None:
        """Write the keys or values of whole pages.

        Args:
            records: uint8 [..., record].
            part: Keys or values.
            fields: The arrays of `runtime.kv.kinds.page_fields`, with the leading dimensions of the records.
        """
        for name, values in fields.items():
            arrangement = self._arrangements[part][name]
            for place, array in zip(arrangement.names, arrangement.arrange(values), strict=True):
                self._places[part][place].view(records)[...] = array

    def read(self, records: npt.NDArray[np.uint8], part: Part) -> dict[str, Array]:
        """The fields of whole pages: the reverse of `write`.

        Args:
            records: uint8 [..., record].
            part: Keys or values.

        Returns:
            Arrays by their names, with the leading dimensions of the records.
        """
        return {
            name: own.restore([self._places[part][place].view(records) for place in own.names]).copy()
            for name, own in self._arrangements[part].items()
        }
