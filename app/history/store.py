"""Chat store: saves, lists, searches and deletes chats.

A chat consists of its messages with their parents, and its head, so every branch is saved. A deleted chat can be
restored for an hour; then its text is overwritten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar, get_args

from app.conversation import NOT_RUN, Call, Extras, Message, Passage, Role, Statistics
from app.errors import HistoryError
from app.history.schema import database_error, forget_words, open_database, transaction
from app.language import _
from runtime.system.foreign import encodable, read_json
from runtime.wire.codec import WireError, from_json, to_json

TITLE_LENGTH = 60
"""Most characters of a title taken from the first message."""
MODEL_LENGTH = 300
"""Most characters of a model's name."""
UNDO = timedelta(hours=1)
"""Time within which a deleted chat can be restored."""
UNNAMED = "New chat"
"""Title of a chat without messages."""
_MARK = "\x02"
"""Before and after what matches in a snippet; `char(2)` in SQL."""
_FIRST_IDEOGRAPH = "\u2e80"
"""Scripts from this code point on have no spaces between words; they are searched by substring."""
R = TypeVar("R")
_UNUSED = "title = ? AND NOT EXISTS (SELECT 1 FROM messages WHERE messages.chat = chats.id)"
"""Of a chat `UNNAMED` without messages."""
_COLUMNS = "chats.id, chats.title, chats.model, pinned, chats.created, updated, head, extras"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat without its messages."""

    id: str
    """As `Conversation.id`."""
    title: str
    """In one line."""
    model: str | None
    """The model that answered last."""
    pinned: bool
    """Whether it is listed above the others."""
    created: datetime
    """When it began."""
    updated: datetime
    """Time of the last message."""
    head: str | None
    """The last message shown."""
    extras: Extras = field(default_factory=Extras)
    """Its data apart from messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A search result: a message."""

    chat: Chat
    """Its chat."""
    message: str
    """Its id."""
    pieces: Sequence[str]
    """The words around the match, on one line: every second piece matches."""

    @property
    def snippet(self) -> str:
        """The pieces as one text."""
        return "".join(self.pieces)


class History:
    """The chats in one file. Thread-safe; several programs may use the same file.

    Raises:
        HistoryError: see `open_database`. Every method raises it, too, if the file cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._database = open_database(path)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        with self._lock:
            self._database.close()

    # Writing

    def record(
        self,
        chat: str,
        head: str | None,
        messages: Iterable[Message],
        *,
        title: str | None = None,
        updated: datetime | None = None,
    ) -> None:
        """Save new and changed messages, all or none.

        Args:
            chat: The chat's id; a new chat is created.
            head: The last message shown.
            messages: The messages to save.
            title: A new chat's title; None: from the user's first message.
            updated: Time of the last message; None: now.
        """
        kept = list(messages)
        if not kept:
            return
        now = _now() if updated is None else updated.astimezone().isoformat()
        said = next((message.text for message in kept if message.role == "user"), "")
        model = next((message.model for message in reversed(kept) if message.model), None)
        with self._writing() as database:
            database.execute(
                "INSERT INTO chats (id, title, head, model, created, updated) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET head = excluded.head, model = coalesce(excluded.model, model), "
                "updated = excluded.updated, title = CASE WHEN title = ? THEN excluded.title ELSE title END",
                (chat, title_of(title or said), head, model, min(kept, key=_created).created.isoformat(), now, UNNAMED),
            )
            database.executemany(
                "INSERT INTO messages (id, chat, parent, role, text, state, error, model, statistics, passages, "
                "created, calls) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET text = excluded.text, state = excluded.state, "
                "error = excluded.error, model = excluded.model, "
                "statistics = excluded.statistics, passages = excluded.passages, calls = excluded.calls",
                [_row(chat, message) for message in kept],
            )

    def note(self, chat: str, head: str | None, extras: Extras) -> None:
        """Save a chat's head and extras.

        A chat without messages is only there while it has a draft or documents.
        """
        packed = json.dumps(to_json(extras))
        with self._writing() as database:
            changed = database.execute("UPDATE chats SET head = ?, extras = ? WHERE id = ?", (head, packed, chat))
            if not (extras.draft.strip() or extras.sources):
                database.execute(f"DELETE FROM chats WHERE id = ? AND {_UNUSED}", (chat, UNNAMED))  # noqa: S608
            elif not changed.rowcount:
                now = _now()
                database.execute(
                    "INSERT INTO chats (id, title, model, created, updated, extras) VALUES (?, ?, ?, ?, ?, ?)",
                    (chat, UNNAMED, extras.model, now, now, packed),
                )

    def drop_empty(self) -> None:
        """Delete chats without messages, drafts and documents."""
        with self._writing() as database:
            database.execute(
                "DELETE FROM chats WHERE CASE WHEN extras IS NULL THEN 1 WHEN json_valid(extras) THEN "  # noqa: S608
                "coalesce(json_extract(extras, '$.draft'), '') = '' "
                f"AND coalesce(json_array_length(extras, '$.sources'), 0) = 0 END AND {_UNUSED}",
                (UNNAMED,),
            )

    def rename(self, chat: str, title: str) -> None:
        """Change a chat's title."""
        name = title_of(title)
        if name == UNNAMED:
            raise HistoryError(_("a chat's title needs a word"))
        self._change(chat, "title = ?", name)

    def pin(self, chat: str, *, pinned: bool) -> None:
        """Pin a chat above the others, or unpin it."""
        self._change(chat, "pinned = ?", int(pinned))

    def delete(self, chat: str) -> None:
        """Delete a chat; `restore` undoes it within `UNDO`."""
        self._change(chat, "deleted = ?", _now())

    def restore(self, chat: str) -> None:
        """Restore a recently deleted chat."""
        self._change(chat, "deleted = ?", None)

    def purge(self, *, before: datetime | None = None) -> list[str]:
        """Erase chats deleted longer ago than `UNDO`, or before the given time.

        Returns:
            Their ids.
        """
        limit = (before or datetime.now().astimezone() - UNDO).astimezone().isoformat()
        with self._writing() as database:
            gone = [
                str(row[0])
                for row in database.execute(
                    "SELECT id FROM chats WHERE deleted IS NOT NULL AND julianday(deleted) <= julianday(?)", (limit,)
                )
            ]
            database.executemany("DELETE FROM chats WHERE id = ?", [(chat,) for chat in gone])
            if gone:
                forget_words(database, "words")
                forget_words(database, "chunk_words")
        return gone

    def _change(self, chat: str, change: str, value: object) -> None:
        with self._writing() as database:
            if not database.execute(f"UPDATE chats SET {change} WHERE id = ?", (value, chat)).rowcount:  # noqa: S608
                raise HistoryError(_("there is no chat {chat}", chat=chat))

    # Reading

    def chats(self, limit: int = -1) -> list[Chat]:
        """All chats: pinned ones first, then newest first.

        Args:
            limit: Most chats; -1: all.
        """
        query = (
            f"SELECT {_COLUMNS} FROM chats WHERE deleted IS NULL "  # noqa: S608
            "ORDER BY pinned DESC, updated DESC, chats.rowid DESC LIMIT ?"
        )
        return [_chat(row) for row in self._read(query, (limit,))]

    def find(self, name: str) -> Chat:
        """A chat by its id or a unique prefix.

        Raises:
            HistoryError: there is none, or several.
        """
        query = f"SELECT {_COLUMNS} FROM chats WHERE deleted IS NULL AND lower(substr(id, 1, ?)) = lower(?) LIMIT 2"  # noqa: S608
        rows = self._read(query, (len(name), name)) if name else []
        if len(rows) != 1:
            many = (
                _("several chats begin with {name}; write more of it", name=name)
                if rows
                else _("there is no chat {name}", name=name)
            )
            raise HistoryError(_("{many}: `lowbit-chat chats` lists them", many=many))
        return _chat(rows[0])

    def messages(self, chat: str) -> list[Message]:
        """A chat's messages of all branches, oldest first. An unfinished answer counts as stopped."""
        query = (
            "SELECT id, parent, role, text, state, error, model, statistics, passages, created, calls FROM messages "
            "WHERE chat = ? ORDER BY number"
        )
        return [_message(row) for row in self._read(query, (chat,))]

    def prompts(self, limit: int = 200) -> list[str]:
        """The user's last prompts, newest last, without duplicates."""
        query = (
            "SELECT text FROM messages JOIN chats ON chats.id = messages.chat WHERE role = 'user' "
            "AND deleted IS NULL ORDER BY number DESC LIMIT ?"
        )
        return list(dict.fromkeys(str(row[0]) for row in self._read(query, (limit,))))[::-1]

    def knows(self, messages: Sequence[str]) -> bool:
        """Whether any of these message ids is in the history."""
        return any(self._read("SELECT 1 FROM messages WHERE id = ?", (message,)) for message in messages)

    def search(self, text: str, limit: int = 50) -> list[Found]:
        """Messages that contain all words of a text, the last possibly as a prefix; newest first."""
        words = encodable(text).split()
        if not words:
            return []
        if any(letter >= _FIRST_IDEOGRAPH for letter in text):
            return self._containing(words, limit)
        query = (
            f"SELECT {_COLUMNS}, messages.id, snippet(words, 0, char(2), char(2), '…', 12) FROM words "  # noqa: S608
            "JOIN messages ON messages.number = words.rowid JOIN chats ON chats.id = messages.chat "
            "WHERE words MATCH ? AND deleted IS NULL ORDER BY words.rowid DESC LIMIT ?"
        )
        asked = " ".join('"' + word.replace('"', '""') + '"' for word in words)
        asked += "*" if len(words[-1]) > 1 else ""  # a single letter is a prefix of half of all words
        return [_found(row) for row in self._read(query, (asked, limit))]

    def _containing(self, words: Sequence[str], limit: int) -> list[Found]:
        """Messages that contain all of these texts, even within words."""
        wanted = " AND ".join("instr(messages.text, ?)" for _ in words)
        query = (
            f"SELECT {_COLUMNS}, messages.id, substr(messages.text, max(1, instr(messages.text, ?) - 20), 80) "  # noqa: S608
            f"FROM messages JOIN chats ON chats.id = messages.chat WHERE deleted IS NULL AND {wanted} "
            "ORDER BY messages.number DESC LIMIT ?"
        )
        marked = re.compile(f"({'|'.join(map(re.escape, words))})")
        rows = self._read(query, (words[0], *words, limit))
        return [_found((*row[:9], marked.sub(rf"{_MARK}\1{_MARK}", row[9]))) for row in rows]

    def _read(self, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        try:
            with self._lock:
                return self._database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise HistoryError(database_error(self.path, error)) from error

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Context manager: all writes inside are committed together at the end, or none; other threads wait."""
        with self._writing():
            yield

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction; nested ones join the outer one."""
        with self._lock, transaction(self._database, self.path) as database:
            yield database


def title_of(text: str) -> str:
    """A title from a message: its first line, shortened at a word."""
    line = next((" ".join(line.split()) for line in encodable(text).splitlines() if line.strip()), UNNAMED)
    if len(line) <= TITLE_LENGTH:
        return line
    head, space, _rest = line[:TITLE_LENGTH].rpartition(" ")
    return f"{head if space else line[: TITLE_LENGTH - 1]}…"


def _now() -> str:
    return datetime.now().astimezone().isoformat()


def _created(message: Message) -> datetime:
    return message.created


def _row(chat: str, message: Message) -> tuple[object, ...]:
    statistics = None if message.statistics is None else json.dumps(statistics_json(message.statistics))
    return (
        message.id,
        chat,
        message.parent,
        message.role,
        encodable(message.text),
        message.state,
        None if message.error is None else encodable(message.error),
        message.model,
        statistics,
        None if message.passages is None else json.dumps(to_json(message.passages)),
        message.created.isoformat(),
        json.dumps(calls_json(message.calls)) if message.calls else None,
    )


def calls_json(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Calls as a JSON list."""
    return [dataclasses.asdict(call) for call in calls]


def calls_of(found: object) -> tuple[Call, ...]:
    """Inverse of `calls_json`, without malformed ones. A call that has not ended counts as stopped."""
    calls = _each(Call, found)
    return tuple(call if call.ended else dataclasses.replace(call, state="stopped", result=NOT_RUN) for call in calls)


def statistics_json(statistics: Statistics) -> dict[str, Any]:
    """Statistics as a JSON object."""
    found = {one.name: getattr(statistics, one.name) for one in dataclasses.fields(statistics)}
    k_chunk = found["k_chunk"]
    return {**found, "k_chunk": k_chunk if k_chunk is None or isinstance(k_chunk, int) else dict(k_chunk)}


def statistics_of(found: object) -> Statistics | None:
    """Inverse of `statistics_json`; None if malformed: the message matters more than its statistics."""
    try:
        return from_json(Statistics, found)
    except WireError:
        return None


def extras_of(packed: str | None) -> Extras:
    """Inverse of `History.note`; ignores malformed parts."""
    found = _parsed(packed)
    while isinstance(found, dict):
        try:
            return from_json(Extras, found)
        except WireError as error:
            name = re.split(r"[.\[]", error.field)[0]
            found = {key: part for key, part in found.items() if key != name} if name in found else None
    return Extras()


def _each(kind: type[R], found: object) -> Iterator[R]:
    """The records of a JSON list, without malformed ones."""
    for one in found if isinstance(found, list) else ():
        with contextlib.suppress(WireError):
            yield from_json(kind, one)


def _parsed(packed: str | None) -> Any:
    """What a column holds as JSON; None if it is not JSON."""
    try:
        return None if packed is None else read_json(packed)
    except ValueError:
        return None


def _moment(text: str) -> datetime:
    """A time with its zone; times without one, imported by earlier versions, are local. What is no time is 1970."""
    try:
        moment = datetime.fromisoformat(text)
        local = moment.astimezone()
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0).astimezone()
    return local if moment.tzinfo is None else moment


def _message(row: tuple[Any, ...]) -> Message:
    number, parent, role, text, state, error, model, statistics, passages, created, calls = row
    return Message(
        id=number,
        parent=parent,
        role=role if role in get_args(Role) else "assistant",
        text=text,
        state=state if state in ("done", "failed") else "stopped",
        error=error,
        model=(model or "")[:MODEL_LENGTH] or None,
        statistics=statistics_of(_parsed(statistics)),
        passages=None if passages is None else tuple(_each(Passage, _parsed(passages))),
        calls=calls_of(_parsed(calls)),
        created=_moment(created),
    )


def _title_before(extras: Extras) -> str:
    """The title of a chat without messages."""
    documents = ", ".join(source.name for source in extras.sources)
    return title_of(extras.draft if extras.draft.strip() else documents)


def _chat(row: tuple[Any, ...]) -> Chat:
    number, title, model, pinned, created, updated, head, extras = row[:8]
    more = extras_of(extras)
    return Chat(
        id=number,
        title=_title_before(more) if title == UNNAMED else title,
        model=model,
        pinned=bool(pinned),
        created=_moment(created),
        updated=_moment(updated),
        head=head,
        extras=more,
    )


def _found(row: tuple[Any, ...]) -> Found:
    return Found(chat=_chat(row), message=row[8], pieces=re.sub(r"\s+", " ", str(row[9])).strip().split(_MARK))
