"""The chat in sight, and those beside it whose answers still go on: begun, opened, deleted, kept and forgotten."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from app.conversation import Conversation, Message
from app.errors import ClientError
from app.tui.answers import Answers
from app.tui.connection import Connection
from app.tui.kept import KeptChats

if TYPE_CHECKING:
    from app.history.store import Chat


class OpenChats:
    """The conversations that the program holds. One is in sight; answers in others are written on."""

    def __init__(
        self,
        first: Conversation,
        *,
        kept: KeptChats | None,
        keeps: Callable[[], bool],
        connection: Connection,
        answers: Answers,
    ) -> None:
        """Begin with one conversation.

        Args:
            first: the conversation in sight.
            kept: where conversations are kept; they end with the program where there is none.
            keeps: whether the person wants them kept.
            connection: the runtime, which keeps caches of conversations.
            answers: the answers that are being written.
        """
        self.conversation = first
        """The one in sight."""
        self.kept = kept
        self._keeps, self._connection, self._answers = keeps, connection, answers
        self._ended: list[str] = []  # conversations that the runtime has still to forget
        self._watch(first)

    @property
    def keeps(self) -> bool:
        """Whether what is said is kept for later."""
        return self.kept is not None and self._keeps()

    def _watch(self, conversation: Conversation) -> None:
        conversation.on_change = partial(self._keep, conversation)

    def _keep(self, conversation: Conversation, message: Message) -> None:
        if self.kept is not None and self.keeps:
            self.kept.record(conversation, message)

    def note(self, conversation: Conversation, **changes: Any) -> None:
        """Change what belongs to a conversation beside its messages, and keep that and its head."""
        conversation.extras = replace(conversation.extras, **changes)
        if self.kept is not None and self.keeps and (len(conversation) or conversation.extras.draft.strip()):
            self.kept.note(conversation)

    def begin(self) -> None:
        """Begin another conversation. An answer in the one before goes on if that is kept."""
        before = self.conversation
        self.conversation = before.another()
        self._watch(self.conversation)
        if len(before) and not self.keeps:
            self._ended.append(before.id)

    async def open(self, chat: Chat) -> None:
        """Go on with a chat that is kept, in the place of the one in sight.

        Raises:
            HistoryError: it can't be read.
        """
        if self.kept is None or chat.id == self.conversation.id:
            return
        if (writing := self._answers.of(chat.id)) is not None:
            opened = writing.conversation
        else:
            opened = self.conversation.another()
            opened.restore(chat.id, await self.kept.messages(chat.id), chat.head)
            opened.extras = replace(chat.extras, model=chat.extras.model or chat.model)
            self._watch(opened)
        if not self.keeps:
            await self._answers.stop(self.conversation.id)
            self.begin()
        self.conversation = opened

    async def delete(self, chat: str) -> bool:
        """Delete a chat that is kept; what the runtime keeps of it goes at once, the chat itself can be had back.

        Returns:
            Whether it was the one in sight; an empty one has taken its place.

        Raises:
            HistoryError: it can't be deleted.
        """
        if self.kept is None:
            return False
        await self._answers.stop(chat)
        await self.kept.delete(chat)
        seen = chat == self.conversation.id
        if seen:
            self.conversation = self.conversation.another()
            self._watch(self.conversation)
        self._ended.append(chat)
        with contextlib.suppress(ClientError, OSError):
            await self.forget_ended()
        return seen

    async def forget_ended(self) -> None:
        """Let the runtime delete what it keeps of conversations that ended; where it is not there, it is asked later.

        Raises:
            ClientError: it refused; it is asked again next time.
        """
        while self._ended and (client := self._connection.client) is not None:
            chat = self._ended[0]
            await client.forget(chat)
            if chat in self._ended:
                self._ended.remove(chat)
