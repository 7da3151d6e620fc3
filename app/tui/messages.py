"""Messages between the parts of the UI."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from textual.message import Message

from app.tui.jobs import Job

if TYPE_CHECKING:
    from app.history.exchange import ImportedChat
    from app.history.store import Chat
    from runtime.errors import Problem
    from runtime.wire.requests import QuantizeRequest


@dataclass
class StatusChanged(Message):
    """The runtime's state or model changed."""


@dataclass
class JobChanged(Message):
    """A job started, progressed or ended."""

    job: Job


@dataclass
class RuntimeLost(Message):
    """The runtime process is gone."""

    reason: str


@dataclass
class Submitted(Message):
    """The user sent a prompt; an empty one stands for the first that is queued."""

    text: str


@dataclass
class TakenBack(Message):
    """The user wants a queued prompt back in the composer, by its place in the queue."""

    at: int


@dataclass
class LeftOut(Message):
    """The beginning of a chat no longer fits in the context, so the model no longer sees it."""

    conversation: str


@dataclass
class CallAsked(Message):
    """A call of a tool waits for permission."""

    conversation: str


@dataclass
class ToolsChanged(Message):
    """A server of tools started, ended, or changed its lists."""


@dataclass
class MessageAct(Message):
    """The user wants to act on one message: see `ChatScreen.act`."""

    act: str
    message: str


@dataclass
class WithoutEffect(Message):
    """The budget has no effect on the running model."""

    problem: Problem
    """Why."""


@dataclass
class NotKept(Message):
    """Chats can't be saved."""

    reason: str


@dataclass
class NotSearched(Message):
    """The documents of a chat can't be searched."""

    reason: str


@dataclass
class AttachAsked(Message):
    """The user dropped a file on the terminal."""

    path: Path
    typed: str
    """What to type if it can't be attached."""


@dataclass
class ChatEnded(Message):
    """The chat on screen was deleted; an empty one takes its place."""


@dataclass
class ChatAsked(Message):
    """The user picked a chat to open, or a file with one."""

    chat: Chat | ImportedChat


@dataclass
class LoadAsked(Message):
    """The user picked a model."""

    name: str


@dataclass
class QuantizeAsked(Message):
    """The user wants to quantize a checkpoint and chat with it."""

    request: QuantizeRequest


@dataclass
class TuneAsked(Message):
    """The user wants the running model measured and tuned again."""


@dataclass
class RemoveAsked(Message):
    """The user confirmed the deletion of a stored model."""

    name: str


@dataclass
class SettingChanged(Message):
    """A setting changed; its value is already checked."""

    key: str
    value: str | int | float | None


@dataclass
class ReloadAsked(Message):
    """Settings changed that take effect only after a reload of the model."""
