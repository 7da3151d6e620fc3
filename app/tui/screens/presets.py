"""System prompt presets (F8): choose one for the current chat, or save, edit and delete them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import ClassVar

from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, OptionList, TextArea
from textual.widgets.option_list import Option

from app import presets
from app.language import _
from app.settings import SettingsError
from app.tui.plain import Links, Plain, plain
from app.tui.screens.dialogs import ConfirmDialog, FormDialog
from app.tui.session import Session

NONE = _("none: use the general setting (F3)")
Preset = tuple[str, str]
"""Name and text; both empty for none."""
PROMPT_KEYS = ("preset", "system_prompt")
"""Settings keys of a chat's own system prompt: its preset's name, its text."""


class PresetDialog(FormDialog[Preset]):
    """Asks for the name and text of a preset."""

    def __init__(self, name: str = "", text: str = "", taken: Collection[str] = ()) -> None:
        super().__init__()
        self._named, self._text, self._taken = name, text, taken

    def compose(self) -> ComposeResult:
        """Name, text, buttons."""
        with Vertical(classes="dialog"):
            yield Plain(_("Preset name"))
            yield Input(self._named, placeholder=_("Proofreader"), compact=True)
            yield Plain(_("System prompt"))
            yield TextArea(self._text, compact=True, tab_behavior="focus", show_line_numbers=False)
            yield Plain("", classes="dialog-problem")
            with Horizontal(classes="dialog-buttons"):
                yield Button(_("Save"), id="yes", variant="primary", compact=True)
                yield Button(_("Cancel"), id="no", compact=True)

    @on(Input.Submitted)
    def submit(self) -> None:
        """Accept it if it has a valid name and a text."""
        name, text = self.query_one(Input).value.strip(), self.query_one(TextArea).text.strip()
        problem = presets.name_problem(name) or (None if text else _("A preset needs text."))
        if name in self._taken:
            problem = _("A preset named {name} already exists.", name=name)
        if problem is None:
            self.dismiss((name, text))
            return
        line = self.query_one(".dialog-problem", Plain)
        line.update(problem)
        line.display = True


def ask_for_preset(app: App[object], text: str) -> None:
    """Ask for a name under which to save a system prompt."""
    try:
        known = presets.load()
    except SettingsError as error:
        app.notify(str(error), severity="error")
        return

    def keep(found: Preset | None) -> None:
        if found is not None:
            save(app, {**known, found[0]: found[1]})

    app.push_screen(PresetDialog("", text, known), keep)


def save(app: App[object], wanted: Mapping[str, str]) -> None:
    """Save these presets, or show why that fails."""
    try:
        presets.save(wanted)
    except SettingsError as error:
        app.notify(str(error), severity="error")


class PresetsDialog(ModalScreen[Preset]):
    """The list of presets. It returns the chosen one."""

    VERTICAL_BREAKPOINTS = [(0, "-low"), (22, "-high")]  # noqa: RUF012  declared so by Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "make", _("new"), tooltip=_("Save a new preset"), id="presets.new"),
        Binding("e", "edit", _("edit"), tooltip=_("Edit the preset under the cursor"), id="presets.edit"),
        Binding(
            "d,delete", "delete", _("delete"), tooltip=_("Delete the preset under the cursor"), id="presets.delete"
        ),
        Binding("escape", "dismiss", _("back"), tooltip=_("Leave the chat as it is"), id="presets.back"),
    ]

    def __init__(self, current: str = "") -> None:
        """Make the dialog.

        Args:
            current: the chat's own system prompt; empty if it has none.
        """
        super().__init__()
        self._current = current
        self._presets: dict[str, str] = {}
        self._readable = True

    def compose(self) -> ComposeResult:
        """Names, the selected preset's text, keys."""
        with Vertical(classes="dialog"):
            yield Plain(_("Choose a system prompt for this chat."))
            yield OptionList(compact=True, markup=False)
            yield Plain("", id="preset-text")
            yield Plain("", classes="dialog-problem")
            yield Links(
                _(
                    "⏎ use · [@click=screen.make]N new[/] · [@click=screen.edit]E edit[/] · "
                    "[@click=screen.delete]D delete[/] · [@click=screen.dismiss]Esc back[/]"
                ),
                classes="dialog-keys",
            )

    def on_mount(self) -> None:
        """Highlight the chat's current preset."""
        self._fill()
        names = [name for name, text in self._presets.items() if text == self._current]
        self._go_to(names[0] if names else "")

    def _fill(self) -> None:
        problem = self.query_one(".dialog-problem", Plain)
        try:
            self._presets, self._readable = presets.load(), True
        except SettingsError as error:
            self._readable = False  # so that the unreadable file is not overwritten
            problem.update(str(error))
            problem.display = True
        listed = self.query_one(OptionList)
        listed.clear_options()
        listed.add_options([Option(NONE), *(Option(plain(name)) for name in self._presets)])

    def _go_to(self, name: str) -> None:
        names = list(self._presets)
        self.query_one(OptionList).highlighted = names.index(name) + 1 if name in names else 0

    @property
    def _under(self) -> Preset:
        """The preset under the cursor; empty if none."""
        at = self.query_one(OptionList).highlighted or 0
        return list(self._presets.items())[at - 1] if 0 < at <= len(self._presets) else ("", "")

    @on(OptionList.OptionHighlighted)
    def tell(self) -> None:
        """Show the text of the preset under the cursor."""
        self.query_one("#preset-text", Plain).update(self._under[1])

    @on(OptionList.OptionSelected)
    def choose(self) -> None:
        """Return the preset under the cursor."""
        self.dismiss(self._under)

    def action_make(self) -> None:
        """Ask for a new preset."""
        if self._readable:
            self.app.push_screen(PresetDialog(taken=self._presets), self._kept)

    def action_edit(self) -> None:
        """Edit the preset under the cursor."""
        before, text = self._under
        if before:
            others = self._presets.keys() - {before}
            self.app.push_screen(PresetDialog(before, text, others), lambda found: self._kept(found, before))

    def _kept(self, found: Preset | None, before: str = "") -> None:
        if found is not None:
            others = {name: text for name, text in self._presets.items() if name != before}
            self._save({**others, found[0]: found[1]}, found[0])

    def action_delete(self) -> None:
        """Delete the preset under the cursor after a confirmation."""
        name = self._under[0]

        def decided(confirmed: bool | None) -> None:
            if confirmed:
                self._save({other: text for other, text in self._presets.items() if other != name}, "")

        if name:
            self.app.push_screen(
                ConfirmDialog(_("Delete the preset {name}? Chats that use it keep it.", name=name), _("Delete")),
                decided,
            )

    def _save(self, wanted: dict[str, str], go_to: str) -> None:
        save(self.app, wanted)
        self._fill()
        self._go_to(go_to)

    async def action_dismiss(self, result: Preset | None = None) -> None:
        """Close the dialog without a change."""
        self.dismiss(result)


def ask_for_chat_preset(app: App[object], session: Session, changed: Callable[[], None]) -> None:
    """Ask for a preset for the chat on screen."""
    conversation = session.conversation

    def take(found: Preset | None) -> None:
        if found is not None:
            others = {key: value for key, value in conversation.extras.settings.items() if key not in PROMPT_KEYS}
            own = dict(zip(PROMPT_KEYS, found, strict=True)) if found[0] else {}
            session.note(conversation, settings={**others, **own})
            changed()

    current = conversation.extras.settings.get("system_prompt")
    app.push_screen(PresetsDialog(str(current or "")), take)
