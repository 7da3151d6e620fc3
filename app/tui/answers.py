"""Answers that are being generated. Each streams into its own conversation, on screen or not."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from app.conversation import Call, Conversation, Message, State
from app.errors import ClientError, ContextLengthError
from app.tui.connection import Connection
from app.tui.recent import Recent
from app.tui.tally import Tally, reported, tallied

if TYPE_CHECKING:
    from app.protocol import CallDelta, ChatDelta, ChatOptions

Prompt = tuple[Sequence[Mapping[str, Any]], "ChatOptions"]


class Writing:
    """One answer that is being generated."""

    def __init__(self, conversation: Conversation, answer: str, started: float) -> None:
        self.conversation = conversation
        self.answer = answer
        """Its message; another one after tools were called, since their results are answered by the next message."""
        self.moved = asyncio.Event()
        """Set when `answer` becomes another message."""
        self.on_calls: Callable[[], object] | None = None
        """Called when a call of the answer on screen changes."""
        self.tally = Tally(started=started)
        """What the UI has counted so far."""
        self.on_text: Callable[[str], object] | None = None
        """Receives each piece of text while the answer is on screen."""
        self.task: asyncio.Task[Message] | None = None
        self.reader: asyncio.Task[str | None] | None = None
        self.stopping = False


class Answers:
    """The answers that are being generated, at most one per conversation."""

    def __init__(
        self,
        connection: Connection,
        recent: Recent,
        clock: Callable[[], float],
        *,
        ready: Callable[[Conversation], Awaitable[str | None]],
        prompt: Callable[[Conversation, str, bool], Awaitable[Prompt]],
        shorten: Callable[[Conversation, str], bool],
        run_calls: Callable[[Writing], Awaitable[bool]],
        ended: Callable[[Writing], Awaitable[object]],
    ) -> None:
        """Start with none.

        Args:
            connection: the runtime.
            recent: records speeds.
            clock: seconds, for speeds.
            ready: waits until a conversation's model can answer; returns why it can't, or None.
            prompt: the prompt and options for an answer: (conversation, answer id, whether it is continued).
            shorten: drops more of a conversation so that the prompt fits; returns whether there was more to drop.
            run_calls: runs the tools that an answer called; returns whether the model is to answer their results.
            ended: called after each answer.
        """
        self._connection, self._recent, self._clock = connection, recent, clock
        self._ready, self._prompt, self._shorten, self._ended = ready, prompt, shorten, ended
        self._run_calls = run_calls
        self._writing: dict[str, Writing] = {}

    @property
    def any(self) -> bool:
        """Whether any answer is being generated."""
        return bool(self._writing)

    def of(self, conversation: str) -> Writing | None:
        """The answer that is being generated in a conversation, by the conversation's id."""
        return self._writing.get(conversation)

    def begin(self, conversation: Conversation, answer: str, *, resume: bool = False) -> Writing:
        """Start one answer in a conversation.

        Args:
            conversation: the conversation.
            answer: id of the answer's message; it is empty, or has the text to continue.
            resume: whether to continue from the existing text.

        Returns:
            The answer. Its task ends with the message done, stopped or failed; failures are recorded there, not raised.
        """
        writing = Writing(conversation, answer, self._clock())
        self._writing[conversation.id] = writing
        self._recent.begin()
        conversation.revise(answer, state="streaming", error=None, statistics=None)
        writing.task = asyncio.create_task(self._write(writing, resume=resume))
        return writing

    async def stop(self, conversation: str | None = None) -> None:
        """Stop the answer of one conversation, or all answers. The text so far stays."""
        stopped = [one for chat, one in self._writing.items() if conversation in (None, chat)]
        for writing in stopped:
            writing.stopping = True
            if writing.reader is not None:
                writing.reader.cancel()
        tasks = [writing.task for writing in stopped if writing.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    async def _write(self, writing: Writing, *, resume: bool) -> Message:
        """Read the stream to its end and record how it ended."""
        conversation = writing.conversation
        reader = writing.reader = asyncio.create_task(self._rounds(writing, resume=resume))
        if writing.stopping:
            reader.cancel()
        state: State = "failed"
        error: str | None = "an unexpected error occurred"
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
            message = conversation.revise(writing.answer, state=state, error=error)
        if message.statistics is None and writing.tally.pieces:
            statistics = tallied(writing.tally, self._connection.last_status)
            message = conversation.revise(writing.answer, statistics=statistics)
        await self._ended(writing)
        return message

    async def _rounds(self, writing: Writing, *, resume: bool) -> str | None:
        """Read an answer, run what it calls, and read the answer to that, until nothing is called."""
        conversation = writing.conversation
        while (error := await self._read(writing, resume=resume)) is None:
            if not conversation[writing.answer].calls or not await self._run_calls(writing):
                break
            before = conversation.revise(writing.answer, state="done", error=None)
            following = conversation.add("assistant", "", parent=before.id, state="streaming", model=before.model)
            writing.answer, writing.tally, resume = following.id, Tally(started=self._clock()), False
            writing.on_text = writing.on_calls = None  # they show the message before
            writing.moved.set()
        return error

    async def _read(self, writing: Writing, *, resume: bool) -> str | None:
        """Read the stream to its end; returns why it failed, or None. A prompt that does not fit is shortened."""
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
                return f"{connection.lose()}; this chat is safe"
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
        if delta.calls:
            writing.tally.count(self._clock())
            conversation.revise(answer, calls=joined(conversation[answer].calls, delta.calls))
            if writing.on_calls is not None:
                writing.on_calls()
        if delta.timings is not None:
            statistics = reported(delta.timings, self._connection.last_status)
            statistics = replace(
                statistics, cut=delta.finish_reason == "length", left_out=_left_out(conversation, answer)
            )
            self._recent.last_speed = statistics.tokens_per_s
            conversation.revise(answer, statistics=statistics)


def joined(calls: Sequence[Call], deltas: Sequence[CallDelta]) -> tuple[Call, ...]:
    """The calls of an answer with more pieces of them. A call without an id gets one."""
    found = list(calls)
    for delta in deltas:
        if delta.name or delta.index >= len(found):
            found.append(Call(id=delta.id or uuid.uuid4().hex, name=delta.name, arguments=delta.arguments))
        else:
            before = found[delta.index]
            found[delta.index] = replace(before, arguments=before.arguments + delta.arguments)
    return tuple(found)


def _left_out(conversation: Conversation, answer: str) -> int | None:
    """How many earlier messages the model did not see; None if it saw all."""
    since = conversation.extras.since
    ids = [message.id for message in conversation.path(answer)]
    return ids.index(since) if since in ids and ids.index(since) else None
