"""One sequence of a KV cache as a file, from which it comes back without a prefill.

    magic            8 bytes, `LBCHATKV`
    header           8 bytes of length (little-endian), then JSON: format, about, chat, tokens, paged
    pieces           each 8 bytes of length, then JSON: name -> [dtype, shape]; then the arrays, at multiples of 64
    checksum         16 bytes, BLAKE2b of all before it

What is in the arrays is the backend's business (`runtime.kv.transfer`); the header says whose they are. A file is
written beside its place and renamed, for its owner alone. Nothing waits for the disk: what a power cut spoils does not
match its checksum and is not used.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from models.errors import StoreError
from models.files import replacing
from models.foreign import parse_json
from models.spec import ModelSpec
from models.store.durable import explained
from runtime import program_version
from runtime.compensation import k_chunk_by_type
from runtime.errors import RequestError, SavedCacheError
from runtime.kv.control import KVCache
from runtime.kv.transfer import Arrays

ENDING = ".kv"
"""Ending of a saved cache's name."""
TEMPORARY = ".kv.tmp"
"""Ending while it is being written."""
_MAGIC = b"LBCHATKV"
_FORMAT = 3
_ALIGNMENT = 64
_CHECKSUM = 16
_HASHED = 1 << 22
"""Bytes that are read and hashed at once."""
_DTYPES = ("float16", "float32", "uint8", "int8", "int16", "int32", "uint16", "uint32")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a saved cache belongs to; only where all of this is the same does it mean the same."""

    model: str
    """Content id of the model: a checksum of its files."""
    recipe: Mapping[str, Any]
    """How the model was quantized."""
    spec: Mapping[str, Any]
    """The architecture."""
    kind: Mapping[str, Any]
    """The kind of cache with all its numbers."""
    layout: str
    """Layout of the arrays: backend and version."""
    version: str
    """Version of the program."""
    prompts: Mapping[str, int]
    """Channels per 1024 by which prompts were compensated, by layer type (`DecoderOptions.prompt_k_chunk`)."""

    @classmethod
    def of(
        cls,
        cache: KVCache,
        spec: ModelSpec,
        *,
        model: str,
        recipe: Mapping[str, Any],
        prompts: Mapping[str, int] | int = 0,
    ) -> About:
        """What sequences of a cache belong to.

        Args:
            cache: The cache.
            spec: The model's architecture.
            model: Content id of the model.
            recipe: Its recipe.
            prompts: How its prompts are compensated, as in `DecoderOptions.prompt_k_chunk`.
        """
        plain = json.loads(json.dumps({"recipe": dict(recipe), "spec": asdict(spec), "kind": asdict(cache.kind)}))
        return cls(
            model=model,
            layout=cache.layout,
            version=program_version(),
            prompts=k_chunk_by_type(prompts),
            **plain,
        )

    def differences(self, other: About) -> list[str]:
        """In which words two are not the same."""
        words = {
            "model": "another model",
            "recipe": "another recipe",
            "spec": "another architecture",
            "kind": f"another kind of cache ({other.kind.get('name')})",
            "layout": f"another backend or layout ({other.layout})",
            "version": f"another version of the program ({other.version})",
            "prompts": "another compensation of prompts",
        }
        return [text for name, text in words.items() if getattr(self, name) != getattr(other, name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What stands at the beginning of a file."""

    about: About
    """What it belongs to."""
    chat: str | None
    """Whose it is: the name that the client gave the conversation, where it did."""
    tokens: tuple[int, ...]
    """The sequence."""
    paged: int
    """How many of them are in pages; the rest are in the window."""
    end: int
    """Where the header ends, in bytes."""


def write(
    path: Path, about: About, tokens: Sequence[int], cache: KVCache, slot: int, *, chat: str | None = None
) -> int:
    """Write a slot of a cache to a file that only its owner can read.

    Args:
        path: The file; replaced if it exists. Its folder must exist.
        about: What the cache belongs to.
        tokens: The slot's tokens, as many as it has.
        cache: The cache.
        slot: The slot.
        chat: Whose it is, so that it can be deleted with the conversation; None where nobody said.

    Returns:
        Bytes of the file.

    Raises:
        SavedCacheError: the disk is full, the folder read-only, or the like. Nothing half-written stays.
        RequestError: the slot has another number of tokens, or none.
    """
    if not tokens or len(tokens) != cache.length(slot):
        raise RequestError(f"slot {slot} has {cache.length(slot)} tokens, not {len(tokens)}, and cannot be saved so")
    try:
        with (
            explained(f"cannot save a chat's cache as {path}"),
            replacing(path, prefix=f".{os.getpid()}-", suffix=TEMPORARY, synced=False) as file,
        ):
            size = _write(file, about, tokens, cache, slot, chat)
    except StoreError as error:
        raise SavedCacheError(str(error)) from error
    return size


def writer_is_gone(path: Path) -> bool:
    """Whether a temporary file was left behind: the process that wrote it has ended."""
    import psutil

    pid, _, _ = path.name.removeprefix(".").partition("-")
    return not pid.isdigit() or not psutil.pid_exists(int(pid))


def read_header(path: Path) -> Header:
    """What a file says of itself; the checksum is not looked at.

    Raises:
        SavedCacheError: it cannot be read, or is not a saved cache of this format.
    """
    try:
        with explained(f"cannot read {path}"), path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise SavedCacheError(f"{path} is not a saved cache")
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                raise SavedCacheError(f"{path} is cut off")
            return _header(parse_json(file.read(length)), file.tell())
    except StoreError as error:
        raise SavedCacheError(str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise SavedCacheError(f"{path} is damaged, or of another version of the program ({error})") from error


def load(path: Path, about: About, cache: KVCache, slot: int) -> list[int]:
    """Bring a file back into a slot; what that held is dropped.

    Args:
        path: The file.
        about: What the cache belongs to.
        cache: The cache, with room for the sequence.
        slot: The slot, empty afterwards where this fails.

    Returns:
        The sequence.

    Raises:
        SavedCacheError: the file cannot be read, is damaged, or belongs to something else; the message says to what.
        OutOfMemoryError: not enough pages are free.
    """
    header = read_header(path)
    if reasons := about.differences(header.about):
        raise SavedCacheError(f"the saved cache {path} is not used: it was made with {', '.join(reasons)}")
    try:
        with (
            explained(f"cannot read {path}"),
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        ):
            _verify(path, mapped)
            cache.load(slot, len(header.tokens), header.paged, _pieces(mapped, header))
    except StoreError as error:
        raise SavedCacheError(str(error)) from error
    except (RequestError, ValueError, KeyError, TypeError) as error:
        raise SavedCacheError(f"the saved cache {path} cannot be used: {error}") from error
    return list(header.tokens)


class _Hashed:
    """A file that is written from front to back, and its checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.blake2b(digest_size=_CHECKSUM)
        self.at = 0

    def write(self, data: bytes) -> None:
        """Write bytes."""
        self._file.write(data)
        self.digest.update(data)
        self.at += len(data)

    def json(self, data: object) -> None:
        """Write JSON with its length before it."""
        text = json.dumps(data, separators=(",", ":")).encode()
        self.write(len(text).to_bytes(8, "little") + text)

    def align(self) -> None:
        """Go on at a multiple of the alignment."""
        self.write(bytes(-self.at % _ALIGNMENT))


def _write(file: BinaryIO, about: About, tokens: Sequence[int], cache: KVCache, slot: int, chat: str | None) -> int:
    """Write all of a file. Returns its bytes."""
    out = _Hashed(file)
    out.write(_MAGIC)
    paged = cache.paged_length(slot)
    out.json({"format": _FORMAT, "about": asdict(about), "chat": chat, "tokens": list(tokens), "paged": paged})
    for piece in cache.export(slot):
        out.json({name: [array.dtype.name, list(array.shape)] for name, array in piece.items()})
        for array in piece.values():
            out.align()
            out.write(array.tobytes())
    file.write(out.digest.digest())
    return out.at + _CHECKSUM


def _header(data: Mapping[str, Any], end: int) -> Header:
    if data["format"] != _FORMAT:
        raise ValueError(f"its format is {data['format']}, not {_FORMAT}")
    tokens = tuple(data["tokens"])
    if not all(type(number) is int and number >= 0 for number in (*tokens, data["paged"])):
        raise ValueError("a number is none")
    chat = data["chat"]
    if not (chat is None or isinstance(chat, str)):
        raise ValueError("its chat has no name")
    return Header(about=About(**data["about"]), chat=chat, tokens=tokens, paged=data["paged"], end=end)


def _verify(path: Path, mapped: mmap.mmap) -> None:
    """Raise SavedCacheError where a file does not match its checksum."""
    digest = hashlib.blake2b(digest_size=_CHECKSUM)
    with memoryview(mapped) as data:
        for at in range(0, len(data) - _CHECKSUM, _HASHED):
            digest.update(data[at : min(at + _HASHED, len(data) - _CHECKSUM)])
        if digest.digest() != bytes(data[-_CHECKSUM:]):
            raise SavedCacheError(f"the saved cache {path} is damaged (its checksum does not match) and is not used")


def _pieces(mapped: mmap.mmap, header: Header) -> Iterator[Arrays]:
    """The arrays, copied out of the file piece by piece."""
    at = header.end
    while at < len(mapped) - _CHECKSUM:
        length = int.from_bytes(mapped[at : at + 8], "little")
        described = parse_json(mapped[at + 8 : at + 8 + length])
        at += 8 + length
        piece = {}
        for name, (dtype, shape) in described.items():
            if dtype not in _DTYPES:
                raise ValueError(f"it holds numbers of type {dtype}")
            at += -at % _ALIGNMENT
            size = math.prod(shape) * np.dtype(dtype).itemsize
            piece[name] = np.frombuffer(mapped[at : at + size], dtype).reshape(shape)
            at += size
        yield piece
