"""Import and export of chats: Markdown for people, JSON with every branch, and ChatGPT's export."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, cast

from app.conversation import MAX_TEXT, Call, Conversation, Message, Passage, Role, State, Statistics
from app.errors import HistoryError
from app.history import markdown
from app.history.markdown import FORMAT, moment_of
from app.history.store import MODEL_LENGTH, Chat, History, calls_json, statistics_json, title_of
from app.language import _
from runtime.system.foreign import read_json
from runtime.wire.codec import WireError, Within, from_json

VERSION = 1
MAX_CHATS = 100_000
"""Most chats in a file, and most messages in a chat."""
REMEDY = _(
    "nothing was imported: correct the file, or give one of `lowbit-chat chats export`, or ChatGPT's conversations.json"
)
_STATES = ("done", "stopped", "failed")
_LARGEST_FILE = 1 << 28
"""In bytes."""
MAX_CALLS = 256
"""Most calls in a message."""
Name = Annotated[str, Within(1, MODEL_LENGTH)]
Text = Annotated[str, Within(0, MAX_TEXT)]
Seconds = Annotated[float, Within(0, 200_000_000_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedChat:
    """A chat read from a file."""

    id: str
    """Its id in the file, or a new one."""
    title: str
    """Its title."""
    head: str | None
    """The last message shown."""
    messages: Sequence[Message]
    """All branches; parents before their children."""

    def renewed(self) -> ImportedChat:
        """The same chat with new ids."""
        ids = {message.id: uuid.uuid4().hex for message in self.messages}
        messages = [
            replace(message, id=ids[message.id], parent=ids.get(message.parent or "")) for message in self.messages
        ]
        return replace(self, id=uuid.uuid4().hex, head=ids.get(self.head or ""), messages=messages)


def to_markdown(chat: Chat, messages: Sequence[Message]) -> str:
    """The branch on screen, as a document for reading and importing."""
    return markdown.write(chat.title, _restored(chat, messages).path())


def about(chat: Chat) -> dict[str, Any]:
    """A chat without its messages, as a JSON object."""
    return {
        "id": chat.id,
        "title": chat.title,
        "model": chat.model,
        "pinned": chat.pinned,
        "created": chat.created.isoformat(),
        "updated": chat.updated.isoformat(),
    }


def to_json(chat: Chat, messages: Sequence[Message]) -> dict[str, Any]:
    """A chat with all messages, as a JSON object."""
    conversation = _restored(chat, messages)
    return {
        **about(chat),
        "head": conversation.head,
        "messages": [
            {
                "id": message.id,
                "parent": message.parent,
                "role": message.role,
                "text": message.text,
                "state": message.state,
                "error": message.error,
                "model": message.model,
                "statistics": None if message.statistics is None else statistics_json(message.statistics),
                "passages": None if message.passages is None else [asdict(passage) for passage in message.passages],
                **({"calls": calls_json(message.calls)} if message.calls else {}),
                "created": message.created.isoformat(),
            }
            for message in conversation
        ],
    }


def _restored(chat: Chat, messages: Sequence[Message]) -> Conversation:
    conversation = Conversation()
    conversation.restore(chat.id, messages, chat.head)
    return conversation


def document(chats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The file of several chats, each from `to_json`."""
    return {"format": FORMAT, "version": VERSION, "chats": list(chats)}


def import_chat(history: History, chat: ImportedChat) -> str | None:
    """Import a chat into a history. It gets new ids if any of its ids are taken.

    Returns:
        Its id in the history; None if an identical chat is there already, or it has no messages.
    """
    if not chat.messages:
        return None
    there = {message.id: message.text for message in history.messages(chat.id)}
    if all(there.get(message.id) == message.text for message in chat.messages):
        return None
    own = chat.renewed() if there or history.knows([message.id for message in chat.messages]) else chat
    last = max(message.created for message in own.messages)
    history.record(own.id, own.head, own.messages, title=own.title, updated=last)
    return own.id


def import_chats(history: History, chats: Sequence[ImportedChat]) -> list[str]:
    """Import all or none of several chats; see `import_chat`.

    Returns:
        The ids of the imported chats.
    """
    with history.transaction():
        return [new for chat in chats if (new := import_chat(history, chat)) is not None]


def read_file(file: Path) -> list[ImportedChat]:
    """Read the chats of a file; see `read`.

    Raises:
        HistoryError: it can't be read.
    """
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise HistoryError(_("{file} is larger than 256 MiB: split it", file=file))
        text = file.read_bytes().decode("utf-8-sig")  # preserves line ends
    except UnicodeDecodeError as error:
        raise HistoryError(_("{file} is not UTF-8 text: {error}", file=file, error=error)) from error
    except OSError as error:
        raise HistoryError(_("{file} can't be read: {reason}", file=file, reason=error.strerror)) from error
    return read(text, file.name)


def read(text: str, name: str) -> list[ImportedChat]:
    """Read the chats of a file: our JSON, our Markdown, or ChatGPT's conversations.json.

    Raises:
        HistoryError: it is none of these, or damaged.
    """
    try:
        if not text.lstrip().startswith(("{", "[")):
            return [_of_markdown(text)]
        content = read_json(text)
        if isinstance(content, dict) and content.get("format") == FORMAT:
            if content.get("version") != VERSION:
                raise HistoryError(_("it was written by a newer version of lowbit-chat: update the program"))
            return [_of_json(chat, f"chats[{at}]") for at, chat in enumerate(from_json(_File, content).chats)]
        conversations = content if isinstance(content, list) else [content]
        return [_of_chatgpt(one) for one in from_json(_ChatGptFile, {"conversations": conversations}).conversations]
    except HistoryError as error:
        raise HistoryError(f"{name}: {error}") from error
    except ValueError as error:
        raise HistoryError(f"{name}: {error}; {REMEDY}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """A message in the format of `to_json`."""

    id: Name
    parent: Name | None
    role: Role
    text: Text
    state: str
    created: str
    error: Text | None = None
    model: Name | None = None
    statistics: Statistics | None = None
    passages: Annotated[Sequence[Passage], Within(0, MAX_CHATS)] | None = None
    calls: Annotated[Sequence[Call], Within(0, MAX_CALLS)] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chat:
    """A chat in the format of `to_json`."""

    id: Name
    title: Text
    head: Name | None
    messages: Annotated[Sequence[_Message], Within(0, MAX_CHATS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file in the format of `document`."""

    chats: Annotated[Sequence[_Chat], Within(0, MAX_CHATS)]


def _of_json(found: _Chat, where: str) -> ImportedChat:
    messages = []
    for at, one in enumerate(found.messages):
        try:
            created = moment_of(one.created)
        except ValueError as error:
            raise WireError(
                _("{where}.messages[{at}].created: {error}", where=where, at=at, error=error), "created"
            ) from error
        messages.append(
            Message(
                id=one.id,
                parent=one.parent,
                role=one.role,
                text=one.text,
                state=cast("State", one.state if one.state in _STATES else "stopped"),
                error=one.error,
                model=one.model,
                statistics=one.statistics,
                passages=one.passages,
                calls=one.calls if one.role == "assistant" else (),
                created=created,
            )
        )
    return _checked(ImportedChat(id=found.id, title=title_of(found.title), head=found.head, messages=messages))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Author:
    role: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    parts: Annotated[Sequence[Any], Within(0, MAX_CHATS)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    author: _Author | None = None
    content: _Content | None = None
    create_time: Seconds | None = None
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    parent: Name | None = None
    message: _Said | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChatGpt:
    """A conversation in ChatGPT's export."""

    mapping: Mapping[Name, _Node]
    title: Text | None = None
    create_time: Seconds | None = None
    current_node: Name | None = None
    conversation_id: Name | None = None
    id: Name | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChatGptFile:
    conversations: Annotated[Sequence[_ChatGpt], Within(0, MAX_CHATS)]


def _of_chatgpt(found: _ChatGpt) -> ImportedChat:
    """Convert a conversation of ChatGPT's export, a tree of nodes that do not all have visible messages."""
    mapping = found.mapping
    shown: dict[str, Message] = {}
    begun = _moment(found.create_time)

    def visible(node: str | None) -> str | None:
        """The nearest visible node from here upwards."""
        seen: set[str] = set()
        while node is not None and node not in shown and node in mapping and node not in seen:
            seen.add(node)
            node = mapping[node].parent
        return node if node in shown else None

    for node in _parents_first(mapping):
        message = mapping[node].message or _Said()
        role = message.author.role if message.author is not None else None
        parts = (message.content.parts if message.content is not None else None) or ()
        text = "\n\n".join(part for part in parts if isinstance(part, str) and part.strip())
        if role not in ("user", "assistant") or not text:
            continue
        model = (message.metadata or {}).get("model_slug") if role == "assistant" else None
        shown[node] = Message(
            id=node,
            parent=visible(mapping[node].parent),
            role=cast("Role", role),
            text=text[:MAX_TEXT],
            model=model[:MODEL_LENGTH] if isinstance(model, str) else None,
            created=_moment(message.create_time, begun),
        )
    head = visible(found.current_node)
    messages = list(shown.values())
    number = found.conversation_id or found.id or uuid.uuid4().hex
    last = messages[-1].id if messages else None
    title = title_of(found.title or (messages[0].text if messages else ""))
    return _checked(ImportedChat(id=number, title=title, head=head or last, messages=messages))


def _parents_first(mapping: Mapping[str, _Node]) -> list[str]:
    """Sort nodes so that parents come before their children."""
    order: list[str] = []
    done: set[str] = set()
    for first in mapping:
        line: list[str] = []
        node: str | None = first
        while node is not None and node in mapping and node not in done:
            done.add(node)
            line.append(node)
            node = mapping[node].parent
        order += reversed(line)
    return order


def _of_markdown(text: str) -> ImportedChat:
    title, messages = markdown.read(text)
    return ImportedChat(
        id=uuid.uuid4().hex, title=title_of(title or messages[0].text), head=messages[-1].id, messages=messages
    )


def _checked(chat: ImportedChat) -> ImportedChat:
    """Check that a chat's links have targets and no cycles."""
    seen: set[str] = set()
    for message in chat.messages:
        if message.id in seen or (message.parent is not None and message.parent not in seen):
            raise HistoryError(_("the messages of {title!r} do not follow each other", title=chat.title))
        seen.add(message.id)
    if chat.head is not None and chat.head not in seen:
        raise HistoryError(_("the last message of {title!r} is missing", title=chat.title))
    return chat


def _moment(seconds: float | None, otherwise: datetime | None = None) -> datetime:
    if seconds is not None:
        return datetime.fromtimestamp(seconds, UTC).astimezone()
    return otherwise or datetime.now().astimezone()
