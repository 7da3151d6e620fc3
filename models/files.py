"""Atomic replacement of files, and private folders.

It uses only the standard library. `tuner`, which may not import `models`, has a small one of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_TRIES, _PAUSE_S = 20, 0.05
"""Attempts to replace a file on Windows, and seconds between them."""


@contextlib.contextmanager
def replacing(
    path: Path, temporary: Path | None = None, *, prefix: str | None = None, suffix: str = "", synced: bool = True
) -> Iterator[BinaryIO]:
    """Write a file that atomically replaces `path` when the block ends. If the block fails, it is removed.

    Args:
        path: The file to replace or create. Its folder must exist.
        temporary: Name of the file until then, in the same folder; it gets the usual permissions. If None, the file has
            a new name, and only its owner may read it (mode 0600).
        prefix: Prefix of the new name; a dot and the name of `path` if None.
        suffix: Suffix of the new name.
        synced: Whether the content reaches the disk before `path` is replaced, so that it survives a power cut.

    Raises:
        OSError: it can't be written; `path` is unchanged.
    """
    if temporary is None:
        prefix = f".{path.name}-" if prefix is None else prefix
        descriptor, name = tempfile.mkstemp(prefix=prefix, suffix=suffix, dir=path.parent)
        os.close(descriptor)
        temporary = Path(name)
    try:
        with temporary.open("wb") as file:
            yield file
            if synced:
                file.flush()
                os.fsync(file.fileno())
        _replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _replace(temporary: Path, path: Path) -> None:
    """Rename over a file. Windows refuses while another program reads it, which takes moments: it is tried again."""
    for _ in range(_TRIES if sys.platform == "win32" else 0):
        with contextlib.suppress(PermissionError):
            temporary.replace(path)
            return
        time.sleep(_PAUSE_S)
    temporary.replace(path)


def private_folder(folder: Path) -> Path:
    """Create a folder and its missing parents, private to their owner (mode 0700). Existing folders are unchanged.

    Returns:
        The folder.

    Raises:
        OSError: it cannot be created.
    """
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        path.mkdir(mode=0o700, exist_ok=True)
    return folder
