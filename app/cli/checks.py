"""Checks of `lowbit-chat doctor`. Each returns the problems it found, with advice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.amounts import byte_count
from runtime.errors import Problem

if TYPE_CHECKING:
    from app.cli.services import Services
    from models.store import Store
    from runtime.backends import Presence
    from tuner.detect import Machine

_GIB = 1 << 30
_MIN_MEMORY = 1 * _GIB
_MIN_DISK = 5 * _GIB
_LARGE_REMAINS = 256 << 20
_HUB_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The backend that would run a model here."""

    backend: str
    """Name of the backend."""
    reason: str
    """The reason, in one sentence."""
    variant: str | None
    """Instruction set of the CPU kernels; None if they cannot be built."""


def choose(presences: Mapping[str, Presence]) -> tuple[Choice, list[Problem]]:
    """The backend a model would get, and the problems of the others.

    Args:
        presences: Whether each backend can run here, best first.
    """
    from runtime.backends import backend

    first = next(name for name, presence in presences.items() if presence.usable)
    skipped = [presence.reason for presence in list(presences.values())[: list(presences).index(first)]]
    problems = [
        Problem(what=f"{backend(name).label} is not used: {presence.reason}", fix=presence.fix)
        for name, presence in presences.items()
        if not presence.usable and presence.fix is not None
    ]
    reason = "; ".join([*skipped, presences[first].reason])
    return Choice(backend=first, reason=reason, variant=presences["cpu"].variant), problems


def versions() -> dict[str, str | None]:
    """Versions of the dependencies, without importing them; None for those not installed."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("lowbit-chat", "torch", "numba", "triton", "transformers", "textual"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def check_packages(found: dict[str, str | None]) -> list[Problem]:
    """Missing packages, apart from those without which stored models run on a processor."""
    from models.needed import LEFT_OUT

    needed = [name for name in found if name not in LEFT_OUT]
    return [
        Problem(what=f"the package {name} is not installed", fix="reinstall the program with its dependencies")
        for name in needed
        if found[name] is None
    ]


def check_memory(machine: Machine) -> list[Problem]:
    """Whether there is enough memory for even a small model."""
    memory = machine.memory
    if memory.available_bytes >= _MIN_MEMORY:
        return []
    from runtime.load.memory import largest_process

    holder = largest_process()
    return [
        Problem(
            what=f"only {byte_count(memory.available_bytes)} of {byte_count(memory.total_bytes)} memory is free",
            fix=f"close other programs{f' ({holder})' if holder else ''}, or give the container more",
        )
    ]


def check_link(used: Presence) -> list[Problem]:
    """Whether the link of the card in use is fast enough for compensation, or unknown."""
    from runtime.server.store.inspecting import link_problems

    return link_problems(used.gpu)


def check_folders(folders: dict[str, Path]) -> Iterator[Problem]:
    """Whether the program's folders are writable, have space, and are closed to others."""
    for role, folder in folders.items():
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not os.access(existing, os.W_OK | os.X_OK):
            yield Problem(
                what=f"the {role} folder {folder} can't be written",
                fix=f"change the permissions of {existing}, or set LOWBIT_CHAT_HOME to another folder",
            )
        elif (free := shutil.disk_usage(existing).free) < _MIN_DISK and role == "model":
            yield Problem(
                what=f"only {byte_count(free)} of disk is free for models in {folder}",
                fix="remove models (lowbit-chat rm NAME), or set LOWBIT_CHAT_HOME to a larger disk",
            )
        if os.name == "posix" and role != "cache" and folder.is_dir() and folder.stat().st_mode & 0o077:
            yield Problem(
                what=f"other users of this machine can look into the {role} folder {folder}",
                fix=f"chmod 700 {folder}",
            )


def check_settings() -> list[Problem]:
    """Whether the settings can be read."""
    from app.paths import settings_file
    from app.settings import SettingsError, load

    try:
        load()
    except SettingsError as error:
        return [Problem(what=str(error), fix=f"correct {settings_file()} or the variable that the message names")]
    return []


def check_store(store: Store) -> Iterator[Problem]:
    """Whether stored models are complete, as far as a quick look can tell."""
    from models.errors import ModelError

    try:
        infos, damaged = store.list(), store.damaged()
    except ModelError as error:
        yield Problem(what=str(error), fix="change the folder's permissions, or set LOWBIT_CHAT_HOME to another one")
        return
    for entry in damaged:
        yield Problem(what=f"{entry.folder} is damaged: {entry.reason}", fix=f"delete it from {store.root}")
    for info in infos:
        try:
            store.open(info.name)
        except ModelError as error:
            yield Problem(
                what=f"{info.name} is damaged: {error}", fix=f"lowbit-chat rm {info.name}, and quantize it again"
            )


def check_remains(store: Store, lock_home: Path) -> Iterator[Problem]:
    """Leftovers of crashed or killed processes."""
    from runtime.server.lock import is_alive, lock_path, read_lock

    lock = lock_path(lock_home)
    record = read_lock(lock)
    if lock.exists() and (record is None or not is_alive(record)):
        yield Problem(
            what=f"a runtime process that has ended left behind {lock}",
            fix="start the program once, or delete the file",
        )
    work = store.root / ".work"
    for folder in sorted(work.iterdir()) if work.is_dir() else []:
        held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if held >= _LARGE_REMAINS:
            name = folder.name.replace("--", "/", 1)
            yield Problem(
                what=f"an unfinished {name} takes {byte_count(held)}",
                fix=f"quantize it again to finish it, or lowbit-chat rm {name}",
            )


def check_hub() -> list[Problem]:
    """Whether the hub responds."""
    import httpx

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return [Problem(what="HF_HUB_OFFLINE forbids the hub", fix="unset HF_HUB_OFFLINE to download models")]
    try:
        httpx.head(f"{endpoint}/api/models", timeout=_HUB_PATIENCE_S, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return [
            Problem(
                what=f"{endpoint} does not answer: {error}",
                fix="check the network, HTTPS_PROXY and HF_ENDPOINT; models that are here already run without it",
            )
        ]
    return []


def all_problems(
    services: Services, machine: Machine, used: Presence, found: dict[str, str | None], *, hub: bool
) -> list[Problem]:
    """All problems, in the order in which to look at them."""
    from app import paths

    store = services.store()
    folders = {"home": paths.home(), "model": store.root, "cache": paths.cache_dir()}
    checks: list[Callable[[], list[Problem]]] = [
        lambda: check_packages(found),
        lambda: check_memory(machine),
        lambda: check_link(used),
        lambda: list(check_folders(folders)),
        check_settings,
        lambda: list(check_store(store)),
        lambda: list(check_remains(store, paths.home())),
        *([check_hub] if hub else []),
    ]
    return [problem for check in checks for problem in check()]
