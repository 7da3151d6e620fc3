"""Saved caches: one sequence of a KV cache as a file, restored without a prefill; and the folder of such files.

    magic            8 bytes, `LBCHATKV`
    header           8 bytes of length (little-endian), then JSON: format, about, chat, tokens, paged
    pieces           each 8 bytes of length, then JSON: name -> [dtype, shape]; then the arrays, at multiples of 64
    checksum         16 bytes, BLAKE2b of all before it

The backend defines the arrays (`runtime.kv.stores`); the header says what they belong to. A file is written under a
temporary name and renamed, readable by its owner only. It is not synced to disk: a file damaged by a power cut fails
its checksum and is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from models.errors import StoreError
from models.files import replacing
from models.foreign import parse_json
from models.spec import ModelSpec
from models.store.durable import explained
from models.store.manifest import content_of
from runtime import program_version
from runtime.compensation import k_chunk_by_type
from runtime.errors import OutOfMemoryError, RequestError, SavedCacheError, byte_count
from runtime.kv.control import KVCache
from runtime.kv.stores import Arrays
from runtime.wire.answers import Holding

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
FOLDER_BYTES = 2 << 30
"""Size limit of all saved caches together, including those of other models, in bytes."""
SMALLEST = 1024
"""Shorter sequences are not saved: their prefill takes no longer than a person is willing to wait."""
GAIN = 256
"""Tokens a file must spare to be worth reading, and that a sequence must add to an existing file to be worth saving."""
SAVING_S = 2.0
"""Time limit for saving, in seconds: no new file is begun after this, so that the program ends promptly."""
_STALE_S = 3600.0
"""A temporary file older than this is abandoned, even if its writer's process id is in use again."""
_RESERVE = 256 << 20
"""Bytes of the disk that stay free."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Identity of a saved cache. A file is only valid where all of these fields match."""

    model: str
    """Content id of the model: a checksum of its files."""
    recipe: Mapping[str, Any]
    spec: Mapping[str, Any]
    kind: Mapping[str, Any]
    """The kind of cache, with all its parameters."""
    layout: str
    """Layout of the arrays: backend and version."""
    version: str
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
        """The identity of a cache's sequences."""
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
    chat: str | None
    """The client's name for the conversation, if it gave one."""
    tokens: tuple[int, ...]
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
    """Load a file into a slot, replacing the slot's contents; it is empty afterwards if that fails.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSequence:
    """A saved cache that belongs to the loaded model."""

    path: Path
    tokens: npt.NDArray[np.int32]
    chat: str | None = None
    """Name of the conversation; None if the client gave none."""


def holding(folder: Path) -> Holding:
    """Total size of a folder's saved caches, in bytes."""
    return _sum(_listed(folder))


def forget(folder: Path, *, chat: str | None = None, model: str | None = None) -> Holding:
    """Delete saved caches: those of a chat, of a model, or all of them if neither is given.

    Unreadable files are deleted with any chat, since they may belong to it. Files that another process is writing are
    left alone unless everything is deleted.

    Args:
        folder: Where the files are.
        chat: The name of a conversation, as its client gave it.
        model: Content id of a model.

    Returns:
        The deleted files.

    Raises:
        SavedCacheError: the system refuses to delete one; the message says which.
    """
    unwanted = [path for path in _listed(folder) if _is_of(path, chat, model)]
    taken = _sum(unwanted)
    for path in unwanted:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise SavedCacheError(f"cannot delete the saved cache {path}: {error.strerror}") from error
    return taken


@contextlib.contextmanager
def forgetting(folder: Path, models: Path) -> Iterator[None]:
    """Context manager that, on exit, deletes the saved caches of models that were deleted or replaced inside it.

    Raises:
        SavedCacheError: the system refuses to delete one.
    """
    before = _contents(models)
    try:
        yield
    finally:
        for model in before - _contents(models):
            forget(folder, model=model)


class SavedCaches:
    """The saved caches of one loaded model. Never raises: what cannot be saved or used is logged.

    Args:
        folder: Folder of the files of all models; created for its owner only, on the first save.
        about: Identity of this model's caches.
        model: The model's folder: if it has been deleted, nothing is saved. None: not checked.
        limit: Total size limit in bytes; the least recently used files are deleted.
        smallest: Sequences with fewer tokens are not saved.
        gain: Tokens a file must spare to be worth reading.
    """

    def __init__(
        self,
        folder: Path,
        about: About,
        *,
        model: Path | None = None,
        limit: int = FOLDER_BYTES,
        smallest: int = SMALLEST,
        gain: int = GAIN,
    ) -> None:
        self._folder, self._about, self._model = folder, about, model
        self._limit, self._smallest, self._gain = limit, smallest, gain
        self._prefix = f"{_model_prefix(about.model)}{about.kind['name']}-"
        self._found: list[SavedSequence] = []
        self._found = self._scan()
        self._prune()

    def longest(self, tokens: Sequence[int], *, beyond: int, context: int) -> SavedSequence | None:
        """The file with the longest common prefix, which counts as used now; ties go to the shortest file.

        Args:
            tokens: The beginning of a prompt.
            beyond: Tokens available without a file; a file must offer clearly more.
            context: Longer sequences are ignored.
        """
        self._look_again()
        wanted, best, most = np.array(tokens, np.int32), None, beyond + self._gain - 1
        for file in sorted(self._found, key=lambda file: len(file.tokens)):
            if len(file.tokens) <= context and (shared := _shared(file.tokens, wanted)) > most:
                best, most = file, shared
        if best is not None:
            with contextlib.suppress(OSError):
                os.utime(best.path)
        return best

    def load(self, file: SavedSequence, cache: KVCache, slot: int) -> list[int]:
        """Load a file into a slot that has room for it.

        Returns:
            The sequence; empty if the file was unusable, in which case it is deleted.
        """
        try:
            tokens = load(file.path, self._about, cache, slot)
        except OutOfMemoryError as error:
            logger.warning("a saved chat is computed again: %s", error)
            return []
        except SavedCacheError as error:
            logger.warning("a saved chat is computed again: %s", error)
            self._remove(file.path)
            return []
        return tokens

    def save(self, cache: KVCache, sequences: Sequence[tuple[int, Sequence[int], str | None]]) -> None:
        """Save the sequences worth a file, then delete files beyond the limit.

        Args:
            cache: The cache.
            sequences: Slots with their tokens and conversation names, most important first.
        """
        sequences = [sequence for sequence in sequences if len(sequence[1]) >= self._smallest]
        if not sequences or (self._model is not None and content_of(self._model) != self._about.model):
            return
        began = time.monotonic()
        self._look_again()
        for slot, tokens, chat in sequences:
            if time.monotonic() - began > SAVING_S:
                break
            array = np.array(tokens, np.int32)
            if any(_shared(file.tokens, array) + self._gain > len(array) for file in self._found):
                continue
            try:
                self._write(cache, slot, array, chat)
            except (SavedCacheError, OSError) as error:
                logger.warning("a chat's cache is not saved: %s", error)
        self._prune()

    def _write(self, cache: KVCache, slot: int, tokens: npt.NDArray[np.int32], chat: str | None) -> None:
        """Write one sequence, and delete the files that it extends."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)  # no matter who made it
        needed = cache.slot_bytes(slot)
        if needed > self._limit or needed > shutil.disk_usage(self._folder).free - _RESERVE:
            raise SavedCacheError(
                f"it takes {byte_count(needed)}, for which there is no room in {self._folder} (at most "
                f"{byte_count(self._limit)} are used, and {byte_count(_RESERVE)} of the disk stay free)"
            )
        name = hashlib.blake2b(tokens.tobytes(), digest_size=12).hexdigest()
        path = self._folder / f"{self._prefix}{name}{ENDING}"
        write(path, self._about, tokens.tolist(), cache, slot, chat=chat)
        for file in list(self._found):
            if _shared(file.tokens, tokens) + self._gain > len(file.tokens):
                self._remove(file.path)
        self._found.append(SavedSequence(path=path, tokens=tokens, chat=chat))

    def _prune(self) -> None:
        """Delete the least recently used files until the rest fits the limit, and leftovers of crashes."""
        files = []
        for path in _listed(self._folder):
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.name.endswith(ENDING):
                    files.append((status.st_mtime, status.st_size, path))
                elif writer_is_gone(path) or time.time() - status.st_mtime > _STALE_S:
                    path.unlink()
        kept = 0
        for _, taken, path in sorted(files, reverse=True):
            kept += taken
            if kept > self._limit:
                self._remove(path)

    def _scan(self) -> list[SavedSequence]:
        """List the files of this model. Logs why a file that was made for it cannot be used."""
        files = []
        for path in _listed(self._folder):
            if not (path.name.startswith(self._prefix) and path.name.endswith(ENDING)):
                continue
            try:
                header = read_header(path)
            except SavedCacheError as error:
                logger.warning("a saved chat is not used: %s", error)
                self._remove(path)
                continue
            if reasons := self._about.differences(header.about):
                logger.info("the saved cache %s is not used: it was made with %s", path, ", ".join(reasons))
            else:
                files.append(SavedSequence(path=path, tokens=np.array(header.tokens, np.int32), chat=header.chat))
        return files

    def _look_again(self) -> None:
        """Forget files that somebody has deleted."""
        self._found = [file for file in self._found if file.path.exists()]

    def _remove(self, path: Path) -> None:
        """Delete a file and forget it."""
        self._found = [file for file in self._found if file.path != path]
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _shared(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> int:
    """Length of the common prefix."""
    count = min(len(first), len(second))
    different = np.flatnonzero(first[:count] != second[:count])
    return int(different[0]) if len(different) else count


def _model_prefix(model: str) -> str:
    """Prefix of the names of a model's files."""
    return f"{model[:16]}-"


def _contents(models: Path) -> set[str]:
    """Content ids of all stored models."""
    try:
        contents = [content_of(folder) for folder in models.iterdir()]
    except OSError:
        return set()
    return {content for content in contents if content is not None}


def _listed(folder: Path) -> list[Path]:
    """Saved caches and temporary files, by name; none if the folder does not exist."""
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith((ENDING, TEMPORARY)))
    except OSError:
        return []


def _is_of(path: Path, chat: str | None, model: str | None) -> bool:
    """Whether a file belongs to a chat or a model that is being deleted."""
    if chat is None and model is None:
        return True
    if path.name.endswith(TEMPORARY):
        return writer_is_gone(path)
    if model is not None and path.name.startswith(_model_prefix(model)):
        return True
    if chat is None:
        return False
    try:
        return read_header(path).chat == chat
    except SavedCacheError:
        return True


def _sum(paths: Sequence[Path]) -> Holding:
    """Total size of some files; missing files count as zero."""
    sizes = []
    for path in paths:
        with contextlib.suppress(OSError):
            sizes.append(path.stat().st_size)
    return Holding(files=len(sizes), bytes=sum(sizes))
