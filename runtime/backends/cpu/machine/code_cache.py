"""Stored machine code: one file per unit, written atomically, and cleanup of old files.

Processes and program versions share the folder. A file is written under a temporary name and renamed; a process reads
it completely, so removing it does not affect processes that run the code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from models.files import replacing
from runtime.system.private_files import read_private

_MAGIC: Final = b"lowbit-chat machine code 1\n"
_DIGEST_BYTES: Final = 32
_NAME: Final = re.compile(r"(?P<unit>\w+)-[0-9a-f]{16}(?P<file>\.code)?")
"""A file of machine code, or a folder as used by older versions."""
_STAMP_S: Final = 3600.0
"""Seconds after which a new use is recorded."""
_SUPERSEDED_S: Final = 86400.0
"""Seconds after its last use that superseded code is removed."""
_PATIENCE_S: Final = 300.0
"""Seconds to wait for another process that compiles the same unit, before compiling it here."""
_FORGOTTEN_S: Final = 60 * 86400.0
"""Seconds after its last use that any code is removed."""


def file_of(folder: Path, symbol: str) -> Path:
    """The file of a unit's machine code."""
    return folder / f"{symbol}.code"


@contextlib.contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Context manager: only one process at a time makes a file, if the system supports locks."""
    import filelock

    locks = file.parent / "locks"
    lock = filelock.FileLock(locks / f"{file.stem.rpartition('-')[0]}.lock", timeout=_PATIENCE_S)
    try:
        locks.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError, filelock.Timeout):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def read(file: Path) -> bytes | None:
    """The contents of a file; None if it does not exist, is damaged, or may have been written by another user.

    Records the use in its time stamp.
    """
    try:
        data = read_private(file)
        if time.time() - file.stat().st_mtime > _STAMP_S:
            os.utime(file)
    except OSError:
        return None
    start = len(_MAGIC) + _DIGEST_BYTES
    code = data[start:]
    return code if data[:start] == _head(file, code) else None


def _head(file: Path, code: bytes) -> bytes:
    """Header of a file: LLVM would crash on damaged code or a wrong name."""
    return _MAGIC + hashlib.sha256(file.name.encode() + code).digest()


def write(file: Path, code: bytes) -> None:
    """Store machine code, and remove old files.

    Raises:
        OSError: it cannot be written.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(file, prefix=f"{file.stem}.", suffix=".part", synced=False) as out:
        out.write(_head(file, code) + code)
    sweep(file.parent)


def sweep(folder: Path) -> None:
    """Remove unused files: superseded versions of units a day after their last use, others much later.

    The last used version of every unit stays, so that a running program still finds its own.
    """
    now, used = time.time(), []
    with contextlib.suppress(OSError):
        used = [(entry.stat().st_mtime, entry) for entry in folder.iterdir()]
    seen = set()
    for stamp, entry in sorted(used, reverse=True):
        found = _NAME.fullmatch(entry.name)
        if found and found["file"] and found["unit"] not in seen:
            seen.add(found["unit"])
            patience = _FORGOTTEN_S
        elif found or entry.suffix == ".part":
            patience = _SUPERSEDED_S
        else:
            continue
        if now - stamp > patience:
            _remove(entry)


def _remove(entry: Path) -> None:
    """Remove a file or a folder; another process may be removing it too."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            entry.unlink()
