"""The list of keys (F1) and the runtime's log (F6)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import TextArea

from app import paths
from app.chat.commands import known
from app.language import _
from app.printable import printable
from app.supervisor import OLD_LOG_NAME
from app.tui.keys import KEYS, current_key
from app.tui.plain import Plain
from app.tui.widgets.composer import Composer
from app.tui.widgets.key_line import KeyLine
from app.tui.widgets.message_view import MessageView

WRITING = (
    ("⏎", _("send")),
    (_("Shift+⏎, Alt+⏎, Ctrl+J"), _("start a new line")),
    ("↑ ↓", _("earlier prompts, from the first or last line")),
    ("/ @", _("commands, files")),
    ("^X ^E", _("edit the draft in $VISUAL or $EDITOR")),
)
WITH_IDS = 100
"""Minimum width at which the list of keys shows action ids."""
LOG_CHARACTERS = 200_000
"""Characters shown of the end of a log."""


class HelpScreen(ModalScreen[None]):
    """All keys, grouped by where they work."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,f1,q", "dismiss", _("close"), id="help.close")]

    def __init__(self, *, commands: bool = False) -> None:
        super().__init__()
        self._commands = commands

    def compose(self) -> ComposeResult:
        """The list."""
        with VerticalScroll(classes="dialog", id="help"):
            if self._commands:
                yield from self._listed()
            yield Plain(_("Everywhere"), classes="setting-group")
            moves = [(" ".join(getattr(self.app, "moves", ())), _("move in lists and messages"))]
            yield Plain(_table([*self._rows(KEYS), *(row for row in moves if row[0])]))
            yield Plain(_("While writing"), classes="setting-group")
            yield Plain(_table([*WRITING, *self._rows(Composer.BINDINGS)]))
            yield Plain(_("On a message (Ctrl+↑ or a click)"), classes="setting-group")
            yield Plain(_table(self._rows(MessageView.BINDINGS)))
            if not self._commands:
                yield from self._listed()

    def _listed(self) -> ComposeResult:
        yield Plain(_("Commands, typed like a message"), classes="setting-group")
        yield Plain(_table((one.usage, one.help) for one in known()))

    def _rows(self, bindings: Iterable[BindingType]) -> list[tuple[str, ...]]:
        """Keys, what they do, and, where there is room, the ids by which they can be changed."""
        keymap = getattr(self.app, "keymap", {})
        wide = self.app.size.width >= WITH_IDS
        found = [one for one in bindings if isinstance(one, Binding)]
        rows = [(key_name(current_key(one, keymap)), one.tooltip or one.description) for one in found]
        return [(*row, one.id or "") for row, one in zip(rows, found, strict=True)] if wide else list(rows)

    async def action_dismiss(self, result: None = None) -> None:
        """Back."""
        self.dismiss(result)


class LogScreen(Screen[None]):
    """The runtime's log: its start, warnings, and why it ended."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", _("back"), id="log.back")]

    def compose(self) -> ComposeResult:
        """The log, as text that can be copied."""
        yield TextArea("", read_only=True, compact=True, id="log", show_line_numbers=False)
        yield KeyLine()

    def on_mount(self) -> None:
        """Read the log."""
        area = self.query_one(TextArea)
        area.load_text(printable(log_text()))
        area.move_cursor(area.document.end)

    async def action_dismiss(self, result: None = None) -> None:
        """Back to the chat."""
        self.dismiss(result)


def log_text() -> str:
    """The logs of the previous and of the current runtime."""
    present = paths.log_file()
    parts = []
    for file, words in ((present.with_name(OLD_LOG_NAME), _("previous runtime")), (present, _("current runtime"))):
        try:
            text = file.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:]
        except OSError:
            continue
        parts.append(f"── {words} · {file}\n{text.strip() or _('empty')}\n")
    return "\n".join(parts) or _("There is no log yet. It will be written to {present}.", present=present)


def key_name(key: str) -> str:
    """The display name of a key: `^N`, `Esc`, `F2`."""
    names = {
        "escape": "Esc",
        "underscore": "_",
        "pageup": "PgUp",
        "pagedown": "PgDn",
        "up": "↑",
        "down": "↓",
        "left": "←",
        "right": "→",
    }
    shown = []
    for one in key.split(","):
        *modifiers, last = one.split("+")
        name = names.get(last, last.upper() if len(last) == 1 or last[1:].isdigit() else last.capitalize())
        control = "^" if len(name) == 1 and name.isascii() else _("Ctrl+")
        shown.append("".join(control if part == "ctrl" else f"{part.capitalize()}+" for part in modifiers) + name)
    return ", ".join(shown)


def _table(rows: Iterable[Sequence[str]]) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True)
    for key, words, *ids in rows:
        table.add_row(Text(key, style="bold"), Text(words), Text("".join(ids), style="dim"))
    return table
