"""Folders: the files in one that may be documents, without following links."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.errors import DocumentError
from app.language import _

MAX_FILES = 20_000
"""Maximum number of files that are read in a folder."""
DEEPEST = 60
"""Maximum depth of folders in folders."""
PASSED_OVER = frozenset({"node_modules", "__pycache__", "venv"})
"""Folders with files that others made; so are hidden ones, virtual environments, and caches marked as such."""
MOST_NAMES = 200
"""Names that are listed; typing narrows them down."""
_LOOKED_AT = 20_000
"""Entries of a folder that are looked at for names."""
_MARKS = frozenset({"pyvenv.cfg", "CACHEDIR.TAG"})


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source."""

    name: str
    """Its path inside the folder, with `/`; its name if the source is a file."""
    path: Path
    size: int
    """In bytes."""
    changed: int
    """Time of its last change in nanoseconds since 1970."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a source consists of."""

    files: tuple[File, ...]
    """In order of their names."""
    skipped: Mapping[str, int]
    """How many files and folders were left out, by reason."""


def survey(path: Path) -> Survey:
    """Look through a file or a folder without opening any file.

    Raises:
        DocumentError: it does not exist, can't be read, or is neither.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return _walk(path)
    except OSError as error:
        raise DocumentError(
            _("{name} can't be read: {reason}", name=path.name or path, reason=error.strerror)
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise DocumentError(_("{name} is a device or a pipe, not a file", name=path.name))
    return Survey((File(path.name, path, status.st_size, status.st_mtime_ns),), {})


def _walk(folder: Path) -> Survey:
    files: list[File] = []
    skipped: Counter[str] = Counter()
    waiting = [(folder, "", 0)]
    while waiting:
        inside, prefix, depth = waiting.pop()
        try:
            with os.scandir(inside) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            if inside is folder:
                raise
            skipped["unreadable folders"] += 1
            continue
        if depth and not _MARKS.isdisjoint(entry.name for entry in found):
            continue
        for entry in found:
            if entry.name.startswith("."):
                continue
            try:
                if entry.is_symlink():
                    skipped["links"] += 1
                elif entry.is_dir(follow_symlinks=False):
                    if depth == DEEPEST:
                        skipped[_("folders more than {most} deep", most=DEEPEST)] += 1
                    elif entry.name not in PASSED_OVER:
                        waiting.append((Path(entry.path), f"{prefix}{entry.name}/", depth + 1))
                elif not entry.is_file(follow_symlinks=False):
                    skipped["devices and pipes"] += 1
                elif not _encodable(entry.name):
                    skipped["names that are not valid Unicode"] += 1
                elif len(files) == MAX_FILES:
                    skipped[_("files beyond the first {most:,}", most=MAX_FILES)] += 1
                else:
                    status = entry.stat(follow_symlinks=False)
                    name = prefix + entry.name
                    files.append(File(name, Path(entry.path), status.st_size, status.st_mtime_ns))
            except OSError:
                skipped["unreadable files"] += 1
    return Survey(tuple(sorted(files, key=lambda file: file.name)), dict(skipped))


def names(text: str) -> list[str]:
    """Names that a path may go on with: folders first, hidden ones only where the text asks for them.

    Args:
        text: What was typed of a path.
    """
    head, slash, tail = text.rpartition(os.sep)
    found: list[tuple[bool, str]] = []
    with contextlib.suppress(OSError, RuntimeError, ValueError), os.scandir(Path(head + slash).expanduser()) as entries:
        for _at, entry in zip(range(_LOOKED_AT), entries, strict=False):
            if entry.name.lower().startswith(tail.lower()) and (tail.startswith(".") or not entry.name.startswith(".")):
                found.append((not entry.is_dir(), entry.name))
    return [name + ("" if file else os.sep) for file, name in sorted(found)[:MOST_NAMES]]


def _encodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
