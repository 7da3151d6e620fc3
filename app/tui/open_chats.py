"""The open conversations: the one on screen, and others whose answers are still being generated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from app.conversation import Conversation, Message
from app.errors import ClientError
from app.tui.answers import Answers
from app.tui.background_history import BackgroundHistory
from app.tui.connection import Connection

if TYPE_CHECKING:
    from app.history.exchange import ImportedChat
    from app.history.store import Chat


class OpenChats:
    """The conversations in memory. One is on screen; answers in others continue in the background."""

    def __init__(
        self,
        first: Conversation,
        *,
        history: BackgroundHistory | None,
        enabled: Callable[[], bool],
        connection: Connection,
        answers: Answers,
    ) -> None:
        """Start with one conversation.

        Args:
            first: the conversation on screen.
            history: where conversations are saved; without one they end with the program.
            enabled: whether the settings allow saving.
            connection: the runtime, which keeps caches of conversations.
            answers: the answers that are being generated.
        """
        self.conversation = first
        """The one on screen."""
        self.history = history
        self._enabled, self._connection, self._answers = enabled, connection, answers
        self._ended: list[str] = []  # conversations whose caches the runtime has yet to delete
        self._watch(first)

    @property
    def saves(self) -> bool:
        """Whether conversations are saved."""
        return self.history is not None and self._enabled()

    def _watch(self, conversation: Conversation) -> None:
        conversation.on_change = partial(self._keep, conversation)

    def _keep(self, conversation: Conversation, message: Message) -> None:
        if self.history is not None and self.saves:
            self.history.record(conversation, message)

    def note(self, conversation: Conversation, **changes: Any) -> None:
        """Change a conversation's `Extras`, and save them with its head."""
        conversation.extras = replace(conversation.extras, **changes)
        extras, history = conversation.extras, self.history
        if history is None or not self.saves:
            return
        if len(conversation) or extras.draft.strip() or extras.sources or history.path.is_file():
            history.note(conversation)

    def begin(self) -> None:
        """Start a new conversation. An answer in the previous one continues if that is saved."""
        before = self.conversation
        self.conversation = before.another()
        self._watch(self.conversation)
        if len(before) and not self.saves:
            self._ended.append(before.id)

    async def open(self, chat: Chat | ImportedChat) -> None:
        """Open a saved chat, or one from a file, in place of the one on screen.

        Raises:
            HistoryError: it can't be read.
        """
        from app.history.exchange import ImportedChat

        if isinstance(chat, ImportedChat):
            opened = self.conversation.another()
            opened.restore(chat.id, chat.messages, chat.head)
            self._watch(opened)
            for message in opened:
                self._keep(opened, message)
        elif self.history is None or chat.id == self.conversation.id:
            return
        elif (writing := self._answers.of(chat.id)) is not None:
            opened = writing.conversation
        else:
            opened = self.conversation.another()
            opened.restore(chat.id, await self.history.messages(chat.id), chat.head)
            opened.extras = replace(chat.extras, model=chat.extras.model or chat.model)
            self._watch(opened)
        if not self.saves:
            await self._answers.stop(self.conversation.id)
            self.begin()
        self.conversation = opened

    async def delete(self, chat: str) -> bool:
        """Delete a saved chat. Its caches go at once; the chat itself can be restored.

        Returns:
            Whether it was on screen; an empty one has taken its place.

        Raises:
            HistoryError: it can't be deleted.
        """
        if self.history is None:
            return False
        await self._answers.stop(chat)
        await self.history.delete(chat)
        seen = chat == self.conversation.id
        if seen:
            self.conversation = self.conversation.another()
            self._watch(self.conversation)
        self._ended.append(chat)
        with contextlib.suppress(ClientError, OSError):
            await self.forget_ended()
        return seen

    async def forget_ended(self) -> None:
        """Have the runtime delete the caches of ended conversations; without a runtime, do so later.

        Raises:
            ClientError: it refused; the next call tries again.
        """
        while self._ended and (client := self._connection.client) is not None:
            chat = self._ended[0]
            await client.forget(chat)
            if chat in self._ended:
                self._ended.remove(chat)
