"""The folder of saved caches: which sequences are worth a file, which file a prompt begins from, and how much stays."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from runtime.errors import OutOfMemoryError, SavedCacheError
from runtime.kv import saved
from runtime.kv.control import KVCache

FOLDER_BYTES = 2 << 30
"""Bytes that all saved caches may have together, those of other models included."""
SMALLEST = 1024
"""A shorter sequence is not saved: a prefill of it takes no longer than a person waits."""
GAIN = 256
"""Tokens that a file must spare to be read, and that a sequence must add to another one to be saved beside it."""
SAVING_S = 2.0
"""No file is begun after so many seconds of saving: whoever ends the program does not wait for ever."""
_STALE_S = 3600.0
"""A file that is being written for longer was left behind by a process that is gone."""
_RESERVE = 256 << 20
"""Bytes of the disk that stay free."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSequence:
    """A file that belongs to the loaded model."""

    path: Path
    """Where it is."""
    tokens: npt.NDArray[np.int32]
    """Its sequence."""


class SavedCaches:
    """The saved caches of one loaded model. Nothing here raises: what cannot be saved or used is told to the log.

    Args:
        folder: Where the files are, of all models; made for its owner alone when something is saved.
        about: What this model's caches belong to.
        limit: Bytes that all files may have together; those unused for longest are deleted.
        smallest: Tokens below which a sequence is not saved.
        gain: Tokens that a file must spare.
    """

    def __init__(
        self,
        folder: Path,
        about: saved.About,
        *,
        limit: int = FOLDER_BYTES,
        smallest: int = SMALLEST,
        gain: int = GAIN,
    ) -> None:
        self._folder, self._about = folder, about
        self._limit, self._smallest, self._gain = limit, smallest, gain
        self._prefix = f"{about.model[:16]}-{about.kind['name']}-"
        self._found: list[SavedSequence] = []
        self._found = self._scan()

    def longest(self, tokens: Sequence[int], *, beyond: int, context: int) -> SavedSequence | None:
        """The file with most tokens in common at its beginning with some others; of equals the shortest.

        Args:
            tokens: What a prompt begins with.
            beyond: Tokens that are at hand without a file; it must have clearly more.
            context: Longer sequences do not count.
        """
        wanted, best, most = np.array(tokens, np.int32), None, beyond + self._gain - 1
        for found in sorted(self._found, key=lambda found: len(found.tokens)):
            if len(found.tokens) <= context and (shared := _shared(found.tokens, wanted)) > most:
                best, most = found, shared
        return best

    def load(self, found: SavedSequence, cache: KVCache, slot: int) -> list[int]:
        """Bring a file back into a slot with room for it.

        Returns:
            The sequence; empty where the file was of no use: it is deleted then.
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

    def save(self, cache: KVCache, sequences: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Write what is worth a file, then delete what is too much.

        Args:
            cache: The cache.
            sequences: Slots and their tokens, the most important first.
        """
        began = time.monotonic()
        for slot, tokens in sequences:
            if len(tokens) < self._smallest or time.monotonic() - began > SAVING_S:
                continue
            array = np.array(tokens, np.int32)
            if any(_shared(found.tokens, array) + self._gain > len(array) for found in self._found):
                continue
            try:
                self._write(cache, slot, array)
            except (SavedCacheError, OSError) as error:
                logger.warning("a chat's cache is not saved: %s", error)
        self._prune()

    def _write(self, cache: KVCache, slot: int, tokens: npt.NDArray[np.int32]) -> None:
        """Write one sequence; files that it goes on from are deleted."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        needed = cache.slot_bytes(slot)
        if needed > self._limit or needed > shutil.disk_usage(self._folder).free - _RESERVE:
            raise SavedCacheError(f"it takes {needed >> 20} MiB, for which there is no room in {self._folder}")
        name = hashlib.blake2b(tokens.tobytes(), digest_size=12).hexdigest()
        path = self._folder / f"{self._prefix}{name}{saved.ENDING}"
        saved.write(path, self._about, tokens.tolist(), cache, slot)
        for found in list(self._found):
            if _shared(found.tokens, tokens) + self._gain > len(found.tokens):
                self._remove(found.path)
        self._found.append(SavedSequence(path=path, tokens=tokens))

    def _prune(self) -> None:
        """Delete files, those unused for longest first, until all that stay have room; and what a crash left behind."""
        files = []
        for path in self._listed():
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.name.endswith(saved.ENDING):
                    files.append((status.st_mtime, status.st_size, path))
                elif time.time() - status.st_mtime > _STALE_S:
                    path.unlink()
        kept = 0
        for _, size, path in sorted(files, reverse=True):
            kept += size
            if kept > self._limit:
                self._remove(path)

    def _scan(self) -> list[SavedSequence]:
        """The files that belong to this model. Why one does not is told to the log, where it was made for it."""
        found = []
        for path in self._listed():
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
                found.append(SavedSequence(path=path, tokens=np.array(header.tokens, np.int32)))
        return found

    def _listed(self) -> list[Path]:
        """Saved caches and files that are being written, by name; none where there is no folder."""
        try:
            return sorted(
                path for path in self._folder.iterdir() if path.name.endswith((saved.ENDING, saved.TEMPORARY))
            )
        except OSError:
            return []

    def _remove(self, path: Path) -> None:
        """Delete a file, and know it no more."""
        self._found = [found for found in self._found if found.path != path]
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _shared(first: npt.NDArray[np.int32], second: npt.NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    count = min(len(first), len(second))
    different = np.flatnonzero(first[:count] != second[:count])
    return int(different[0]) if len(different) else count
