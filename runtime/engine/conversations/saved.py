"""Saved caches: one sequence of a KV cache as a file, restored without a prefill.

    magic            8 bytes, `LBCHATKV`
    header           8 bytes of length (little-endian), then JSON: format, about, chat, tokens, paged
    pieces           each 8 bytes of length, then JSON: name -> [dtype, shape]; then the arrays, at multiples of 64
    checksum         16 bytes, BLAKE2b of all before it

The backend defines the arrays (`runtime.kv.transfer`); the header says what they belong to. A file is written under a
temporary name and renamed, readable by its owner only. It is not synced to disk: a file damaged by a power cut fails
its checksum and is ignored.
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
from runtime.kv.interfaces import KVCache
from runtime.kv.transfer import Arrays

ENDING = ".kv"
"""Suffix of a saved cache."""
TEMPORARY = ".kv.tmp"
"""Suffix of a saved cache that is still being written."""
_MAGIC = b"LBCHATKV"
_FORMAT = 3
_ALIGNMENT = 64
_CHECKSUM = 16
_HASHED = 1 << 22
"""Bytes read and hashed at a time."""
_DTYPES = ("float16", "float32", "uint8", "int8", "int16", "int32", "uint16", "uint32")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Identity of a saved cache. A file is only valid where all of these fields match."""

    model: str
    """Content id of the model: a checksum of its files."""
    recipe: Mapping[str, Any]
    """The model's quantization recipe."""
    spec: Mapping[str, Any]
    """The architecture."""
    kind: Mapping[str, Any]
    """The kind of cache, with all its parameters."""
    layout: str
    """Layout of the arrays: backend and version."""
    version: str
    """Version of the program."""
    prompts: Mapping[str, int]
    """Compensated channels per 1024 of prompts, by layer type (`DecoderOptions.prompt_k_chunk`)."""

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
        """The identity of a cache's sequences.

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
        """The differences between two identities, in words."""
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
    """The header of a file."""

    about: About
    """Identity of the cache."""
    chat: str | None
    """The client's name for the conversation, if it gave one."""
    tokens: tuple[int, ...]
    """The sequence."""
    paged: int
    """Tokens in pages; the rest are in the window."""
    end: int
    """Offset of the end of the header, in bytes."""


def write(
    path: Path, about: About, tokens: Sequence[int], cache: KVCache, slot: int, *, chat: str | None = None
) -> int:
    """Write a slot of a cache to a file that only its owner can read.

    Args:
        path: The file; replaced if it exists. Its folder must exist.
        about: What the cache belongs to.
        tokens: All tokens of the slot.
        cache: The cache.
        slot: The slot.
        chat: Name of the conversation, so that the file can be deleted with it; None if the client gave none.

    Returns:
        Bytes of the file.

    Raises:
        SavedCacheError: the disk is full, the folder is read-only, or similar. No partial file is left behind.
        RequestError: the slot is empty, or holds a different number of tokens.
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
    """Whether the process that was writing a temporary file has ended."""
    import psutil

    pid, _, _ = path.name.removeprefix(".").partition("-")
    return not pid.isdigit() or not psutil.pid_exists(int(pid))


def read_header(path: Path) -> Header:
    """Read a file's header, without verifying the checksum.

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
    """Load a file into a slot, replacing the slot's contents.

    Args:
        path: The file.
        about: What the cache belongs to.
        cache: The cache, with room for the sequence.
        slot: The slot; empty afterwards if loading fails.

    Returns:
        The sequence.

    Raises:
        SavedCacheError: the file cannot be read, is damaged, or does not belong to this cache; the message says why.
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
    """A file written sequentially, and its checksum."""

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
        """Write JSON, prefixed with its length."""
        text = json.dumps(data, separators=(",", ":")).encode()
        self.write(len(text).to_bytes(8, "little") + text)

    def align(self) -> None:
        """Pad to the next multiple of the alignment."""
        self.write(bytes(-self.at % _ALIGNMENT))


def _write(file: BinaryIO, about: About, tokens: Sequence[int], cache: KVCache, slot: int, chat: str | None) -> int:
    """Write the whole file. Returns its size in bytes."""
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
    """Raise SavedCacheError if a file does not match its checksum."""
    digest = hashlib.blake2b(digest_size=_CHECKSUM)
    with memoryview(mapped) as data:
        for at in range(0, len(data) - _CHECKSUM, _HASHED):
            digest.update(data[at : min(at + _HASHED, len(data) - _CHECKSUM)])
        if digest.digest() != bytes(data[-_CHECKSUM:]):
            raise SavedCacheError(f"the saved cache {path} is damaged (its checksum does not match) and is not used")


def _pieces(mapped: mmap.mmap, header: Header) -> Iterator[Arrays]:
    """The arrays, copied out of the file one piece at a time."""
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
