"""A conversation: immutable messages with parent links, and the head of the branch on screen.

Several messages may answer the same parent. The head alone decides which one is shown, so asking again never loses
a message.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from app.language import _
from runtime.system.foreign import encodable
from runtime.text.reasoning import split_reasoning
from runtime.wire.codec import Count, Number


def _now() -> datetime:
    return datetime.now().astimezone()


Role = Literal["user", "assistant"]
State = Literal["streaming", "done", "stopped", "failed"]
CallState = Literal["asked", "running", "done", "failed", "refused", "stopped"]
NOT_RUN = "The call was stopped before it had a result."
Unit = Literal["line", "page", "paragraph"]
MAX_TEXT = 2**24
"""Maximum length in characters of a message from outside the program."""


DRAFTS = {"copies": _("copied drafts"), "head": _("the head's drafts"), "model": _("the model's drafts")}
"""Drafts by what made them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Statistics of an answer. Values that the runtime did not report are None."""

    tokens: Count
    """Tokens of the answer."""
    tokens_per_s: Number | None = None
    first_after_s: Number | None = None
    """Seconds from sending to the first text."""
    context_used: Count | None = None
    """Tokens of prompt and answer together."""
    context: Count | None = None
    """Size of the context in tokens."""
    bits: Number | None = None
    k_chunk: Mapping[str, Count] | Count | None = None
    """Compensated channels per 1024, one number or by layer type."""
    slowdown_percent: float | None = None
    """Measured slowdown of decoding by compensation, in percent."""
    prompt_slowdown_percent: float | None = None
    """Measured slowdown of the prompt by compensation, in percent."""
    gamma: Count | None = None
    """Tokens drafted per round; 0 if drafts were turned off because they did not pay; None without any."""
    acceptance_rate: Number | None = None
    """Share of the drafted tokens that were accepted."""
    tokens_per_verify: Number | None = None
    """Tokens per round of speculation."""
    drafted_by: str | None = None
    """What drafted most of them, see `runtime.wire.answers.SpeculationRecord.source`."""
    memory_bytes: Count | None = None
    cut: bool = False
    """Whether the answer ended because no more tokens were allowed or fit."""
    looped: bool = False
    """Whether it was ended because it only repeated itself."""
    left_out: Count | None = None
    """Number of messages at the beginning of the chat that the model did not see, because they did not fit."""
    estimated: bool = False
    """Whether these are the UI's own counts, because the answer ended before the runtime reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a tool, in the answer that made it."""

    id: str
    """What its result refers to."""
    name: str
    """The tool, as the model knows it."""
    arguments: str
    """JSON."""
    server: str = ""
    """Where the tool is."""
    state: CallState = "asked"
    result: str = ""
    """What the model gets: the result, or why there is none."""

    @property
    def ended(self) -> bool:
        """Whether it has a result."""
        return self.state not in ("asked", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A passage of a document that was found for a question."""

    file: str
    """The document's name, printable."""
    unit: Unit
    """What `first` and `last` count."""
    first: Count
    """Number of its first line, page or paragraph, from 1."""
    last: Count
    """Number of its last one."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file or folder whose passages a chat searches."""

    path: str
    """Its absolute path."""
    name: str
    """Its name on the screen, printable."""
    tokens: Count
    """Its size in tokens, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One immutable message. A changed text is a new `Message` with the same id."""

    id: str
    parent: str | None
    """Id of the message that it follows; None at the beginning."""
    role: Role
    text: str
    state: State = "done"
    error: str | None = None
    """The reason in one sentence, if `state` is failed."""
    model: str | None = None
    """Name of the model that answered."""
    statistics: Statistics | None = None
    calls: Sequence[Call] = ()
    """The tools that this answer called. The answer that uses their results is the next message."""
    passages: Sequence[Passage] | None = None
    """The passages of documents that the answer was given, none if nothing was found; None if nothing was searched."""
    created: datetime = field(default_factory=_now)

    @property
    def length(self) -> int:
        """Characters that the model reads of it."""
        return len(self.text) + sum(len(call.name) + len(call.arguments) + len(call.result) for call in self.calls)

    @property
    def resumable(self) -> bool:
        """Whether it is an answer that ended early and can be continued."""
        cut = self.statistics is not None and (self.statistics.cut or self.statistics.looped)
        if self.calls:
            return False  # its next message is what goes on
        return self.role == "assistant" and (self.state in ("stopped", "failed") or cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """A conversation's data apart from its messages."""

    model: str | None = None
    """The model that it uses; None until one is chosen."""
    settings: Mapping[str, str | int | float | None] = field(default_factory=dict)
    """The conversation's own settings, by key: system prompt and sampling."""
    draft: str = ""
    """Text that was typed but not sent."""
    since: str | None = None
    """Id of the first message that the model still sees; earlier ones no longer fit. None if it sees all."""
    summary: str = ""
    """The summary of the messages before `since` that the model is given."""
    tools: Sequence[str] | None = None
    """Keys of the tools that it may use; None: those that a new chat begins with."""
    queued: Sequence[str] = ()
    """Prompts that are sent one after the other when the answer before them is complete."""
    sources: Sequence[Source] = ()
    """The documents that are searched for every prompt."""


class Conversation:
    """Messages by id, and the head: the last message of the path that is shown."""

    def __init__(self, now: Callable[[], datetime] = _now) -> None:
        self._messages: dict[str, Message] = {}
        self._now = now
        self.on_change: Callable[[Message], object] | None = None
        """Called with every message that is added or changed."""
        self.id = uuid.uuid4().hex
        """Its random name in the runtime, which reveals nothing about its content."""
        self.head: str | None = None
        self.extras = Extras()

    def another(self) -> Conversation:
        """A new, empty conversation with the same clock."""
        return Conversation(self._now)

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._messages

    def __getitem__(self, message_id: str) -> Message:
        return self._messages[message_id]

    def __iter__(self) -> Iterator[Message]:
        """The messages of all branches, parents first."""
        return iter(self._messages.values())

    def add(self, role: Role, text: str, *, parent: str | None, **fields: Any) -> Message:
        """Add a message under `parent` and make it the head. Lone surrogates in its text are replaced.

        Raises:
            KeyError: there is no message `parent`.
        """
        if parent is not None and parent not in self._messages:
            raise KeyError(parent)
        message = Message(
            id=uuid.uuid4().hex, parent=parent, role=role, text=encodable(text), created=self._now(), **fields
        )
        self._messages[message.id] = message
        self.head = message.id
        self._tell(message)
        return message

    def revise(self, message_id: str, **changes: Any) -> Message:
        """Replace a message by a changed copy: an answer that grew, stopped or failed.

        Raises:
            KeyError: there is no such message.
        """
        message = dataclasses.replace(self._messages[message_id], **changes)
        self._messages[message_id] = message
        self._tell(message)
        return message

    def _tell(self, message: Message) -> None:
        if self.on_change is not None:
            self.on_change(message)

    def path(self, head: str | None = None) -> list[Message]:
        """The messages from the first one to `head`, by default the conversation's head."""
        at = self.head if head is None else head
        path: list[Message] = []
        while at is not None:
            message = self._messages[at]
            path.append(message)
            at = message.parent
        return path[::-1]

    def siblings(self, message_id: str) -> list[Message]:
        """All messages with the same parent, including this one, oldest first."""
        parent = self._messages[message_id].parent
        return [message for message in self._messages.values() if message.parent == parent]

    def branches(self) -> Mapping[str | None, list[str]]:
        """The ids of each message's children, oldest first; first messages are under None."""
        found: dict[str | None, list[str]] = {}
        for message in self._messages.values():
            found.setdefault(message.parent, []).append(message.id)
        return found

    def leaf(self, message_id: str) -> str:
        """The last message of the newest path through a message."""
        followed: dict[str, str] = {}
        for message in self._messages.values():
            if message.parent is not None:
                followed[message.parent] = message.id
        while message_id in followed:
            message_id = followed[message_id]
        return message_id

    def walk(self, message_id: str, step: int) -> bool:
        """Move the head to a sibling branch of a message.

        Args:
            message_id: a message of the current path.
            step: -1 for the previous sibling, 1 for the next one.

        Returns:
            Whether there is such a sibling; the path then leads through it.
        """
        siblings = [message.id for message in self.siblings(message_id)]
        at = siblings.index(message_id) + step
        if not 0 <= at < len(siblings):
            return False
        self.head = self.leaf(siblings[at])
        return True

    def restore(self, conversation_id: str, messages: Sequence[Message], head: str | None) -> None:
        """Load a saved conversation into this one.

        Args:
            conversation_id: Its name in the runtime.
            messages: The messages of all branches. One whose parent is missing, or follows it, starts a branch of its
                own, so that every path ends.
            head: Id of the head; the newest message if that is missing.
        """
        found = {message.id: message for message in messages}
        self._messages = {}
        for message in messages:
            line: dict[str, Message] = {}
            at: str | None = message.id
            while at in found and at not in self._messages and at not in line:
                line[at] = found[at]
                at = found[at].parent
            if line and at not in self._messages:
                top = next(reversed(line))
                line[top] = dataclasses.replace(line[top], parent=None)
            self._messages |= dict(reversed(line.items()))
        self.id = conversation_id
        self.head = head if head in found else messages[-1].id if messages else None


def prompt_of(path: Sequence[Message], system_prompt: str = "") -> list[Mapping[str, Any]]:
    """The messages in the form that the model receives.

    Answers that failed before their first word are left out. Prompts that then follow each other are merged, because
    chat templates require alternating turns. Calls of tools are followed by their results.
    """
    prompt: list[Mapping[str, Any]] = []
    if system_prompt.strip():
        prompt.append({"role": "system", "content": system_prompt})
    for message in path:
        if message.calls:
            prompt += _called(message)
            continue
        if message.role == "assistant" and not message.text:
            continue
        content = message.text if message is path[-1] or message.role == "user" else split_reasoning(message.text)[1]
        if prompt and prompt[-1]["role"] == message.role:
            content = f"{prompt.pop()['content']}\n\n{content}"
        prompt.append({"role": message.role, "content": content})
    return prompt


def _called(message: Message) -> list[Mapping[str, Any]]:
    """An answer with calls, and their results."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.calls
    ]
    said = {"role": "assistant", "content": split_reasoning(message.text)[1], "tool_calls": calls}
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": call.result if call.ended else NOT_RUN}
        for call in message.calls
    ]
    return [said, *results]
