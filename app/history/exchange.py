"""Chats as files: Markdown for people, JSON with every branch, and the export of ChatGPT."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, cast

from app.conversation import Conversation, Message, Role, State
from app.errors import HistoryError
from app.history.store import Chat, History, statistics_json, statistics_of, title_of

FORMAT = "lowbit-chat"
VERSION = 1
_STATES = ("done", "stopped", "failed")
_TURN = re.compile(r"^<!-- lowbit-chat: (user|assistant) (\S+) -->$", re.MULTILINE)
_HEADING = re.compile(r"\A\s*## (.*)\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """A chat that a file holds."""

    id: str
    """Its id there, or a new one."""
    title: str
    """Its title."""
    head: str | None
    """The message that is shown last."""
    messages: Sequence[Message]
    """All branches; parents before what follows them."""

    def renewed(self) -> Brought:
        """The same chat under new ids."""
        ids = {message.id: uuid.uuid4().hex for message in self.messages}
        messages = [
            replace(message, id=ids[message.id], parent=ids.get(message.parent or "")) for message in self.messages
        ]
        return replace(self, id=uuid.uuid4().hex, head=ids.get(self.head or ""), messages=messages)


def to_markdown(chat: Chat, messages: Sequence[Message]) -> str:
    """The path that is shown, as a document that can be read and brought back.

    Args:
        chat: The chat.
        messages: Its messages of all branches.
    """
    conversation, parts = Conversation(), [f"# {chat.title}"]
    conversation.restore(chat.id, messages, chat.head)
    for message in conversation.path():
        who = "You" if message.role == "user" else (message.model or "Assistant")
        ended = {"stopped": "\n\n*stopped*", "failed": f"\n\n*failed: {message.error}*"}.get(message.state, "")
        mark = f"<!-- {FORMAT}: {message.role} {message.created.isoformat()} -->"
        parts.append(f"{mark}\n## {who}\n\n{message.text}{ended}")
    return "\n\n".join(parts) + "\n"


def about(chat: Chat) -> dict[str, Any]:
    """A chat without its messages as a JSON object."""
    return {
        "id": chat.id,
        "title": chat.title,
        "model": chat.model,
        "pinned": chat.pinned,
        "created": chat.created.isoformat(),
        "updated": chat.updated.isoformat(),
    }


def to_json(chat: Chat, messages: Sequence[Message]) -> dict[str, Any]:
    """All of a chat as a JSON object."""
    return {
        **about(chat),
        "head": chat.head,
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
                "created": message.created.isoformat(),
            }
            for message in messages
        ],
    }


def document(chats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A file of chats, each from `to_json`."""
    return {"format": FORMAT, "version": VERSION, "chats": list(chats)}


def bring(history: History, chat: Brought) -> str | None:
    """Put a chat into a history. One whose id, or whose messages' ids, are taken already gets new ones.

    Returns:
        Its id there; None where it is there already, message by message, or holds no message.
    """
    if not chat.messages:
        return None
    there = {message.id: message.text for message in history.messages(chat.id)}
    if all(there.get(message.id) == message.text for message in chat.messages):
        return None
    own = chat.renewed() if there or history.knows([message.id for message in chat.messages]) else chat
    history.record(own.id, own.head, own.messages, title=own.title, updated=own.messages[-1].created)
    return own.id


def read(text: str, name: str) -> list[Brought]:
    """The chats of a file: our JSON, our Markdown, or ChatGPT's conversations.json.

    Args:
        text: Its content.
        name: What it is called, for errors.

    Raises:
        HistoryError: it is none of these, or damaged.
    """
    try:
        if not text.lstrip().startswith(("{", "[")):
            return [_of_markdown(text, name)]
        content = json.loads(text)
        if isinstance(content, dict) and content.get("format") == FORMAT:
            if content.get("version") != VERSION:
                raise HistoryError(f"{name} was written by a newer version of lowbit-chat: update the program")
            return [_checked(_of_json(chat)) for chat in content["chats"]]
        conversations = content if isinstance(content, list) else [content]
        return [_checked(_of_chatgpt(conversation)) for conversation in conversations]
    except HistoryError as error:
        raise HistoryError(f"{name}: {error}") if not str(error).startswith(name) else error from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HistoryError(
            f"{name} holds no chats that can be read ({type(error).__name__}: {error}): give a file of `lowbit-chat "
            "chats export`, or ChatGPT's conversations.json"
        ) from error


def _of_json(found: Mapping[str, Any]) -> Brought:
    messages = [
        Message(
            id=_text(one["id"]),
            parent=None if one["parent"] is None else _text(one["parent"]),
            role=_role(one["role"]),
            text=_text(one["text"]),
            state=cast("State", one["state"] if one["state"] in _STATES else "stopped"),
            error=one.get("error"),
            model=one.get("model"),
            statistics=statistics_of(one.get("statistics")),
            created=datetime.fromisoformat(one["created"]),
        )
        for one in found["messages"]
    ]
    return Brought(id=_text(found["id"]), title=title_of(_text(found["title"])), head=found["head"], messages=messages)


def _of_chatgpt(found: Mapping[str, Any]) -> Brought:
    """A conversation of ChatGPT's export: a tree of nodes, of which some hold no message that a person would see."""
    mapping: Mapping[str, Any] = found["mapping"]
    shown: dict[str, Message] = {}
    begun = _moment(found.get("create_time"))

    def visible(node: str | None) -> str | None:
        """The nearest node from here upwards that is shown."""
        seen: set[str] = set()
        while node is not None and node not in shown and node in mapping and node not in seen:
            seen.add(node)
            node = mapping[node].get("parent")
        return node if node in shown else None

    for node in _parents_first(mapping):
        message = mapping[node].get("message") or {}
        role = (message.get("author") or {}).get("role")
        parts = (message.get("content") or {}).get("parts") or []
        text = "\n\n".join(part for part in parts if isinstance(part, str) and part.strip())
        if role not in ("user", "assistant") or not text:
            continue
        model = (message.get("metadata") or {}).get("model_slug") if role == "assistant" else None
        shown[node] = Message(
            id=node,
            parent=visible(mapping[node].get("parent")),
            role=role,
            text=text,
            model=model,
            created=_moment(message.get("create_time"), begun),
        )
    head = visible(found.get("current_node"))
    messages = list(shown.values())
    title = title_of(_text(found.get("title") or (messages[0].text if messages else "")))
    number = found.get("conversation_id") or found.get("id") or uuid.uuid4().hex
    last = messages[-1].id if messages else None
    return Brought(id=_text(number), title=title, head=head or last, messages=messages)


def _parents_first(mapping: Mapping[str, Any]) -> list[str]:
    """Nodes in an order in which each one's parent stands before it."""
    order: list[str] = []
    done: set[str] = set()
    for first in mapping:
        line: list[str] = []
        node: str | None = first
        while node is not None and node in mapping and node not in done:
            done.add(node)
            line.append(node)
            node = mapping[node].get("parent")
        order += reversed(line)
    return order


def _of_markdown(text: str, name: str) -> Brought:
    turns = list(_TURN.finditer(text))
    if not turns:
        raise HistoryError(f"{name} is no exported chat: its turns are not marked")
    title = next((line[2:] for line in text[: turns[0].start()].splitlines() if line.startswith("# ")), "")
    messages: list[Message] = []
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        body = text[turn.end() : None if following is None else following.start()]
        heading = _HEADING.match(body)
        role = _role(turn[1])
        messages.append(
            Message(
                id=uuid.uuid4().hex,
                parent=messages[-1].id if messages else None,
                role=role,
                text=(body[heading.end() :] if heading else body).strip("\n"),
                model=heading[1] if heading and role == "assistant" else None,
                created=datetime.fromisoformat(turn[2]),
            )
        )
    return Brought(
        id=uuid.uuid4().hex, title=title_of(title or messages[0].text), head=messages[-1].id, messages=messages
    )


def _checked(chat: Brought) -> Brought:
    """A chat whose links lead somewhere, and in no circle."""
    seen: set[str] = set()
    for message in chat.messages:
        if message.id in seen or (message.parent is not None and message.parent not in seen):
            raise HistoryError(f"the messages of {chat.title!r} do not follow each other")
        seen.add(message.id)
    if chat.head is not None and chat.head not in seen:
        raise HistoryError(f"the last message of {chat.title!r} is missing")
    return chat


def _role(value: object) -> Role:
    if value != "user" and value != "assistant":
        raise HistoryError(f"a message is by {value!r}, who is neither user nor assistant")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text was expected, not {value!r}"[:80])
    return value


def _moment(seconds: object, otherwise: datetime | None = None) -> datetime:
    if isinstance(seconds, int | float):
        return datetime.fromtimestamp(seconds, UTC).astimezone()
    return otherwise or datetime.now().astimezone()
