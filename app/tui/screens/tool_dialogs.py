"""Dialogs about tools: whether a call may run, a file of servers to import, the arguments of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input

from app.printable import printable_name
from app.tui.plain import Plain
from app.tui.screens.dialogs import FormDialog
from app.tui.widgets.call_view import pretty

if TYPE_CHECKING:
    from app.tools.permissions import Answer
    from app.tools.server import Offered
    from app.tui.tools import Ask

MOST_SHOWN = 4000
"""Characters of the arguments that are shown; the rest is counted."""


class AskDialog(ModalScreen["Answer | None"]):
    """Asks whether a call may run. None stops the answer."""

    AUTO_FOCUS = "#once"
    VERTICAL_BREAKPOINTS = [(0, "-low"), (22, "-high")]  # noqa: RUF012  declared so by Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer('once')", "once", id="ask.once"),
        Binding("c", "answer('chat')", "this chat", id="ask.chat"),
        Binding("a", "answer('always')", "always", id="ask.always"),
        Binding("n", "answer('no')", "no", id="ask.no"),
        Binding("escape", "answer('stop')", "stop", id="ask.stop"),
    ]

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self._ask = ask

    def compose(self) -> ComposeResult:
        """The call and the answers. "Always" is only offered for a tool that says it changes nothing."""
        call, tool = self._ask.call, self._ask.tool
        kind = "It says that it only reads." if tool.reads else "It may change something."
        with Vertical(classes="dialog"):
            yield Plain(f"May the model call {printable_name(call.name)} of {printable_name(tool.server)}? {kind}")
            with VerticalScroll(id="ask-arguments"):
                yield Plain(shortened(pretty(call.arguments)))
            with Horizontal(classes="dialog-buttons -many"):
                yield Button("Once (Y)", id="once", variant="primary", compact=True)
                yield Button("This chat (C)", id="chat", compact=True)
                if tool.reads:
                    yield Button("Always (A)", id="always", compact=True)
                yield Button("No (N)", id="no", compact=True)
            yield Plain("Esc stops the answer.", classes="dialog-keys")

    @on(Button.Pressed)
    def decide(self, event: Button.Pressed) -> None:
        """Answer with a button."""
        self.action_answer(event.button.id or "no")

    def action_answer(self, answer: str) -> None:
        """Answer with a key."""
        answers: dict[str, Answer] = {"once": "once", "chat": "chat", "no": "no"}
        if self._ask.tool.reads:
            answers["always"] = "always"
        if answer == "stop":
            self.dismiss(None)
        elif answer in answers:
            self.dismiss(answers[answer])


def shortened(text: str) -> str:
    """A text, cut where it is too long for a dialog."""
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}\n… {len(text) - MOST_SHOWN:,} more characters"


class ImportDialog(FormDialog[Path]):
    """Asks for another program's file of servers."""

    def compose(self) -> ComposeResult:
        """An input line and buttons."""
        with Vertical(classes="dialog"):
            yield Plain("A file with mcpServers, such as another program's mcp.json. Its servers are added to yours.")
            yield Input(placeholder="/path/to/mcp.json", compact=True)
            with Horizontal(classes="dialog-buttons"):
                yield Button("Import", id="yes", variant="primary", compact=True)
                yield Button("Cancel", id="no", compact=True)

    @on(Input.Submitted)
    def submit(self) -> None:
        """Accept a path."""
        text = self.query_one(Input).value.strip()
        self.dismiss(Path(text).expanduser() if text else None)


class PromptDialog(FormDialog[Mapping[str, str]]):
    """Asks for the arguments of a server's prompt."""

    def __init__(self, prompt: Offered) -> None:
        super().__init__()
        self._prompt = prompt

    def compose(self) -> ComposeResult:
        """A line for each argument."""
        with Vertical(classes="dialog"):
            yield Plain(self._prompt.title)
            for at, (name, required) in enumerate(self._prompt.arguments):
                hint = f"{name}, required" if required else name
                yield Input(placeholder=printable_name(hint), id=f"argument-{at}", compact=True)
            yield Plain("", classes="dialog-problem")
            with Horizontal(classes="dialog-buttons"):
                yield Button("Insert", id="yes", variant="primary", compact=True)
                yield Button("Cancel", id="no", compact=True)

    @on(Input.Submitted)
    def submit(self) -> None:
        """Accept the arguments if no required one is missing."""
        found = {}
        for at, (name, required) in enumerate(self._prompt.arguments):
            value = self.query_one(f"#argument-{at}", Input).value
            if value:
                found[name] = value
            elif required:
                problem = self.query_one(".dialog-problem", Plain)
                problem.update(f"{name} is required.")
                problem.display = True
                return
        self.dismiss(found)
