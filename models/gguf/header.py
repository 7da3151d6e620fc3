"""GGUF files by their names, and their headers: the metadata, and where each tensor is. Weights are not touched.

A large model comes in parts, `Qwen3-32B-Q8_0-00001-of-00002.gguf`, of which the first holds all metadata.

Types and their block sizes are those of the `gguf` package. Its reader is not used: it makes an array of every token's
bytes (2.3 s for a vocabulary of 49,152), and in a damaged file it follows counts beyond the end for ever.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.errors import CheckpointError
from models.foreign import open_file

DEFAULT_TYPES = ("Q8_0", "BF16", "F16", "F32")
"""Types to take unless one is asked for, the best first. 8 bits are half the download of 16, and rounding them again to
4 or 3 bits costs next to nothing; what has fewer bits is only taken on request."""
_TYPE = re.compile(
    r".*?[.-](?P<type>I?Q\d\w*|TQ\d_\d|MXFP4|NVFP4|BF16|F(?:P)?16|F(?:P)?32)(?:-\d{5}-of-\d{5})?\.gguf",
    re.ASCII | re.IGNORECASE,
)
PART = re.compile(r"(?P<model>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
"""Name of a part of a model."""
_MOST_PARTS = 999
_PROJECTOR = "mmproj"
"""What the names of a vision model's image encoders begin with."""


def type_of(file: str) -> str | None:
    """The type of weights that a file's name ends with, as in `Qwen3-4B-Q8_0.gguf`; None if it names none."""
    match = _TYPE.fullmatch(file)
    return None if match is None else match["type"].upper().replace("FP16", "F16").replace("FP32", "F32")


def part_names(file: str) -> tuple[str, ...]:
    """Names of all files of a model, by the name of any."""
    match = PART.fullmatch(file)
    count = 0 if match is None else int(match["count"])
    if match is None or not 1 <= count <= _MOST_PARTS:
        return (file,)
    return tuple(f"{match['model']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))


def choose(name: str, files: Iterable[str], wanted: str | None) -> tuple[str, ...]:
    """The GGUF files of the model to take: one, or all of its parts in order.

    Args:
        name: The repository, for messages.
        files: Names of files.
        wanted: A type of weights; the first of `DEFAULT_TYPES` that there is if None.

    Raises:
        CheckpointError: there is none of that type, or not all of its parts.
    """
    models = {file for file in files if file.endswith(".gguf") and not file.startswith(_PROJECTOR)}
    whole = {parts for parts in map(part_names, models) if models.issuperset(parts)}
    types = {kind: parts for parts in sorted(whole, reverse=True) if (kind := type_of(parts[0])) is not None}
    for kind in DEFAULT_TYPES if wanted is None else (wanted.upper(),):
        if kind in types:
            return types[kind]
    if wanted is None and len(whole) == 1 and not types:
        return whole.pop()
    if not models:
        raise CheckpointError(f"{name} has no GGUF file: leave out ':{wanted}', or choose another repository.")
    if not types:
        raise CheckpointError(
            f"{name} has GGUF files of which parts are missing, or without a type in their names "
            f"({', '.join(sorted(models)[:3])}): choose another repository, or download one and give its path."
        )
    there = ", ".join(sorted(types))
    if wanted is not None:
        raise CheckpointError(f"{name} has no GGUF file of type {wanted} (there are: {there}): name one of them.")
    raise CheckpointError(
        f"{name} has only GGUF files of few bits ({there}), and quantizing one of them loses quality twice: choose a "
        f"repository with Q8_0 or safetensors, or name a type anyway, as in {name}:{min(types)}."
    )


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
    """All files (`models.gguf.header`)."""
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]


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
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error


def _what_it_is(path: Path, beginning: bytes) -> str:
    if beginning.startswith(b"version https://git-lfs"):
        return f"{path} is a Git LFS pointer, not the model itself. Run `git lfs pull` in its folder."
    if not beginning:
        return f"{path} is empty. {DOWNLOAD_AGAIN}"
    return f"{path} is not a GGUF file (it does not begin with 'GGUF'). Give a .gguf file or a checkpoint's folder."


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
            raise self._damaged(f"its alignment is {alignment!r}, which is not a power of two")
        begin = -(-self._position // alignment) * alignment
        return Header(path=self._path, files=(self._path,), metadata=metadata, tensors=self._placed(listed, begin))

    def _check_version(self) -> None:
        version: int = self._scalar("I")
        if version & 0xFFFF == 0 and version:
            raise CheckpointError(
                f"{self._path} was written for machines with the other byte order (big-endian). Take the usual file, "
                "which is little-endian."
            )
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self._path} has version {version} of the GGUF format (supported: {VERSIONS[0]} and {VERSIONS[1]}). "
                "Take a newer conversion of the model."
                if version < VERSIONS[0]
                else f"{self._path} has version {version} of the GGUF format, which this program does not know yet "
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
                    f"{self._path} is cut off: the tensor '{name}' ends at byte {begin + offset + size}, the file at "
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
            raise self._damaged(f"{what} is not UTF-8 text") from error

    def _scalar(self, code: str) -> Any:
        begin = self._need(struct.calcsize(f"<{code}"), "its header")
        return struct.unpack_from(f"<{code}", self._data, begin)[0]

    def _need(self, size: int, what: str) -> int:
        """Skip a number of bytes, which must exist. Returns their start."""
        self._holds(size, what)
        begin, self._position = self._position, self._position + size
        return begin

    def _holds(self, size: int, what: str) -> None:
        if self._position + size > len(self._data):
            raise CheckpointError(f"{self._path} is cut off: it ends within {what}. {DOWNLOAD_AGAIN}")
        if self._position + size > _MAX_BYTES:
            raise self._damaged(f"its header has more than {_MAX_BYTES >> 20} MiB")

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {reason}. {DOWNLOAD_AGAIN}")


def read_model(path: Path) -> Header:
    """Read the header of a GGUF file; where it is one of several parts, those of all of them as one.

    Args:
        path: The file, or any of the parts; the others lie beside it.

    Raises:
        CheckpointError: see `read_header`; or a part is missing, or belongs to another model.
    """
    given = read_header(path)
    count = given.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return given
    match = PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model, but its name does not say which. Give the parts their names "
            f"back, NAME-00001-of-{count:05}.gguf and so on, in one folder."
        )
    paths = [path.with_name(name) for name in part_names(path.name)]
    missing = [own.name for own in paths if not own.is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of {count} parts of the model are missing: {', '.join(missing[:4])}"
            f"{', …' if len(missing) > 4 else ''}. Download them into the same folder."
        )
    parts = [given if own == path else read_header(own) for own in paths]
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        placed = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if placed != (number, count) or tensors.keys() & part.tensors.keys():
            raise CheckpointError(
                f"{part.path} is not part {number + 1} of {count} of the model that the other files beside it hold. "
                "Download it again."
            )
        tensors |= part.tensors
    promised = parts[0].metadata.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise CheckpointError(
            f"{parts[0].path}: its {count} parts hold {len(tensors)} tensors, not {promised} as it says: they do not "
            "belong together. Download them again."
        )
    return replace(parts[0], tensors=tensors, files=tuple(paths))
