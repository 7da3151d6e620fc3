"""An answer as a stream of events: it is prompted, read, and goes on after the tools that it called."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.chat.prompts import Host, LeftOut, NotSearched, Prompts
from app.chat.tally import Tally, continued, reported, tallied
from app.chat.tools import CallAsked, CallChanged, ChatTools
from app.conversation import Call, Conversation, State
from app.errors import ClientError, ContextLengthError, NotReadyError
from app.language import _

if TYPE_CHECKING:
    from app.protocol import CallDelta, ChatDelta


@dataclass(frozen=True, slots=True)
class Written:
    """A piece of the answer: text, or a part of a call."""

    delta: ChatDelta


@dataclass(frozen=True, slots=True)
class Continued:
    """The results of tools are answered by another message: `Answer.message` from now on."""


Event = Written | CallChanged | CallAsked | Continued | LeftOut | NotSearched


class Answer:
    """One answer that is being generated.

    Args:
        host: Has the model.
        prompts: Makes the prompt.
        tools: Runs what is called.
        conversation: The conversation.
        message: Id of the answer's message; it is empty, or has the text to continue.
        resume: Whether to continue from the existing text.
        summarize: Whether messages that are left out are summarized, whatever the settings say.
        clock: Seconds, for speeds.
    """

    def __init__(
        self,
        host: Host,
        prompts: Prompts,
        tools: ChatTools,
        conversation: Conversation,
        message: str,
        *,
        resume: bool = False,
        summarize: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.conversation = conversation
        self.message = message
        """Id of its message; another one after tools were called, since their results are answered by the next one."""
        self.tally = Tally(started=clock())
        """What was counted so far of this message."""
        self._host, self._prompts, self._tools, self._clock = host, prompts, tools, clock
        self._resume, self._summarize = resume, summarize
        self._before = conversation[message].statistics if resume else None
        self._status = host.status  # as of the model that answers, which may be gone at the end
        conversation.revise(message, state="streaming", error=None, statistics=None)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Generate it. Every event has changed the conversation already.

        Failures of the model are recorded in the message, not raised. Whoever leaves early stops the answer; the text
        so far stays.
        """
        state: State = "failed"
        error = _("an unexpected error occurred")
        try:
            async with contextlib.aclosing(self._rounds()) as events:
                async for event in events:
                    yield event
            state, error = "done", ""
        except (NotReadyError, ContextLengthError) as failure:
            error = str(failure)
        except (ClientError, OSError) as failure:
            error = await self._host.why(failure)
        except (asyncio.CancelledError, GeneratorExit):
            state, error = "stopped", ""
            raise
        finally:
            self._end(state, error or None)

    def _end(self, state: State, error: str | None) -> None:
        message = self.conversation.revise(self.message, state=state, error=error)
        if message.statistics is None:
            own = continued(self._before, tallied(self.tally, self._status)) if self.tally.pieces else self._before
            self.conversation.revise(self.message, statistics=own)

    async def _rounds(self) -> AsyncGenerator[Event, None]:
        """Read an answer, run what it calls, and read the answer to that, until nothing is called."""
        conversation = self.conversation
        while True:
            async with contextlib.aclosing(self._read()) as events:
                async for event in events:
                    yield event
            if not conversation[self.message].calls:
                return
            context = None if self._status is None else self._status.context
            async with contextlib.aclosing(self._tools.run(conversation, self.message, context)) as changes:
                async for change in changes:
                    yield change
            before = conversation.revise(self.message, state="done", error=None)
            following = conversation.add("assistant", "", parent=before.id, state="streaming", model=before.model)
            self.message, self.tally = following.id, Tally(started=self._clock())
            self._resume, self._before = False, None
            yield Continued()

    async def _read(self) -> AsyncGenerator[Event, None]:
        """Read the model's stream to its end. A prompt that does not fit is shortened."""
        conversation = self.conversation
        while True:
            model = await self._host.model_for(conversation)
            self._status = self._host.status
            try:
                prompt = await self._prompts.make(
                    model, conversation, self.message, resume=self._resume, summarize=self._summarize
                )
                self._summarize = False  # the wish was for once
                for happened in prompt.events:
                    yield happened
                async with contextlib.aclosing(model.chat(prompt.messages, prompt.options)) as deltas:
                    async for delta in deltas:
                        self._take(delta)
                        yield Written(delta)
            except ContextLengthError:
                if (shortened := self._prompts.shorten(conversation, self.message)) is None:
                    raise
                for left in shortened:
                    yield left
            else:
                return

    def _take(self, delta: ChatDelta) -> None:
        conversation, answer = self.conversation, self.message
        if delta.model is not None and delta.model != conversation[answer].model:
            conversation.revise(answer, model=delta.model)
        if delta.text:
            self.tally.count(self._clock())
            conversation.revise(answer, text=conversation[answer].text + delta.text)
        if delta.calls:
            self.tally.count(self._clock())
            conversation.revise(answer, calls=joined(conversation[answer].calls, delta.calls))
        if delta.timings is not None:
            statistics = replace(
                continued(self._before, reported(delta.timings, self._status)),
                cut=delta.finish_reason == "length",
                looped=delta.finish_reason == "loop",
                left_out=_left_out(conversation, answer),
            )
            conversation.revise(answer, statistics=statistics)


def joined(calls: Sequence[Call], deltas: Sequence[CallDelta]) -> tuple[Call, ...]:
    """The calls of an answer with more pieces of them. A call without an id gets one."""
    whole = list(calls)
    for delta in deltas:
        if delta.name or delta.index >= len(whole):
            whole.append(Call(id=delta.id or uuid.uuid4().hex, name=delta.name, arguments=delta.arguments))
        else:
            before = whole[delta.index]
            whole[delta.index] = replace(before, arguments=before.arguments + delta.arguments)
    return tuple(whole)


def _left_out(conversation: Conversation, answer: str) -> int | None:
    """How many earlier messages the model did not see; None if it saw all."""
    since = conversation.extras.since
    ids = [message.id for message in conversation.path(answer)]
    return ids.index(since) if since in ids and ids.index(since) else None
