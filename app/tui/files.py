"""The files below the folder that the program was started in, found by a few letters of their paths."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from app.documents.folders import PASSED_OVER
from app.tui.widgets.suggestions import Suggestion

MOST_FILES = 20_000
"""Files that are searched."""
MOST_BYTES = 4_000_000
"""Bytes of their names that git may say."""
LISTING_S = 2.0
"""Seconds after which the files listed so far are searched."""
FRESH_S = 10.0
"""Seconds after which they are listed again."""
MOST_SHOWN = 50


class Files:
    """Searches the files of a folder. Nothing of it runs on the event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listing: asyncio.Task[Sequence[str]] | None = None
        self._since = 0.0

    async def suggest(self, query: str) -> list[Suggestion]:
        """The files whose paths contain the letters of a query in their order, best first."""
        if self._listing is None or (self._listing.done() and time.monotonic() - self._since > FRESH_S):
            self._listing, self._since = asyncio.create_task(listed(self._folder)), time.monotonic()
        names = await asyncio.shield(self._listing)  # the next key cancels this search, but not the listing
        found = await asyncio.to_thread(best, query, names)
        return [Suggestion(text=name, label=name, path=self._folder / name) for name in found]


async def listed(folder: Path) -> Sequence[str]:
    """Paths of the files below a folder: what git does not ignore, or all but hidden ones where there is no git."""
    with contextlib.suppress(OSError):
        # A repository may name a program for git to run, the file system monitor.
        words = ("git", "-c", "core.fsmonitor=false", "ls-files", "-coz", "--exclude-standard")
        quiet = asyncio.subprocess.DEVNULL
        git = await asyncio.create_subprocess_exec(
            *words, cwd=folder, stdin=quiet, stdout=asyncio.subprocess.PIPE, stderr=quiet
        )
        assert git.stdout is not None
        said = bytearray()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LISTING_S):
                    while len(said) < MOST_BYTES and (part := await git.stdout.read(1 << 16)):
                        said += part
        finally:
            with contextlib.suppress(ProcessLookupError):
                git.kill()
            await git.wait()
        names = [name for name in said.decode("utf-8", "replace").split("\0") if name and "\ufffd" not in name]
        if names:
            return list(dict.fromkeys(names))[:MOST_FILES]
    return await asyncio.to_thread(_walked, folder)


def _walked(folder: Path) -> list[str]:
    found: list[str] = []
    end = time.monotonic() + LISTING_S
    for inside, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in PASSED_OVER)
        prefix = os.path.relpath(inside, folder)
        found += [name if prefix == "." else f"{prefix}{os.sep}{name}" for name in names if not name.startswith(".")]
        if len(found) > MOST_FILES or time.monotonic() > end:
            break
    return found[:MOST_FILES]


def best(query: str, names: Sequence[str]) -> list[str]:
    """The paths that match a query: first those whose file's name begins with it, then short ones."""
    wanted = query.lower()
    letters = re.compile("[^\n]*?".join(map(re.escape, wanted)))

    def rank(name: str) -> tuple[bool, bool, bool, int, str]:
        path = name.lower()
        file = path.replace(os.sep, "/").rpartition("/")[2]
        return not file.startswith(wanted), wanted not in file, wanted not in path, len(path), path

    return sorted((name for name in names if letters.search(name.lower())), key=rank)[:MOST_SHOWN]
