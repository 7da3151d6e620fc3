"""The folder of saved caches: chooses sequences to save, finds the file for a prompt, and limits the total size."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.store.manifest import content_of
from runtime.engine.conversations import saved
from runtime.errors import OutOfMemoryError, SavedCacheError, size
from runtime.kv.interfaces import KVCache
from runtime.wire.answers import Holding

FOLDER_BYTES = 2 << 30
"""Size limit of all saved caches together, including those of other models, in bytes."""
SMALLEST = 1024
"""Shorter sequences are not saved: their prefill takes no longer than a person is willing to wait."""
GAIN = 256
"""Tokens a file must spare to be worth reading, and that a sequence must add to an existing file to be worth saving."""
SAVING_S = 2.0
"""Time limit for saving, in seconds: no new file is begun after this, so that the program ends promptly."""
_STALE_S = 3600.0
"""A temporary file older than this is abandoned, even if its writer's process id is in use again."""
_RESERVE = 256 << 20
"""Bytes of the disk that stay free."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSequence:
    """A saved cache that belongs to the loaded model."""

    path: Path
    """Its path."""
    tokens: npt.NDArray[np.int32]
    """Its sequence."""
    chat: str | None = None
    """Name of the conversation; None if the client gave none."""


def holding(folder: Path) -> Holding:
    """Total size of a folder's saved caches, in bytes."""
    return _sum(_listed(folder))


def forget(folder: Path, *, chat: str | None = None, model: str | None = None) -> Holding:
    """Delete saved caches: those of a chat, of a model, or all of them if neither is given.

    Unreadable files are deleted with any chat, since they may belong to it. Files that another process is writing are
    left alone unless everything is deleted.

    Args:
        folder: Where the files are.
        chat: The name of a conversation, as its client gave it.
        model: Content id of a model.

    Returns:
        The deleted files.

    Raises:
        SavedCacheError: the system refuses to delete one; the message says which.
    """
    unwanted = [path for path in _listed(folder) if _is_of(path, chat, model)]
    taken = _sum(unwanted)
    for path in unwanted:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise SavedCacheError(f"cannot delete the saved cache {path}: {error.strerror}") from error
    return taken


@contextlib.contextmanager
def forgetting(folder: Path, models: Path) -> Iterator[None]:
    """Context manager that, on exit, deletes the saved caches of models that were deleted or replaced inside it.

    Args:
        folder: Where the saved caches are.
        models: Folder of the stored models.

    Raises:
        SavedCacheError: the system refuses to delete one.
    """
    before = _contents(models)
    try:
        yield
    finally:
        for model in before - _contents(models):
            forget(folder, model=model)


class SavedCaches:
    """The saved caches of one loaded model. Never raises: what cannot be saved or used is logged.

    Args:
        folder: Folder of the files of all models; created for its owner only, on the first save.
        about: Identity of this model's caches.
        model: The model's folder: if it has been deleted, nothing is saved. None: not checked.
        limit: Total size limit in bytes; the least recently used files are deleted.
        smallest: Sequences with fewer tokens are not saved.
        gain: Tokens a file must spare to be worth reading.
    """

    def __init__(
        self,
        folder: Path,
        about: saved.About,
        *,
        model: Path | None = None,
        limit: int = FOLDER_BYTES,
        smallest: int = SMALLEST,
        gain: int = GAIN,
    ) -> None:
        self._folder, self._about, self._model = folder, about, model
        self._limit, self._smallest, self._gain = limit, smallest, gain
        self._prefix = f"{_model_prefix(about.model)}{about.kind['name']}-"
        self._found: list[SavedSequence] = []
        self._found = self._scan()
        self._prune()

    def longest(self, tokens: Sequence[int], *, beyond: int, context: int) -> SavedSequence | None:
        """The file with the longest common prefix; ties go to the shortest file.

        Args:
            tokens: The beginning of a prompt.
            beyond: Tokens available without a file; a file must offer clearly more.
            context: Longer sequences are ignored.
        """
        self._look_again()
        wanted, best, most = np.array(tokens, np.int32), None, beyond + self._gain - 1
        for found in sorted(self._found, key=lambda found: len(found.tokens)):
            if len(found.tokens) <= context and (shared := _shared(found.tokens, wanted)) > most:
                best, most = found, shared
        return best

    def load(self, found: SavedSequence, cache: KVCache, slot: int) -> list[int]:
        """Load a file into a slot that has room for it.

        Returns:
            The sequence; empty if the file was unusable, in which case it is deleted.
        """
        try:
            tokens = saved.load(found.path, self._about, cache, slot)
        except OutOfMemoryError as error:
            logger.warning("a saved chat is computed again: %s", error)
            return []
        except SavedCacheError as error:
            logger.warning("a saved chat is computed again: %s", error)
            self._remove(found.path)
            return []
        with contextlib.suppress(OSError):
            os.utime(found.path)
        return tokens

    def save(self, cache: KVCache, sequences: Sequence[tuple[int, Sequence[int], str | None]]) -> None:
        """Save the sequences worth a file, then delete files beyond the limit.

        Args:
            cache: The cache.
            sequences: Slots with their tokens and conversation names, most important first.
        """
        if self._model is not None and content_of(self._model) != self._about.model:
            return
        began = time.monotonic()
        self._look_again()
        for slot, tokens, chat in sequences:
            if len(tokens) < self._smallest or time.monotonic() - began > SAVING_S:
                continue
            array = np.array(tokens, np.int32)
            if any(_shared(found.tokens, array) + self._gain > len(array) for found in self._found):
                continue
            try:
                self._write(cache, slot, array, chat)
            except (SavedCacheError, OSError) as error:
                logger.warning("a chat's cache is not saved: %s", error)
        self._prune()

    def _write(self, cache: KVCache, slot: int, tokens: npt.NDArray[np.int32], chat: str | None) -> None:
        """Write one sequence, and delete the files that it extends."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)  # no matter who made it
        needed = cache.slot_bytes(slot)
        if needed > self._limit or needed > shutil.disk_usage(self._folder).free - _RESERVE:
            raise SavedCacheError(
                f"it takes {size(needed)}, for which there is no room in {self._folder} (at most {size(self._limit)} "
                f"are used, and {size(_RESERVE)} of the disk stay free)"
            )
        name = hashlib.blake2b(tokens.tobytes(), digest_size=12).hexdigest()
        path = self._folder / f"{self._prefix}{name}{saved.ENDING}"
        saved.write(path, self._about, tokens.tolist(), cache, slot, chat=chat)
        for found in list(self._found):
            if _shared(found.tokens, tokens) + self._gain > len(found.tokens):
                self._remove(found.path)
        self._found.append(SavedSequence(path=path, tokens=tokens, chat=chat))

    def _prune(self) -> None:
        """Delete the least recently used files until the rest fits the limit, and leftovers of crashes."""
        files = []
        for path in _listed(self._folder):
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.name.endswith(saved.ENDING):
                    files.append((status.st_mtime, status.st_size, path))
                elif saved.writer_is_gone(path) or time.time() - status.st_mtime > _STALE_S:
                    path.unlink()
        kept = 0
        for _, taken, path in sorted(files, reverse=True):
            kept += taken
            if kept > self._limit:
                self._remove(path)

    def _scan(self) -> list[SavedSequence]:
        """List the files of this model. Logs why a file that was made for it cannot be used."""
        found = []
        for path in _listed(self._folder):
            if not (path.name.startswith(self._prefix) and path.name.endswith(saved.ENDING)):
                continue
            try:
                header = saved.read_header(path)
            except SavedCacheError as error:
                logger.warning("a saved chat is not used: %s", error)
                self._remove(path)
                continue
            if reasons := self._about.differences(header.about):
                logger.info("the saved cache %s is not used: it was made with %s", path, ", ".join(reasons))
            else:
                found.append(SavedSequence(path=path, tokens=np.array(header.tokens, np.int32), chat=header.chat))
        return found

    def _look_again(self) -> None:
        """Forget files that somebody has deleted."""
        self._found = [found for found in self._found if found.path.exists()]

    def _remove(self, path: Path) -> None:
        """Delete a file and forget it."""
        self._found = [found for found in self._found if found.path != path]
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _shared(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> int:
    """Length of the common prefix."""
    count = min(len(first), len(second))
    different = np.flatnonzero(first[:count] != second[:count])
    return int(different[0]) if len(different) else count


def _model_prefix(model: str) -> str:
    """Prefix of the names of a model's files."""
    return f"{model[:16]}-"


def _contents(models: Path) -> set[str]:
    """Content ids of all stored models."""
    try:
        found = [content_of(folder) for folder in models.iterdir()]
    except OSError:
        return set()
    return {content for content in found if content is not None}


def _listed(folder: Path) -> list[Path]:
    """Saved caches and temporary files, by name; none if the folder does not exist."""
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith((saved.ENDING, saved.TEMPORARY)))
    except OSError:
        return []


def _is_of(path: Path, chat: str | None, model: str | None) -> bool:
    """Whether a file belongs to a chat or a model that is being deleted."""
    if chat is None and model is None:
        return True
    if path.name.endswith(saved.TEMPORARY):
        return saved.writer_is_gone(path)
    if model is not None and path.name.startswith(_model_prefix(model)):
        return True
    if chat is None:
        return False
    try:
        return saved.read_header(path).chat == chat
    except SavedCacheError:
        return True


def _sum(paths: Sequence[Path]) -> Holding:
    """Total size of some files; missing files count as zero."""
    sizes = []
    for path in paths:
        with contextlib.suppress(OSError):
            sizes.append(path.stat().st_size)
    return Holding(files=len(sizes), bytes=sum(sizes))
