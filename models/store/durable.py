"""Files that are either whole or absent, whatever happens: written beside, synced, renamed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from models.errors import StoreError

TEMPORARY = ".tmp"
"""Ending of a file that is being written."""
_REASONS = {
    errno.ENOSPC: "the disk is full; free some space and try again",
    errno.EDQUOT: "the disk quota is used up; free some space and try again",
    errno.EFBIG: "the file would be larger than this disk or user may have",
    errno.EROFS: "the folder is read-only",
    errno.EACCES: "permission denied; check who owns the folder",
    errno.EPERM: "permission denied; check who owns the folder",
}


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file so that `path` holds either what it held before or all of `pieces`, even after a power cut.

    Raises:
        StoreError: the disk is full, the folder read-only, or the like. Nothing half-written stays.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with explained(f"cannot write {path}"):
            with temporary.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_folder(folder: Path) -> None:
    """Create a folder and its missing parents, open to their owner alone.

    Raises:
        StoreError: it cannot be created.
    """
    with explained(f"cannot create {folder}"):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "there is a file of that name")


def move_folder(source: Path, target: Path) -> None:
    """Rename a folder durably. `target` must not exist, or be an empty folder.

    Raises:
        StoreError: the system refuses.
    """
    with explained(f"cannot move {source} to {target}"):
        source.rename(target)
        sync_folder(target.parent)
        if source.parent != target.parent:
            sync_folder(source.parent)


def remove_folder(folder: Path) -> None:
    """Delete a folder with all it holds, or the link in its place. Nothing happens if it does not exist.

    Raises:
        StoreError: the system refuses.
    """
    with explained(f"cannot remove {folder}"):
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        elif folder.exists():
            shutil.rmtree(folder)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an operating system's refusal into a `StoreError` that says what was tried and what to do."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0) or error.strerror or str(error)
        raise StoreError(f"{what}: {reason}") from error
