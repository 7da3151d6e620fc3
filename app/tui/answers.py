"""Answers while they are written: each reads its stream into its own conversation, whatever is on the screen."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from app.conversation import Conversation, Message, State
from app.errors import ClientError, ContextLengthError
from app.tui.connection import Connection
from app.tui.recent import Recent
from app.tui.tally import Tally, reported, tallied

if TYPE_CHECKING:
    from app.protocol import ChatDelta, ChatOptions

Prompt = tuple[Sequence[Mapping[str, str]], "ChatOptions"]


class Writing:
    """One answer that is being written."""

    def __init__(self, conversation: Conversation, answer: str, started: float) -> None:
        self.conversation = conversation
        self.answer = answer
        """Its message."""
        self.tally = Tally(started=started)
        """It as counted so far."""
        self.on_text: Callable[[str], object] | None = None
        """Takes every piece of text as it comes, while somebody looks."""
        self.task: asyncio.Task[Message] | None = None
        self.reader: asyncio.Task[str | None] | None = None
        self.stopping = False


class Answers:
    """The answers that are being written, at most one in a conversation."""

    def __init__(
        self,
        connection: Connection,
        recent: Recent,
        clock: Callable[[], float],
        *,
        ready: Callable[[Conversation], Awaitable[str | None]],
        prompt: Callable[[Conversation, str, bool], Awaitable[Prompt]],
        shorten: Callable[[Conversation, str], bool],
        ended: Callable[[Writing], Awaitable[object]],
    ) -> None:
        """Begin with none.

        Args:
            connection: the runtime.
            recent: takes speeds.
            clock: seconds, for speeds.
            ready: waits until the model of a conversation can answer; returns why it can't, or None.
            prompt: what is asked for an answer of a conversation, by its id, begun or continued.
            shorten: leaves out more of a conversation for an answer; returns whether there was more.
            ended: called after each answer.
        """
        self._connection, self._recent, self._clock = connection, recent, clock
        self._ready, self._prompt, self._shorten, self._ended = ready, prompt, shorten, ended
        self._writing: dict[str, Writing] = {}

    @property
    def any(self) -> bool:
        """Whether any answer is being written."""
        return bool(self._writing)

    def of(self, conversation: str) -> Writing | None:
        """The answer that is being written in a conversation, by its id."""
        return self._writing.get(conversation)

    def begin(self, conversation: Conversation, answer: str, *, resume: bool = False) -> Writing:
        """Let the model write one answer into a conversation.

        Args:
            conversation: the conversation.
            answer: the answer's message, which is empty, or is continued.
            resume: whether to go on from the text that is there.

        Returns:
            The answer; its task ends with the message done, stopped or failed. Failures are told in it, not raised.
        """
        writing = Writing(conversation, answer, self._clock())
        self._writing[conversation.id] = writing
        self._recent.begin()
        conversation.revise(answer, state="streaming", error=None, statistics=None)
        writing.task = asyncio.create_task(self._write(writing, resume=resume))
        return writing

    async def stop(self, conversation: str | None = None) -> None:
        """Stop the answer of a conversation, or of all; what came stays."""
        stopped = [one for chat, one in self._writing.items() if conversation in (None, chat)]
        for writing in stopped:
            writing.stopping = True
            if writing.reader is not None:
                writing.reader.cancel()
        tasks = [writing.task for writing in stopped if writing.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    async def _write(self, writing: Writing, *, resume: bool) -> Message:
        """Read the stream to its end, and say how it ended."""
        conversation, answer = writing.conversation, writing.answer
        reader = writing.reader = asyncio.create_task(self._read(writing, resume=resume))
        if writing.stopping:
            reader.cancel()
        state: State = "failed"
        error: str | None = "something unexpected went wrong"
        try:
            error = await reader
            state = "done" if error is None else "failed"
        except asyncio.CancelledError:
            state, error = "stopped", None
            if not writing.stopping:
                reader.cancel()
                raise
        finally:
            self._writing.pop(conversation.id, None)
            message = conversation.revise(answer, state=state, error=error)
        if message.statistics is None and writing.tally.pieces:
            statistics = tallied(writing.tally, self._connection.last_status)
            message = conversation.revise(answer, statistics=statistics)
        await self._ended(writing)
        return message

    async def _read(self, writing: Writing, *, resume: bool) -> str | None:
        """Read the stream to its end; returns why it failed, or None. More is left out of what does not fit."""
        connection, conversation = self._connection, writing.conversation
        while True:
            if (reason := await self._ready(conversation)) is not None:
                return reason
            try:
                messages, options = await self._prompt(conversation, writing.answer, resume)
                stream = connection.require().chat(messages, options)
                async with contextlib.aclosing(stream) as deltas:
                    async for delta in deltas:
                        self._take(writing, delta)
            except ContextLengthError as failure:
                if not self._shorten(conversation, writing.answer):
                    return str(failure)
            except (ClientError, OSError) as failure:
                if await connection.alive() is not None:
                    return str(failure)
                return f"{connection.lose()}, and this chat is kept"
            else:
                return None

    def _take(self, writing: Writing, delta: ChatDelta) -> None:
        conversation, answer = writing.conversation, writing.answer
        if delta.model is not None and delta.model != conversation[answer].model:
            conversation.revise(answer, model=delta.model)
        if delta.text:
            now = self._clock()
            writing.tally.count(now)
            self._recent.count(now)
            conversation.revise(answer, text=conversation[answer].text + delta.text)
            if writing.on_text is not None:
                writing.on_text(delta.text)
        if delta.timings is not None:
            statistics = reported(delta.timings, self._connection.last_status)
            statistics = replace(
                statistics, cut=delta.finish_reason == "length", left_out=_left_out(conversation, answer)
            )
            self._recent.last_speed = statistics.tokens_per_s
            conversation.revise(answer, statistics=statistics)


def _left_out(conversation: Conversation, answer: str) -> int | None:
    """Messages before the answer that the model was not given; None where it was given all."""
    since = conversation.extras.since
    ids = [message.id for message in conversation.path(answer)]
    return ids.index(since) if since in ids and ids.index(since) else None
