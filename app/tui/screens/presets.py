"""System prompts with names (F8): one is chosen for the chat in sight; others are kept, changed, deleted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, OptionList, Static, TextArea
from textual.widgets.option_list import Option

from app import presets
from app.settings import SettingsError
from app.tui.printable import printable
from app.tui.screens.dialogs import ConfirmDialog, FormDialog

NONE = "none: as set for all chats (F3)"
Preset = tuple[str, str]
"""Name and text; both empty: none."""


class PresetDialog(FormDialog[Preset]):
    """Asks for name and text of a preset."""

    def __init__(self, name: str = "", text: str = "", taken: Collection[str] = ()) -> None:
        """Make the dialog.

        Args:
            name: the name it has, or is likely to get.
            text: its text so far.
            taken: names of other presets.
        """
        super().__init__()
        self._named, self._text, self._taken = name, text, taken

    def compose(self) -> ComposeResult:
        """Name, text, buttons."""
        with Vertical(classes="dialog"):
            yield Static("Name of the preset")
            yield Input(self._named, placeholder="Proofreader", compact=True)
            yield Static("What the model is told before the chat")
            yield TextArea(self._text, compact=True, tab_behavior="focus", show_line_numbers=False)
            yield Static("", markup=False, classes="dialog-problem")
            with Horizontal(classes="dialog-buttons"):
                yield Button("Keep", id="yes", variant="primary", compact=True)
                yield Button("Cancel", id="no", compact=True)

    @on(Input.Submitted)
    def submit(self) -> None:
        """Take it, if it has a name and a text."""
        name, text = self.query_one(Input).value.strip(), self.query_one(TextArea).text.strip()
        problem = presets.name_problem(name) or (None if text else "A preset needs a text.")
        if name in self._taken:
            problem = f"There is a preset {name} already."
        if problem is None:
            self.dismiss((name, text))
            return
        line = self.query_one(".dialog-problem", Static)
        line.update(problem)
        line.display = True


def ask_for_preset(app: App[object], text: str) -> None:
    """Ask for the name under which a system prompt is kept."""
    try:
        known = presets.load()
    except SettingsError as error:
        app.notify(str(error), severity="error", markup=False)
        return

    def keep(found: Preset | None) -> None:
        if found is not None:
            save(app, {**known, found[0]: found[1]})

    app.push_screen(PresetDialog("", text, known), keep)


def save(app: App[object], wanted: Mapping[str, str]) -> None:
    """Keep these presets; tell where that can't be."""
    try:
        presets.save(wanted)
    except SettingsError as error:
        app.notify(str(error), severity="error", markup=False)


class PresetsDialog(ModalScreen[Preset]):
    """The presets. It ends with the one that was chosen."""

    VERTICAL_BREAKPOINTS = [(0, "-low"), (22, "-high")]  # noqa: RUF012  declared so by Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "make", "new", tooltip="Keep another preset", id="presets.new"),
        Binding("e", "edit", "edit", tooltip="Change the preset under the cursor", id="presets.edit"),
        Binding("d,delete", "delete", "delete", tooltip="Delete the preset under the cursor", id="presets.delete"),
        Binding("escape", "dismiss", "back", tooltip="Leave the chat as it is", id="presets.back"),
    ]

    def __init__(self, current: str = "") -> None:
        """Make the dialog.

        Args:
            current: the system prompt that the chat has of its own; empty where it has none.
        """
        super().__init__()
        self._current = current
        self._presets: dict[str, str] = {}
        self._readable = True

    def compose(self) -> ComposeResult:
        """Names, the text of the one under the cursor, keys."""
        with Vertical(classes="dialog"):
            yield Static("What shall the model be told before this chat?")
            yield OptionList(compact=True, markup=False)
            yield Static("", markup=False, id="preset-text")
            yield Static("", markup=False, classes="dialog-problem")
            yield Static(
                "⏎ takes it · [@click=screen.make]N new[/] · [@click=screen.edit]E edit[/] · "
                "[@click=screen.delete]D delete[/] · [@click=screen.dismiss]Esc back[/]",
                classes="dialog-keys",
            )

    def on_mount(self) -> None:
        """Begin with the one that the chat has."""
        self._fill()
        names = [name for name, text in self._presets.items() if text == self._current]
        self._go_to(names[0] if names else "")

    def _fill(self) -> None:
        problem = self.query_one(".dialog-problem", Static)
        try:
            self._presets, self._readable = presets.load(), True
        except SettingsError as error:
            self._readable = False  # then nothing is written over it
            problem.update(printable(str(error)))
            problem.display = True
        listed = self.query_one(OptionList)
        listed.clear_options()
        listed.add_options([Option(NONE), *(Option(printable(name)) for name in self._presets)])

    def _go_to(self, name: str) -> None:
        names = list(self._presets)
        self.query_one(OptionList).highlighted = names.index(name) + 1 if name in names else 0

    @property
    def _under(self) -> Preset:
        """The preset under the cursor; empty for none."""
        at = self.query_one(OptionList).highlighted or 0
        return list(self._presets.items())[at - 1] if 0 < at <= len(self._presets) else ("", "")

    @on(OptionList.OptionHighlighted)
    def tell(self) -> None:
        """Show the text of the one under the cursor."""
        self.query_one("#preset-text", Static).update(printable(self._under[1]))

    @on(OptionList.OptionSelected)
    def choose(self) -> None:
        """Take the one under the cursor."""
        self.dismiss(self._under)

    def action_make(self) -> None:
        """Ask for another preset."""
        if self._readable:
            self.app.push_screen(PresetDialog(taken=self._presets), self._kept)

    def action_edit(self) -> None:
        """Ask for another name and text of the one under the cursor."""
        before, text = self._under
        if before:
            others = self._presets.keys() - {before}
            self.app.push_screen(PresetDialog(before, text, others), lambda found: self._kept(found, before))

    def _kept(self, found: Preset | None, before: str = "") -> None:
        if found is not None:
            others = {name: text for name, text in self._presets.items() if name != before}
            self._save({**others, found[0]: found[1]}, found[0])

    def action_delete(self) -> None:
        """Ask whether to delete the one under the cursor."""
        name, _ = self._under

        def decided(confirmed: bool | None) -> None:
            if confirmed:
                self._save({other: text for other, text in self._presets.items() if other != name}, "")

        if name:
            self.app.push_screen(
                ConfirmDialog(f"Delete the preset {name}? Chats that have it keep it.", "Delete"), decided
            )

    def _save(self, wanted: dict[str, str], go_to: str) -> None:
        save(self.app, wanted)
        self._fill()
        self._go_to(go_to)

    async def action_dismiss(self, result: Preset | None = None) -> None:
        """Leave the chat as it is."""
        self.dismiss(result)
