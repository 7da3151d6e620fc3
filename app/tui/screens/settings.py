"""The settings (F3). Each is applied as soon as it is left; what needs a reload is reloaded on leaving the screen."""

from __future__ import annotations

from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Input, Select, Static, TextArea

from app.settings import RULES, UNSET, Settings, SettingsError, Value, check
from app.tui.messages import ReloadAsked, SettingChanged
from app.tui.session import Session
from app.tui.widgets.header import HeaderBar

GROUPS = {
    "Chat": ("system_prompt", "temperature", "top_p", "top_k", "min_p", "max_tokens"),
    "Memory and quality": ("kv", "context", "k_chunk"),
    "Runtime": ("backend",),
    "Look": ("theme",),
}


class SettingRow(Vertical):
    """One setting: its name, its value, what it means, and what is wrong with what was typed."""

    def __init__(self, key: str, value: Value) -> None:
        super().__init__(id=f"setting-{key}", classes="setting")
        self.key = key
        self._rule = RULES[key]
        self._value = value

    def compose(self) -> ComposeResult:
        """Name, field and meaning on one line, the problem under them."""
        shown = UNSET if self._value is None else str(self._value)
        with Horizontal(classes="setting-line"):
            yield Static(self.key.replace("_", " "), classes="setting-name")
            if self._rule.choices:
                choices = [(choice, choice) for choice in self._rule.choices]
                yield Select(choices, value=shown, allow_blank=False, compact=True)
            elif self._rule.kind is str:
                yield TextArea(
                    shown,
                    compact=True,
                    tab_behavior="focus",
                    show_line_numbers=False,
                    highlight_cursor_line=False,
                    placeholder=self._rule.meaning,
                )
            else:
                yield Input(shown, compact=True)
            if self._rule.kind is not str or self._rule.choices:
                meaning = self._rule.meaning + (" · reloads" if self._rule.reload else "")
                yield Static(meaning, markup=False, classes="setting-meaning")
        yield Static("", markup=False, classes="setting-problem")

    def typed(self) -> str:
        """What stands in the field."""
        if self._rule.choices:
            return str(self.query_one(Select).value)
        if self._rule.kind is str:
            return self.query_one(TextArea).text
        return self.query_one(Input).value.strip()

    def take(self) -> bool:
        """Check what was typed and say so.

        Returns:
            Whether there is a new, acceptable value; `value` then holds it.
        """
        problem = self.query_one(".setting-problem", Static)
        try:
            value = check(self.key, self.typed() or (UNSET if self._rule.optional else ""))
        except SettingsError:
            problem.update(f"allowed: {self._rule.allowed}")
            problem.display = True
            return False
        problem.display = False
        changed = value != self._value
        self._value = value
        return changed

    @property
    def value(self) -> Value:
        """The value that was last accepted."""
        return self._value


class SettingsScreen(Screen[None]):
    """All settings but the model, which F2 picks."""

    AUTO_FOCUS = "#setting-temperature Input"
    HORIZONTAL_BREAKPOINTS = [(0, "-slim"), (60, "-narrow"), (90, "-wide")]  # noqa: RUF012  declared so by Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "back", tooltip="Back to the chat", id="settings.back"),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._before: Settings = session.settings

    def compose(self) -> ComposeResult:
        """Groups of settings, and a line that says what a change entails."""
        yield HeaderBar()
        with VerticalScroll(id="settings"):
            for group, keys in GROUPS.items():
                yield Static(group, classes="setting-group")
                for key in keys:
                    yield SettingRow(key, self._before.get(key))
        yield Static("", markup=False, id="settings-note")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Show what runs."""
        self.show_session()

    def show_session(self) -> None:
        """Bring the header up to date."""
        for header in self.query(HeaderBar):
            header.show(self._session)

    @on(Input.Submitted)
    @on(Input.Blurred)
    @on(Select.Changed)
    def field_left(self, event: Input.Submitted | Input.Blurred | Select.Changed) -> None:
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

    def _to_reload(self) -> list[str]:
        return [
            row.key for row in self.query(SettingRow)
            if RULES[row.key].reload and row.value != self._before.get(row.key)
        ]  # fmt: skip

    def _say_what_reloads(self) -> None:
        keys = self._to_reload()
        note = self.query_one("#settings-note", Static)
        note.display = bool(keys)
        names = ", ".join(key.replace("_", " ") for key in keys)
        note.update(f"{names}: the model is loaded again when you leave this screen")

    def action_leave(self) -> None:
        """Apply what is typed, reload if that is needed, and go back to the chat."""
        for row in self.query(SettingRow):
            self._take(row)
        if self._to_reload():
            self.app.post_message(ReloadAsked())
        self.dismiss()
