"""What a model is given of a conversation: its messages as far as they fit, and how the answer is to be drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from textual.message import Message as Event

from app.conversation import Conversation, Message, prompt_of, split_reasoning
from app.errors import ClientError
from app.fitting import Fit, fit, later, rate_of
from app.settings import Settings
from app.tui.answers import Prompt
from app.tui.connection import Connection
from app.tui.messages import LeftOut

if TYPE_CHECKING:
    from runtime.wire.answers import Status

SUMMARIZE = "Summarize the conversation above in a few sentences: what was asked, what was found, what is still open."
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")


class Note(Protocol):
    """Changes what belongs to a conversation beside its messages, and keeps that."""

    def __call__(self, conversation: Conversation, **changes: Any) -> None:
        """Change `Extras` by its fields."""


class Prompts:
    """Makes prompts."""

    def __init__(
        self,
        connection: Connection,
        settings: Callable[[], Settings],
        note: Note,
        post: Callable[[Event], object],
        summarizes: Callable[[], bool],
    ) -> None:
        """Begin.

        Args:
            connection: the runtime, which says how much fits, and writes summaries.
            settings: everybody's settings.
            note: keeps what is left out of a conversation.
            post: takes the event that something is left out.
            summarizes: whether the person wants a summary this time, whatever the settings say.
        """
        self._connection, self._settings, self._note, self._post = connection, settings, note, post
        self._summarizes = summarizes

    @property
    def _status(self) -> Status | None:
        return self._connection.status

    def setting_of(self, conversation: Conversation, key: str) -> Any:
        """A setting as it is for a conversation: its own, or everybody's."""
        own = conversation.extras.settings
        return own[key] if key in own else self._settings().get(key)

    def fit(self, conversation: Conversation, path: Sequence[Message]) -> Fit:
        """What the model will be given of a path of a conversation."""
        ids = [message.id for message in path]
        since = conversation.extras.since
        first = ids.index(since) if since in ids else 0
        context = self._status.context if self._status is not None else None
        if context is None:
            return Fit(first=first, tokens=0)
        return fit(
            path,
            context,
            first=first,
            answer=self.setting_of(conversation, "max_tokens"),
            system=str(self.setting_of(conversation, "system_prompt")),
        )

    def will_leave_out(self, conversation: Conversation, typed: str) -> int:
        """Messages of a conversation that the next prompt leaves out and the last one did not."""
        path = conversation.path()
        if not path or self._status is None or not self._status.context:
            return 0
        asked = Message(id="", parent=path[-1].id, role="user", text=typed)
        before = [message.id for message in path]
        since = conversation.extras.since
        now = before.index(since) if since in before else 0
        return max(0, self.fit(conversation, [*path, asked]).first - now)

    async def make(self, conversation: Conversation, answer: str, resume: bool) -> Prompt:
        """What is asked for an answer of a conversation, by its id, begun or continued."""
        from app.protocol import ChatOptions

        sampling: dict[str, Any] = {key: self.setting_of(conversation, key) for key in SAMPLING_KEYS}
        path = conversation.path(answer)
        path = path if resume else path[:-1]
        found = self.fit(conversation, path)
        if found.first and path[found.first].id != conversation.extras.since:
            await self._leave_out(conversation, path, found.first)
        system = str(self.setting_of(conversation, "system_prompt"))
        prompt = prompt_of(path[found.first :], self._with_summary(conversation, system, found.first))
        return prompt, ChatOptions(
            **sampling, model=conversation.extras.model, chat=conversation.id, continue_final=resume
        )

    @staticmethod
    def _with_summary(conversation: Conversation, system: str, first: int) -> str:
        """The system prompt, with what is told of the messages that are left out."""
        summary = conversation.extras.summary
        return f"{system}\n\nEarlier in this conversation: {summary}".strip() if first and summary else system

    def read_before(self, conversation: Conversation, answer: str) -> list[Mapping[str, str]]:
        """What the model had been given when it wrote an answer, as far as that can be told now."""
        path = conversation.path(answer)
        statistics = path[-1].statistics
        first = statistics.left_out or 0 if statistics is not None else 0
        system = str(self.setting_of(conversation, "system_prompt"))
        return prompt_of(path[first:-1], self._with_summary(conversation, system, first))

    async def _leave_out(self, conversation: Conversation, path: Sequence[Message], first: int) -> None:
        """Take note of what the model reads from now on, with a summary of the rest where that is wanted."""
        summary = ""
        if self._settings().overflow == "summarize" or self._summarizes():
            summary = await self._summary(conversation, path[:first])
        self._note(conversation, since=path[first].id, summary=summary)
        self._post(LeftOut(conversation.id))

    async def _summary(self, conversation: Conversation, messages: Sequence[Message]) -> str:
        """What was said in some messages, by the model; as much of them as fits, and nothing where it fails."""
        from app.protocol import ChatOptions

        context = (self._status.context if self._status is not None else None) or 0
        rate = rate_of(messages)
        room = int(context / 2 / rate)
        said = "\n\n".join(f"{message.role}: {split_reasoning(message.text)[1]}" for message in messages)
        before = f"Summary of what was said before: {old}\n\n" if (old := conversation.extras.summary) else ""
        asked = f"{before}{said}"[-room:] + f"\n\n{SUMMARIZE}"
        options = ChatOptions(model=conversation.extras.model, max_tokens=max(32, context // 8), temperature=0.0)
        stream = self._connection.require().chat([{"role": "user", "content": asked}], options)
        try:
            async with contextlib.aclosing(stream) as deltas:
                return "".join([delta.text async for delta in deltas]).strip()
        except ClientError:
            return ""

    def shorten(self, conversation: Conversation, answer: str) -> bool:
        """Leave out one more exchange, for the runtime counted more tokens than were estimated."""
        path = conversation.path(answer)[:-1]
        ids = [message.id for message in path]
        since = conversation.extras.since
        found = later(path, ids.index(since) if since in ids else 0)
        if found is None:
            return False
        self._note(conversation, since=path[found].id)
        self._post(LeftOut(conversation.id))
        return True
