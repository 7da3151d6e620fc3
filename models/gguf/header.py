"""The header of a GGUF file: its metadata, and where each tensor is. Weights are not touched.

Types and their block sizes are those of the `gguf` package. Its reader is not used: it makes an array of every token's
bytes (2.3 s for a vocabulary of 49,152), and in a damaged file it follows counts beyond the end for ever.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.errors import CheckpointError
from models.foreign import open_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Supported versions of the format; version 1 had other lengths and was used only for some weeks."""
WHOLE_TYPES = ("F32", "F16", "BF16")
"""Types of weights that are not low-bit."""
DOWNLOAD_AGAIN = "Download the model again."

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata values of a fixed size, by their number, as `struct` calls them."""
_STRING = 8
_ARRAY = 9
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_BYTES = 128 << 20
"""Maximum size of a header; the largest known vocabularies need a sixth of it."""
_MAX_TEXTS = 1 << 22
"""Maximum number of texts in all lists together; each takes 60 bytes of memory but only 8 in the file."""
_MAX_TENSORS = 1 << 16
_MAX_NAME = (1 << 16) - 1
"""Bytes of a key of the metadata, as the format has it."""

Value = bool | int | float | str | list[str] | memoryview
"""A value of the metadata; a list of numbers or truth values is a view of them that takes no more than in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor's location and type."""

    path: Path
    """The file."""
    name: str
    """Its name there, `blk.0.attn_q.weight`."""
    shape: tuple[int, ...]
    """The slowest dimension first, as numpy and safetensors have it (a file lists them the other way round)."""
    kind: str
    """Its type by ggml's name, `Q4_K`."""
    offset: int
    """First byte in the file."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The part of a GGUF file before its weights."""

    path: Path
    """The file; of several, the first."""
    files: tuple[Path, ...]
    """All files (`models.gguf.parts`)."""
    metadata: Mapping[str, Value]
    """Every value by its key."""
    tensors: Mapping[str, TensorInfo]
    """Every tensor by its name."""


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file and check that all of its tensors are there.

    Raises:
        CheckpointError: the file cannot be read, is no GGUF file, is cut off or damaged.
    """
    try:
        with open_file(path) as file:
            beginning = file.read(64)
            if not beginning.startswith(MAGIC):
                raise CheckpointError(_what_it_is(path, beginning))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from error


def _what_it_is(path: Path, beginning: bytes) -> str:
    if beginning.startswith(b"version https://git-lfs"):
        return f"{path}: is a Git LFS pointer, not the model itself. Run `git lfs pull` in its folder."
    if not beginning:
        return f"{path}: is empty. {DOWNLOAD_AGAIN}"
    return f"{path}: is not a GGUF file (it does not begin with 'GGUF'). Give a .gguf file or a checkpoint's folder."


class _Reader:
    """Parses a header. No count is trusted until the file is known to be long enough for it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._position = len(MAGIC)
        self._texts = 0

    def header(self) -> Header:
        self._check_version()
        tensors, values = self._scalar("Q"), self._scalar("Q")
        if tensors > _MAX_TENSORS:
            raise self._damaged(f"it promises {tensors:,} tensors")
        metadata: dict[str, Value] = {}
        for _ in range(values):
            key = self._string("a key of the metadata", longest=_MAX_NAME)
            if key in metadata:
                raise self._damaged(f"it has the key '{key}' twice")
            metadata[key] = self._value(key)
        listed = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"its alignment is {alignment!r}, which is no power of two")
        begin = -(-self._position // alignment) * alignment
        return Header(path=self._path, files=(self._path,), metadata=metadata, tensors=self._placed(listed, begin))

    def _check_version(self) -> None:
        version: int = self._scalar("I")
        if version & 0xFFFF == 0 and version:
            raise CheckpointError(
                f"{self._path}: was written for machines with the other byte order (big-endian). Take the usual file, "
                "which is little-endian."
            )
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self._path}: has version {version} of the GGUF format (supported: {VERSIONS[0]} and {VERSIONS[1]}). "
                "Take a newer conversion of the model."
                if version < VERSIONS[0]
                else f"{self._path}: has version {version} of the GGUF format, which this program does not know yet "
                f"(supported: {VERSIONS[0]} and {VERSIONS[1]})."
            )

    def _placed(self, listed: list[tuple[str, tuple[int, ...], str, int, int]], begin: int) -> dict[str, TensorInfo]:
        """Tensors by name, each seen to lie within the file."""
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset, size in listed:
            if name in tensors:
                raise self._damaged(f"it has the tensor '{name}' twice")
            if begin + offset + size > len(self._data):
                raise CheckpointError(
                    f"{self._path}: is cut off: the tensor '{name}' ends at byte {begin + offset + size}, the file at "
                    f"{len(self._data)}. {DOWNLOAD_AGAIN}"
                )
            tensors[name] = TensorInfo(
                path=self._path, name=name, shape=shape, kind=kind, offset=begin + offset, size=size
            )
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], str, int, int]:
        """Name, shape, type, offset after the header, and bytes of the next tensor."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._string("the name of a tensor", longest=_MAX_NAME)
        dimensions: int = self._scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"the tensor '{name}' has {dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        if not all(shape):
            raise self._damaged(f"the tensor '{name}' is empty")
        number, offset = self._scalar("I"), self._scalar("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise self._damaged(f"the tensor '{name}' has unknown type {number}") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self._damaged(f"the tensor '{name}' has rows of {shape[-1]}, where {kind.name} has blocks of {block}")
        return name, shape, kind.name, offset, math.prod(shape) // block * block_bytes

    def _value(self, key: str) -> Value:
        kind: int = self._scalar("I")
        if kind in _SCALARS:
            value: Value = self._scalar(_SCALARS[kind])
            return value
        if kind == _STRING:
            return self._string(f"'{key}'")
        if kind == _ARRAY:
            return self._array(key)
        raise self._damaged(f"'{key}' has unknown type {kind}")

    def _array(self, key: str) -> list[str] | memoryview:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            self._holds(8 * count, f"'{key}'")
            self._texts += count
            if self._texts > _MAX_TEXTS:
                raise self._damaged(f"its lists have more than {_MAX_TEXTS:,} texts")
            return [self._string(f"'{key}'") for _ in range(count)]
        if kind not in _SCALARS:
            raise self._damaged(f"'{key}' is a list of unsupported type {kind}")
        code = _SCALARS[kind]
        size = struct.calcsize(f"<{code}") * count
        begin = self._need(size, f"'{key}'")
        # A copy: a view of the mapped file would end the process if the file became shorter.
        return memoryview(self._data[begin : begin + size]).cast(code)  # type: ignore[call-overload,no-any-return]

    def _string(self, what: str, *, longest: int = _MAX_BYTES) -> str:
        size: int = self._scalar("Q")
        if size > longest:
            self._holds(size, what)
            raise self._damaged(f"{what} has {size:,} bytes")
        begin = self._need(size, what)
        try:
            return self._data[begin : begin + size].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} is not text in UTF-8") from error

    def _scalar(self, code: str) -> Any:
        begin = self._need(struct.calcsize(f"<{code}"), "its header")
        return struct.unpack_from(f"<{code}", self._data, begin)[0]

    def _need(self, size: int, what: str) -> int:
        """Skip a number of bytes, which must exist. Returns their start."""
        self._holds(size, what)
        begin, self._position = self._position, self._position + size
        return begin

    def _holds(self, size: int, what: str) -> None:
        """Check that a number of bytes remain."""
        if self._position + size > len(self._data):
            raise CheckpointError(f"{self._path}: is cut off: it ends within {what}. {DOWNLOAD_AGAIN}")
        if self._position + size > _MAX_BYTES:
            raise self._damaged(f"its header has more than {_MAX_BYTES >> 20} MiB")

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: is damaged: {reason}. {DOWNLOAD_AGAIN}")
