"""Page layout: one record of bytes for each layer and key-value head of a page of the KV cache.

A record holds keys and values: first the codes, in the vectors that `runtime.backends.cpu.kernels.attention.products`
multiplies (or float16 values in those of `runtime.backends.cpu.kernels.attention.span`), then scales, zeros and GEAR's
corrections. Channels are padded to whole vectors.

The fields of a page are declared in `runtime.kv.kinds.page_fields`. Each has one or two *places* in the record, in an
order of its own if kernels need one (`Arrangement`). The table of places defines how records are written and read, how
compiled code sees them (`cache_at`, then `cache.keys.scales`) and their size: a new field needs no change here.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from runtime.backends.cpu.data.records import padded
from runtime.kv.kinds import KINDS, PARTS, CacheKind, Field, Part, page_fields

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A field stored unchanged; subclasses differ.

    Args:
        names: The places it occupies.
        dtype: Type of each.
        shape: Shape of each.
    """

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    aligned: ClassVar[bool] = False
    """Whether its places are aligned to 64 bytes; those come first."""

    def arrange(self, values: Array) -> Sequence[Array]:
        """Convert a field's values [...] to the contents of its places."""
        return (values,)

    def restore(self, arrays: Sequence[Array]) -> Array:
        """The reverse of `arrange`."""
        return arrays[0]


@dataclass(frozen=True, slots=True)
class _Turned(Arrangement):
    """A factor [length, rank], stored as padded columns."""

    length: int
    rank: int

    def arrange(self, values: Array) -> Sequence[Array]:
        return (_filled(np.swapaxes(values, -1, -2), self.shape),)

    def restore(self, arrays: Sequence[Array]) -> Array:
        return np.swapaxes(arrays[0][..., : self.rank, : self.length], -1, -2)


@dataclass(frozen=True, slots=True)
class _Scales(Arrangement):
    """Scales and zeros [vectors, groups, 2], stored separately, group by group, with padded vectors."""

    vectors: int

    def arrange(self, values: Array) -> Sequence[Array]:
        return [_filled(np.swapaxes(values[..., i], -1, -2), self.shape) for i in range(2)]

    def restore(self, arrays: Sequence[Array]) -> Array:
        return np.stack([np.swapaxes(array[..., : self.vectors], -1, -2) for array in arrays], axis=-1)


@dataclass(frozen=True, slots=True)
class _HalfKeys(Arrangement):
    """Half precision [T, D], stored as [T / 16, D, 16]."""

    aligned: ClassVar[bool] = True

    def arrange(self, values: Array) -> Sequence[Array]:
        tiles, D, lanes = self.shape
        return (np.swapaxes(values.reshape(*values.shape[:-2], tiles, lanes, D), -1, -2),)

    def restore(self, arrays: Sequence[Array]) -> Array:
        tiles, D, lanes = self.shape
        return np.swapaxes(arrays[0], -1, -2).reshape(*arrays[0].shape[:-3], tiles * lanes, D)


@dataclass(frozen=True, slots=True)
class _HalfValues(Arrangement):
    """Half precision [T, D], stored with D padded to 16."""

    dim: int
    aligned: ClassVar[bool] = True

    def arrange(self, values: Array) -> Sequence[Array]:
        return (_filled(values, self.shape),)

    def restore(self, arrays: Sequence[Array]) -> Array:
        return arrays[0][..., : self.dim]


@dataclass(frozen=True, slots=True)
class _Codes(Arrangement):
    """Codes, stored in the vectors of `runtime.backends.cpu.kernels.attention.products`."""

    bits: int
    """Bits of a plane."""
    part: Part
    tokens: int
    dim: int
    signed: bool
    """Whether the field's codes are signed (a lower plane's): vectors store them with an offset."""
    aligned: ClassVar[bool] = True

    @property
    def _width(self) -> int:
        """Channels of whole vectors."""
        return padded(self.dim, 32 if self.part == "values" else 8 if self.bits == 8 else 32 // self.bits)

    def arrange(self, values: Array) -> Sequence[Array]:
        lead, T = values.shape[:-2], self.tokens
        codes = _unpacked(values, self.bits, self.dim)
        codes = _filled(codes ^ 8 if self.signed else codes, (T, self._width))
        fields = codes.reshape(*lead, *self._split)
        order = [self._split_names.index(name) for name in self._order]
        fields = np.moveaxis(fields, [i - len(order) for i in order], range(-len(order), 0))
        return (fields if self.bits == 8 else _joined(fields, self.bits),)

    def restore(self, arrays: Sequence[Array]) -> Array:
        stored, T = arrays[0], self.tokens
        fields = stored
        if self.bits < 8:
            shifts = np.arange(0, 8, self.bits, dtype=np.uint8)
            fields = (stored[..., None] >> shifts) & np.uint8(2**self.bits - 1)
        order = [self._split_names.index(name) for name in self._order]
        fields = np.moveaxis(fields, range(-len(order), 0), [i - len(order) for i in order])
        codes = fields.reshape(*fields.shape[: -len(order)], T, self._width)[..., : self.dim]
        return _packed(codes ^ 8 if self.signed else codes, self.bits)

    @property
    def _split(self) -> tuple[int, ...]:
        """Tokens and channels [T, width], split into what the vectors order; the names are `_split_names`."""
        T, width, fields = self.tokens, self._width, 2 if self.bits == 8 else 8 // self.bits
        if self.part == "keys":
            return (T // 16, 16, width // (4 * fields), fields, 4)
        if self.bits == 2:
            return (T // 16, 4, 4, width // 32, 2, 16)
        return (T // 4, 4, width // 32, 2, 16)

    @property
    def _split_names(self) -> str:
        """One letter for each.

        Of keys: tile t, lane l, vector v, field f, byte b. Of values: n, field f, byte b of tokens; block k, half h,
        lane l of channels.
        """
        if self.part == "keys":
            return "tlvfb"
        return "nfbkhl" if self.bits == 2 else "nbkhl"

    @property
    def _order(self) -> str:
        """The same letters in storage order, fields of a byte last."""
        if self.part == "keys":
            return "tvflb" if self.bits == 8 else "tvlbf"
        return {2: "knhlbf", 4: "knlbh", 8: "knhlb"}[self.bits]


def arrangement_of(kind: CacheKind, part: Part, field: Field, head_dim: int) -> Arrangement:
    """The CPU's arrangement of a field.

    Args:
        kind: The kind of cache.
        part: Keys or values.
        field: One of its `page_fields`.
        head_dim: D.
    """
    T, D, keys = kind.page, head_dim, part == "keys"
    P = padded(D, 32)
    if field.name == "x":
        if keys:
            return _HalfKeys(("codes",), "float16", (T // 16, D, 16))
        return _HalfValues(("codes",), "float16", (T, padded(D, 16)), D)
    if field.name in ("codes", "upper", "lower"):
        bits = 4 if kind.hierarchical else kind.code(part).bits
        shape: tuple[int, ...]
        if keys:
            shape = (T // 16, -(-D // 8), 2, 16, 4) if bits == 8 else (T // 16, -(-D // (32 // bits)), 16, 4)
        else:
            shape = {2: (P // 32, T // 16, 2, 16, 4), 4: (P // 32, T // 4, 16, 4), 8: (P // 32, T // 4, 2, 16, 4)}[bits]
        lower = field.name == "lower"
        return _Codes(("lower" if lower else "codes",), "uint8", shape, bits, part, T, D, lower)
    if field.name == "scales":
        vectors, groups, _ = field.shape
        wide = P if kind.code(part).axis == "channel" else vectors
        return _Scales(("scales", "zeros"), "float16", (groups, wide), vectors)
    if field.name in ("a", "b"):
        length, rank = field.shape
        return _Turned((field.name,), "float16", (kind.rank, T if field.name == "a" else P), length, rank)
    return Arrangement((field.name,), field.dtype, field.shape)


def _filled(values: Array, shape: tuple[int, ...]) -> Array:
    """Pad the last dimensions with zeros."""
    lead = values.shape[: -len(shape)]
    out = np.zeros((*lead, *shape), values.dtype)
    filled: tuple[Any, ...] = (..., *(slice(size) for size in values.shape[len(lead) :]))
    out[filled] = values
    return out


def _joined(fields: Array, bits: int) -> Array:
    """Join fields [..., 8 / bits] into bytes, first lowest."""
    out = np.zeros(fields.shape[:-1], np.uint8)
    for i in range(fields.shape[-1]):
        out |= fields[..., i] << np.uint8(bits * i)
    return out


def _unpacked(packed: Array, bits: int, count: int) -> Array:
    """Unpack codes, low bits first, to one per byte."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[..., None] >> shifts) & np.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))[..., :count]


def _packed(codes: Array, bits: int) -> Array:
    """The reverse of `_unpacked`."""
    each = 8 // bits
    wide = _filled(codes, (padded(codes.shape[-1], each),))
    return _joined(wide.reshape(*codes.shape[:-1], wide.shape[-1] // each, each), bits)


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
