"""Prompts made from conversations: the messages that fit in the context, and the sampling options."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from textual.message import Message as Event

from app.conversation import Conversation, Message, prompt_of
from app.documents.prompt import BYTES_PER_TOKEN, grounded, passage_room
from app.errors import ClientError, HistoryError
from app.fitting import USUAL_CONTEXT, Fit, fit, later, rate_of
from app.settings import Settings
from app.tui.answers import Prompt
from app.tui.connection import Connection
from app.tui.documents import Documents
from app.tui.messages import LeftOut, NotSearched
from runtime.text.reasoning import split_reasoning, switch

if TYPE_CHECKING:
    from runtime.wire.answers import Status

SUMMARIZE = "Summarize the conversation above in a few sentences: what was asked, what was found, what is still open."


class Note(Protocol):
    """Changes a conversation's `Extras` and saves them."""

    def __call__(self, conversation: Conversation, **changes: Any) -> None:
        """Change `Extras` by its fields."""


class OffersTools(Protocol):
    """The part of `app.tui.tools.ChatTools` used here."""

    async def records(self, conversation: Conversation, path: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        """The tools that an answer may call, in OpenAI's format."""
        ...

    def size(self, conversation: Conversation) -> int:
        """Characters of their descriptions."""
        ...


class Prompts:
    """Makes prompts."""

    def __init__(
        self,
        connection: Connection,
        settings: Callable[[], Settings],
        note: Note,
        post: Callable[[Event], object],
        summarizes: Callable[[], bool],
        documents: Documents,
        tools: OffersTools,
    ) -> None:
        """Start.

        Args:
            connection: the runtime, which knows the context's size and writes summaries.
            settings: the general settings.
            note: saves which messages are left out of a conversation.
            post: receives the event that messages are left out.
            summarizes: whether the user asked for a summary this time, whatever the settings say.
            documents: searches the documents of conversations.
            tools: the tools that conversations may use.
        """
        self._connection, self._settings, self._note, self._post = connection, settings, note, post
        self._summarizes, self._documents, self._tools = summarizes, documents, tools

    @property
    def _status(self) -> Status | None:
        return self._connection.status

    def setting_of(self, conversation: Conversation, key: str) -> Any:
        """A conversation's value of a setting: its own, or the general one."""
        own = conversation.extras.settings
        return own[key] if key in own else self._settings().get(key)

    def fit(self, conversation: Conversation, path: Sequence[Message]) -> Fit:
        """The messages of a path that the model will see."""
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
            system=str(self.setting_of(conversation, "system_prompt")) + " " * self._tools.size(conversation),
        )

    def will_leave_out(self, conversation: Conversation, typed: str) -> int:
        """Number of messages of a conversation that the next prompt leaves out and the last one did not."""
        path = grounded(conversation.path())
        if not path or self._status is None or not self._status.context:
            return 0
        asked = Message(id="", parent=path[-1].id, role="user", text=typed)
        before = [message.id for message in path]
        since = conversation.extras.since
        now = before.index(since) if since in before else 0
        return max(0, self.fit(conversation, [*path, asked]).first - now)

    async def make(self, conversation: Conversation, answer: str, resume: bool) -> Prompt:
        """The prompt and options for an answer, which is new or continued."""
        from app.protocol import ChatOptions

        sampling: dict[str, Any] = {
            **self._settings().sampling(self._status.sampling if self._status is not None else None),
            "max_tokens": self.setting_of(conversation, "max_tokens"),
        }
        sampling |= {key: value for key, value in conversation.extras.settings.items() if key in sampling}
        if not resume:
            await self._search(conversation, answer)
        path = grounded(conversation.path(answer))
        path = path if resume else path[:-1]
        tools = () if resume else await self._tools.records(conversation, path)
        found = self.fit(conversation, path)
        if found.first and path[found.first].id != conversation.extras.since:
            await self._leave_out(conversation, path, found.first)
        system = str(self.setting_of(conversation, "system_prompt"))
        prompt = prompt_of(path[found.first :], self._with_summary(conversation, system, found.first))
        return prompt, ChatOptions(
            **sampling,
            model=conversation.extras.model,
            chat=conversation.id,
            continue_final=resume,
            tools=tools or None,
            chat_template_kwargs=switch(self.setting_of(conversation, "thinking")),
        )

    async def _search(self, conversation: Conversation, answer: str) -> None:
        """Find the passages for an answer in the conversation's documents, and keep them with it."""
        if not conversation.extras.sources or conversation[answer].passages is not None:
            return
        parent = conversation[answer].parent
        if parent is not None and conversation[parent].role == "assistant":
            return  # it answers results of tools; the prompt has its passages
        path = grounded(conversation.path(answer))[:-1]
        context = (self._status.context if self._status is not None else None) or USUAL_CONTEXT
        questions = [message.text for message in conversation.path(answer) if message.role == "user"]
        try:
            found = await self._documents.find(
                conversation, questions, passage_room(context, rate_of(path, usual=1 / BYTES_PER_TOKEN))
            )
        except HistoryError as error:
            self._post(NotSearched(str(error)))
        else:
            conversation.revise(answer, passages=tuple(found))

    @staticmethod
    def _with_summary(conversation: Conversation, system: str, first: int) -> str:
        """The system prompt, with the summary of the messages that are left out."""
        summary = conversation.extras.summary
        return f"{system}\n\nEarlier in this conversation: {summary}".strip() if first and summary else system

    def read_before(self, conversation: Conversation, answer: str) -> list[Mapping[str, Any]]:
        """The messages that the model saw when it wrote an answer, as far as that is known now."""
        path = grounded(conversation.path(answer))
        statistics = path[-1].statistics
        first = statistics.left_out or 0 if statistics is not None else 0
        system = str(self.setting_of(conversation, "system_prompt"))
        return prompt_of(path[first:-1], self._with_summary(conversation, system, first))

    async def _leave_out(self, conversation: Conversation, path: Sequence[Message], first: int) -> None:
        """Record where the model's view now begins, with a summary of the rest if wanted."""
        summary = ""
        if self._settings().overflow == "summarize" or self._summarizes():
            summary = await self._summary(conversation, path[:first])
        self._note(conversation, since=path[first].id, summary=summary)
        self._post(LeftOut(conversation.id))

    async def _summary(self, conversation: Conversation, messages: Sequence[Message]) -> str:
        """The model's summary of messages, of as much as fits; empty if it fails."""
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
        """Leave out one more exchange, because the runtime counted more tokens than the estimate; then passages."""
        path = conversation.path(answer)[:-1]
        ids = [message.id for message in path]
        since = conversation.extras.since
        found = later(path, ids.index(since) if since in ids else 0)
        if found is None:
            passages = conversation[answer].passages or ()
            if len(passages) > 1:
                conversation.revise(answer, passages=passages[: len(passages) // 2])
            return len(passages) > 1
        self._note(conversation, since=path[found].id)
        self._post(LeftOut(conversation.id))
        return True
