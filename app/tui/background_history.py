"""The chat history, read and written on background threads so that the UI never blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from app.conversation import Conversation, Message
from app.errors import HistoryError
from app.language import _
from app.threads import run_to_end

if TYPE_CHECKING:
    from app.history.recorder import Recorder
    from app.history.store import Chat, Found, History

T = TypeVar("T")


class BackgroundHistory:
    """One history. Its file is opened on first use.

    Args:
        path: The file.
        on_error: Called once, on any thread, with the reason why chats can't be saved.
    """

    def __init__(self, path: Path, on_error: Callable[[str], object]) -> None:
        self.path = path
        """The file."""
        self._on_error = on_error
        self._recorder: Recorder | None = None
        self._history: History | None = None
        self._closed = False
        self._alone = asyncio.Lock()

    def record(self, conversation: Conversation, message: Message) -> None:
        """Queue a new or changed message of a conversation for writing."""
        if self._recorder is None:
            from app.history.recorder import Recorder

            self._recorder = Recorder(self.path, self._on_error)
        self._recorder.record(conversation.id, conversation.head, message)

    def note(self, conversation: Conversation) -> None:
        """Queue a conversation's head, draft and settings for writing."""
        if self._recorder is None:
            from app.history.recorder import Recorder

            self._recorder = Recorder(self.path, self._on_error)
        self._recorder.note(conversation.id, conversation.head, conversation.extras)

    async def prompts(self) -> Sequence[str]:
        """The user's latest prompts, newest last."""
        if not self.path.is_file():
            return ()
        return await self._do(lambda history: history.prompts())

    async def chats(self, limit: int = -1) -> Sequence[Chat]:
        """Saved chats, pinned ones first, then newest first.

        Args:
            limit: Maximum number of chats; -1 for all.

        Raises:
            HistoryError: the history can't be read. Every method here raises it.
        """
        if not self.path.is_file():
            return ()
        return await self._do(lambda history: history.chats(limit))

    async def search(self, text: str) -> Sequence[Found]:
        """Messages that contain the words of a text; see `History.search`."""
        if not self.path.is_file():
            return ()
        return await self._do(lambda history: history.search(text))

    async def messages(self, chat: str) -> list[Message]:
        """The messages of all branches of a chat."""
        return await self._do(lambda history: history.messages(chat))

    async def rename(self, chat: str, title: str) -> None:
        """Rename a chat."""
        await self._do(lambda history: history.rename(chat, title))

    async def pin(self, chat: str, *, pinned: bool) -> None:
        """Pin or unpin a chat."""
        await self._do(lambda history: history.pin(chat, pinned=pinned))

    async def delete(self, chat: str) -> None:
        """Delete a chat; `restore` undoes it."""
        await self._do(lambda history: history.delete(chat))

    async def restore(self, chat: str) -> None:
        """Restore a deleted chat."""
        await self._do(lambda history: history.restore(chat))

    async def close(self) -> None:
        """Write what is still queued. Safe to call twice."""
        async with self._alone:
            await run_to_end(self._close)

    def _close(self) -> None:
        self._closed = True
        if self._recorder is not None:
            self._recorder.close()
        if self._history is not None:
            self._history.close()

    async def _do(self, act: Callable[[History], T]) -> T:
        """Run a function on the history after all queued writes."""
        async with self._alone:
            return await run_to_end(lambda: self._with_history(act))

    def _with_history(self, act: Callable[[History], T]) -> T:
        from app.history.store import History

        if self._recorder is not None:
            self._recorder.flush()
        if self._closed:
            raise HistoryError(_("the chats are closed"))
        if self._history is None:
            self._history = History(self.path)
            self._history.purge()
            self._history.drop_empty()
        return act(self._history)
