"""Safe reading of untrusted files.

A model's folder may contain a pipe without a writer, a link to an endless device, JSON that is nested a million times,
or data on which a Rust library panics. Here all of that is an OSError or a ValueError, so that callers have only these
two to handle.

Of a safetensors file the header table is read, and each tensor's location checked against the file's size. The format:
8 bytes with the table's length, the table as JSON, and the tensors one after another without holes.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20
"""Maximum size of a file that is read as a whole. The largest known tokenizer.json has 34 MB."""
MAX_JSON = 32 << 20
"""Maximum size of a JSON file; parsing takes up to twenty times that in memory."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading, without waiting for a pipe or reading a device.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    _check_regular(path.stat(), path)
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a file as a whole.

    Raises:
        OSError: it cannot be read, is no regular file, or is too large.
    """
    with open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EINVAL, f"it has more than {most >> 20} MiB, far more than such files have", str(path))
    return content


def check_folder(folder: Path) -> None:
    """Check that a folder contains only files and folders, before a library reads it unchecked.

    Raises:
        OSError: it can't be listed, or contains a pipe, a device or the like, or a link to one.
    """
    with os.scandir(folder) as found:
        for entry in found:
            with suppress(FileNotFoundError):  # a link that leads nowhere
                if not entry.is_dir():
                    _check_regular(entry.stat(), Path(entry.path))


def parse_json(content: bytes | str, *, unique: bool = False) -> Any:
    """Parse JSON.

    Args:
        content: The text.
        unique: Whether to refuse duplicate keys; otherwise the last one counts.

    Raises:
        ValueError: it is malformed, nested too deeply, or contains text that can't be encoded as UTF-8.
    """
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    try:
        found = json.loads(text, object_pairs_hook=_unique if unique else None)
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is malformed.
    """
    return parse_json(read_file(path, MAX_JSON))


@contextmanager
def panics_raised() -> Iterator[None]:
    """Turn panics of Rust libraries into ValueError.

    pyo3 raises a panic as a BaseException, which passes through `except Exception` and kills threads and servers.

    Raises:
        ValueError: a library panicked.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise ValueError(f"the library that reads it crashed: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a duplicate key")
    return found


def _check_regular(found: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


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
