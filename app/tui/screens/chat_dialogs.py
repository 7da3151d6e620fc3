"""Dialogs about the current chat: its settings, a full context, a document to attach, a tool's call and its prompts."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Key
from textual.widgets import Button, Input, OptionList, TextArea
from textual.widgets.option_list import Option

from app.conversation import Source
from app.documents.folders import names
from app.language import _, ngettext
from app.printable import printable_name
from app.settings import RULES, SAMPLING_DEFAULTS, SettingsError, Value, check
from app.tui.figures import setting_name
from app.tui.plain import Plain, PlainList, plain
from app.tui.screens.dialogs import FormDialog, UnaskedDialog
from app.tui.screens.presets import ask_for_preset
from app.tui.session import Session
from app.tui.widgets.call_view import pretty

if TYPE_CHECKING:
    from app.chat.tools import CallAsked
    from app.tools.permissions import Answer
    from app.tools.server import Offered


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
            yield Plain(_("For this chat only. Empty fields use the general settings (F3)."))
            yield Plain(_("system prompt"), classes="setting-name")
            yield TextArea(
                str(self._own.get("system_prompt") or ""),
                compact=True,
                tab_behavior="focus",
                show_line_numbers=False,
                placeholder=plain(str(self._general.get("system_prompt") or _("none"))),
            )
            for key in CHAT_KEYS:
                with Horizontal(classes="setting-line"):
                    yield Plain(setting_name(key), classes="setting-name")
                    value, general = self._own.get(key), self._general[key]
                    yield Input("" if value is None else f"{value}", placeholder=general, id=f"own-{key}", compact=True)
            yield Plain("", classes="dialog-problem")
            with Horizontal(classes="dialog-buttons"):
                yield Button(_("Apply"), id="yes", variant="primary", compact=True)
                yield Button(_("Save as preset"), id="preset", compact=True)
                yield Button(_("Cancel"), id="no", compact=True)

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
                    problem.update(_("{name} must be {allowed}", name=setting_name(key), allowed=RULES[key].allowed))
                    problem.display = True
                    return
        self.dismiss(found)


class OverflowDialog(UnaskedDialog[Overflow]):
    """Asks what to do with a chat that no longer fits in the context."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "answer('keep')", _("not now"), id="overflow.keep"),
    ]
    letters = MappingProxyType({"d": "drop", "s": "summarize", "n": "new"})

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def compose(self) -> ComposeResult:
        """The question and its answers."""
        question = ngettext(
            "This chat no longer fits in the context. What should happen to the oldest message?",
            "This chat no longer fits in the context. What should happen to the oldest {count} messages?",
            self._count,
        )
        with Vertical(classes="dialog"):
            yield Plain(question)
            yield Plain(_("They stay visible here, but the model will no longer see them."), classes="dialog-keys")
            with Horizontal(classes="dialog-buttons -many"):
                yield Button(_("Drop (D)"), id="drop", compact=True)
                yield Button(_("Summarize (S)"), id="summarize", compact=True)
                yield Button(_("New chat (N)"), id="new", compact=True)
                yield Button(_("Not now"), id="keep", compact=True)

    @on(Button.Pressed)
    def decide(self, event: Button.Pressed) -> None:
        """Answer with a button."""
        self.action_answer(event.button.id or "keep")

    def action_answer(self, answer: str) -> None:
        """Answer."""
        answers: dict[str, Overflow] = {"drop": "drop", "summarize": "summarize", "new": "new"}
        self.dismiss(answers.get(answer, "keep"))


def ask_for_chat_settings(app: App[object], session: Session, changed: Callable[[], None]) -> None:
    """Ask for the settings of the chat on screen."""
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
            words[key] = _("{value} (the model's)", value=words[key])
    tokens = "auto" if settings.max_tokens is None else str(settings.max_tokens)
    return {**words, "thinking": settings.thinking, "max_tokens": tokens, "system_prompt": settings.system_prompt}


UP = "‥/"


@dataclass(frozen=True, slots=True)
class Attachment:
    """What the user wants."""

    path: Path
    """A file or folder."""
    remove: bool = False
    """Whether it is no longer to be searched."""


class AttachDialog(FormDialog[Attachment]):
    """Asks for a file or folder, or for a source that is no longer to be searched."""

    def __init__(self, sources: Sequence[Source], folder: Path) -> None:
        super().__init__()
        self._sources = list(sources)
        self._folder = folder
        self._names: list[str] = []

    def compose(self) -> ComposeResult:
        """A path, the names in its folder, the sources, buttons."""
        with Vertical(classes="dialog"):
            yield Plain(_("A file to send, or a folder to search"))
            yield Input(f"{self._folder}{os.sep}", placeholder=_("/path/to/file"), compact=True, select_on_focus=False)
            yield PlainList(compact=True, markup=False, id="attach-names")
            yield Plain("", classes="dialog-problem")
            if self._sources:
                yield Plain(_("Searched in this chat; ⏎ removes one"))
                options = [Option(plain(f"{source.name} ✕")) for source in self._sources]
                yield OptionList(*options, compact=True, markup=False, id="attach-sources")
            with Horizontal(classes="dialog-buttons"):
                yield Button(_("Attach"), id="yes", variant="primary", compact=True)
                yield Button(_("Cancel"), id="no", compact=True)

    @on(Input.Changed)
    def list_names(self, event: Input.Changed) -> None:
        """List the names that the path may go on with."""
        self.query_one(".dialog-problem", Plain).display = False
        self._list(event.value)

    @work(exclusive=True, group="names", exit_on_error=False)
    async def _list(self, text: str) -> None:
        found = await asyncio.to_thread(names, text)
        self._names = found if text.rpartition(os.sep)[2] else [UP, *found]
        listed = self.query_one("#attach-names", PlainList)
        before = listed.under
        listed.fill([Option(plain(name), id=name) for name in self._names])
        if self.focused is listed and listed.under != before:
            self._go_to_first()

    def on_key(self, event: Key) -> None:
        """Go from the path down to the names."""
        if event.key == "down" and isinstance(self.focused, Input):
            self.query_one("#attach-names", PlainList).focus()
            self._go_to_first()
            event.stop()

    def _go_to_first(self) -> None:
        """Put the cursor on the first name that does not lead up."""
        listed = self.query_one("#attach-names", PlainList)
        listed.highlighted = min(int(self._names[:1] == [UP]), len(self._names) - 1) if self._names else None

    @on(OptionList.OptionSelected, "#attach-names")
    def take_name(self, event: OptionList.OptionSelected) -> None:
        """Open the folder under the cursor, or attach the file."""
        line = self.query_one(Input)
        inside = Path(line.value.rpartition(os.sep)[0] + os.sep)
        name = event.option_id or UP
        line.value = f"{inside.parent}{os.sep}".replace("//", "/") if name == UP else f"{inside / name}"
        if name.endswith(os.sep) or name == UP:
            line.value = line.value.rstrip(os.sep) + os.sep
            line.cursor_position = len(line.value)
        else:
            self.submit()

    @on(OptionList.OptionSelected, "#attach-sources")
    def remove_source(self, event: OptionList.OptionSelected) -> None:
        """Search a source no longer."""
        self.dismiss(Attachment(Path(self._sources[event.option_index].path), remove=True))

    @on(Input.Submitted)
    def submit(self) -> None:
        """Accept the path if something is there."""
        text = self.query_one(Input).value.strip()
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            path = Path(text).expanduser().absolute()
            if text and path.exists():
                self.dismiss(Attachment(path))
                return
        problem = self.query_one(".dialog-problem", Plain)
        problem.update(_("No such file or folder."))
        problem.display = True


MOST_SHOWN = 4000
"""Characters of the arguments that are shown; the rest is counted."""


class AskDialog(UnaskedDialog["Answer | None"]):
    """Asks whether a call may run. None stops the answer."""

    VERTICAL_BREAKPOINTS = [(0, "-low"), (22, "-high")]  # noqa: RUF012  declared so by Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "answer('stop')", _("stop"), id="ask.stop"),
    ]

    def __init__(self, ask: CallAsked) -> None:
        super().__init__()
        self._ask = ask
        always = {"a": "always"} if ask.tool.reads else {}
        self.letters = {"y": "once", "c": "chat", "n": "no", **always}

    def compose(self) -> ComposeResult:
        """The call and the answers. "Always" is only offered for a tool that says it changes nothing."""
        call, tool = self._ask.call, self._ask.tool
        kind = _("The server says that it only reads.") if tool.reads else _("It may change something.")
        with Vertical(classes="dialog"):
            yield Plain(
                _(
                    "Allow the model to run {name} (server {server})?",
                    name=printable_name(call.name),
                    server=printable_name(tool.server),
                )
            )
            yield Plain(kind)
            with VerticalScroll(id="ask-arguments"):
                yield Plain(shortened(pretty(call.arguments)))
            with Horizontal(classes="dialog-buttons -many"):
                yield Button(_("Once (Y)"), id="once", compact=True)
                yield Button(_("This chat (C)"), id="chat", compact=True)
                if tool.reads:
                    yield Button(_("Always (A)"), id="always", compact=True)
                yield Button(_("No (N)"), id="no", compact=True)
            yield Plain(_("Esc stops the answer. Letters count after a pause in typing."), classes="dialog-keys")

    @on(Button.Pressed)
    def decide(self, event: Button.Pressed) -> None:
        """Answer with a button."""
        self.action_answer(event.button.id or "no")

    def action_answer(self, answer: str) -> None:
        """Answer."""
        answers: dict[str, Answer] = {"once": "once", "chat": "chat", "no": "no"}
        if self._ask.tool.reads:
            answers["always"] = "always"
        if answer == "stop":
            self.dismiss(None)
        elif answer in answers:
            self.dismiss(answers[answer])


def shortened(text: str) -> str:
    """A text, cut where it is too long for a dialog."""
    if len(text) <= MOST_SHOWN:
        return text
    more = ngettext("… {count:,} more character", "… {count:,} more characters", len(text) - MOST_SHOWN)
    return f"{text[:MOST_SHOWN]}\n{more}"


class ImportDialog(FormDialog[Path]):
    """Asks for another program's file of servers."""

    def compose(self) -> ComposeResult:
        """An input line and buttons."""
        with Vertical(classes="dialog"):
            yield Plain(_("A file with mcpServers, such as another program's mcp.json. Its servers join yours."))
            yield Input(placeholder=_("/path/to/mcp.json"), compact=True)
            with Horizontal(classes="dialog-buttons"):
                yield Button(_("Import"), id="yes", variant="primary", compact=True)
                yield Button(_("Cancel"), id="no", compact=True)

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
                hint = _("{name}, required", name=name) if required else name
                yield Input(placeholder=printable_name(hint), id=f"argument-{at}", compact=True)
            yield Plain("", classes="dialog-problem")
            with Horizontal(classes="dialog-buttons"):
                yield Button(_("Insert"), id="yes", variant="primary", compact=True)
                yield Button(_("Cancel"), id="no", compact=True)

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
                problem.update(_("{name} is required.", name=name))
                problem.display = True
                return
        self.dismiss(found)
