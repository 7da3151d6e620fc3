"""The settings screen (F3). A setting applies when its field loses focus; a needed reload happens on leaving."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Button, Collapsible, Input, RadioSet, Select, TextArea

from app.errors import ClientError
from app.language import _
from app.network import host_of
from app.settings import RULES, Settings
from app.tui.figures import setting_name
from app.tui.messages import ReloadAsked, SettingChanged
from app.tui.plain import Plain
from app.tui.screens.dialogs import ConfirmDialog
from app.tui.session import Session
from app.tui.widgets.header import HeaderBar
from app.tui.widgets.key_line import KeyLine
from app.tui.widgets.progress_panel import ProgressPanel
from app.tui.widgets.setting_row import BudgetRow, OfferRow, SavedRow, SettingRow, cache_effect, effect

if TYPE_CHECKING:
    from runtime.wire.answers import Caches
    from runtime.wire.device import DeviceReport

QUALITY, MEMORY, CHAT, LOOK = _("Quality and speed"), _("Memory"), _("Chat"), _("Look")
ADVANCED = _("Advanced")
GROUPS = {
    QUALITY: ("budget", "speculate"),
    MEMORY: ("kv", "context"),
    CHAT: (
        "system_prompt",
        "thinking",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "max_tokens",
        "overflow",
        "history",
    ),
    LOOK: ("theme", "sidebar", "vim", "keys"),
    ADVANCED: (
        "prompt_budget",
        "k_chunk",
        "gamma",
        "sensitive_layers",
        "num_parallel",
        "max_models",
        "backend",
        "experts_on_device",
        "layers_on_device",
        "idle_unload",
    ),
}
"""Settings by heading; the last ones are folded unless one of them was changed."""
OF_ANY_RUNTIME = (CHAT, LOOK)
"""Groups that also apply to a remote server."""
REMOTE_NOTE = _(
    "{host} generates the answers, with its own model, settings, memory and context. "
    "To return to this machine: ^P, Endpoint."
)


class SettingsScreen(Screen[None]):
    """All settings except the model, which F2 picks, and another server, which ^P does."""

    AUTO_FOCUS = "#setting-budget RadioSet, #settings TextArea"
    HORIZONTAL_BREAKPOINTS = [(0, "-slim"), (75, "-narrow"), (90, "-wide"), (110, "-broad")]  # noqa: RUF012  declared so by Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", _("back"), tooltip=_("Back to the chat"), id="settings.back"),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._before: Settings = session.settings
        self._report: DeviceReport | None = None
        self._caches: Caches | None = None
        self._seen: tuple[object, ...] = ()
        self._remote: str | None = None

    def compose(self) -> ComposeResult:
        """Groups of settings, a line about pending reloads, and the progress of a job that a change started."""
        yield HeaderBar()
        with VerticalScroll(id="settings", can_focus=False):
            remote = self._remote = self._session.remote
            if remote is not None:
                yield Plain(REMOTE_NOTE.format(host=host_of(remote)), id="settings-elsewhere")
            for group, keys in GROUPS.items():
                if remote is not None and group not in OF_ANY_RUNTIME:
                    continue
                if group == ADVANCED:
                    usual = all(self._before.get(key) == Settings().get(key) for key in keys)
                    with Collapsible(title=group, collapsed=usual, id="settings-advanced"):
                        for key in keys:
                            yield SettingRow(key, self._before.get(key))
                    continue
                yield Plain(group, classes="setting-group")
                for key in keys:
                    row = BudgetRow if key == "budget" else SettingRow
                    yield row(key, self._before.get(key))
                if group == QUALITY:
                    yield OfferRow()
                if group == MEMORY:
                    yield Plain("", id="cache-effect")
                    yield SavedRow()
        yield Plain("", id="settings-note")
        yield ProgressPanel()
        yield KeyLine()

    def on_mount(self) -> None:
        """Show the running model."""
        self.show_session()

    def show_session(self) -> None:
        """Update header, progress and the budget's effect."""
        if not self.query(ProgressPanel):
            return
        session = self._session
        self.query_one(HeaderBar).show(session)
        self.query_one(ProgressPanel).show(session.job)
        if session.remote != self._remote:
            self.refresh(recompose=True)  # the server changed
        if session.remote is not None:
            return
        self._show_effect()
        status = session.status
        seen = (session.ready, status and status.model, status and status.budget, session.working)
        if seen != self._seen:
            self._seen = seen
            self.run_worker(self._ask_device(), group="device", exclusive=True, exit_on_error=False)
            self.run_worker(self._ask_caches(), group="caches", exclusive=True, exit_on_error=False)

    async def _ask_device(self) -> None:
        try:
            self._report = await self._session.client().device()
        except (ClientError, OSError):
            self._report = None  # the effect is shown without it
        self._show_effect()

    async def _ask_caches(self) -> None:
        try:
            self._caches = await self._session.client().caches()
        except (ClientError, OSError):
            self._caches = None
        for row in self.query(SavedRow):
            row.show(self._caches)
        self._show_effect()

    @on(Button.Pressed, "#offer-take")
    def take_offer(self) -> None:
        """Apply the best measured offer; the model is reloaded on leaving the screen."""
        for key, value in self.query_one(OfferRow).changes.items():
            row = self.query_one(f"#setting-{key}", SettingRow)
            row.put(value)
            self._take(row)

    @on(Button.Pressed, "#saved-delete")
    def delete_saved(self) -> None:
        """Delete the caches of all chats after a confirmation."""

        def delete(confirmed: bool | None) -> None:
            if confirmed:
                self.run_worker(self._delete_saved(), group="saved", exclusive=True, exit_on_error=False)

        question = _(
            "Delete the caches of all chats? The messages stay. A chat that goes on is processed again from the start."
        )
        self.app.push_screen(ConfirmDialog(question, _("Delete")), delete)

    async def _delete_saved(self) -> None:
        try:
            await self._session.client().forget()
        except (ClientError, OSError) as error:
            self.notify(str(error), severity="error")
        await self._ask_caches()

    def _show_effect(self) -> None:
        if not self.query(BudgetRow):
            return
        session = self._session
        lines = effect(
            session.settings,
            session.status if session.ready else None,
            self._report,
            speed=session.recent.last_speed,
            tuning=session.tuning,
        )
        settings, caches = session.settings, self._caches
        found = self._report.tuning if self._report is not None and session.ready else None
        wanted = settings.compensation()
        applied = not session.tuning and session.status is not None and session.status.budget == wanted.budget
        bought = () if found is None else found.bought
        row = self.query_one(BudgetRow)
        row.show_effect(lines, bought, wanted.budget_percent, applied=applied, exact=wanted.exact)
        self.query_one(OfferRow).show(None if found is None else found.offer, settings)
        words = cache_effect(caches, settings.kv, settings.context, session.status)
        about = self.query_one("#cache-effect", Plain)
        about.update("\n".join(words))
        about.display = bool(words)

    @on(Input.Submitted)
    @on(Input.Blurred)
    @on(Select.Changed)
    @on(RadioSet.Changed)
    def field_left(self, event: Input.Submitted | Input.Blurred | Select.Changed | RadioSet.Changed) -> None:
        """Apply a field."""
        event.stop()
        self._apply(event.control)

    def on_descendant_blur(self, event: events.DescendantBlur) -> None:
        """Apply a text area that lost focus."""
        if isinstance(event.widget, TextArea):
            self._apply(event.widget)

    def _apply(self, widget: object) -> None:
        for row in self.query(SettingRow):
            if widget in row.walk_children():
                self._take(row)

    def _take(self, row: SettingRow) -> None:
        if row.take():
            self.app.post_message(SettingChanged(row.key, row.value))
            self._show_reload_note()

    def _to_reload(self) -> list[str]:
        return [
            row.key for row in self.query(SettingRow)
            if RULES[row.key].reload and row.value != self._before.get(row.key)
        ]  # fmt: skip

    def _show_reload_note(self) -> None:
        keys = self._to_reload()
        note = self.query_one("#settings-note", Plain)
        names = ", ".join(map(setting_name, keys))
        note.update(_("{names}: the model is reloaded when you leave this screen", names=names) if keys else "")

    def apply(self) -> None:
        """Apply what was typed, and reload if needed, before the screen closes."""
        for row in self.query(SettingRow):
            self._take(row)
        if self._to_reload():
            self.app.post_message(ReloadAsked())

    def action_leave(self) -> None:
        """Apply what was typed, and go back to the chat."""
        self.apply()
        self.dismiss()
