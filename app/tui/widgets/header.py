"""The top line: what runs, and what it takes."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import Static

from app.amounts import byte_count
from app.tui.figures import SEPARATOR, bit_count, budget_text, k_chunk_text
from app.tui.session import Session


class HeaderPart(Static, can_focus=True):
    """A piece of the header that opens a screen when it is clicked or entered."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "open", "Open", show=False, id="header.open")]

    def __init__(self, action: str, tooltip: str, *, id: str) -> None:  # noqa: A002  the name is Textual's
        super().__init__(id=id, markup=False)
        self._action = action
        self.tooltip = tooltip

    def leads_to(self, action: str, tooltip: str) -> None:
        """Open something else from now on."""
        self._action, self.tooltip = action, tooltip

    async def action_open(self) -> None:
        """Open the screen."""
        await self.run_action(self._action)

    async def on_click(self) -> None:
        """Open the screen."""
        await self.action_open()


class HeaderBar(Horizontal):
    """`lowbit-chat  demo · 4-bit · budget 5 %        cpu · 812 MB`."""

    def compose(self) -> ComposeResult:
        """The name, what runs, how it is set, and on what it runs."""
        yield Static("lowbit-chat", id="header-name")
        yield HeaderPart("app.models", "The model that runs. Opens the models (F2).", id="header-model")
        yield HeaderPart("app.settings", "How it is set. Opens the settings (F3).", id="header-settings")
        yield HeaderPart("app.device", "What it runs on. Opens the device (F4).", id="header-device")

    def show(self, session: Session) -> None:
        """Say what the session is doing."""
        model, settings = model_parts(session), settings_parts(session)
        self.set_class(bool(settings), "-parted")
        self.query_one("#header-model", HeaderPart).update(SEPARATOR.join(model))
        self.query_one("#header-settings", HeaderPart).update(SEPARATOR.join(["", *settings]).lstrip())
        device = self.query_one("#header-device", HeaderPart)
        device.update(device_line(session))
        if session.remote is None:
            device.leads_to("app.device", "What it runs on. Opens the device (F4).")
        else:
            device.leads_to("app.endpoint", "The server that answers. Asks for another one, or this machine again.")


def model_line(session: Session) -> str:
    """What runs and how it is set, or why nothing does."""
    return SEPARATOR.join([*model_parts(session), *settings_parts(session)])


def model_parts(session: Session) -> list[str]:
    """What runs, or why nothing does."""
    status = session.status
    if session.working and session.job is not None:
        return [f"{session.job.title} …"]
    if status is None:
        return [session.problem or "starting …"]
    if session.resting:
        return [f"{session.wanted} rests until you write"]
    if not session.ready or status.model is None:
        return ["no model loaded"]
    return [status.model] if status.bits is None else [status.model, bit_count(status.bits)]


def settings_parts(session: Session) -> list[str]:
    """How the model that runs is set: its budget, or its k_chunk where that was given instead."""
    status = session.status
    if status is None or session.working or not session.ready or status.model is None:
        return []
    parts = [budget_text(status.budget_percent) or k_chunk_text(status.k_chunk)]
    if status.kv and status.kv != "fp16":
        parts.append(f"KV {status.kv}")
    return [part for part in parts if part]


def device_line(session: Session) -> str:
    """What it runs on, and the memory really in use."""
    status = session.status
    if status is None or not session.ready:
        return ""
    parts = [status.backend or "", byte_count(status.memory_bytes) if status.memory_bytes else ""]
    return SEPARATOR.join(part for part in parts if part)
