"""Chats as files, out and in again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.conversation import Conversation, Statistics
from app.errors import HistoryError
from app.history import exchange
from app.history.store import History


@pytest.fixture
def history(tmp_path: Path) -> History:
    """One chat with two branches."""
    history, conversation = History(tmp_path / "history.db"), Conversation()
    first = conversation.add("user", "Show me a fence", parent=None)
    one = conversation.add("assistant", "```md\n## You\n```", parent=first.id, model="demo")
    conversation.revise(one.id, statistics=Statistics(tokens=5, k_chunk={"qkv": 2}))
    other = conversation.add("assistant", "no", parent=first.id, model="demo")
    conversation.revise(other.id, state="failed", error="it broke")
    conversation.head = one.id
    history.record(conversation.id, one.id, [conversation[first.id], conversation[one.id], conversation[other.id]])
    return history


def test_json_brings_back_every_branch(history: History, tmp_path: Path) -> None:
    (chat,) = history.chats()
    text = json.dumps(exchange.document([exchange.to_json(chat, history.messages(chat.id))]))
    (brought,) = exchange.read(text, "chats.json")
    other = History(tmp_path / "other.db")
    assert exchange.bring(other, brought) == chat.id
    assert other.messages(chat.id) == history.messages(chat.id)
    assert other.chats()[0].title == chat.title
    assert exchange.bring(other, brought) is None


def test_a_chat_that_went_on_is_brought_beside_the_old_one(history: History) -> None:
    (chat,) = history.chats()
    content = exchange.to_json(chat, history.messages(chat.id))
    content["messages"][1]["text"] = "changed"
    (brought,) = exchange.read(json.dumps(exchange.document([content])), "chats.json")
    new = exchange.bring(history, brought)
    assert new not in (None, chat.id)
    assert [message.text for message in history.messages(chat.id)][1].startswith("```md")
    assert [message.text for message in history.messages(str(new))][1] == "changed"
    content["id"] = "another"
    (stolen,) = exchange.read(json.dumps(exchange.document([content])), "chats.json")
    assert exchange.bring(history, stolen) not in (None, "another")
    assert [message.text for message in history.messages(chat.id)][1].startswith("```md")


def test_markdown_shows_the_path_and_comes_back(history: History, tmp_path: Path) -> None:
    (chat,) = history.chats()
    text = exchange.to_markdown(chat, history.messages(chat.id))
    assert text.startswith("# Show me a fence\n")
    assert "\n## You\n\nShow me a fence" in text
    assert "\n## demo\n\n```md\n## You\n```" in text
    (brought,) = exchange.read(text, "chat.md")
    assert [(message.role, message.text, message.model) for message in brought.messages] == [
        ("user", "Show me a fence", None),
        ("assistant", "```md\n## You\n```", "demo"),
    ]
    assert exchange.bring(History(tmp_path / "other.db"), brought)


def node(parent: str | None, role: str | None, *parts: object, **more: Any) -> dict[str, Any]:
    message = None if role is None else {"author": {"role": role}, "content": {"parts": list(parts)}, **more}
    return {"parent": parent, "message": message, "children": []}


def chatgpt() -> dict[str, Any]:
    return {
        "title": "Sky",
        "create_time": 1_700_000_000.5,
        "current_node": "e",
        "conversation_id": "c-1",
        "mapping": {
            "e": node("d", "assistant", "Rayleigh.", create_time=1_700_000_009, metadata={"model_slug": "gpt-4o"}),
            "root": node(None, None),
            "s": node("root", "system", ""),
            "u": node("s", "user", "Why blue?", {"asset_pointer": "image"}),
            "d": node("u", "tool", "searching"),
            "f": node("d", "assistant", "Scattering."),
        },
    }


def test_an_export_of_chatgpt_is_read(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    (brought,) = exchange.read(json.dumps([chatgpt()]), "conversations.json")
    assert exchange.bring(history, brought) == "c-1"
    assert exchange.bring(history, brought) is None
    (chat,) = history.chats()
    assert (chat.title, chat.head) == ("Sky", "e")
    found = {message.id: message for message in history.messages("c-1")}
    assert (found["u"].text, found["u"].parent) == ("Why blue?", None)
    assert (found["e"].parent, found["f"].parent, found["e"].model) == ("u", "u", "gpt-4o")
    assert chat.updated.timestamp() in (1_700_000_009, 1_700_000_000.5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# A document\n\nof nobody's",
        "{",
        "[1, 2]",
        "[" * 100_000,
        '{"format": "lowbit-chat", "version": 9, "chats": []}',
        '{"format": "lowbit-chat", "version": 1, "chats": [{}]}',
        '{"format": "lowbit-chat", "version": 1, "chats": [{"id": "a", "title": "b", "head": "x", "messages": []}]}',
        '{"mapping": {"a": {"parent": "a", "message": {"author": {"role": 3}}}}, "title": 7}',
        "<!-- lowbit-chat: user yesterday -->\n## You\n\nHi",
    ],
)
def test_what_is_no_chat_is_refused_by_name(text: str) -> None:
    with pytest.raises(HistoryError, match=r"^file\.x"):
        exchange.read(text, "file.x")


def test_a_circle_of_parents_ends(tmp_path: Path) -> None:
    circle = {"mapping": {"a": node("b", "user", "x"), "b": node("a", "user", "y")}, "title": "t"}
    (brought,) = exchange.read(json.dumps(circle), "file.x")
    assert exchange.bring(History(tmp_path / "history.db"), brought)
