"""Arrangements: the order of page fields (`runtime.kv.kinds.page_fields`) in the CPU's records, and its inverse.

Fields without an arrangement of their own are stored unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from runtime.kv.kinds import CacheKind, Field, Part

Array = npt.NDArray[Any]


def padded(count: int, multiple: int) -> int:
    """The next multiple, at or above count."""
    return -(-count // multiple) * multiple


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
