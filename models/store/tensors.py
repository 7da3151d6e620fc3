"""Safetensors files, mapped without a copy and written in bounded memory.

The safetensors library copies every tensor for numpy, so mapped access uses its own small reader. The library can read
the files written here: a little-endian length, a JSON header padded with spaces so that the data starts at a multiple
of 64 bytes, then the tensors one after another, largest item size first.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.errors import StoreError
from models.foreign import open_file, read_table

Array = npt.NDArray[Any]

DTYPES: Mapping[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
}
"""Types that a stored model uses, by their safetensors names."""
_NAMES = {**{dtype: name for name, dtype in DTYPES.items()}, np.dtype("<i8"): "I64"}
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file's header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte in the file."""

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read and check the header of a safetensors file.

    Raises:
        StoreError: the file is missing, foreign, truncated or damaged.
    """
    try:
        places = read_table(path)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise StoreError(
            f"{path} is truncated, or its safetensors header is damaged: {error}; quantize the model again"
        ) from error
    foreign = sorted({place.dtype for place in places.values()} - DTYPES.keys())
    if foreign:
        kind = foreign[0][:20]
        raise StoreError(
            f"{path}: the safetensors header is damaged: no stored model holds {kind}; quantize the model again"
        )
    return {
        name: TensorEntry(dtype=DTYPES[place.dtype], shape=place.shape, offset=place.offset)
        for name, place in places.items()
    }


class MappedTensors:
    """The tensors of one safetensors file as read-only views of a memory map. Pages are read when they are touched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = read_header(path)
        try:
            with open_file(path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise StoreError(f"cannot map {path}: {error.strerror}") from error

    def get(self, name: str) -> Array | None:
        return self[name] if name in self.entries else None

    def release(self) -> None:
        """Leave the pages that were read to the system's cache of the file; they come back when they are touched."""
        if hasattr(mmap, "MADV_DONTNEED"):  # on Windows there is none
            self._map.madvise(mmap.MADV_DONTNEED)

    def __getitem__(self, name: str) -> Array:
        entry = self.entries.get(name)
        if entry is None:
            raise StoreError(f"{self.path} has no tensor {name}")
        if entry.count == 0:
            return np.frombuffer(b"", entry.dtype).reshape(entry.shape)
        return np.frombuffer(self._map, entry.dtype, entry.count, entry.offset).reshape(entry.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseTensor:
    """A tensor to be written in pieces, without being in memory as a whole."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Array]]
    """Yields consecutive ranges of the first axis that make up the whole tensor."""


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
