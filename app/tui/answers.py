"""The answers in progress, each read by a task of its own, on screen or not, and recent speeds for sparklines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable

from textual.message import Message as Posted

from app.chat.answers import Answer, Event, Written
from app.chat.prompts import Host, LeftOut, NotSearched, Prompts
from app.chat.tally import Tally
from app.chat.tools import CallAsked, ChatTools
from app.conversation import Conversation
from app.tui import messages

KEPT = 120
"""Number of samples of each kind."""
SAMPLE_S = 1.0
"""Minimum time over which a speed is averaged."""


class Recent:
    """The latest speeds and memory sizes, oldest first."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything, since another model is measured from now on."""
        self.speeds: deque[float] = deque(maxlen=KEPT)
        """Tokens per second while answers were generated."""
        self.memory: deque[int] = deque(maxlen=KEPT)
        """Memory of the runtime process in bytes."""
        self.last_speed: float | None = None
        """Tokens per second of the last answer that the runtime reported."""
        self._since: float | None = None
        self._pieces = 0

    def begin(self) -> None:
        """Start an answer. The time before its first token does not count as time between tokens."""
        self._since = None

    def count(self, now: float) -> None:
        """Count one token."""
        if self._since is None:
            self._since, self._pieces = now, 0
            return
        self._pieces += 1
        passed = now - self._since
        if passed >= SAMPLE_S:
            self.speeds.append(self._pieces / passed)
            self._since, self._pieces = now, 0

    def hold(self, memory_bytes: int | None) -> None:
        """Record the runtime's memory use."""
        if memory_bytes is not None:
            self.memory.append(memory_bytes)


class AnswerTask:
    """One answer in progress."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._followed: asyncio.Queue[Event | None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.stopping = False
        self._over = False

    @property
    def conversation(self) -> Conversation:
        return self._answer.conversation

    @property
    def message(self) -> str:
        """Id of its message now."""
        return self._answer.message

    @property
    def tally(self) -> Tally:
        """What was counted so far of this message."""
        return self._answer.tally

    def events(self) -> AsyncGenerator[Event, None]:
        """All that it brings; for its task."""
        return self._answer.events()

    def follow(self) -> AsyncGenerator[Event, None]:
        """What it brings from now on; for the screen."""
        followed = self._followed = asyncio.Queue[Event | None]()
        if self._over:
            followed.put_nowait(None)

        async def events() -> AsyncGenerator[Event, None]:
            while (event := await followed.get()) is not None:
                yield event

        return events()

    def tell(self, event: Event | None) -> None:
        """Show an event to who follows; None is the end."""
        self._over = event is None
        if self._followed is not None:
            self._followed.put_nowait(event)


class Answers:
    """The answers in progress, at most one per conversation.

    Args:
        host: Has the model.
        prompts: Makes the prompts.
        tools: Runs what is called.
        recent: Records speeds.
        post: Receives what the user should know.
        done: Called with an answer when its chat may have another one, before anyone else can begin that.
        ended: Called after each answer.
        clock: Seconds, for speeds.
    """

    def __init__(
        self,
        host: Host,
        prompts: Prompts,
        tools: ChatTools,
        recent: Recent,
        post: Callable[[Posted], object],
        done: Callable[[AnswerTask], object],
        ended: Callable[[], Awaitable[object]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._prompts, self._tools = host, prompts, tools
        self._recent, self._post, self._done, self._ended, self._clock = recent, post, done, ended, clock
        self._writing: dict[str, AnswerTask] = {}

    @property
    def any(self) -> bool:
        """Whether any answer is being generated."""
        return bool(self._writing)

    def of(self, conversation: str) -> AnswerTask | None:
        """The answer that is being generated in a conversation, by the conversation's id."""
        return self._writing.get(conversation)

    def begin(
        self, conversation: Conversation, message: str, *, resume: bool = False, summarize: bool = False
    ) -> AnswerTask:
        """Start one answer in a conversation; arguments as of `Answer`."""
        self._recent.begin()
        answer = Answer(
            self._host,
            self._prompts,
            self._tools,
            conversation,
            message,
            resume=resume,
            summarize=summarize,
            clock=self._clock,
        )
        writing = self._writing[conversation.id] = AnswerTask(answer)
        writing.task = asyncio.create_task(self._write(writing))
        return writing

    async def stop(self, conversation: str | None = None) -> None:
        """Stop the answer of one conversation, or all answers. The text so far stays."""
        stopped = [one for chat, one in self._writing.items() if conversation in (None, chat)]
        if not stopped:
            return
        await asyncio.sleep(0)  # a task that is cancelled before its first step could not record it
        for writing in stopped:
            if writing.task is not None and not writing.stopping:
                writing.stopping = True
                writing.task.cancel()
        await asyncio.wait([writing.task for writing in stopped if writing.task is not None])

    async def _write(self, writing: AnswerTask) -> None:
        try:
            async with contextlib.aclosing(writing.events()) as events:
                async for event in events:
                    self._take(writing, event)
                    writing.tell(event)
        except asyncio.CancelledError:
            if not writing.stopping:
                raise
        finally:
            self._writing.pop(writing.conversation.id, None)
            self._done(writing)
            writing.tell(None)
        await self._ended()

    def _take(self, writing: AnswerTask, event: Event) -> None:
        chat = writing.conversation
        match event:
            case Written(delta):
                if delta.text:
                    self._recent.count(writing.tally.last)
                if delta.timings is not None:
                    self._recent.last_speed = delta.timings.decode_tokens_per_s
            case CallAsked():
                self._post(messages.CallAsked(chat.id))
            case LeftOut():
                self._post(messages.LeftOut(chat.id))
            case NotSearched(reason):
                self._post(messages.NotSearched(reason))
            case _:
                pass
