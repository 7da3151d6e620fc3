"""Dialogs about the current chat: its own settings, and what to do when it is full."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, TextArea

from app.settings import RULES, SAMPLING_DEFAULTS, SettingsError, Value, check
from app.tui.plain import Plain, plain
from app.tui.screens.dialogs import FormDialog
from app.tui.screens.presets import ask_for_preset
from app.tui.session import Session

CHAT_KEYS = ("thinking", *SAMPLING_DEFAULTS, "max_tokens")
"""Settings that a chat can override, besides its system prompt."""
Overflow = Literal["drop", "summarize", "new", "keep"]


class ChatSettingsDialog(FormDialog[Mapping[str, Value]]):
    """Asks for the settings of one chat. Empty fields use the general settings."""

    AUTO_FOCUS = "TextArea"

    def __init__(self, own: Mapping[str, Value], general: Mapping[str, str]) -> None:
        super().__init__()
        self._own, self._general = own, general

    def compose(self) -> ComposeResult:
        """System prompt, sampling, buttons."""
        with Vertical(classes="dialog"):
            yield Plain("For this chat only. Empty fields use the general settings (F3).")
            yield Plain("system prompt", classes="setting-name")
            yield TextArea(
                str(self._own.get("system_prompt") or ""),
                compact=True,
                tab_behavior="focus",
                show_line_numbers=False,
                placeholder=plain(str(self._general.get("system_prompt") or "none")),
            )
            for key in CHAT_KEYS:
                with Horizontal(classes="setting-line"):
                    yield Plain(key.replace("_", " "), classes="setting-name")
                    value, general = self._own.get(key), self._general[key]
                    yield Input("" if value is None else f"{value}", placeholder=general, id=f"own-{key}", compact=True)
            yield Plain("", classes="dialog-problem")
            with Horizontal(classes="dialog-buttons"):
                yield Button("Apply", id="yes", variant="primary", compact=True)
                yield Button("Save as preset", id="preset", compact=True)
                yield Button("Cancel", id="no", compact=True)

    @on(Button.Pressed, "#preset")
    def keep_as_preset(self, event: Button.Pressed) -> None:
        """Ask for a name under which to save the system prompt as a preset."""
        event.stop()
        event.prevent_default()
        ask_for_preset(self.app, self.query_one(TextArea).text.strip())

    @on(Input.Submitted)
    def submit(self) -> None:
        """Accept the values if they are valid."""
        found: dict[str, Value] = {}
        if (system := self.query_one(TextArea).text).strip():
            found["system_prompt"] = system
        for key in CHAT_KEYS:
            if text := self.query_one(f"#own-{key}", Input).value.strip():
                try:
                    found[key] = check(key, text)
                except SettingsError:
                    problem = self.query_one(".dialog-problem", Plain)
                    problem.update(f"{key.replace('_', ' ')}: allowed: {RULES[key].allowed}")
                    problem.display = True
                    return
        self.dismiss(found)


class OverflowDialog(ModalScreen[Overflow]):
    """Asks what to do with a chat that no longer fits in the context."""

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
            yield Plain(f"This chat no longer fits in the context. What should happen to the {oldest}?")
            yield Plain("They stay visible here, but the model will no longer see them.", classes="setting-name")
            with Horizontal(classes="dialog-buttons -many"):
                yield Button("Drop (D)", id="drop", variant="primary", compact=True)
                yield Button("Summarize (S)", id="summarize", compact=True)
                yield Button("New chat (N)", id="new", compact=True)
                yield Button("Not now", id="keep", compact=True)

    @on(Button.Pressed)
    def decide(self, event: Button.Pressed) -> None:
        """Answer with a button."""
        self.action_answer(event.button.id or "keep")

    def action_answer(self, answer: str) -> None:
        """Answer with a key."""
        answers: dict[str, Overflow] = {"drop": "drop", "summarize": "summarize", "new": "new"}
        self.dismiss(answers.get(answer, "keep"))


def ask_for_chat_settings(app: App[object], session: Session, changed: Callable[[], None]) -> None:
    """Ask for the settings of the chat on screen.

    Args:
        app: shows the dialog.
        session: has the chat.
        changed: called after a change.
    """
    conversation = session.conversation

    def take(found: Mapping[str, Value] | None) -> None:
        if found is not None:
            before, own = conversation.extras.settings, dict(found)
            if "preset" in before and before.get("system_prompt") == own.get("system_prompt"):
                own["preset"] = before["preset"]
            session.note(conversation, settings=own)
            changed()

    app.push_screen(ChatSettingsDialog(conversation.extras.settings, _general(session)), take)


def _general(session: Session) -> dict[str, str]:
    """What applies to a chat that sets nothing itself, in words, with the values that the model's maker recommends."""
    settings = session.settings
    recommended = (session.status.sampling if session.status is not None else None) or {}
    words = {key: f"{value:g}" for key, value in settings.sampling(recommended).items()}
    for key in recommended.keys() & words.keys():
        if settings.get(key) is None:
            words[key] += " (the model's)"
    tokens = "auto" if settings.max_tokens is None else str(settings.max_tokens)
    return {**words, "thinking": settings.thinking, "max_tokens": tokens, "system_prompt": settings.system_prompt}
