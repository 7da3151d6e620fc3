"""Chats that were had before."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from app.conversation import Conversation
from app.history.store import History


def keep_chats(
    path: Path, chats: Iterable[tuple[str, str]], *, model: str = "demo", begun: Iterable[datetime] = ()
) -> Path:
    """Write chats of a question and an answer into a history file."""
    history, times = History(path), iter(begun)
    for question, answer in chats:
        when = next(times, None)
        conversation = Conversation() if when is None else Conversation(lambda when=when: when)  # type: ignore[misc]
        conversation.add("user", question, parent=None)
        conversation.add("assistant", answer, parent=conversation.head, model=model)
        history.record(conversation.id, conversation.head, conversation.path(), updated=when)
    history.close()
    return path
