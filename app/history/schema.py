"""The database that chats are kept in, and how an older one is brought up to date."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from app.errors import HistoryError
from models.files import private_folder

BUSY_S = 5.0
"""How long one program waits while another one writes."""

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
)
"""What leads from each version to the next; an empty file is version 0."""


def _create(path: Path) -> None:
    """Make the file, if there is none, so that only its owner can read it.

    A file that is there must not be touched: whoever closes a file gives up all locks that his process has on it, those
    of SQLite's connections as well. Another program would then take itself for the last one, and delete the log that
    these connections go on writing to.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def open_database(path: Path) -> sqlite3.Connection:
    """Open the database, made or brought up to date where that is needed. Only its owner can read it.

    Args:
        path: The file.

    Returns:
        A connection that any thread may use, one at a time, and that begins no transaction by itself.

    Raises:
        HistoryError: it is damaged, cannot be written, or was made by a newer version of the program.
    """
    try:
        private_folder(path.parent)
        _create(path)
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise HistoryError(f"chats cannot be kept in {path}: {error}") from error
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        _migrate(connection, path)
    except sqlite3.Error as error:
        connection.close()
        raise HistoryError(told(path, error)) from error
    except BaseException:
        connection.close()
        raise
    return connection


def version_of(connection: sqlite3.Connection) -> int:
    """The version of the database's form."""
    with closing(connection.execute("PRAGMA user_version")) as cursor:
        return int(cursor.fetchone()[0])


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the database up to date, all or nothing; another program that does the same is waited for."""
    if version_of(connection) == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        found = version_of(connection)
        if found > len(MIGRATIONS):
            raise HistoryError(
                f"{path} was written by a newer version of lowbit-chat: update the program, or move the file away"
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


def told(path: Path, error: sqlite3.Error) -> str:
    """What went wrong with a database, and what to do."""
    if isinstance(error, sqlite3.OperationalError):
        return f"chats cannot be kept in {path}: {error}"
    return f"{path} is damaged ({error}): move it away to begin a new history; `sqlite3 FILE .recover` may save the old"
