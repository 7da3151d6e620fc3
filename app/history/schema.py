"""Database schema of the chat history, and its migrations."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from app.errors import HistoryError
from app.language import _
from models.files import private_folder

BUSY_S = 5.0
"""Seconds to wait while another program writes."""

MIGRATIONS: Sequence[str] = (
    """
    CREATE TABLE chats (
        id TEXT PRIMARY KEY,
        title TEXT NOT NULL,
        head TEXT,
        model TEXT,
        pinned INTEGER NOT NULL DEFAULT 0,
        created TEXT NOT NULL,
        updated TEXT NOT NULL,
        deleted TEXT
    ) STRICT;
    CREATE INDEX chats_by_time ON chats (pinned, updated);
    CREATE TABLE messages (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        chat TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        parent TEXT,
        role TEXT NOT NULL,
        text TEXT NOT NULL,
        state TEXT NOT NULL,
        error TEXT,
        model TEXT,
        statistics TEXT,
        created TEXT NOT NULL
    ) STRICT;
    CREATE INDEX messages_by_chat ON messages (chat);
    CREATE VIRTUAL TABLE words USING fts5 (
        text, content='messages', content_rowid='number', tokenize='unicode61 remove_diacritics 2', prefix='2 3'
    );
    CREATE TRIGGER message_added AFTER INSERT ON messages BEGIN
        INSERT INTO words (rowid, text) VALUES (new.number, new.text);
    END;
    CREATE TRIGGER message_deleted AFTER DELETE ON messages BEGIN
        INSERT INTO words (words, rowid, text) VALUES ('delete', old.number, old.text);
    END;
    CREATE TRIGGER message_changed AFTER UPDATE OF text ON messages WHEN old.text <> new.text BEGIN
        INSERT INTO words (words, rowid, text) VALUES ('delete', old.number, old.text);
        INSERT INTO words (rowid, text) VALUES (new.number, new.text);
    END;
    """,
    """
    ALTER TABLE chats ADD COLUMN extras TEXT;
    CREATE INDEX messages_by_role ON messages (role, number);
    """,
    """
    ALTER TABLE messages ADD COLUMN passages TEXT;
    CREATE TABLE sources (
        number INTEGER PRIMARY KEY,
        path TEXT NOT NULL UNIQUE
    ) STRICT;
    CREATE TABLE attached (
        chat TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        source INTEGER NOT NULL REFERENCES sources (number) ON DELETE CASCADE,
        PRIMARY KEY (chat, source)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX attached_by_source ON attached (source);
    CREATE TRIGGER source_detached AFTER DELETE ON attached BEGIN
        DELETE FROM sources WHERE number = old.source AND NOT EXISTS (SELECT 1 FROM attached WHERE source = old.source);
    END;
    CREATE TABLE files (
        number INTEGER PRIMARY KEY,
        source INTEGER NOT NULL REFERENCES sources (number) ON DELETE CASCADE,
        name TEXT NOT NULL,
        size INTEGER NOT NULL,
        changed INTEGER NOT NULL,
        bytes INTEGER NOT NULL DEFAULT 0,
        problem TEXT,
        UNIQUE (source, name)
    ) STRICT;
    CREATE TABLE chunks (
        number INTEGER PRIMARY KEY,
        source INTEGER NOT NULL,
        file INTEGER NOT NULL REFERENCES files (number) ON DELETE CASCADE,
        unit TEXT NOT NULL,
        first INTEGER NOT NULL,
        last INTEGER NOT NULL,
        text TEXT NOT NULL
    ) STRICT;
    CREATE INDEX chunks_by_file ON chunks (file);
    CREATE INDEX chunks_by_source ON chunks (source);
    CREATE VIRTUAL TABLE chunk_words USING fts5(
        text, content='chunks', content_rowid='number', tokenize='porter unicode61 remove_diacritics 2'
    );
    CREATE TRIGGER chunk_added AFTER INSERT ON chunks BEGIN
        INSERT INTO chunk_words (rowid, text) VALUES (new.number, new.text);
    END;
    CREATE TRIGGER chunk_deleted AFTER DELETE ON chunks BEGIN
        INSERT INTO chunk_words (chunk_words, rowid, text) VALUES ('delete', old.number, old.text);
    END;
    """,
    """
    ALTER TABLE messages ADD COLUMN calls TEXT;
    """,
)
"""Migrations from each version to the next; an empty file is version 0."""


def _create(path: Path) -> None:
    """Create the file, if it does not exist, readable by its owner only.

    An existing file must not be opened here: closing it would release all locks that this process holds on it,
    including those of SQLite's connections. Another program would then believe to be the last user, and delete the log
    that these connections still write to.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def open_database(path: Path | None) -> sqlite3.Connection:
    """Open the database, creating or migrating it if needed. Only its owner can read it.

    Args:
        path: The file; None for an empty database in memory, which ends with the connection.

    Returns:
        A connection that any thread may use, one at a time, without implicit transactions.

    Raises:
        HistoryError: it is damaged, cannot be written, or was made by a newer version of the program.
    """
    try:
        if path is not None:
            private_folder(path.parent)
            _create(path)
        connection = sqlite3.connect(path or ":memory:", timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise HistoryError(_("chats cannot be kept in {path}: {error}", path=path, error=error)) from error
    try:
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
        _keep_log(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        _migrate(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise HistoryError(database_error(path, error)) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _keep_log(connection: sqlite3.Connection) -> None:
    """Switch the database to a write-ahead log.

    SQLite does not wait for another connection that switches a new file, whatever the timeout: it is tried again.
    """
    given_up = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > given_up:
                raise
            time.sleep(0.01)


def version_of(connection: sqlite3.Connection) -> int:
    """The schema version of the database."""
    with closing(connection.execute("PRAGMA user_version")) as cursor:
        return int(cursor.fetchone()[0])


def _migrate(connection: sqlite3.Connection, path: Path | None) -> None:
    """Migrate the database, all or nothing; waits for other programs that do the same."""
    if version_of(connection) == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        found = version_of(connection)
        if found > len(MIGRATIONS):
            raise HistoryError(
                _(
                    "{path} was written by a newer version of lowbit-chat: update the program, or move the file away",
                    path=path,
                )
            )
        for script in MIGRATIONS[found:]:
            for statement in _statements(script):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> list[str]:
    """A script's statements. `executescript` would end the transaction."""
    found, begun = [], ""
    for part in script.split(";"):
        begun += part
        if begun.strip() and sqlite3.complete_statement(f"{begun};"):
            found.append(begun)
            begun = ""
        elif begun.strip():
            begun += ";"
    return found


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, path: Path | None) -> Iterator[sqlite3.Connection]:
    """Context manager: what is written inside is committed together, or not at all; nested ones join the outer one.

    Raises:
        HistoryError: it can't be written.
    """
    if connection.in_transaction:
        yield connection
        return
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        raise HistoryError(database_error(path, error)) from error


def forget_words(database: sqlite3.Connection, index: str) -> None:
    """Have a word index forget the words of deleted rows, which it only does when it is rewritten."""
    database.execute(f"INSERT INTO {index} ({index}) VALUES ('optimize')")  # noqa: S608  our own name


def database_error(path: Path | None, error: sqlite3.Error) -> str:
    """An error about a database, with advice."""
    if isinstance(error, sqlite3.OperationalError):
        return _("chats cannot be kept in {path}: {error}", path=path, error=error)
    return _(
        "{path} is damaged ({error}): move it away to begin a new history; `sqlite3 FILE .recover` may save the old",
        path=path,
        error=error,
    )
