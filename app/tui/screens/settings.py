"""The settings (F3). Each is applied as soon as it is left; what needs a reload is reloaded on leaving the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Button, Footer, Input, RadioSet, Select, Static, TextArea

from app.errors import ClientError
from app.remote import host_of
from app.settings import RULES, Settings
from app.tui.messages import ReloadAsked, SettingChanged
from app.tui.screens.dialogs import ConfirmDialog
from app.tui.session import Session
from app.tui.widgets.budget_row import BudgetRow, effect
from app.tui.widgets.header import HeaderBar
from app.tui.widgets.offer_row import OfferRow
from app.tui.widgets.progress_panel import ProgressPanel
from app.tui.widgets.saved_row import SavedRow, cache_effect
from app.tui.widgets.setting_row import SettingRow
from runtime.compensation import of_settings

if TYPE_CHECKING:
    from runtime.wire.answers import Caches
    from runtime.wire.device import DeviceReport

GROUPS = {
    "Quality and speed": ("budget", "prompt_budget", "k_chunk", "speculate", "gamma", "num_parallel"),
    "Memory": ("kv", "context"),
    "Chat": (
        "system_prompt",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "max_tokens",
        "overflow",
        "history",
    ),
    "Look": ("theme", "sidebar", "keys"),
    "Runtime": ("backend", "idle_unload"),
}
OF_ANY_RUNTIME = ("Chat", "Look")
"""Groups that also count where a server elsewhere answers."""
ELSEWHERE = (
    "{host} answers. Its model, how it is set, its memory and its context are its own; "
    "^P, Endpoint, lets this machine answer again."
)


class SettingsScreen(Screen[None]):
    """All settings but the model, which F2 picks."""

    AUTO_FOCUS = "#setting-budget RadioSet, #settings TextArea"
    HORIZONTAL_BREAKPOINTS = [(0, "-slim"), (75, "-narrow"), (90, "-wide"), (110, "-broad")]  # noqa: RUF012  declared so by Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "back", tooltip="Back to the chat", id="settings.back"),
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
        """Groups of settings, a line that says what a change entails, and the work that a change began."""
        yield HeaderBar()
        with VerticalScroll(id="settings", can_focus=False):
            remote = self._remote = self._session.remote
            if remote is not None:
                yield Static(ELSEWHERE.format(host=host_of(remote)), markup=False, id="settings-elsewhere")
            for group, keys in GROUPS.items():
                if remote is not None and group not in OF_ANY_RUNTIME:
                    continue
                yield Static(group, classes="setting-group")
                for key in keys:
                    row = BudgetRow if key == "budget" else SettingRow
                    yield row(key, self._before.get(key))
                    if key == "gamma":
                        yield OfferRow()
                if group == "Memory":
                    yield Static("", markup=False, id="cache-effect")
                    yield SavedRow()
        yield Static("", markup=False, id="settings-note")
        yield ProgressPanel()
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Show what runs."""
        self.show_session()

    def show_session(self) -> None:
        """Bring header, progress and what the budget buys up to date."""
        if not self.query(ProgressPanel):
            return
        session = self._session
        self.query_one(HeaderBar).show(session)
        self.query_one(ProgressPanel).show(session.job)
        if session.remote != self._remote:
            self.refresh(recompose=True)  # another server answers from now on
        if session.remote is not None:
            return
        self._show_effect()
        status = session.status
        seen = (session.ready, status and status.model, status and status.budget_percent, session.working)
        if seen != self._seen:
            self._seen = seen
            self.run_worker(self._ask_device(), group="device", exclusive=True, exit_on_error=False)
            self.run_worker(self._ask_caches(), group="caches", exclusive=True, exit_on_error=False)

    async def _ask_device(self) -> None:
        try:
            self._report = await self._session.device()
        except (ClientError, OSError):
            self._report = None  # then the effect is told without it
        self._show_effect()

    async def _ask_caches(self) -> None:
        try:
            self._caches = await self._session.caches()
        except (ClientError, OSError):
            self._caches = None
        for row in self.query(SavedRow):
            row.show(self._caches)
        self._show_effect()

    @on(Button.Pressed, "#offer-take")
    def take_offer(self) -> None:
        """Decode as the best way that was measured does; the model is loaded again when the screen is left."""
        for key, value in self.query_one(OfferRow).changes.items():
            row = self.query_one(f"#setting-{key}", SettingRow)
            row.put(value)
            self._take(row)

    @on(Button.Pressed, "#saved-delete")
    def delete_saved(self) -> None:
        """Delete what is kept of chats, if that is confirmed."""

        def delete(confirmed: bool | None) -> None:
            if confirmed:
                self.run_worker(self._delete_saved(), group="saved", exclusive=True, exit_on_error=False)

        question = (
            "Delete the caches of all chats? What was said stays, and is read from its beginning when it goes on."
        )
        self.app.push_screen(ConfirmDialog(question, "Delete"), delete)

    async def _delete_saved(self) -> None:
        try:
            await self._session.forget_all()
        except (ClientError, OSError) as error:
            self.notify(str(error), severity="error", markup=False)
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
        wanted = of_settings(settings.k_chunk, settings.budget).budget_percent
        self.query_one(BudgetRow).show_effect(lines, () if found is None else found.bought, wanted)
        self.query_one(OfferRow).show(None if found is None else found.offer, settings)
        words = cache_effect(caches.kinds if caches is not None else {}, settings.kv, settings.context, session.status)
        about = self.query_one("#cache-effect", Static)
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
        """Apply a text that was left."""
        if isinstance(event.widget, TextArea):
            self._apply(event.widget)

    def _apply(self, widget: object) -> None:
        for row in self.query(SettingRow):
            if widget in row.walk_children():
                self._take(row)

    def _take(self, row: SettingRow) -> None:
        if row.take():
            self.app.post_message(SettingChanged(row.key, row.value))
            self._say_what_reloads()
            self.call_later(self._show_effect)

    def _to_reload(self) -> list[str]:
        return [
            row.key for row in self.query(SettingRow)
            if RULES[row.key].reload and row.value != self._before.get(row.key)
        ]  # fmt: skip

    def _say_what_reloads(self) -> None:
        keys = self._to_reload()
        note = self.query_one("#settings-note", Static)
        names = ", ".join(key.replace("_", " ") for key in keys)
        note.update(f"{names}: the model is loaded again when you leave this screen" if keys else "")

    def apply(self) -> None:
        """Apply what is typed, and reload if that is needed. The screen is about to be left."""
        for row in self.query(SettingRow):
            self._take(row)
        if self._to_reload():
            self.app.post_message(ReloadAsked())

    def action_leave(self) -> None:
        """Apply what is typed, and go back to the chat."""
        self.apply()
        self.dismiss()
