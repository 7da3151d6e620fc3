"""The index: passages of the documents that chats search, in their database.

A source is a file or folder that was attached to a chat. Its passages are cut once and shared by all chats that it is
attached to; a file is read again only if its size or time has changed. The last chat that is deleted takes them along.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from app.conversation import Passage
from app.documents.folders import File, survey
from app.documents.prompt import BYTES_PER_TOKEN, shortened
from app.documents.reader import Reader
from app.documents.search import Match, best, subject
from app.documents.sections import Section, chunks
from app.errors import DocumentError, HistoryError
from app.history.schema import database_error, forget_words, open_database, transaction
from app.language import _
from app.printable import printable_name

MAX_INDEXED = 64_000_000
"""Maximum text of a source that is indexed, in bytes: about 16 million tokens."""
_BATCH = 500
"""Passages written in a transaction: other writers wait for a fraction of a second."""
Report = Callable[[int, int], object]
"""Receives how many files are done, and of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A source after it was read."""

    name: str
    """How it is called on the screen."""
    files: int
    """Files with passages."""
    passages: int
    bytes: int
    """Length of its text."""
    problems: tuple[str, ...]
    """Why something was not read, a sentence each."""
    fresh: int
    """Files that were read this time; the others had not changed."""

    @property
    def tokens(self) -> int:
        """Its size in tokens, about."""
        return self.bytes // BYTES_PER_TOKEN


class Index:
    """The index in a chat history's file, or in memory. Thread-safe.

    Args:
        path: The file; None keeps everything in memory.
        reader: Reads documents.

    Raises:
        HistoryError: see `open_database`. Every method raises it, too, if the file cannot be read or written.
    """

    def __init__(self, path: Path | None, reader: Reader) -> None:
        self._path, self._reader = path, reader
        self._database = open_database(path)
        self._lock = threading.RLock()

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._lock:
            self._database.close()

    def update(
        self,
        chat: str,
        path: Path,
        report: Report = lambda _done, _of: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> State:
        """Attach a source to a chat, and read what has changed in it.

        Args:
            chat: The chat's id; a chat without messages is created.
            path: A file or folder.
            report: Receives the progress.
            stopped: Polled between files; what was read stays.

        Returns:
            Its state.

        Raises:
            DocumentError: it can't be read at all; it is not attached then.
        """
        found = survey(path)
        source = self._attach(chat, path)
        known = {
            str(name): (int(number), int(size), int(changed))
            for number, name, size, changed in self._read(
                "SELECT number, name, size, changed FROM files WHERE source = ?", source
            )
        }
        gone = [number for name, (number, _, _) in known.items() if name not in {file.name for file in found.files}]
        with self._writing() as database:
            database.executemany("DELETE FROM files WHERE number = ?", [(number,) for number in gone])
        changed = [file for file in found.files if known.get(file.name, (0, -1, -1))[1:] != (file.size, file.changed)]
        left = MAX_INDEXED - self._bytes(source)
        over = 0
        for done, file in enumerate(changed):
            if stopped():
                break
            report(len(found.files) - len(changed) + done, len(found.files))
            if left <= 0:
                over += 1
                continue
            left -= self._store(source, file, stopped)
        problems = [_("{count:,} {what} left out", count=count, what=what) for what, count in found.skipped.items()]
        if over:
            problems.append(
                _(
                    "{over:,} files left out: only {most} MB of text are searched",
                    over=over,
                    most=MAX_INDEXED // 1_000_000,
                )
            )
        return self._state(source, path, problems, len(changed))

    def _attach(self, chat: str, path: Path) -> int:
        now = datetime.now().astimezone().isoformat()
        with self._writing() as database:
            database.execute(
                "INSERT INTO chats (id, title, created, updated) VALUES (?, 'New chat', ?, ?) ON CONFLICT DO NOTHING",
                (chat, now, now),
            )
            database.execute("INSERT INTO sources (path) VALUES (?) ON CONFLICT DO NOTHING", (str(path),))
            ((source,),) = database.execute("SELECT number FROM sources WHERE path = ?", (str(path),)).fetchall()
            database.execute("INSERT INTO attached VALUES (?, ?) ON CONFLICT DO NOTHING", (chat, source))
        return int(source)

    def _store(self, source: int, file: File, stopped: Callable[[], bool]) -> int:
        """Read a file and store its passages. Returns the length of its text in bytes."""
        size = 0
        problem: str | None = None

        def counted() -> Iterator[Section]:
            nonlocal size, problem
            try:
                for section in self._reader.read(file.path):
                    size += len(section.text.encode())
                    yield section
            except DocumentError as error:
                problem = str(error)

        cut = list(chunks(counted()))
        if stopped():
            return 0
        for begin in range(0, max(1, len(cut)), _BATCH):
            with self._writing() as database:
                if begin == 0:
                    database.execute("DELETE FROM files WHERE source = ? AND name = ?", (source, file.name))
                    number = database.execute(
                        "INSERT INTO files (source, name, size, changed, bytes, problem) VALUES (?, ?, ?, -1, ?, ?)",
                        (source, file.name, file.size, size, problem),
                    ).lastrowid
                database.executemany(
                    "INSERT INTO chunks (source, file, unit, first, last, text) VALUES (?, ?, ?, ?, ?, ?)",
                    [(source, number, one.unit, one.first, one.last, one.text) for one in cut[begin : begin + _BATCH]],
                )
                if begin + _BATCH >= len(cut):  # only now does the file count as read
                    database.execute("UPDATE files SET changed = ? WHERE number = ?", (file.changed, number))
        return size

    def _bytes(self, source: int) -> int:
        ((total,),) = self._read("SELECT coalesce(sum(bytes), 0) FROM files WHERE source = ?", source)
        return int(total)

    def _state(self, source: int, path: Path, problems: Sequence[str], fresh: int) -> State:
        rows = self._read(
            "SELECT name, problem FROM files WHERE source = ? AND problem IS NOT NULL ORDER BY name", source
        )
        ((files, passages),) = self._read("SELECT count(DISTINCT file), count(*) FROM chunks WHERE source = ?", source)
        return State(
            name=printable_name(path.name or str(path)),
            files=files,
            passages=passages,
            bytes=self._bytes(source),
            problems=(*problems, *_grouped(rows)),
            fresh=fresh,
        )

    def detach(self, chat: str, path: Path) -> None:
        """Detach a source from a chat. Its passages are deleted with the last chat that searches it."""
        with self._writing() as database:
            database.execute(
                "DELETE FROM attached WHERE chat = ? AND source = (SELECT number FROM sources WHERE path = ?)",
                (chat, str(path)),
            )
            forget_words(database, "chunk_words")

    def search(self, sources: Iterable[Path], questions: Sequence[str], room: int) -> list[Passage]:
        """The passages of some sources that the last question is about, best first.

        Args:
            sources: Files and folders; of one that was never read, nothing is found.
            questions: The user's prompts, the last one last. One that names no subject ("and then?") is about that of
                the one before.
            room: Maximum length of all passages in characters.
        """
        try:
            with self._lock:
                return self._passages(best(self._database, list(map(str, sources)), subject(questions)), room)
        except sqlite3.Error as error:
            raise HistoryError(database_error(self._path, error)) from error

    def _passages(self, matches: Sequence[Match], room: int) -> list[Passage]:
        found: list[Passage] = []
        for match in matches:
            ((name, folder, unit, first, last, text),) = self._read(
                "SELECT files.name, sources.path, unit, first, last, text FROM chunks "
                "JOIN files ON files.number = chunks.file JOIN sources ON sources.number = chunks.source "
                "WHERE chunks.number = ?",
                match.chunk,
            )
            if found and len(text) > room:
                break
            top = Path(folder).name
            file = name if name == top else f"{top}/{name}"
            passage = Passage(file=printable_name(file), unit=unit, first=first, last=last, text=text)
            found.append(shortened(passage, room))
            room -= len(text)
        return found

    def _read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise HistoryError(database_error(self._path, error)) from error

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, transaction(self._database, self._path) as database:
            yield database


def _grouped(problems: Iterable[tuple[str, str]]) -> list[str]:
    """Problems of files in sentences, one for each reason.

    Args:
        problems: Each file's name, and the problem as the reader said it.
    """
    alike: dict[str, list[str]] = {}
    for name, problem in problems:
        reason = problem.removeprefix(printable_name(name.rpartition("/")[2]))
        alike.setdefault(reason, []).append(problem)
    return [
        same[0] if len(same) == 1 else _("{same} (and {count:,} more like it)", same=same[0], count=len(same) - 1)
        for same in alike.values()
    ]
