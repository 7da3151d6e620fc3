"""Lock file: the address and token of a running runtime process. Does not import torch.

The file is `<home>/runtime.json`, readable by its owner only and written atomically. It identifies a process by id and
creation time, so that a reused process id is not mistaken for the runtime.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from models.files import replacing
from runtime.system.foreign import read_json
from runtime.system.hosts import is_loopback
from runtime.system.lifetimes import process_create_time
from runtime.system.private_files import ANY_ACCESS, is_private, read_private

LOCK_NAME = "runtime.json"
"""Name of the lock file in the home folder."""
_TIME_TOLERANCE_S = 0.05
"""Tolerance of creation times in seconds: they pass through JSON and a clock of 100 ticks a second."""
_LARGEST_ID, _LATEST, _LARGEST = 2**31, 2**40, 2**16
"""Limits of a process id, of a time in seconds, and of the file's size in bytes."""
_WORD = re.compile(r"[\x21-\x7e]{1,512}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRecord:
    """Contents of the lock file."""

    pid: int
    """Process id of the runtime."""
    create_time: float
    """When that process was created, seconds since 1970."""
    host: str
    """Address it listens on: must be loopback, since the token is sent there."""
    port: int
    """TCP port it listens on."""
    token: str
    """Bearer token required by every request."""
    version: str
    """Version of the program it runs."""

    def __post_init__(self) -> None:
        for field, kind in (("pid", int), ("host", str), ("port", int), ("token", str), ("version", str)):
            if type(getattr(self, field)) is not kind:
                raise ValueError(f"{field} must be of type {kind.__name__}")
        if type(self.create_time) not in (int, float) or not 0 < self.create_time < _LATEST:
            raise ValueError("create_time is not a time")
        if not 0 < self.pid < _LARGEST_ID or not 0 < self.port < 65536 or not _WORD.fullmatch(self.token):
            raise ValueError("pid, port or token is out of range")
        if not _WORD.fullmatch(self.version):
            raise ValueError("version is not a word")
        if not is_loopback(self.host):
            raise ValueError("a runtime listens on this machine alone")

    def __repr__(self) -> str:
        return f"LockRecord(pid={self.pid}, host={self.host!r}, port={self.port}, version={self.version!r})"

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def lock_path(home: Path) -> Path:
    """Path of the lock file in a home folder."""
    return home / LOCK_NAME


def is_alive(record: LockRecord) -> bool:
    """Whether the very process that wrote a record is still running."""
    created = process_create_time(record.pid)
    return created is not None and abs(created - record.create_time) < _TIME_TOLERANCE_S


def read_lock(path: Path) -> LockRecord | None:
    """Read a lock file; None if it does not exist, is malformed, or may have been written by another user."""
    try:
        if path.lstat().st_size > _LARGEST:
            return None
        data = read_json(read_private(path, ANY_ACCESS))
        if not isinstance(data, dict) or data.keys() != {field.name for field in fields(LockRecord)}:
            return None
        return LockRecord(**data)
    except (OSError, ValueError):
        return None


def running_record(home: Path) -> LockRecord | None:
    """The record of the runtime that is up in a home folder, of whatever version; None if there is none."""
    record = read_lock(lock_path(home))
    return record if record is not None and is_alive(record) else None


def write_lock(path: Path, record: LockRecord) -> None:
    """Write a lock file atomically, for its owner only (mode 0600).

    Raises:
        OSError: the folder is missing or cannot be written, or its files cannot be closed to other users.
    """
    with replacing(path) as file:  # for its owner only, where the disk supports owners
        file.write(json.dumps(asdict(record)).encode())
        if not is_private(Path(file.name), ANY_ACCESS):
            raise PermissionError(
                f"other users have access to every file in {path.parent}, and one has to hold a secret: set "
                "LOWBIT_CHAT_HOME to a folder on another disk"
            )


def remove_lock(path: Path, record: LockRecord) -> None:
    """Delete a lock file unless another runtime has replaced it."""
    if read_lock(path) == record:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
