"""How the CPU backend lays out a page of the KV cache: one record of bytes for each layer and key-value head.

A record holds keys and values together: first the codes, in the vectors that
`runtime.backends.cpu.kernels.attention.products` multiplies (or halves in those of
`runtime.backends.cpu.kernels.attention.span`), then scales, zeros and GEAR's corrections. Channels are padded to whole
vectors. `PageLayout` knows the places, describes them to compiled code as words, and converts to and from the fields of
`runtime.kv.kinds.page_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from runtime.kv.kinds import PARTS, CacheKind, Part, page_fields

# Words of a cache's description, int64 each: sizes, places in a record in bytes, and addresses.
FORMAT: Final = 0
"""Bits of a code, 2, 4 or 8; or `TWO_PLANES` of 4 bits; or `HALF` precision."""
TWO_PLANES, HALF = 44, 16
TOKENS, DIM, PADDED, RECORD = 1, 2, 3, 4
"""Tokens of a page; D; D padded; bytes of a record."""
KEY_CODES, KEY_LOWER, KEY_SCALES, KEY_ZEROS, KEY_VECTORS, KEY_TOKENWISE, KEY_GROUP = 5, 6, 7, 8, 9, 10, 11
"""Places of codes and scales; the lower plane counted from the codes; vectors of 16 tokens; whether a scale spans a
token; tokens of a group."""
VALUE_CODES, VALUE_LOWER, VALUE_SCALES, VALUE_ZEROS, VALUE_COUNT, VALUE_BLOCK, VALUE_GROUP = 12, 13, 14, 15, 16, 17, 18
"""Likewise; vectors along the tokens of 32 channels, their bytes, channels of a group."""
RANK, KEY_A, KEY_B, VALUE_A, VALUE_B = 19, 20, 21, 22, 23
KEY_OUTLIERS, KEY_INDICES, KEY_KEPT, VALUE_OUTLIERS, VALUE_INDICES, VALUE_KEPT = 24, 25, 26, 27, 28, 29
"""Outliers of a vector and their places."""
DITHER, TABLES, TABLE_STEP, PAGED = 30, 31, 32, 33
"""Addresses of the dither, the block tables (and bytes of one), and int32 tokens in pages of each slot."""
WINDOW, WORDS = 34, 36
"""Tokens that a window has room for; number of words."""

Array = npt.NDArray[Any]


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def form_of(kind: CacheKind) -> int:
    """A kind's word FORMAT."""
    return TWO_PLANES if kind.hierarchical else kind.keys.bits


@dataclass(frozen=True, slots=True)
class _Place:
    """One array of a record."""

    offset: int
    """Bytes from the record's start."""
    dtype: str
    shape: tuple[int, ...]


class PageLayout:
    """Where a record keeps what.

    Args:
        kind: The kind of cache.
        head_dim: D.
    """

    def __init__(self, kind: CacheKind, head_dim: int) -> None:
        self.kind, self.head_dim = kind, head_dim
        self.format = form_of(kind)
        """Word FORMAT."""
        self.lowbit = self.format != HALF
        """Whether attention goes by integer products."""
        self.padded = _padded(head_dim, 32 if self.lowbit else 16)
        """Channels of padded vectors."""
        self._places: dict[tuple[Part, str], _Place] = {}
        self._size = 0
        for part in PARTS:
            self._place_codes(part)
        for part in PARTS:
            self._place_scales(part)
        self.record = _padded(self._size, 64)
        """Bytes of a record."""

    def description(
        self, *, dither: int = 0, tables: int = 0, table_step: int = 0, paged: int = 0, window: int = 0
    ) -> Array:
        """The words that compiled code reads; the arguments are addresses and sizes that a layout does not know.

        Returns:
            int64 [WORDS].
        """
        words = np.zeros(WORDS, np.int64)
        kind, T = self.kind, self.kind.page
        words[[FORMAT, TOKENS, DIM, PADDED, RECORD]] = self.format, T, self.head_dim, self.padded, self.record
        for part, at in zip(PARTS, (KEY_CODES, VALUE_CODES), strict=True):
            codes = self._offset(part, "codes")
            words[at] = codes
            words[at + 1] = max(0, self._offset(part, "lower") - codes)
            words[at + 2], words[at + 3] = self._offset(part, "scales"), self._offset(part, "zeros")
        words[KEY_TOKENWISE] = int(kind.keys.axis == "token")
        words[KEY_GROUP] = T if kind.keys.axis == "token" else kind.keys.group or T
        width = kind.values.group or self.padded
        words[VALUE_GROUP] = min(width, self.padded)
        if self.lowbit:
            words[KEY_VECTORS] = self._places["keys", "codes"].shape[1]
            words[VALUE_COUNT] = T // (16 if self.format == 2 else 4)
            words[VALUE_BLOCK] = int(np.prod(self._places["values", "codes"].shape[1:]))
        if kind.rank:
            words[RANK] = kind.rank
            words[[KEY_A, KEY_B]] = self._offset("keys", "a"), self._offset("keys", "b")
            words[[VALUE_A, VALUE_B]] = self._offset("values", "a"), self._offset("values", "b")
        if kind.sparsity:
            for part, at in zip(PARTS, (KEY_OUTLIERS, VALUE_OUTLIERS), strict=True):
                words[at] = self._places[part, "indices"].shape[1]
                words[at + 1], words[at + 2] = self._offset(part, "indices"), self._offset(part, "outliers")
        words[[DITHER, TABLES, TABLE_STEP, PAGED, WINDOW]] = dither, tables, table_step, paged, window
        return words

    def write(self, records: npt.NDArray[np.uint8], part: Part, fields: Mapping[str, Array]) -> None:
        """Write the keys or values of whole pages.

        Args:
            records: uint8 [..., record].
            part: Keys or values.
            fields: The arrays of `runtime.kv.kinds.page_fields`, with the leading dimensions of the records.
        """
        for name, values in fields.items():
            if name in ("codes", "upper", "lower", "x"):
                self._view(records, part, self._named(name))[...] = self._arranged(part, name, values)
            elif name == "scales":
                for i, target in enumerate(("scales", "zeros")):
                    turned = np.swapaxes(values[..., i], -1, -2)
                    self._view(records, part, target)[..., : turned.shape[-1]] = turned
            elif name in ("a", "b"):
                length, rank = values.shape[-2:]
                self._view(records, part, name)[..., :rank, :length] = np.swapaxes(values, -1, -2)
            else:
                self._view(records, part, name)[...] = values

    def read(self, records: npt.NDArray[np.uint8], part: Part) -> dict[str, Array]:
        """The fields of whole pages: the reverse of `write`.

        Args:
            records: uint8 [..., record].
            part: Keys or values.

        Returns:
            Arrays by their names, with the leading dimensions of the records.
        """
        fields: dict[str, Array] = {}
        for field in page_fields(self.kind, part, self.head_dim):
            name, shape = field.name, field.shape
            if name in ("codes", "upper", "lower", "x"):
                fields[name] = self._canonical(part, name, self._view(records, part, self._named(name)))
            elif name == "scales":
                both = [self._view(records, part, source)[..., : shape[0]] for source in ("scales", "zeros")]
                fields[name] = np.stack([np.swapaxes(one, -1, -2) for one in both], axis=-1)
            elif name in ("a", "b"):
                length, rank = shape
                fields[name] = np.swapaxes(self._view(records, part, name)[..., :rank, :length], -1, -2).copy()
            else:
                fields[name] = self._view(records, part, name).copy()
        return fields

    def _named(self, field: str) -> str:
        """The place that a field's codes have."""
        return "codes" if field in ("upper", "x") else field

    def _add(self, part: Part, name: str, dtype: str, *shape: int) -> None:
        self._places[part, name] = _Place(self._size, dtype, shape)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._size += _padded(size, 64) if name in ("codes", "lower") else _padded(size, 2)

    def _place_codes(self, part: Part) -> None:
        T, D, P = self.kind.page, self.head_dim, self.padded
        shape: tuple[int, ...]
        if not self.lowbit:
            shape = (T // 16, D, 16) if part == "keys" else (T, P)
            self._add(part, "codes", "float16", *shape)
            return
        if self.format == 8:
            shape = (T // 16, -(-D // 8), 2, 16, 4) if part == "keys" else (P // 32, T // 4, 2, 16, 4)
        elif part == "keys":
            shape = (T // 16, -(-D // (16 if self.format == 2 else 8)), 16, 4)
        elif self.format == 2:
            shape = (P // 32, T // 16, 2, 16, 4)
        else:
            shape = (P // 32, T // 4, 16, 4)
        self._add(part, "codes", "uint8", *shape)
        if self.format == TWO_PLANES:
            self._add(part, "lower", "uint8", *shape)

    def _place_scales(self, part: Part) -> None:
        kind, code, T, P = self.kind, self.kind.code(part), self.kind.page, self.padded
        if self.format == HALF:
            return
        vectors, length = (T, self.head_dim) if code.axis == "token" else (P, T)
        groups = -(-length // (code.group or length))
        self._add(part, "scales", "float16", groups, vectors)
        self._add(part, "zeros", "float16", groups, vectors)
        if kind.rank:
            self._add(part, "a", "float16", kind.rank, T)
            self._add(part, "b", "float16", kind.rank, P)
        if kind.sparsity:
            count = 2 * kind.outliers(length)
            vectors = T if code.axis == "token" else self.head_dim
            self._add(part, "indices", "int16", vectors, count)
            self._add(part, "outliers", "float16", vectors, count)

    def _offset(self, part: Part, name: str) -> int:
        place = self._places.get((part, name))
        return place.offset if place else 0

    def _view(self, records: npt.NDArray[np.uint8], part: Part, name: str) -> Array:
        """A place of all records, as an array of its type in their memory."""
        place = self._places[part, name]
        size = int(np.prod(place.shape)) * np.dtype(place.dtype).itemsize
        raw = records[..., place.offset : place.offset + size]
        return raw.view(place.dtype).reshape(*records.shape[:-1], *place.shape)

    def _arranged(self, part: Part, name: str, values: Array) -> Array:
        """Codes [..., T, D * bits / 8] in the order of their vectors."""
        T, D = self.kind.page, self.head_dim
        lead = values.shape[:-2]
        if not self.lowbit:
            if part == "keys":
                return np.swapaxes(values.reshape(*lead, T // 16, 16, D), -1, -2)
            return _widened(values, self.padded)
        if self.format == 8:
            if part == "keys":
                fields = _widened(values, _padded(D, 8)).reshape(*lead, T // 16, 16, -1, 2, 4)
                return np.moveaxis(fields, -4, -2)  # tile, token, vector, half, byte
            fields = _widened(values, self.padded).reshape(*lead, T // 4, 4, -1, 2, 16)
            return np.moveaxis(fields, (-5, -4), (-4, -1))  # quad, byte, block, half, lane
        bits = 2 if self.format == 2 else 4
        codes = _unpacked(values, bits, D)
        if name == "lower":
            codes = codes ^ 8
        each = 8 // bits
        if part == "keys":
            codes = _widened(codes, _padded(D, 4 * each))
            fields = codes.reshape(*lead, T // 16, 16, -1, each, 4)  # tile, token, vector, field, byte
            return _joined(np.moveaxis(fields, (-4, -3, -2, -1), (-3, -4, -1, -2)), bits)
        codes = _widened(codes, self.padded)
        if bits == 2:
            fields = codes.reshape(*lead, T // 16, 4, 4, -1, 2, 16)  # n, field, byte, block, half, lane
            return _joined(np.moveaxis(fields, (-6, -5, -4, -3, -2, -1), (-5, -1, -2, -6, -4, -3)), bits)
        fields = codes.reshape(*lead, T // 4, 4, -1, 2, 16)  # quad, byte, block, field, lane
        return _joined(np.moveaxis(fields, (-5, -4, -3, -2, -1), (-4, -2, -5, -1, -3)), bits)

    def _canonical(self, part: Part, name: str, stored: Array) -> Array:
        """The reverse of `_arranged`."""
        T, D = self.kind.page, self.head_dim
        if not self.lowbit:
            if part == "keys":
                lead = stored.shape[:-3]
                return np.swapaxes(stored, -1, -2).reshape(*lead, T, D).copy()
            return stored[..., :D].copy()
        if self.format == 8:
            lead = stored.shape[:-5]
            fields = np.moveaxis(stored, -2, -4) if part == "keys" else np.moveaxis(stored, (-4, -1), (-5, -4))
            width = _padded(D, 8) if part == "keys" else self.padded
            return fields.reshape(*lead, T, width)[..., :D].copy()
        bits = 2 if self.format == 2 else 4
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        fields = (stored[..., None] >> shifts) & np.uint8(2**bits - 1)
        width = _padded(D, 32 // bits) if part == "keys" else self.padded
        if part == "keys":  # tile, vector, token, byte, field
            lead = fields.shape[:-5]
            codes = np.moveaxis(fields, (-5, -4, -3, -2, -1), (-5, -3, -4, -1, -2)).reshape(*lead, T, width)
        elif bits == 2:  # block, n, half, lane, byte, field
            lead = fields.shape[:-6]
            codes = np.moveaxis(fields, (-5, -1, -2, -6, -4, -3), (-6, -5, -4, -3, -2, -1)).reshape(*lead, T, width)
        else:  # block, quad, lane, byte, field
            lead = fields.shape[:-5]
            codes = np.moveaxis(fields, (-4, -2, -5, -1, -3), (-5, -4, -3, -2, -1)).reshape(*lead, T, width)
        codes = codes[..., :D]
        return _packed(codes ^ 8 if name == "lower" else codes, bits)


def _widened(values: Array, width: int) -> Array:
    """The last dimension filled up with zeros."""
    out = np.zeros((*values.shape[:-1], width), values.dtype)
    out[..., : values.shape[-1]] = values
    return out


def _joined(fields: Array, bits: int) -> Array:
    """Fields [..., 8 / bits] of a byte, the first lowest, as bytes."""
    out = np.zeros(fields.shape[:-1], np.uint8)
    for i in range(fields.shape[-1]):
        out |= fields[..., i] << np.uint8(bits * i)
    return out


def _unpacked(packed: Array, bits: int, count: int) -> Array:
    """Codes packed side by side, low bits first, one a byte."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[..., None] >> shifts) & np.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))[..., :count]


def _packed(codes: Array, bits: int) -> Array:
    """The reverse of `_unpacked`."""
    each = 8 // bits
    return _joined(
        _widened(codes, _padded(codes.shape[-1], each)).reshape(*codes.shape[:-1], -(-codes.shape[-1] // each), each),
        bits,
    )
