"""The chat history on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.conversation import Conversation
from app.history.store import History
from app.paths import history_file

Answer = Callable[..., dict[str, Any]]
Run = Callable[..., Any]
Error = Callable[..., str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own."""
    monkeypatch.setenv("LOWBIT_CHAT_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def chat(home: Path) -> str:
    """The id of the only chat that is kept."""
    conversation = Conversation()
    conversation.add("user", "Why is the sky blue?", parent=None)
    conversation.add("assistant", "Rayleigh scattering.", parent=conversation.head, model="demo")
    history = History(history_file())
    history.record(conversation.id, conversation.head, conversation.path())
    history.close()
    return conversation.id


def test_without_chats_there_is_nothing_and_nothing_is_made(home: Path, answer: Answer, error: Error) -> None:
    assert answer("chats") == {"chats": []}
    assert answer("chats", "search", "sky") == {"found": []}
    assert "no chat" in error("chats", "export", "abc")
    assert not history_file().exists()


def test_list_and_search(chat: str, answer: Answer, run: Run) -> None:
    (entry,) = answer("chats", "list")["chats"]
    assert (entry["id"], entry["title"], entry["model"]) == (chat, "Why is the sky blue?", "demo")
    (found,) = answer("chats", "search", "rayl")["found"]
    assert (found["id"], found["snippet"]) == (chat, "Rayleigh scattering.")
    assert chat[:8] in run("chats").stdout
    assert "Rayleigh" in run("chats", "search", "rayl").stdout


def test_export_and_import(chat: str, home: Path, run: Run, answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "## demo\n\nRayleigh scattering." in run("chats", "export", chat[:6]).stdout
    assert json.loads(run("chats", "export", chat, "--format", "json").stdout)["chats"][0]["id"] == chat
    run("chats", "export", chat, "--format", "json", "-o", home / "chat.json")
    assert answer("chats", "import", home / "chat.json") == {"imported": 0, "skipped": 1}
    monkeypatch.setenv("LOWBIT_CHAT_HOME", str(home / "other"))
    assert answer("chats", "import", home / "chat.json") == {"imported": 1, "skipped": 0}
    assert answer("chats")["chats"][0]["title"] == "Why is the sky blue?"


def test_what_cannot_be_brought_in_is_told(home: Path, error: Error) -> None:
    (home / "wrong.json").write_text("{}")
    assert "wrong.json" in error("chats", "import", home / "wrong.json")
    (home / "bytes.json").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in error("chats", "import", home / "bytes.json")
    assert "absent.json" in error("chats", "import", home / "absent.json")
    assert not history_file().exists()
