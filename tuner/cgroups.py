"""Limits of Linux control groups on this process (both versions), as containers and service managers set them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """The tightest memory limit above this process."""

    limit_bytes: int
    """The limit of the whole group."""
    used_bytes: int
    """Memory in use that can't be reclaimed; cached file pages don't count."""


def memory_limit(root: Path) -> GroupMemory | None:
    """The memory limit that leaves the least room; None if there is none."""
    found = [limit for folder in _folders(root, "memory") if (limit := _memory_of(folder)) is not None]
    return min(found, key=lambda group: group.limit_bytes - group.used_bytes, default=None)


def processor_limit(root: Path) -> float | None:
    """CPU time that the groups allow, in processors; None if there is no limit."""
    found = [quota for folder in _folders(root, "cpu") if (quota := _quota_of(folder)) is not None]
    return min(found, default=None)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of all its parents, for version 2 and version 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth])


def _memory_of(folder: Path) -> GroupMemory | None:
    limit = _number(folder / "memory.max")
    used = _number(folder / "memory.current")
    files = ("active_file", "inactive_file")
    if limit is None:
        limit = _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.usage_in_bytes")
        files = ("total_active_file", "total_inactive_file")
    if limit is None or used is None:
        return None
    statistics = _statistics(folder / "memory.stat")
    kept = used - sum(statistics.get(name, 0) for name in files)
    return GroupMemory(limit_bytes=limit, used_bytes=max(0, kept))


def _quota_of(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    allowed, every = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return allowed / every if allowed is not None and allowed > 0 and every else None


def _number(file: Path) -> int | None:
    """The number in a file; None for `max`, a missing file, and anything else."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _statistics(file: Path) -> dict[str, int]:
    try:
        pairs = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
