"""Questions about the chat in sight: its own settings, a file to attach, what to do when it is full."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static, TextArea

from app.settings import RULES, SettingsError, Value, check
from app.tui.screens.dialogs import FormDialog
from app.tui.screens.presets import ask_for_preset

CHAT_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
"""Sampling that a chat can have of its own, beside its system prompt."""
Overflow = Literal["drop", "summarize", "new", "keep"]


class ChatSettingsDialog(FormDialog[Mapping[str, Value]]):
    """Asks for the settings of one chat. What is left empty is as it is for all."""

    AUTO_FOCUS = "TextArea"

    def __init__(self, own: Mapping[str, Value], general: Mapping[str, Value]) -> None:
        super().__init__()
        self._own, self._general = own, general

    def compose(self) -> ComposeResult:
        """System prompt, sampling, buttons."""
        with Vertical(classes="dialog"):
            yield Static("This chat alone. What is empty is as set for all (F3).")
            yield Static("system prompt", classes="setting-name")
            yield TextArea(
                str(self._own.get("system_prompt") or ""),
                compact=True,
                tab_behavior="focus",
                show_line_numbers=False,
                placeholder=str(self._general.get("system_prompt") or "none"),
            )
            for key in CHAT_KEYS:
                with Horizontal(classes="setting-line"):
                    yield Static(key.replace("_", " "), classes="setting-name")
                    value, general = self._own.get(key), self._general.get(key)
                    shown = "auto" if general is None else f"{general}"
                    yield Input("" if value is None else f"{value}", placeholder=shown, id=f"own-{key}", compact=True)
            yield Static("", markup=False, classes="dialog-problem")
            with Horizontal(classes="dialog-buttons"):
                yield Button("Apply", id="yes", variant="primary", compact=True)
                yield Button("Keep as preset", id="preset", compact=True)
                yield Button("Cancel", id="no", compact=True)

    @on(Button.Pressed, "#preset")
    def keep_as_preset(self, event: Button.Pressed) -> None:
        """Ask for a name under which the system prompt is kept, for other chats."""
        event.stop()
        event.prevent_default()
        ask_for_preset(self.app, self.query_one(TextArea).text.strip())

    @on(Input.Submitted)
    def submit(self) -> None:
        """Take what was filled in, if it is acceptable."""
        found: dict[str, Value] = {}
        if (system := self.query_one(TextArea).text).strip():
            found["system_prompt"] = system
        for key in CHAT_KEYS:
            if text := self.query_one(f"#own-{key}", Input).value.strip():
                try:
                    found[key] = check(key, text)
                except SettingsError:
                    problem = self.query_one(".dialog-problem", Static)
                    problem.update(f"{key.replace('_', ' ')}: allowed is {RULES[key].allowed}")
                    problem.display = True
                    return
        self.dismiss(found)


class AttachDialog(FormDialog[Path]):
    """Asks for a text file."""

    def compose(self) -> ComposeResult:
        """A line to write in, and buttons."""
        with Vertical(classes="dialog"):
            yield Static("A text file to send with the message")
            yield Input(placeholder="/path/to/notes.txt", compact=True)
            yield Static("", markup=False, classes="dialog-problem")
            with Horizontal(classes="dialog-buttons"):
                yield Button("Attach", id="yes", variant="primary", compact=True)
                yield Button("Cancel", id="no", compact=True)

    @on(Input.Submitted)
    def submit(self) -> None:
        """Take the file, if there is one."""
        try:
            path = Path(self.query_one(Input).value.strip()).expanduser()
            found = path.is_file()
        except (OSError, RuntimeError, ValueError):
            found = False
        if found:
            self.dismiss(path)
            return
        problem = self.query_one(".dialog-problem", Static)
        problem.update("There is no such file.")
        problem.display = True


class OverflowDialog(ModalScreen[Overflow]):
    """Asks what to do with a chat that does not fit the context any more."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "answer('keep')", "not now", id="overflow.keep"),
        Binding("d", "answer('drop')", "drop", id="overflow.drop"),
        Binding("s", "answer('summarize')", "summarize", id="overflow.summarize"),
        Binding("n", "answer('new')", "new chat", id="overflow.new"),
    ]

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def compose(self) -> ComposeResult:
        """The question and its answers."""
        oldest = "oldest message" if self._count == 1 else f"oldest {self._count} messages"
        with Vertical(classes="dialog"):
            yield Static(f"This chat no longer fits the context. What shall become of the {oldest}?", markup=False)
            yield Static("They stay here to be read; it is the model that no longer gets them.", classes="setting-name")
            with Horizontal(classes="dialog-buttons -many"):
                yield Button("Drop (D)", id="drop", variant="primary", compact=True)
                yield Button("Summarize (S)", id="summarize", compact=True)
                yield Button("New chat (N)", id="new", compact=True)
                yield Button("Not now", id="keep", compact=True)

    @on(Button.Pressed)
    def decide(self, event: Button.Pressed) -> None:
        """Answer by the button."""
        self.action_answer(event.button.id or "keep")

    def action_answer(self, answer: str) -> None:
        """Answer by a key."""
        answers: dict[str, Overflow] = {"drop": "drop", "summarize": "summarize", "new": "new"}
        self.dismiss(answers.get(answer, "keep"))
