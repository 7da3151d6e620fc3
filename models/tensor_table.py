"""The header table of a safetensors file: each tensor's location, checked against the file's size.

Format: 8 bytes with the table's length, the table as JSON, and the tensors one after another without holes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.foreign import MAX_JSON, open_file, parse_json

_LENGTH = 8
_MAX_DIMENSIONS = 8
_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
"""Bytes per item by type; other types exist but are never read here."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's location and type."""

    dtype: str
    """Type of its items, for example `BF16`."""
    shape: tuple[int, ...]
    """Its shape."""
    offset: int
    """First byte in the file."""
    size: int
    """Bytes."""


def read_table(path: Path) -> dict[str, Place]:
    """Every tensor of a safetensors file by its name.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is truncated, damaged, or something else.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH), "little")
        if size < _LENGTH or length > size - _LENGTH:
            raise ValueError("it is not a safetensors file, or it is truncated")
        if length > MAX_JSON:
            raise ValueError(f"its header has more than {MAX_JSON >> 20} MiB")
        table = parse_json(file.read(length), unique=True)
    if not isinstance(table, dict):
        raise ValueError("its header is not an object")
    table.pop("__metadata__", None)
    begin = _LENGTH + length
    places = {name: _place(name, entry, begin) for name, entry in table.items()}
    end = begin
    for place in sorted(places.values(), key=lambda place: (place.offset, place.size)):
        if place.offset != end:
            raise ValueError("its tensors overlap or leave holes")
        end += place.size
    if end != size:
        raise ValueError(f"it has {size:,} bytes, but its header says {end:,}")
    return places


def _place(name: str, entry: Any, base: int) -> Place:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its header lacks the location of '{name[:60]}'") from error
    numbers = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    if not isinstance(dtype, str) or not numbers or begin > end or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"its header entry for '{name[:60]}' is invalid")
    if dtype in _BYTES and end - begin != math.prod(shape) * _BYTES[dtype]:
        raise ValueError(f"its header gives '{name[:60]}' {end - begin:,} bytes, which does not match its shape")
    return Place(dtype, shape, base + begin, end - begin)
