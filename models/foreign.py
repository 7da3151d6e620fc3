"""Safe reading of untrusted files.

A model's folder may contain a pipe without a writer, a link to an endless device, JSON that is nested a million times,
or data on which a Rust library panics. Here all of that is an OSError or a ValueError, so that callers have only these
two to handle.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20
"""Maximum size of a file that is read as a whole. The largest known tokenizer.json has 34 MB."""
MAX_JSON = 32 << 20
"""Maximum size of a JSON file; parsing takes up to twenty times that in memory."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading, without waiting for a pipe or reading a device.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    _check_regular(path.stat(), path)
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read a file as a whole.

    Args:
        path: The file.
        most: Maximum size in bytes.

    Raises:
        OSError: it cannot be read, is no regular file, or is too large.
    """
    with open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EINVAL, f"it has more than {most >> 20} MiB, which no such file has", str(path))
    return content


def check_folder(folder: Path) -> None:
    """Check that a folder contains only files and folders, before a library reads it unchecked.

    Raises:
        OSError: it can't be listed, or contains a pipe, a device or the like, or a link to one.
    """
    with os.scandir(folder) as found:
        for entry in found:
            with suppress(FileNotFoundError):  # a link that leads nowhere
                if not entry.is_dir():
                    _check_regular(entry.stat(), Path(entry.path))


def parse_json(content: bytes | str, *, unique: bool = False) -> Any:
    """Parse JSON.

    Args:
        content: The text.
        unique: Whether to refuse duplicate keys; otherwise the last one counts.

    Raises:
        ValueError: it is malformed, nested too deeply, or contains text that can't be encoded as UTF-8.
    """
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    try:
        found = json.loads(text, object_pairs_hook=_unique if unique else None)
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is malformed.
    """
    return parse_json(read_file(path, MAX_JSON))


@contextmanager
def panics_raised() -> Iterator[None]:
    """Turn panics of Rust libraries into ValueError.

    pyo3 raises a panic as a BaseException, which passes through `except Exception` and kills threads and servers.

    Raises:
        ValueError: a library panicked.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise ValueError(f"the library that reads it crashed: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a key twice")
    return found


def _check_regular(found: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
