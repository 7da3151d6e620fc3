"""Prompts made from conversations: the messages that fit in the context, and the sampling options.

The oldest messages are dropped first, down to half of the context at once. The cache of the rest then stays valid for
many turns, which it would not if every turn dropped a little more.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from app.chat.documents import Documents
from app.chat.tools import ChatTools
from app.conversation import Conversation, Message, prompt_of
from app.documents.prompt import BYTES_PER_TOKEN, grounded, material, passage_room, shortened
from app.errors import ClientError, HistoryError
from runtime.text.reasoning import split_reasoning, switch

if TYPE_CHECKING:
    from app.protocol import ChatDelta, ChatOptions
    from app.settings import Settings
    from runtime.wire.answers import Status

SUMMARIZE = "Summarize the conversation above in a few sentences: what was asked, what was found, what is still open."
TOKENS_PER_CHARACTER = 0.4
"""Assumed tokens per character before anything was counted. Most text has fewer; too many is the safer guess."""
TOKENS_PER_MESSAGE = 8
"""Approximate number of tokens that a chat template adds to a message."""
ANSWER_SHARE = 0.25
"""Maximum share of the context that is reserved for the answer."""
USUAL_CONTEXT = 4096
"""Tokens of context that are assumed where no model is loaded, or a server does not report it."""
KEPT_SHARE = 0.5
"""Share of the context that is filled after messages were dropped."""
SHORTEST_PASSAGE = 40
"""Characters to which the last passage is cut where nothing else can make room."""
_OF_A_CHAT = ("repetition_penalty", "seed", "stop", "response_format")
"""Sampling options that a chat may have for itself, and that are no settings."""


class Model(Protocol):
    """What answers: a runtime's client, or a model of this process."""

    def chat(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> AsyncGenerator[ChatDelta, None]:
        """Answer a conversation."""
        ...


class Host(Protocol):
    """What holds conversations: a session of the terminal UI, or a command."""

    @property
    def status(self) -> Status | None:
        """The model, and how it runs; None if there is none yet."""
        ...

    @property
    def settings(self) -> Settings:
        """The general settings."""
        ...

    async def model_for(self, conversation: Conversation) -> Model:
        """What answers a conversation, once it can.

        Raises:
            NotReadyError: it can't.
        """
        ...

    async def why(self, failure: Exception) -> str:
        """Why an answer failed, for the user."""
        ...

    def note(self, conversation: Conversation, **changes: Any) -> None:
        """Change a conversation's `Extras`, and save them."""
        ...


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The beginning of a conversation no longer fits in the context, so the model no longer sees it."""


@dataclass(frozen=True, slots=True)
class NotSearched:
    """The documents of a conversation can't be searched."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a model is asked."""

    messages: Sequence[Mapping[str, Any]]
    options: ChatOptions
    events: Sequence[LeftOut | NotSearched]
    """What happened to the conversation for its sake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The part of a path that the model sees."""

    first: int
    """Index of the first message that it sees."""
    tokens: int
    """Estimated number of tokens."""


class Prompts:
    """Makes prompts.

    Args:
        host: Has the settings and the model's context, and saves which messages are left out.
        documents: Searches the documents of conversations.
        tools: The tools that conversations may use.
    """

    def __init__(self, host: Host, documents: Documents, tools: ChatTools) -> None:
        self._host, self._documents, self._tools = host, documents, tools

    @property
    def _context(self) -> int | None:
        status = self._host.status
        return None if status is None else status.context

    def setting_of(self, conversation: Conversation, key: str) -> Any:
        """A conversation's value of a setting: its own, or the general one."""
        own = conversation.extras.settings
        return own[key] if key in own else self._host.settings.get(key)

    def sampling(self, conversation: Conversation) -> dict[str, Any]:
        """How answers of a conversation are sampled: arguments of `ChatOptions`."""
        status, own = self._host.status, conversation.extras.settings
        general = {
            **self._host.settings.sampling(status.sampling if status is not None else None),
            "max_tokens": self._host.settings.max_tokens,
        }
        found: dict[str, Any] = {
            **general,
            **{key: value for key, value in own.items() if key in general or key in _OF_A_CHAT},
        }
        if isinstance(stop := found.get("stop"), str):
            found["stop"] = (stop,)
        return found

    def fit(self, conversation: Conversation, path: Sequence[Message]) -> Fit:
        """The messages of a path that the model will see."""
        ids = [message.id for message in path]
        since = conversation.extras.since
        first = ids.index(since) if since in ids else 0
        if self._context is None:
            return Fit(first=first, tokens=0)
        return fit(
            path,
            self._context,
            first=first,
            answer=self.setting_of(conversation, "max_tokens"),
            system=str(self.setting_of(conversation, "system_prompt")) + " " * self._tools.size(conversation),
        )

    def will_leave_out(self, conversation: Conversation, typed: str) -> int:
        """Number of messages of a conversation that the next prompt leaves out and the last one did not."""
        path = grounded(conversation.path())
        if not path or not self._context:
            return 0
        asked = Message(id="", parent=path[-1].id, role="user", text=typed)
        before = [message.id for message in path]
        since = conversation.extras.since
        now = before.index(since) if since in before else 0
        return max(0, self.fit(conversation, [*path, asked]).first - now)

    async def make(
        self, model: Model, conversation: Conversation, answer: str, *, resume: bool, summarize: bool
    ) -> Prompt:
        """The prompt of an answer.

        Args:
            model: What answers; it also writes the summary.
            conversation: The conversation.
            answer: Id of the answer.
            resume: Whether it has text that is continued.
            summarize: Whether messages that are left out are summarized, whatever the settings say.
        """
        from app.protocol import ChatOptions

        events: list[LeftOut | NotSearched] = []
        if not resume and (reason := await self._search(conversation, answer)) is not None:
            events.append(NotSearched(reason))
        path = grounded(conversation.path(answer))
        path = path if resume else path[:-1]
        tools = () if resume else await self._tools.records(conversation, path)
        first = self.fit(conversation, path).first
        if first and path[first].id != conversation.extras.since:
            summary = ""
            if summarize or self._host.settings.overflow == "summarize":
                summary = await self._summary(model, conversation, path[:first])
            self._host.note(conversation, since=path[first].id, summary=summary)
            events.append(LeftOut())
        options = ChatOptions(
            **self.sampling(conversation),
            model=conversation.extras.model,
            chat=conversation.id or None,
            continue_final=resume,
            end_loops=True,
            reasoning_in_content=True,
            tools=tools or None,
            chat_template_kwargs=switch(self.setting_of(conversation, "thinking")),
        )
        return Prompt(
            messages=prompt_of(path[first:], self._system(conversation, first)), options=options, events=events
        )

    async def _search(self, conversation: Conversation, answer: str) -> str | None:
        """Keep the passages for an answer with it. Returns why the conversation's documents can't be searched."""
        if not conversation.extras.sources or conversation[answer].passages is not None:
            return None
        parent = conversation[answer].parent
        if parent is not None and conversation[parent].role == "assistant":
            return None  # it answers results of tools; the prompt has its passages
        path = grounded(conversation.path(answer))[:-1]
        room = passage_room(self._context or USUAL_CONTEXT, rate_of(path, usual=1 / BYTES_PER_TOKEN))
        questions = [message.text for message in conversation.path(answer) if message.role == "user"]
        try:
            passages = await self._documents.find(conversation, questions, room)
        except HistoryError as error:
            return str(error)
        conversation.revise(answer, passages=tuple(passages))
        return None

    def _system(self, conversation: Conversation, first: int) -> str:
        """The system prompt, with the summary of the messages before `first`."""
        system, summary = str(self.setting_of(conversation, "system_prompt")), conversation.extras.summary
        return f"{system}\n\nEarlier in this conversation: {material(summary)}".strip() if first and summary else system

    def read_before(self, conversation: Conversation, answer: str) -> list[Mapping[str, Any]]:
        """The messages that the model saw when it wrote an answer, as far as that is known now."""
        path = grounded(conversation.path(answer))
        statistics = path[-1].statistics
        first = statistics.left_out or 0 if statistics is not None else 0
        return prompt_of(path[first:-1], self._system(conversation, first))

    async def _summary(self, model: Model, conversation: Conversation, messages: Sequence[Message]) -> str:
        """The model's summary of messages, of as much as fits; empty if it fails."""
        from app.protocol import ChatOptions

        context = self._context or 0
        room = int(context / 2 / rate_of(messages))
        said = "\n\n".join(f"{message.role}: {split_reasoning(message.text)[1]}" for message in messages)
        before = f"Summary of what was said before: {old}\n\n" if (old := conversation.extras.summary) else ""
        asked = material(f"{before}{said}"[-room:]) + f"\n\n{SUMMARIZE}"
        options = ChatOptions(model=conversation.extras.model, max_tokens=max(32, context // 8), temperature=0.0)
        try:
            async with contextlib.aclosing(model.chat([{"role": "user", "content": asked}], options)) as deltas:
                return "".join([delta.text async for delta in deltas]).strip()
        except ClientError:
            return ""

    def shorten(self, conversation: Conversation, answer: str) -> Sequence[LeftOut] | None:
        """Leave out one more exchange, because the runtime counted more tokens than the estimate; then passages.

        Returns:
            What happened to the conversation; None if it can't be shortened.
        """
        path = conversation.path(answer)[:-1]
        ids = [message.id for message in path]
        since = conversation.extras.since
        now = ids.index(since) if since in ids else 0
        if (following := _later(path, now)) != now:
            self._host.note(conversation, since=path[following].id)
            return (LeftOut(),)
        passages = tuple(conversation[answer].passages or ())
        if len(passages) > 1:
            passages = passages[: len(passages) // 2]
        elif passages and len(passages[0].text) > SHORTEST_PASSAGE:
            passages = (shortened(passages[0], len(passages[0].text) // 2),)
        else:
            return None
        conversation.revise(answer, passages=passages)
        return ()


def fit(path: Sequence[Message], context: int, *, first: int = 0, answer: int | None = None, system: str = "") -> Fit:
    """Choose the messages that the model sees.

    Args:
        path: The messages up to the prompt to answer.
        context: Size of the context in tokens.
        first: Index of the first message that it saw last time.
        answer: Maximum length of the answer in tokens, if set.
        system: The system prompt, and as many characters as the descriptions of tools have.

    Returns:
        The choice. It always contains the user's last message, whether that fits or not.
    """
    rate = rate_of(path, len(system))
    costs = [message_tokens(message, rate) for message in path]
    fixed = len(system) * rate + (TOKENS_PER_MESSAGE if system else 0)
    free = context - min(ANSWER_SHARE * context, answer or context)
    if fixed + sum(costs[first:]) > free:
        first = _later(path, first)
        while first < len(path) - 1 and fixed + sum(costs[first:]) > KEPT_SHARE * context:
            following = _later(path, first)
            if following == first:
                break
            first = following
    return Fit(first=first, tokens=round(fixed + sum(costs[first:])))


def rate_of(path: Sequence[Message], fixed: int = 0, usual: float = TOKENS_PER_CHARACTER) -> float:
    """Tokens per character of this conversation, by the runtime's last count.

    Args:
        path: Its messages.
        fixed: Characters that every prompt holds besides: the system prompt, and what describes tools.
        usual: What to assume before anything was counted.
    """
    characters, rate = fixed, usual
    for message in path:
        characters += message.length
        counted = message.statistics
        if counted is not None and counted.context_used and not counted.left_out and characters:
            rate = counted.context_used / characters
    return rate


def message_tokens(message: Message, rate: float) -> float:
    """Estimated number of tokens of a message."""
    return message.length * rate + TOKENS_PER_MESSAGE * (1 + len(message.calls))


def _later(path: Sequence[Message], first: int) -> int:
    """Index of the next user message after `first`; `first` if there is none."""
    return next((at for at in range(first + 1, len(path)) if path[at].role == "user"), first)
