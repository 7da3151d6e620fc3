"""Atomic and durable changes of files and folders, which survive a power cut."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from models import files
from models.errors import StoreError

TEMPORARY = ".tmp"
"""Suffix of a file that is being written."""
_REASONS = {
    errno.ENOSPC: "the disk is full; free some space and try again",
    errno.EDQUOT: "the disk quota is used up; free some space and try again",
    errno.EFBIG: "the file would be larger than this disk or user may have",
    errno.EROFS: "the folder is read-only",
    errno.EACCES: "permission denied; check who owns the folder",
    errno.EPERM: "permission denied; check who owns the folder",
}


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file so that `path` has either its old content or all of `pieces`, even after a power cut.

    Raises:
        StoreError: the disk is full, the folder read-only, or the like. No partial file remains.
    """
    with explained(f"cannot write {path}"):
        with files.replacing(path, path.with_name(path.name + TEMPORARY)) as file:
            for piece in pieces:
                file.write(piece)
        sync_folder(path.parent)


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
    """Create a folder and its missing parents, private to their owner.

    Raises:
        StoreError: it can't be created.
    """
    with explained(f"cannot create {folder}"):
        if not files.private_folder(folder).is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "there is a file of that name")


def move_folder(source: Path, target: Path) -> None:
    """Rename a folder durably. `target` must not exist, or be an empty folder.

    Raises:
        StoreError: a file operation failed.
    """
    with explained(f"cannot move {source} to {target}"):
        source.rename(target)
        sync_folder(target.parent)
        if source.parent != target.parent:
            sync_folder(source.parent)


def remove_folder(folder: Path) -> None:
    """Delete a folder with its content, or a link in its place. Does nothing if it does not exist.

    Raises:
        StoreError: a file operation failed.
    """
    with explained(f"cannot remove {folder}"):
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        elif folder.exists():
            shutil.rmtree(folder)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an OSError into a `StoreError` that says what failed and what to do."""
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0) or error.strerror or str(error)
        raise StoreError(f"{what}: {reason}") from error
