"""The manifest: sizes and checksums of a stored model's files, and a summary for listings.

There are two checks. `check_quickly` checks only sizes and a sample of each file, so that loading stays fast; `verify`
reads every byte. The manifest contains the sha256 of its own content, so damage to it is detected too.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from models.errors import StoreError
from models.foreign import MAX_JSON, open_file, parse_json, read_file
from models.store.durable import explained, write_file
from models.store.layout import MANIFEST

FORMAT = "lowbit-chat-model"
VERSION = 1
_EDGE = 64 * 1024
_PAGE = 4096
_PAGES = 14
_PIECE = 1 << 20
_MAX_REASON = 200
_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "int | None": (int, type(None)),
    "str": (str,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "str | None": (str, type(None)),
}
"""The accepted value types for each annotation of a field."""
_LATER = "active_bytes"
"""The field of a summary that is left out where it is None, so that earlier versions read the model."""
_AGAIN = "quantize the model again"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a stored model."""

    bytes: int
    sha256: str
    """Of the whole file, hexadecimal."""
    sample: str
    """CRC-32 of the file's `sample`, hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The summary of a model in a listing."""

    family: str
    """`llama`, `mistral`, `qwen2`, `qwen3` or `phi3`."""
    parameters: int
    """Weights of the full-precision model, a tied embedding counted once."""
    context: int
    """Longest context in tokens."""
    bits_per_weight: float
    """Bits of all linear layers including the head, scales and zero-points, divided by their weights."""
    gpu_bytes: int
    """Bytes a device needs for the weights: linear layers, norms, residual scales; no embedding, no residuals."""
    residual_bytes: int
    disk_bytes: int
    """Bytes of all files except the manifest."""
    perplexity_before: float | None
    """Perplexity of the full-precision model on the evaluation text as a chat gets it: on the second half of each
    window. None if there was no text."""
    perplexity_after: float | None
    """The same of the low-bit model: prompts without compensation, then about what the default budget buys."""
    warning: str | None
    """A warning to read before using the model, for example that it collapsed."""
    active_bytes: int | None = None
    """Of `gpu_bytes`, what a token reads of a mixture of experts; None: all of them. Absent in older models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    summary: Summary
    files: Mapping[str, FileEntry]

    def write(self, folder: Path) -> None:
        """Write manifest.json into the folder."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "summary": {name: value for name, value in asdict(self.summary).items() if name != _LATER or value},
            "files": {name: asdict(self.files[name]) for name in sorted(self.files)},
        }
        write_file(folder / MANIFEST, [json_bytes({**body, "sha256": _digest(body)})])

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check manifest.json.

        Raises:
            StoreError: it is missing, damaged, foreign or of a newer version.
        """
        path = folder / MANIFEST
        try:
            body = read_stored(path)
        except FileNotFoundError as error:
            raise StoreError(f"{folder} is not a stored model: it has no {MANIFEST}") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise StoreError(f"{path} belongs to another program")
        if body.get("version") != VERSION:
            raise StoreError(f"{path} has format version {body.get('version')}, this program reads {VERSION}; {_AGAIN}")
        digest = body.pop("sha256", None)
        try:
            if digest != _digest(body):
                raise ValueError("its checksum does not match")
            files = {str(name): _read(FileEntry, entry) for name, entry in body["files"].items()}
            if any(name != Path(name).name or name in (".", "..") for name in files):
                raise ValueError("a file lies outside the folder")
            return cls(summary=_read(Summary, body["summary"]), files=files)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"{path} is damaged ({error}); {_AGAIN}") from error


def read_stored(path: Path, parse: Callable[[bytes], Any] = parse_json) -> Any:
    """The parsed content of a stored model's file.

    Raises:
        FileNotFoundError: there is none.
        StoreError: it cannot be read, or is damaged.
    """
    try:
        return parse(read_file(path, MAX_JSON))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise StoreError(f"{path} is damaged ({error}); {_AGAIN}") from error


def _read(kind: type[Any], data: dict[str, Any]) -> Any:
    data = {field.name: field.default for field in fields(kind) if field.default is not MISSING} | data
    if data.keys() != {field.name for field in fields(kind)}:
        raise ValueError(f"keys of {kind.__name__}: {', '.join(sorted(data))}"[:_MAX_REASON])
    for field in fields(kind):
        value = data[field.name]
        if type(value) not in _KINDS[str(field.type)]:
            raise ValueError(f"{field.name} is {value!r}"[:_MAX_REASON])
    return kind(**data)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def json_bytes(data: object) -> bytes:
    """A JSON file for people and programs: indented, keys in the given order, the same bytes every time."""
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()


def describe(path: Path, watch: Callable[[int], None] | None = None) -> FileEntry:
    """Read a whole file and describe it.

    Args:
        path: The file.
        watch: Called with the bytes read so far after each piece; may raise to stop.
    """
    digest, size = hashlib.sha256(), 0
    with explained(f"cannot read {path}"), open_file(path) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
            if watch is not None:
                watch(size)
    return FileEntry(bytes=size, sha256=digest.hexdigest(), sample=sample(path))


def sample(path: Path) -> str:
    """CRC-32 of a small file, or of both ends and 14 evenly spread pages of a large one, as 8 hexadecimal digits."""
    with explained(f"cannot read {path}"), open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _PIECE:
            return f"{zlib.crc32(file.read()):08x}"
        places = [(0, _EDGE)]
        places += [(size * part // (_PAGES + 1) // _PAGE * _PAGE, _PAGE) for part in range(1, _PAGES + 1)]
        places += [(size - _EDGE, _EDGE)]
        checksum = 0
        for offset, length in places:
            file.seek(offset)
            checksum = zlib.crc32(file.read(length), checksum)
    return f"{checksum:08x}"


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Check that every file exists in the folder with its size.

    Raises:
        StoreError: a file is missing, truncated or too long; or there is a link, a pipe or a device.
    """
    with explained(f"cannot list {folder}"), os.scandir(folder) as found:
        plain = {
            entry.name: entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False) for entry in found
        }
    odd = sorted(name for name, is_plain in plain.items() if not is_plain)
    if odd:
        raise StoreError(f"{folder / odd[0]} is a link or a device; a stored model is files in a folder; {_AGAIN}")
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError as error:
            raise StoreError(f"{folder / name} is missing; {_AGAIN}") from error
        except OSError as error:
            raise StoreError(f"cannot read {folder / name}: {error.strerror}") from error
        if size != entry.bytes:
            what = "truncated" if size < entry.bytes else "damaged"
            raise StoreError(f"{folder / name} is {what}: {size:,} bytes instead of {entry.bytes:,}; {_AGAIN}")


def check_quickly(folder: Path, manifest: Manifest) -> None:
    """Check sizes and samples of all files, quickly enough for a load.

    Raises:
        StoreError: a file is missing, truncated or visibly damaged.
    """
    check_sizes(folder, manifest)
    for name, entry in manifest.files.items():
        if sample(folder / name) != entry.sample:
            raise StoreError(f"{folder / name} is damaged (its checksum does not match); {_AGAIN}")


def verify(folder: Path, manifest: Manifest, watch: Callable[[int, int], None] | None = None) -> None:
    """Read every byte of every file and compare sha256.

    Args:
        folder: The model's folder.
        manifest: Its manifest.
        watch: Called with bytes read and bytes in all; may raise to stop.

    Raises:
        StoreError: a file is missing, truncated or damaged.
    """
    check_sizes(folder, manifest)
    done, total = 0, sum(entry.bytes for entry in manifest.files.values())
    for name, entry in manifest.files.items():
        before = done

        def advance(size: int, before: int = before) -> None:
            if watch is not None:
                watch(before + size, total)

        if describe(folder / name, advance) != entry:
            raise StoreError(f"{folder / name} is damaged (its sha256 does not match); {_AGAIN}")
        done += entry.bytes


def content_of(folder: Path) -> str | None:
    """The checksum of a folder's manifest, which identifies its weights; None if it can't be read."""
    try:
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return None
