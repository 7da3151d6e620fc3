"""Machine code on disk: a file for a unit, whole or not there, whatever is killed, and old ones removed.

The folder is shared by processes and versions of the program. A file is written beside its place and then renamed; a
process reads it once, whole, so that removing it takes nothing from anybody who runs it.
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
from runtime.system.own_files import read_own

_MAGIC: Final = b"lowbit-chat machine code 1\n"
_DIGEST_BYTES: Final = 32
_NAME: Final = re.compile(r"(?P<unit>\w+)-[0-9a-f]{16}(?P<file>\.code)?")
"""A file of machine code, or a folder of it as older versions kept it."""
_STAMP_S: Final = 3600.0
"""Seconds after which a use is noted again."""
_SUPERSEDED_S: Final = 86400.0
"""Seconds after its last use that code is removed of which there is another version, used later."""
_PATIENCE_S: Final = 300.0
"""How long a process waits for another that makes the same; then it makes it itself."""
_FORGOTTEN_S: Final = 60 * 86400.0
"""Seconds after its last use that any code is removed."""


def file_of(folder: Path, symbol: str) -> Path:
    """The file in a folder for a unit's machine code."""
    return folder / f"{symbol}.code"


@contextlib.contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Let one process make a file while others wait; where nothing can be locked, all do."""
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
    """What a file keeps; None where there is none, it is damaged, or another user may have written it.

    That it was used is noted in its time stamp.
    """
    try:
        data = read_own(file)
        if time.time() - file.stat().st_mtime > _STAMP_S:
            os.utime(file)
    except OSError:
        return None
    start = len(_MAGIC) + _DIGEST_BYTES
    code = data[start:]
    return code if data[:start] == _head(file, code) else None


def _head(file: Path, code: bytes) -> bytes:
    """What stands before the code: LLVM would crash over a damaged one, or one of another name."""
    return _MAGIC + hashlib.sha256(file.name.encode() + code).digest()


def write(file: Path, code: bytes) -> None:
    """Keep machine code, and remove what is old.

    Raises:
        OSError: it cannot be written.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(file, prefix=f"{file.stem}.", suffix=".part", synced=False) as out:
        out.write(_head(file, code) + code)
    sweep(file.parent)


def sweep(folder: Path) -> None:
    """Remove what nobody uses any more: superseded versions of units a day after their last use, others much later.

    Of every unit the version used last stays, so that a version of the program that runs finds its own.
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
    """Remove a file or a folder, which another process may be removing too."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            entry.unlink()
