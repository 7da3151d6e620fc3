"""The header: the running model, its settings, and the device."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal

from app.amounts import byte_count
from app.language import _
from app.printable import printable_name
from app.tui.figures import SEPARATOR, bit_count, budget_text, k_chunk_text
from app.tui.plain import Plain
from app.tui.session import Session
from runtime.kv.kinds import DEFAULT_KV


class HeaderPart(Plain, can_focus=True):
    """A part of the header that opens a screen on a click or Enter."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "open", _("Open"), show=False, id="header.open")]

    def __init__(self, action: str, tooltip: str, *, id: str) -> None:  # noqa: A002  the name is Textual's
        super().__init__(id=id)
        self._action = action
        self.tooltip = tooltip

    def leads_to(self, action: str, tooltip: str) -> None:
        """Change the screen it opens."""
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
        """Name, model, settings, device."""
        yield Plain("lowbit-chat", id="header-name")
        yield HeaderPart("app.models", _("The running model. Opens the models (F2)."), id="header-model")
        yield HeaderPart("app.settings", _("Its settings. Opens the settings (F3)."), id="header-settings")
        yield HeaderPart("app.device", _("The device. Opens the device screen (F4)."), id="header-device")

    def show(self, session: Session) -> None:
        """Show the session's state."""
        model, settings = model_parts(session), settings_parts(session)
        self.set_class(bool(settings), "-parted")
        self.query_one("#header-model", HeaderPart).update(SEPARATOR.join(model))
        self.query_one("#header-settings", HeaderPart).update(SEPARATOR.join(["", *settings]).lstrip())
        device = self.query_one("#header-device", HeaderPart)
        device.update(device_line(session))
        if session.remote is None:
            device.leads_to("app.device", _("The device. Opens the device screen (F4)."))
        else:
            device.leads_to("app.endpoint", _("The remote server. Opens the choice of server."))


def model_line(session: Session) -> str:
    """The running model and its settings, or why there is none."""
    return SEPARATOR.join([*model_parts(session), *settings_parts(session)])


def model_parts(session: Session) -> list[str]:
    """The running model, or why there is none."""
    status = session.status
    if session.working and session.job is not None:
        return [f"{session.job.title} …"]
    if status is None:
        return [session.problem or _("starting …")]
    if session.resting:
        return [_("{name} unloaded; loads when you write", name=printable_name(session.wanted or ""))]
    if not session.ready or status.model is None:
        return [_("no model loaded")]
    from runtime.wire.answers import BASE

    name = printable_name(status.model)
    parts = [name, "" if status.bits is None else bit_count(status.bits), _(BASE) if status.base else ""]
    return [part for part in parts if part]


def settings_parts(session: Session) -> list[str]:
    """The running model's settings: its budget, or the k_chunk that overrides it."""
    status = session.status
    if status is None or session.working or not session.ready or status.model is None:
        return []
    parts = [budget_text(status.budget) or k_chunk_text(status.k_chunk)]
    if status.kv and status.kv != DEFAULT_KV:
        parts.append(f"KV {status.kv}")
    return [part for part in parts if part]


def device_line(session: Session) -> str:
    """The device, and the memory in use."""
    status = session.status
    if status is None or not session.ready:
        return ""
    parts = [status.backend or "", byte_count(status.memory_bytes) if status.memory_bytes else ""]
    return SEPARATOR.join(part for part in parts if part)
