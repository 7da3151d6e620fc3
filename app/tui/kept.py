"""The chats that are kept, for the screens: written behind, read and changed without blocking the screen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from app.conversation import Conversation, Message

if TYPE_CHECKING:
    from app.history.recorder import Recorder
    from app.history.store import Chat, Found, History

T = TypeVar("T")


class KeptChats:
    """One history. Its file is opened when something is kept or asked for.

    Args:
        path: The file.
        on_error: Told once, by any thread, why chats can't be kept.
    """

    def __init__(self, path: Path, on_error: Callable[[str], object]) -> None:
        self._path, self._on_error = path, on_error
        self._recorder: Recorder | None = None
        self._history: History | None = None
        self._alone = asyncio.Lock()

    def record(self, conversation: Conversation, message: Message) -> None:
        """Keep a message of a conversation, new or changed, soon."""
        if self._recorder is None:
            from app.history.recorder import Recorder

            self._recorder = Recorder(self._path, self._on_error)
        self._recorder.record(conversation.id, conversation.head, message)

    def note(self, conversation: Conversation) -> None:
        """Keep which message of a conversation is shown last, and its draft and settings, soon."""
        if self._recorder is None:
            from app.history.recorder import Recorder

            self._recorder = Recorder(self._path, self._on_error)
        self._recorder.note(conversation.id, conversation.head, conversation.extras)

    async def prompts(self) -> Sequence[str]:
        """What the person said last, the newest last."""
        if not self._path.is_file():
            return ()
        return await self._do(lambda history: history.prompts())

    async def chats(self, limit: int = -1) -> Sequence[Chat]:
        """Chats: pinned ones first, then the newest first.

        Args:
            limit: Most chats; -1: all.

        Raises:
            HistoryError: the history can't be read; so every method.
        """
        if not self._path.is_file():
            return ()
        return await self._do(lambda history: history.chats(limit))

    async def search(self, text: str) -> Sequence[Found]:
        """Messages that hold the words of a text; see `History.search`."""
        if not self._path.is_file():
            return ()
        return await self._do(lambda history: history.search(text))

    async def messages(self, chat: str) -> list[Message]:
        """A chat's messages of all branches."""
        return await self._do(lambda history: history.messages(chat))

    async def rename(self, chat: str, title: str) -> None:
        """Give a chat another title."""
        await self._do(lambda history: history.rename(chat, title))

    async def pin(self, chat: str, *, pinned: bool) -> None:
        """Put a chat above the others, or back among them."""
        await self._do(lambda history: history.pin(chat, pinned=pinned))

    async def delete(self, chat: str) -> None:
        """Delete a chat; `restore` brings it back."""
        await self._do(lambda history: history.delete(chat))

    async def restore(self, chat: str) -> None:
        """Bring back a chat that was deleted."""
        await self._do(lambda history: history.restore(chat))

    async def close(self) -> None:
        """Write what is left. Safe to call twice."""
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        if self._history is not None:
            await asyncio.to_thread(self._history.close)

    async def _do(self, act: Callable[[History], T]) -> T:
        """Do something with the history, once what was said is written."""
        async with self._alone:
            return await asyncio.to_thread(self._with_history, act)

    def _with_history(self, act: Callable[[History], T]) -> T:
        from app.history.store import History

        if self._recorder is not None:
            self._recorder.flush()
        if self._history is None:
            self._history = History(self._path)
            self._history.purge()
            self._history.drop_empty()
        return act(self._history)
