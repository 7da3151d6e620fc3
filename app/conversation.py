"""A conversation: immutable messages with parent links, and the head that a person is looking at.

Several messages may answer the same parent; which one is shown is decided by the head alone, so nothing said is ever
lost by asking again.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal


def _now() -> datetime:
    return datetime.now().astimezone()


REASONING = ("<think>", "</think>")
"""What reasoning models write around what they think before they answer."""
Role = Literal["user", "assistant"]
State = Literal["streaming", "done", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What an answer cost. Anything the runtime did not tell is None."""

    tokens: int
    """Tokens of the answer."""
    tokens_per_s: float | None = None
    first_after_s: float | None = None
    """Seconds from sending to the first text."""
    context_used: int | None = None
    """Tokens of prompt and answer together."""
    context: int | None = None
    """Tokens that fit."""
    bits: float | None = None
    k_chunk: Mapping[str, int] | int | None = None
    """Compensated channels per 1024, one number or by layer type."""
    slowdown_percent: float | None = None
    """By how much compensation slowed decoding down, as it was measured."""
    prompt_slowdown_percent: float | None = None
    """How much longer the prompt took by compensation, as it was measured."""
    gamma: int | None = None
    """Tokens drafted a round at the end; 0: rounds did not pay. None: there was no speculation."""
    acceptance_rate: float | None = None
    """Part of the drafted tokens that stayed."""
    tokens_per_verify: float | None = None
    """Tokens that a round of speculation gave."""
    memory_bytes: int | None = None
    cut: bool = False
    """Whether the answer ended because no more tokens were allowed or fit."""
    left_out: int | None = None
    """Messages at the beginning of the chat that the model was not given, because they did not fit."""
    estimated: bool = False
    """Whether the UI counted itself, because the answer ended before the runtime could report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message, never changed: a longer text is another `Message` with the same id."""

    id: str
    parent: str | None
    """Id of the message it follows; None at the beginning."""
    role: Role
    text: str
    state: State = "done"
    error: str | None = None
    """Why it failed, in one sentence, when `state` is failed."""
    model: str | None = None
    """Name of the model that answered."""
    statistics: Statistics | None = None
    created: datetime = field(default_factory=_now)

    @property
    def resumable(self) -> bool:
        """Whether it is an answer that ended early and can be continued."""
        cut = self.statistics is not None and self.statistics.cut
        return self.role == "assistant" and (self.state in ("stopped", "failed") or cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What belongs to a conversation beside its messages."""

    model: str | None = None
    """The model that it is had with; None while nobody chose."""
    settings: Mapping[str, str | int | float | None] = field(default_factory=dict)
    """Settings of this conversation alone, by key: system prompt and sampling."""
    draft: str = ""
    """What was typed and not sent."""
    since: str | None = None
    """The first message that the model still reads; what is before it no longer fits. None: all."""
    summary: str = ""
    """What the model is told of the messages before `since`."""


class Conversation:
    """Messages by id, and the head: the last message of the path that is shown."""

    def __init__(self, now: Callable[[], datetime] = _now) -> None:
        self._messages: dict[str, Message] = {}
        self._now = now
        self.on_change: Callable[[Message], object] | None = None
        """Told of every message that is added or changed."""
        self.id = uuid.uuid4().hex
        """What the runtime knows it by; nothing said can be told from it."""
        self.head: str | None = None
        self.extras = Extras()

    def another(self) -> Conversation:
        """An empty conversation beside this one."""
        return Conversation(self._now)

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._messages

    def __getitem__(self, message_id: str) -> Message:
        return self._messages[message_id]

    def add(self, role: Role, text: str, *, parent: str | None, **fields: Any) -> Message:
        """Add a message under `parent` and make it the head.

        Raises:
            KeyError: there is no message `parent`.
        """
        if parent is not None and parent not in self._messages:
            raise KeyError(parent)
        message = Message(id=uuid.uuid4().hex, parent=parent, role=role, text=text, created=self._now(), **fields)
        self._messages[message.id] = message
        self.head = message.id
        self._tell(message)
        return message

    def revise(self, message_id: str, **changes: Any) -> Message:
        """Put a changed copy in the place of a message: an answer that grew, stopped or failed.

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
        """The messages from the first one to `head` (by default the conversation's own)."""
        at = self.head if head is None else head
        path: list[Message] = []
        while at is not None:
            message = self._messages[at]
            path.append(message)
            at = message.parent
        return path[::-1]

    def siblings(self, message_id: str) -> list[Message]:
        """All messages that follow the same parent, itself included, oldest first."""
        parent = self._messages[message_id].parent
        return [message for message in self._messages.values() if message.parent == parent]

    def branches(self) -> Mapping[str | None, list[str]]:
        """The ids of the messages that follow each message, oldest first; those that begin under None."""
        found: dict[str | None, list[str]] = {}
        for message in self._messages.values():
            found.setdefault(message.parent, []).append(message.id)
        return found

    def leaf(self, message_id: str) -> str:
        """The last message of the newest path that leads on from a message."""
        followed: dict[str, str] = {}
        for message in self._messages.values():
            if message.parent is not None:
                followed[message.parent] = message.id
        while message_id in followed:
            message_id = followed[message_id]
        return message_id

    def walk(self, message_id: str, step: int) -> bool:
        """Look at the branch beside a message.

        Args:
            message_id: the message, one of the path that is shown.
            step: -1 for the sibling before it, 1 for the one after it.

        Returns:
            Whether there is one; the path then leads through it.
        """
        siblings = [message.id for message in self.siblings(message_id)]
        at = siblings.index(message_id) + step
        if not 0 <= at < len(siblings):
            return False
        self.head = self.leaf(siblings[at])
        return True

    def restore(self, conversation_id: str, messages: Sequence[Message], head: str | None) -> None:
        """Become a conversation that was had before.

        Args:
            conversation_id: What the runtime knows it by.
            messages: All branches. A message whose parent is missing begins one of its own.
            head: The message that is shown last; the newest one where it is missing.
        """
        ids = {message.id for message in messages}
        self._messages = {
            message.id: message if message.parent in ids else dataclasses.replace(message, parent=None)
            for message in messages
        }
        self.id = conversation_id
        self.head = head if head in ids else messages[-1].id if messages else None


def prompt_of(path: Sequence[Message], system_prompt: str = "") -> list[Mapping[str, str]]:
    """The messages as a model is given them.

    Answers that failed before their first word are left out; prompts that then follow each other become one, because
    chat templates insist on turns.
    """
    prompt: list[Mapping[str, str]] = []
    if system_prompt.strip():
        prompt.append({"role": "system", "content": system_prompt})
    for message in path:
        if message.role == "assistant" and not message.text:
            continue
        content = message.text if message is path[-1] or message.role == "user" else split_reasoning(message.text)[1]
        if prompt and prompt[-1]["role"] == message.role:
            content = f"{prompt.pop()['content']}\n\n{content}"
        prompt.append({"role": message.role, "content": content})
    return prompt


def split_reasoning(text: str) -> tuple[str, str]:
    """What a model thought before its answer, and the answer. Reasoning that has not ended yet is all reasoning."""
    if not text.lstrip().startswith(REASONING[0]):
        return "", text
    inside = text.lstrip().removeprefix(REASONING[0])
    thought, ended, answer = inside.partition(REASONING[1])
    return thought.strip("\n"), answer.lstrip("\n") if ended else ""
