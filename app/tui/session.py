"""The work behind the screens: the open chats and their answers, over a runtime and its model. Knows no widgets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from textual.message import Message as Event

from app.conversation import Conversation
from app.errors import ClientError
from app.settings import Settings
from app.tui.answers import Answers, Writing
from app.tui.kept import KeptChats
from app.tui.messages import ChatEnded
from app.tui.model_work import ModelWork
from app.tui.open_chats import OpenChats
from app.tui.prompts import Prompts
from app.tui.runtime import SupervisorLike
from app.tui.tally import Tally

if TYPE_CHECKING:
    from app.history.store import Chat
    from models.progress import Progress
    from runtime.wire.inspection import Inspection

FORGET_TIMEOUT_S = 3.0
"""Whoever quits does not wait longer for the runtime to forget the chat."""


class Session(ModelWork):
    """Connects the runtime and the chats, and says what happens as events."""

    def __init__(
        self,
        supervisor: Callable[[], SupervisorLike],
        settings: Settings,
        post: Callable[[Event], object],
        *,
        conversation: Conversation | None = None,
        kept: KeptChats | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a session; nothing is started yet.

        Args:
            supervisor: makes the supervisor, called when the runtime is started and not before.
            settings: the settings to begin with.
            post: takes the events, on the event loop's thread.
            conversation: the conversation; a new one by default.
            kept: where conversations are kept; they end with the program where there is none.
            clock: seconds, for speeds.
        """
        super().__init__(supervisor, settings, post, clock)
        self.summarizes = False
        """Whether what is left out next is summarized, because the person said so this time."""
        self._prompts = Prompts(self._connection, lambda: self.settings, self.note, post, self._wants_summary)
        self.answers = Answers(
            self._connection,
            self.recent,
            clock,
            ready=self._ready_to_answer,
            prompt=self._prompts.make,
            shorten=self._prompts.shorten,
            ended=self._answer_ended,
        )
        self._chats = OpenChats(
            Conversation() if conversation is None else conversation,
            kept=kept,
            keeps=lambda: self.settings.history == "on",
            connection=self._connection,
            answers=self.answers,
        )

    def _wants_summary(self) -> bool:
        """Whether what is left out now is to be summarized; the wish is for once."""
        wanted, self.summarizes = self.summarizes, False
        return wanted

    async def close(self) -> None:
        """Stop what runs and end what was started; chats that are not kept end with it. Safe to call twice."""
        await self.answers.stop()
        await self.stop_work()
        self.note(self.conversation)
        self._chats.begin()
        with contextlib.suppress(ClientError, OSError, TimeoutError):
            async with asyncio.timeout(FORGET_TIMEOUT_S):
                await self.forget_ended()
        try:
            if self.kept is not None:
                await self.kept.close()
        finally:
            await self._connection.close()

    async def switch(self) -> None:
        """Let the server answer that the settings name now; answers and work of the one before are stopped."""
        await self.answers.stop()
        await self.stop_work()
        await self._connection.close()
        self.wanted = None if self.remote else self.settings.model
        await self._connect(restart=False)

    async def wake(self) -> None:
        """The machine slept: what ran on a graphics card is started again, for drivers lose it in a suspend."""
        status = self.status
        if status is not None and status.backend == "triton" and not self._recovering:
            await self.answers.stop()
            await self.recover()

    async def load(self, name: str) -> bool:
        """Load a model with the present settings; the chat in sight is had with it from now on.

        Returns:
            Whether it is loaded.
        """
        await self.answers.stop()
        self.note(self.conversation, model=name)
        return await super().load(name)

    def _takes_over(self) -> bool:
        return not len(self.conversation) and not self.generating

    # Chats

    @property
    def conversation(self) -> Conversation:
        """The conversation in sight."""
        return self._chats.conversation

    @property
    def kept(self) -> KeptChats | None:
        """Where conversations are kept."""
        return self._chats.kept

    @property
    def keeps(self) -> bool:
        """Whether what is said is kept for later."""
        return self._chats.keeps

    async def open_chat(self, chat: Chat) -> None:
        """Go on with a chat that is kept, in the place of the present one, whose answer is written on.

        Raises:
            HistoryError: it can't be read.
        """
        await self._chats.open(chat)

    async def delete_chat(self, chat: str) -> None:
        """Delete a chat that is kept; what the runtime keeps of it goes at once, the chat itself can be had back.

        Raises:
            HistoryError: it can't be deleted.
        """
        if await self._chats.delete(chat):
            self._post(ChatEnded())

    def end_chat(self) -> None:
        """Begin another conversation. Where none is kept, nobody can open this one any more: `forget_ended`."""
        self._chats.begin()

    async def forget_ended(self) -> None:
        """Let the runtime delete what it keeps of conversations that ended; where it is not there, it is asked later.

        Raises:
            ClientError: it refused; it is asked again next time.
        """
        await self._chats.forget_ended()

    # Answers

    @property
    def generating(self) -> bool:
        """Whether an answer is being written, in whatever chat."""
        return self.answers.any

    @property
    def tally(self) -> Tally:
        """The answer that is being written in the chat in sight, as counted so far."""
        writing = self.answers.of(self.conversation.id)
        return Tally(started=0.0) if writing is None else writing.tally

    @property
    def context_used(self) -> int | None:
        """Tokens of the chat in sight, as the runtime last counted them."""
        counted = [message.statistics.context_used for message in self.conversation.path() if message.statistics]
        return next((used for used in reversed(counted) if used is not None), None)

    async def _ready_to_answer(self, conversation: Conversation) -> str | None:
        """Wait until the model of a conversation can answer; returns why it can't, or None."""
        await self._connection.settled.wait()
        if self._connection.client is None:
            await self.recover()
        bound, status = conversation.extras.model, self.status
        if bound is not None and status is not None and status.model != bound and not self.working:
            if not await self._load(bound):
                return f"{self.problem or f'{bound} is not loaded'}; F2 gives this chat to another model"
        elif self.resting and self.wanted is not None:
            await self._load(self.wanted)
        if self._connection.client is None or not self.ready:
            return self.problem or "no model is loaded; pick one with F2"
        if bound is None and self.status is not None and self.status.model is not None:
            self.note(conversation, model=self.status.model)
        return None

    def note(self, conversation: Conversation, **changes: Any) -> None:
        """Change what belongs to a conversation beside its messages, and keep that and its head."""
        self._chats.note(conversation, **changes)

    def setting_of(self, conversation: Conversation, key: str) -> Any:
        """A setting as it is for a conversation: its own, or everybody's."""
        return self._prompts.setting_of(conversation, key)

    def will_leave_out(self, typed: str = "") -> int:
        """Messages of the chat in sight that the next prompt leaves out and the last one did not."""
        return self._prompts.will_leave_out(self.conversation, typed)

    async def inspect(self, answer: str) -> AsyncGenerator[Progress | Inspection, None]:
        """Let the model that wrote an answer of the chat in sight read it again, token by token.

        Raises:
            ClientError: another model is loaded, or it can't be done.
        """
        from runtime.wire.inspection import InspectRequest, Said

        message, model = self.conversation[answer], self.status.model if self.status is not None else None
        if not self.ready or model is None:
            raise ClientError("no model is loaded")
        if message.model not in (None, model):
            raise ClientError(f"{message.model} wrote it, and {model} is loaded; F2 loads the other one")
        before = [Said(**said) for said in self._prompts.read_before(self.conversation, answer)]
        request = InspectRequest(model=model, messages=before, answer=message.text)
        async with contextlib.aclosing(self._connection.require().inspect(request)) as reports:
            async for report in reports:
                yield report

    async def _answer_ended(self, _writing: Writing) -> None:
        if self._connection.client is not None:
            await self.refresh()
