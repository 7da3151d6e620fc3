"""What the parts of the UI tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

from app.tui.jobs import Job

if TYPE_CHECKING:
    from app.history.store import Chat
    from runtime.wire.requests import QuantizeRequest


@dataclass
class StatusChanged(Message):
    """The runtime is doing something else, or with another model."""


@dataclass
class JobChanged(Message):
    """A long piece of work began, went on, or ended."""

    job: Job


@dataclass
class RuntimeLost(Message):
    """The runtime process is gone."""

    reason: str


@dataclass
class Submitted(Message):
    """A person sent a prompt."""

    text: str


@dataclass
class LeftOut(Message):
    """The beginning of a chat does not fit the context any more, and the model is no longer given it."""

    conversation: str


@dataclass
class MessageAct(Message):
    """A person wants something done with one message: see `ChatScreen.act`."""

    act: str
    message: str


@dataclass
class NotKept(Message):
    """Chats can't be kept."""

    reason: str


@dataclass
class ChatEnded(Message):
    """The chat in sight was deleted; an empty one takes its place."""


@dataclass
class ChatAsked(Message):
    """A person picked a chat to go on with."""

    chat: Chat


@dataclass
class LoadAsked(Message):
    """A person picked a model."""

    name: str


@dataclass
class QuantizeAsked(Message):
    """A person wants a low-bit model made of a checkpoint, and to chat with it."""

    request: QuantizeRequest


@dataclass
class TuneAsked(Message):
    """A person wants the model that runs tuned again, measured anew."""


@dataclass
class RemoveAsked(Message):
    """A person confirmed that a stored model may be deleted."""

    name: str


@dataclass
class SettingChanged(Message):
    """A setting got another value, checked already."""

    key: str
    value: str | int | float | None


@dataclass
class ReloadAsked(Message):
    """Settings changed that take effect only when the model is loaded again."""
