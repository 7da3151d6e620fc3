"""The documents of the open chats: read, indexed and searched on background threads, so that the UI never blocks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from app.conversation import Conversation, Passage
from app.errors import DocumentError

if TYPE_CHECKING:
    from app.documents.index import Index, Report, State
    from app.documents.reader import Reader

T = TypeVar("T")


class Documents:
    """Reads documents, and keeps the index of those that are searched.

    Args:
        file: The chat history's file; None keeps every index in memory.
        saves: Whether chats are saved. If not, nothing of a document reaches the disk.
    """

    def __init__(self, file: Path | None, saves: Callable[[], bool]) -> None:
        self._file, self._saves = file, saves
        self._reader: Reader | None = None
        self._indexes: dict[Path | None, Index] = {}
        self._alone = asyncio.Lock()
        self._stop = threading.Event()

    @property
    def busy(self) -> bool:
        """Whether something is being read or searched."""
        return self._alone.locked()

    async def read(self, path: Path) -> tuple[str, str]:
        """The text of a document, and why some of it is missing; empty if nothing is.

        Raises:
            DocumentError: it can't be read.
        """
        return await self._run(lambda: self._reading().text(path))

    async def update(self, chat: str, path: Path, report: Report) -> State:
        """Attach a file or folder to a chat, and read what has changed in it.

        Args:
            chat: The chat's id.
            path: The file or folder.
            report: Receives the progress, on the event loop's thread.

        Raises:
            DocumentError: it can't be read.
            HistoryError: the index can't be written.
        """
        loop = asyncio.get_running_loop()

        def tell(done: int, of: int) -> None:
            loop.call_soon_threadsafe(report, done, of)

        return await self._run(lambda: self._index().update(chat, path, tell, self._stop.is_set))

    async def detach(self, chat: str, path: Path) -> None:
        """Detach a file or folder from a chat.

        Raises:
            HistoryError: the index can't be written.
        """
        await self._run(lambda: self._index().detach(chat, path))

    async def forget_unsaved(self) -> None:
        """Forget the documents of chats that are not saved."""
        if None in self._indexes:
            await self._run(lambda: self._indexes.pop(None).close())

    async def find(self, conversation: Conversation, questions: Sequence[str], room: int) -> list[Passage]:
        """The passages of a conversation's documents that its last question is about, after reading changed files.

        Args:
            conversation: The conversation.
            questions: The user's prompts, the last one last.
            room: Maximum length of all passages in characters.

        Raises:
            HistoryError: the index can't be read or written.
        """
        sources = [Path(source.path) for source in conversation.extras.sources]

        def search() -> list[Passage]:
            index = self._index()
            for path in sources:
                with contextlib.suppress(DocumentError):  # it is gone: what was read of it still holds
                    index.update(conversation.id, path, stopped=self._stop.is_set)
            return index.search(sources, questions, room)

        return await self._run(search)

    async def close(self) -> None:
        """Stop reading, and close the index. Safe to call twice."""
        self._interrupt()
        async with self._alone:
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        for index in self._indexes.values():
            index.close()
        self._indexes.clear()
        if self._reader is not None:
            self._reader.close()

    async def _run(self, act: Callable[[], T]) -> T:
        """Run one function at a time on a thread; when the caller is cancelled, have it stop first."""
        async with self._alone:
            work = asyncio.ensure_future(asyncio.to_thread(act))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                self._interrupt()
                await asyncio.wait([work])
                self._stop.clear()
                raise

    def _interrupt(self) -> None:
        """Have the thread stop soon."""
        self._stop.set()
        if self._reader is not None:
            self._reader.kill()

    def _reading(self) -> Reader:
        from app.documents.reader import Reader

        self._reader = self._reader or Reader()
        return self._reader

    def _index(self) -> Index:
        """The index of saved chats, or that of chats that are not saved, which is in memory."""
        from app.documents.index import Index

        file = self._file if self._saves() else None
        if file not in self._indexes:
            self._indexes[file] = Index(file, self._reading())
        return self._indexes[file]
