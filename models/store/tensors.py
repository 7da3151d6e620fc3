"""Safetensors files, mapped without a copy and written in bounded memory.

The safetensors library copies every tensor it hands to numpy, so mapped access has a small reader of its own. What is
written here the library reads: a little-endian length, a JSON header padded with spaces so that the data begins at a
multiple of 64 bytes, then the tensors one after another, largest item size first.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.errors import StoreError

Array = npt.NDArray[Any]

DTYPES: Mapping[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
}
"""Types that a stored model uses, by their safetensors names."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 64
_LONGEST_HEADER = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file's header."""

    dtype: np.dtype[Any]
    """Type of the items."""
    shape: tuple[int, ...]
    """Shape."""
    offset: int
    """Where its bytes begin, counted from the start of the file."""

    @property
    def count(self) -> int:
        """Number of items."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read and check the header of a safetensors file.

    Raises:
        StoreError: the file is missing, foreign, truncated or damaged.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LONGEST_HEADER):
                raise StoreError(f"{path} is not a safetensors file, or it is truncated")
            header = json.loads(file.read(length))
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise StoreError(f"{path}: the safetensors header is damaged ({error})") from error
    if not isinstance(header, dict):
        raise StoreError(f"{path}: the safetensors header is damaged (not an object)")
    header.pop("__metadata__", None)
    try:
        entries = {name: _entry(fields, 8 + length) for name, fields in header.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{path}: the safetensors header is damaged ({error!r})") from error
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != end:
            raise StoreError(f"{path}: the safetensors header is damaged (tensors overlap or leave holes)")
        end += entry.nbytes
    if end != size:
        raise StoreError(f"{path} has {size:,} bytes where its header promises {end:,}; it is truncated or damaged")
    return entries


def _entry(fields: dict[str, Any], base: int) -> TensorEntry:
    begin, end = fields["data_offsets"]
    shape = tuple(fields["shape"])
    if fields["dtype"] not in DTYPES or not all(type(size) is int and size >= 0 for size in (*shape, begin, end)):
        raise ValueError(f"{fields['dtype']} {shape}")
    entry = TensorEntry(dtype=DTYPES[fields["dtype"]], shape=shape, offset=base + begin)
    if entry.nbytes != end - begin:
        raise ValueError(f"{end - begin} bytes for {shape}")
    return entry


class MappedTensors:
    """The tensors of one safetensors file as read-only views of a memory map. Pages are read when they are touched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = read_header(path)
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise StoreError(f"cannot map {path}: {error.strerror}") from error

    def get(self, name: str) -> Array | None:
        """The tensor of that name, or None."""
        return self[name] if name in self.entries else None

    def __getitem__(self, name: str) -> Array:
        entry = self.entries.get(name)
        if entry is None:
            raise StoreError(f"{self.path} has no tensor {name}")
        if entry.count == 0:
            return np.frombuffer(b"", entry.dtype).reshape(entry.shape)
        return np.frombuffer(self._map, entry.dtype, entry.count, entry.offset).reshape(entry.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseTensor:
    """A tensor to be written that need not be in memory as a whole."""

    dtype: np.dtype[Any]
    """Type of the items."""
    shape: tuple[int, ...]
    """Shape."""
    pieces: Callable[[], Iterator[Array]]
    """Gives consecutive ranges of the first axis, together the whole tensor."""


def tensor_file(tensors: Mapping[str, Array | PiecewiseTensor]) -> Iterator[memoryview]:
    """The bytes of a safetensors file, piece by piece; equal tensors give equal bytes, in any order of the mapping.

    Raises:
        ValueError: a tensor's type is none of DTYPES.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, dict[str, object]] = {}
    offset = 0
    for name in order:
        dtype, shape = tensors[name].dtype, tensors[name].shape
        if dtype not in _NAMES:
            raise ValueError(f"{name}: {dtype} is not stored")
        end = offset + TensorEntry(dtype=dtype, shape=shape, offset=0).nbytes
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in order:
        tensor = tensors[name]
        for piece in tensor.pieces() if isinstance(tensor, PiecewiseTensor) else (tensor,):
            if piece.nbytes:
                yield np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
