"""The documents of the open chats: read, indexed and searched on background threads, so that the UI never blocks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from app.conversation import Conversation, Passage, Source
from app.documents.prompt import BYTES_PER_TOKEN, TICKS, WHOLE_SHARE, attached, estimated_tokens
from app.errors import DocumentError
from app.language import _
from app.printable import printable_name
from app.threads import run_to_end

if TYPE_CHECKING:
    from app.documents.index import Index, Report, State
    from app.documents.reader import Reader

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A document that is short enough to be sent with a prompt."""

    content: str
    """What the prompt holds of it."""
    tokens: int
    lines: int
    files: int
    problems: Sequence[str]
    """Files of a folder that can't be read."""


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

    async def whole(
        self, path: Path, context: int, count: Callable[[str], int | None] = estimated_tokens
    ) -> Whole | None:
        """A file, or a folder's files, if they are short enough to be sent with a prompt.

        Args:
            path: The file or folder.
            context: Size of the model's context in tokens.
            count: Tokens of a text; None if they are certainly more than the context holds.

        Raises:
            DocumentError: it can't be read.
        """
        texts, problems = await self._run(lambda: self._reading().texts(path, context * BYTES_PER_TOKEN))
        tokens = count("\n".join(texts.values()))
        if not texts or tokens is None or tokens > WHOLE_SHARE * context:
            return None
        return Whole(
            content="\n\n".join(attached(printable_name(name), text, TICKS) for name, text in texts.items()),
            tokens=tokens,
            lines=sum(text.count("\n") + 1 for text in texts.values()),
            files=len(texts),
            problems=problems,
        )

    async def search(
        self,
        conversation: Conversation,
        path: Path,
        note: Callable[..., None],
        report: Report = lambda _done, _of: None,
    ) -> State:
        """Have a file or folder searched for a conversation from now on.

        Args:
            conversation: The conversation.
            path: The file or folder.
            note: Changes the conversation's `Extras`.
            report: Receives the progress, on the event loop's thread.

        Raises:
            DocumentError: it can't be read, or has no text.
            HistoryError: the index can't be written.
        """
        loop, name = asyncio.get_running_loop(), printable_name(path.name)

        def tell(done: int, of: int) -> None:
            loop.call_soon_threadsafe(report, done, of)

        before = conversation.extras.sources
        others = [source for source in before if source.path != str(path)]
        note(conversation, sources=[*others, Source(path=str(path), name=name, tokens=0)])
        try:
            state = await self._run(lambda: self._index().update(conversation.id, path, tell, self._stop.is_set))
            if not state.passages:
                await self.detach(conversation.id, path)
                raise DocumentError(
                    state.problems[0] if state.problems else _("{name} has no text to search", name=name)
                )
        except BaseException:
            note(conversation, sources=before)
            raise
        note(conversation, sources=[*others, Source(path=str(path), name=name, tokens=state.tokens)])
        return state

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
            await run_to_end(self._close)

    def _close(self) -> None:
        for index in self._indexes.values():
            index.close()
        self._indexes.clear()
        if self._reader is not None:
            self._reader.close()

    async def _run(self, act: Callable[[], T]) -> T:
        """Run one function at a time on a thread; when the caller is cancelled, have it stop first."""
        async with self._alone:
            try:
                return await run_to_end(act, interrupt=self._interrupt)
            except asyncio.CancelledError:
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
