"""The lock file: where a running runtime process listens, and with which token. Importing this needs no torch.

The file is `<home>/runtime.json`, readable by its owner alone, written at once (temporary file, then rename). It names
a process by id and creation time, so that a process id that came around again is not taken for the runtime.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

LOCK_NAME = "runtime.json"
"""Name of the lock file in the home folder."""
_TIME_TOLERANCE_S = 0.05
"""Creation times that differ by less are the same: they pass through JSON and a clock of 100 ticks a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockRecord:
    """Content of the lock file."""

    pid: int
    """Process id of the runtime."""
    create_time: float
    """When that process was created, seconds since 1970."""
    host: str
    """Address it listens on."""
    port: int
    """TCP port it listens on."""
    token: str
    """Bearer token that every request needs."""
    version: str
    """Version of the program it runs."""

    def __post_init__(self) -> None:
        for field, kind in (("pid", int), ("host", str), ("port", int), ("token", str), ("version", str)):
            if type(getattr(self, field)) is not kind:
                raise ValueError(f"{field} must be of type {kind.__name__}")
        if type(self.create_time) not in (int, float) or self.pid < 1 or not 0 < self.port < 65536 or not self.token:
            raise ValueError("pid, create_time, port or token is out of range")

    def __repr__(self) -> str:
        return f"LockRecord(pid={self.pid}, host={self.host!r}, port={self.port}, version={self.version!r})"

    @property
    def base_url(self) -> str:
        """Where requests go."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def lock_path(home: Path) -> Path:
    """Where the lock file of a home folder lies."""
    return home / LOCK_NAME


def program_version() -> str:
    """Version of the installed program; runtime and UI work together only if theirs are equal."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lowbit-chat")
    except PackageNotFoundError:
        return "0+source"


def process_create_time(pid: int) -> float | None:
    """When a process was created, seconds since 1970; None if there is none, or only its unclaimed remains."""
    import psutil

    try:
        process = psutil.Process(pid)
        created = float(process.create_time())
        return None if process.status() == psutil.STATUS_ZOMBIE else created
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return created


def is_alive(record: LockRecord) -> bool:
    """Whether the very process that wrote a record still runs."""
    created = process_create_time(record.pid)
    return created is not None and abs(created - record.create_time) < _TIME_TOLERANCE_S


def read_lock(path: Path) -> LockRecord | None:
    """Read a lock file; None if there is none, or none that can be understood."""
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict) or data.keys() != {field.name for field in fields(LockRecord)}:
            return None
        return LockRecord(**data)
    except (OSError, ValueError):
        return None


def write_lock(path: Path, record: LockRecord) -> None:
    """Write a lock file for its owner alone (mode 0600), at once.

    Raises:
        OSError: the folder is missing or cannot be written.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{LOCK_NAME}.", dir=path.parent)  # mkstemp gives mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(record), file)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def remove_lock(path: Path, record: LockRecord) -> None:
    """Delete a lock file if it is still the one that was written with `record`; another runtime's file stays."""
    if read_lock(path) == record:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
