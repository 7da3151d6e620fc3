"""The dialog that attaches a file or folder: a path, the names that it may go on with, and what is searched already."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.events import Key
from textual.widgets import Button, Input, OptionList
from textual.widgets.option_list import Option

from app.conversation import Source
from app.tui.plain import Plain, plain
from app.tui.screens.dialogs import FormDialog

MOST = 200
"""Names that are listed; typing narrows them down."""
_LOOKED_AT = 20_000
"""Entries of a folder that are looked at."""
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
        """Make the dialog.

        Args:
            sources: What the chat searches.
            folder: Where to begin.
        """
        super().__init__()
        self._sources = list(sources)
        self._folder = folder
        self._names: list[str] = []

    def compose(self) -> ComposeResult:
        """A path, the names in its folder, the sources, buttons."""
        with Vertical(classes="dialog"):
            yield Plain("A file to send, or a folder to search")
            yield Input(f"{self._folder}{os.sep}", placeholder="/path/to/file", compact=True, select_on_focus=False)
            yield OptionList(compact=True, markup=False, id="attach-names")
            yield Plain("", classes="dialog-problem")
            if self._sources:
                yield Plain("Searched in this chat; ⏎ removes one")
                options = [Option(plain(f"{source.name} ✕")) for source in self._sources]
                yield OptionList(*options, compact=True, markup=False, id="attach-sources")
            with Horizontal(classes="dialog-buttons"):
                yield Button("Attach", id="yes", variant="primary", compact=True)
                yield Button("Cancel", id="no", compact=True)

    @on(Input.Changed)
    def list_names(self, event: Input.Changed) -> None:
        """List the names that the path may go on with."""
        self.query_one(".dialog-problem", Plain).display = False
        self._list(event.value)

    @work(exclusive=True, group="names", exit_on_error=False)
    async def _list(self, text: str) -> None:
        self._names = await asyncio.to_thread(names, text)
        listed = self.query_one("#attach-names", OptionList)
        listed.clear_options()
        listed.add_options([Option(plain(name)) for name in self._names])
        if self.focused is listed:
            self._go_to_first()

    def on_key(self, event: Key) -> None:
        """Go from the path down to the names."""
        if event.key == "down" and isinstance(self.focused, Input):
            self.query_one("#attach-names", OptionList).focus()
            self._go_to_first()
            event.stop()

    def _go_to_first(self) -> None:
        """Put the cursor on the first name that does not lead up."""
        listed = self.query_one("#attach-names", OptionList)
        listed.highlighted = min(int(self._names[:1] == [UP]), len(self._names) - 1) if self._names else None

    @on(OptionList.OptionSelected, "#attach-names")
    def take_name(self, event: OptionList.OptionSelected) -> None:
        """Open the folder under the cursor, or attach the file."""
        line = self.query_one(Input)
        inside = Path(line.value.rpartition(os.sep)[0] + os.sep)
        name = self._names[event.option_index]
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
        problem.update("No such file or folder.")
        problem.display = True


def names(text: str) -> list[str]:
    """Names that a path may go on with: folders first, hidden ones only where the text asks for them.

    Args:
        text: What was typed of a path.
    """
    head, slash, tail = text.rpartition(os.sep)
    found: list[tuple[bool, str]] = []
    with contextlib.suppress(OSError, RuntimeError, ValueError), os.scandir(Path(head + slash).expanduser()) as entries:
        for _, entry in zip(range(_LOOKED_AT), entries, strict=False):
            if entry.name.lower().startswith(tail.lower()) and (tail.startswith(".") or not entry.name.startswith(".")):
                found.append((not entry.is_dir(), entry.name))
    listed = [name + ("" if file else os.sep) for file, name in sorted(found)[:MOST]]
    return listed if tail else [UP, *listed]
