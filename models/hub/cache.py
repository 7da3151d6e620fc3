"""The Hugging Face cache: its layout, and the locks with which several programs share it.

<cache>/models--owner--name/blobs/<digest>              the content
<cache>/models--owner--name/snapshots/<commit>/<file>   a link to it
<cache>/models--owner--name/refs/<revision>             the commit that a branch or tag meant last
<cache>/.locks/models--owner--name/<digest>.lock        held while a blob is made
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from models.errors import CheckpointError, StoreError
from models.files import replacing
from models.gguf.header import choose
from models.hub.listing import (
    CONFIG,
    INDEX,
    SINGLE,
    Listing,
    RemoteFile,
    check_revision,
    is_commit,
    shards_of,
    split_name,
)
from models.hub.meter import bytes_text
from models.hub.transport import stop_if
from models.progress import Cancelled, never_cancelled
from models.store.durable import explained, sync_folder

INCOMPLETE = ".incomplete"
"""Suffix of a partial blob, as huggingface_hub's scans expect it."""
_SPARE_BYTES = 64 << 20
"""Bytes that must stay free on the disk."""
_LOCK_POLL_S = 0.5
_DRAFT = ".draft"


def cached(name: str, revision: str | None = None, *, cache_dir: Path | str | None = None) -> Path | None:
    """A checkpoint that is already in the cache; the hub is not contacted.

    Args:
        name: `owner/name`, or `owner/name:TYPE` for a GGUF file.
        revision: Branch, tag or commit; the default branch if None.
        cache_dir: The cache; that of huggingface_hub if None.

    Returns:
        The snapshot's folder, or a GGUF file in it; None if configuration or weights are missing.

    Raises:
        HubError: the name or revision is invalid.
    """
    repository, gguf_type = split_name(name)
    revision = "main" if revision is None else revision
    check_revision(revision)
    return RepositoryCache(cache_root(cache_dir), repository).complete(revision, gguf_type)


def cache_root(cache_dir: Path | str | None) -> Path:
    """The folder of the cache: `cache_dir`, or what HF_HUB_CACHE and HF_HOME say."""
    from huggingface_hub import constants

    return Path(cache_dir if cache_dir is not None else constants.HF_HUB_CACHE).expanduser().absolute()


class RepositoryCache:
    """The part of the cache that belongs to one repository."""

    def __init__(self, root: Path, name: str) -> None:
        self.name = name
        folder = f"models--{name.replace('/', '--')}"
        self.root = root
        self.folder = root / folder
        self._locks = root / ".locks" / folder

    def blob(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / file.digest

    def partial(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / (file.digest + INCOMPLETE)

    def pointer(self, commit: str, file: RemoteFile) -> Path:
        """The path of a file by its name, in the snapshot."""
        return self.snapshot(commit) / file.name

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def holds(self, commit: str, file: RemoteFile) -> bool:
        """Whether a complete file exists: as a blob, or in its snapshot if links are impossible."""
        return _size(self.blob(file)) == file.size or _size(self.pointer(commit, file)) == file.size

    def drop_damaged(self, commit: str, file: RemoteFile) -> bool:
        """Delete a file that has the right place and size but the wrong content.

        The caller holds the lock of the file's digest.

        Returns:
            Whether there was one.
        """
        damaged = [
            path
            for path in (self.pointer(commit, file), self.blob(file))
            if _size(path) == file.size and not is_intact(path, file)
        ]
        for path in damaged:
            with explained(f"cannot remove {path}"):
                path.unlink(missing_ok=True)
        return bool(damaged)

    def complete(self, revision: str, gguf_type: str | None) -> Path | None:
        """The latest known snapshot of a revision, if it has configuration and all weights; or a GGUF file in it.

        Args:
            revision: Branch, tag or commit.
            gguf_type: The type of weights of a GGUF file; None: safetensors, or else a type that is taken by default.
        """
        commit = revision
        if not is_commit(revision):
            try:
                commit = (self.folder / "refs" / revision).read_text(encoding="ascii").strip()
            except (OSError, UnicodeDecodeError):
                return None
        folder = self.snapshot(commit)
        if not is_commit(commit):
            return None
        if gguf_type is not None or not (folder / CONFIG).is_file():
            try:
                return folder / choose(self.name, [path.name for path in folder.glob("*.gguf")], gguf_type)[0]
            except CheckpointError:
                return None
        try:
            weights = shards_of(folder / INDEX) if (folder / INDEX).is_file() else [SINGLE]
        except (OSError, ValueError):
            return None
        return folder if all((folder / name).is_file() for name in weights) else None

    def prepare(self) -> None:
        """Make the folders."""
        with explained(f"cannot write to the Hugging Face cache {self.root}"):
            for folder in (self._locks, self.folder / "blobs", self.folder / "snapshots"):
                folder.mkdir(parents=True, exist_ok=True)

    def check_space(self, commit: str, files: list[RemoteFile]) -> None:
        """Check that the missing parts of files fit on the disk.

        Raises:
            StoreError: they do not.
        """
        need = sum(
            max(0, file.size - (_size(self.partial(file)) or 0))
            for file in {file.digest: file for file in files}.values()
            if not self.holds(commit, file)
        )
        free = shutil.disk_usage(self.folder).free
        if need and need + _SPARE_BYTES > free:
            raise StoreError(
                f"{bytes_text(need)} are still to come, {bytes_text(_SPARE_BYTES)} must stay free, and the disk of "
                f"{self.root} has {bytes_text(free)} free: make room, or set HF_HOME to a folder on another disk."
            )

    @contextmanager
    def lock(self, key: str, cancelled: Cancelled, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold huggingface_hub's own lock of a blob against huggingface_hub and other runs of this program."""
        path = self._locks / f"{key}.lock"
        with ExitStack() as stack:
            while not self._acquired(path, stack):
                waiting()
                stop_if(cancelled)
            yield

    def _acquired(self, path: Path, stack: ExitStack) -> bool:
        from filelock import Timeout
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        with explained(f"cannot lock {path}"):
            try:
                stack.enter_context(WeakFileLock(path, timeout=_LOCK_POLL_S))
            except Timeout:
                return False
        return True

    def publish(self, listing: Listing, files: list[RemoteFile], revision: str, fresh: set[str]) -> Path:
        """Publish finished blobs: first their names in the snapshot, then the revision's reference.

        The caller holds the lock of the commit.

        Args:
            listing: The repository at its commit.
            files: All files of the checkpoint.
            revision: The requested revision.
            fresh: Digests of the blobs that this run made; without links these are moved instead of copied.
        """
        folder = self.snapshot(listing.commit)
        draft = self.folder / _DRAFT
        with explained(f"cannot write to the Hugging Face cache {self.root}"):
            folder.mkdir(parents=True, exist_ok=True)
            for file in files:
                (folder / file.name).parent.mkdir(exist_ok=True)
                if _size(folder / file.name) == file.size and self._points_right(folder / file.name, file):
                    continue
                if not self._linked(folder / file.name, file, draft):
                    twins = [folder / twin.name for twin in files if twin.digest == file.digest]
                    self._placed(folder / file.name, file, twins, draft, move=file.digest in fresh)
            sync_folder(folder)
            if revision != listing.commit:
                self._refer(revision, listing.commit, draft)
        return folder

    def _points_right(self, pointer: Path, file: RemoteFile) -> bool:
        """Whether a name links to its blob. A regular file is trusted, as in huggingface_hub."""
        if not pointer.is_symlink():
            return True
        return Path(os.path.abspath(pointer.parent / pointer.readlink())) == self.blob(file)  # noqa: PTH100 — one hop

    def _linked(self, pointer: Path, file: RemoteFile, draft: Path) -> bool:
        """Link a name to its blob; False if links are unsupported or disabled."""
        from huggingface_hub import constants

        draft.unlink(missing_ok=True)
        if constants.HF_HUB_DISABLE_SYMLINKS:
            return False
        try:
            draft.symlink_to(os.path.relpath(self.blob(file), pointer.parent))
        except (OSError, NotImplementedError):
            return False
        draft.replace(pointer)
        return True

    def _placed(self, pointer: Path, file: RemoteFile, twins: list[Path], draft: Path, *, move: bool) -> None:
        """Store the content under its name, as huggingface_hub does: a new blob is moved, an older one copied."""
        blob = self.blob(file)
        with self.lock(file.digest, never_cancelled, lambda: None):
            if blob.is_file() and move:
                blob.replace(pointer)
                return
            source = next((path for path in (blob, *twins) if _size(path) == file.size), blob)
            shutil.copyfile(source, draft)
            with draft.open("rb+") as copy:
                os.fsync(copy.fileno())
            draft.replace(pointer)

    def _refer(self, revision: str, commit: str, draft: Path) -> None:
        path = self.folder / "refs" / revision
        path.parent.mkdir(parents=True, exist_ok=True)
        if _size(path) == len(commit) and path.read_text(encoding="ascii") == commit:
            return
        with replacing(path, draft) as file:
            file.write(commit.encode())
        sync_folder(path.parent)


def is_intact(path: Path, file: RemoteFile) -> bool:
    if _size(path) != file.size:
        return False
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, lambda: checksum(file)).hexdigest() == file.digest
    except OSError:
        return False


def checksum(file: RemoteFile) -> hashlib._Hash:
    """The hash behind a file's digest: sha256, or git's sha1 with its header."""
    if len(file.digest) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
