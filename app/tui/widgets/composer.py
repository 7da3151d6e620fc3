"""The composer: the text area for prompts."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import ClassVar

from rich.cells import cell_len
from textual import on, work
from textual.binding import Binding, BindingType
from textual.events import Key, Paste
from textual.widgets import TextArea

from app.language import _, ngettext
from app.tui.figures import token_count
from app.tui.keys import pasted_text
from app.tui.messages import AttachAsked, Submitted, TakenBack
from app.tui.widgets.queue_list import QueueList
from app.tui.widgets.suggestions import Suggestion, Suggestions

AMBER = 0.8
"""Share of the context above which the meter warns."""
METER_CELLS = 8
BORDER_CELLS = 6
"""Cells of the composer's width that the border's text can't use."""
TYPING_S = 0.2
"""Time since the last key in which somebody is taken to be typing."""
PATIENCE_S = 0.8
"""What streams waits so long at most for somebody who types."""
FOLD_LINES = 20
FOLD_CHARACTERS = 4000
"""A paste with more lines or characters is folded into a placeholder."""


class Composer(TextArea):
    """A prompt of any number of lines. Enter sends; Shift+Enter, Alt+Enter or Ctrl+J begin a new line."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+underscore", "undo", _("Undo"), tooltip=_("Undo typing"), show=False, id="composer.undo"),
        Binding("ctrl+up", "screen.to_messages", _("To the messages"), show=False, id="chat.messages"),
        Binding("pageup", "app.scroll_chat(-1)", _("Page up"), show=False, id="chat.page_up"),
        Binding("pagedown", "app.scroll_chat(1)", _("Page down"), show=False, id="chat.page_down"),
        Binding("ctrl+home", "app.scroll_chat(-2)", _("Start of the chat"), show=False, id="chat.home"),
        Binding("ctrl+end", "app.scroll_chat(2)", _("End of the chat, and follow it"), show=False, id="chat.end"),
    ]

    def __init__(self, suggest: Callable[[str], Awaitable[Sequence[Suggestion]]]) -> None:
        super().__init__(
            id="composer",
            soft_wrap=True,
            tab_behavior="focus",
            show_line_numbers=False,
            placeholder=_("Ask anything …"),
            highlight_cursor_line=False,
        )
        self.border_subtitle = _("⏎ send")
        self.past: list[str] = []
        """Earlier prompts, newest last; the arrow keys recall them."""
        self._recalled: int | None = None
        self._typed = ""
        self._typed_at = 0.0
        self._attached: dict[str, str] = {}
        self._suggest = suggest
        self.chord = False
        """Whether Ctrl+X was pressed, which Ctrl+E completes."""

    @property
    def value(self) -> str:
        """The text, with folded parts expanded."""
        text = self.text
        for mark, content in self._attached.items():
            text = text.replace(mark, content)
        return text

    def put(self, text: str) -> None:
        """Replace the text."""
        self._recalled = None
        self._attached.clear()
        self.load_text("")
        if _is_large(text):
            self.attach(_size(text), text)
        else:
            self.load_text(text)
        self.move_cursor(self.document.end)

    def give_back(self, text: str) -> None:
        """Put a prompt back that could not be sent, before anything typed since."""
        self.put(f"{text}\n{self.value}" if self.text else text)

    def rewrite(self, text: str) -> None:
        """Replace the text in a way that can be undone. Placeholders in it keep their meaning."""
        self.replace(text, (0, 0), self.document.end)
        self.move_cursor(self.document.end)

    def attach(self, name: str, content: str) -> None:
        """Insert a placeholder for a long text."""
        mark, number = f"⟦{name}⟧", 2
        while mark in self._attached:
            mark, number = f"⟦{name} ({number})⟧", number + 1
        self._attached[mark] = content
        self.replace(mark, *self.selection)

    async def quiet(self) -> None:
        """Wait until nobody types, at most `PATIENCE_S`."""
        deadline = time.monotonic() + PATIENCE_S
        while (left := min(deadline, self._typed_at + TYPING_S) - time.monotonic()) > 0:  # noqa: ASYNC110  keys move its end
            await asyncio.sleep(left)

    def on_paste(self, event: Paste) -> None:
        """Fold a large paste; attach a file whose path is dropped on the terminal."""
        event.stop()
        event.text = pasted_text(event.text)
        file = _dropped(event.text)
        if file is not None:
            self.post_message(AttachAsked(file, event.text))
        elif _is_large(event.text):
            self.attach(_size(event.text), event.text)
        else:
            return
        event.prevent_default()

    def on_key(self, event: Key) -> None:
        """Send on Enter; a new line on Shift+Enter, Alt+Enter and Ctrl+J; recall with the arrows; ^X ^E."""
        self._typed_at = time.monotonic()
        chord, self.chord = self.chord, event.key == "ctrl+x" and self.selection.is_empty
        if self.chord or self._in_suggestions(event.key):
            pass
        elif chord and event.key == "ctrl+e":
            self.call_later(self.run_action, "app.editor")
        elif event.key == "up" and not self.text and self.screen.query_one(QueueList).texts:
            self.post_message(TakenBack(-1))
        elif event.key == "enter":
            self._send()
        elif event.key in ("shift+enter", "alt+enter", "ctrl+j"):
            self.replace("\n", *self.selection)
            self.scroll_cursor_visible()
        elif not (event.key == "up" and self._recall(-1)) and not (event.key == "down" and self._recall(1)):
            return
        event.prevent_default()
        event.stop()

    def _send(self) -> None:
        """Send the text and start an empty one."""
        text = self.value.strip("\n")
        if text.strip():
            self.put("")
        self.post_message(Submitted(text if text.strip() else ""))

    # Suggestions

    @property
    def suggestions(self) -> Suggestions:
        """The list above."""
        return self.screen.query_one(Suggestions)

    @on(TextArea.Changed)
    def look_up(self) -> None:
        """Suggest how a command may go on, or files for an `@`. Nothing waits for that."""
        if self.text.startswith("/") and self.cursor_location == self.document.end:
            self._look_up(self.text)
        elif searched := self._searched():
            self._look_up(searched)
        else:
            self.hide_suggestions()

    def _searched(self) -> str:
        """`@` and the letters behind it, before the cursor; empty if there is none."""
        row, column = self.cursor_location
        found = re.search(r"(?<!\S)@\S*$", self.document.get_line(row)[:column])
        return found[0] if found else ""

    @work(exclusive=True, group="suggest", exit_on_error=False)
    async def _look_up(self, text: str) -> None:
        self.suggestions.show(await self._suggest(text), first=text.startswith("@"))

    def hide_suggestions(self) -> None:
        """Suggest nothing until the text changes."""
        self.workers.cancel_group(self, "suggest")
        self.suggestions.show(())

    def _in_suggestions(self, key: str) -> bool:
        """Move among the suggestions, take one, or hide them. Returns whether the key was used."""
        listed = self.suggestions
        if not listed.display:
            return False
        if key in ("up", "down"):
            listed.step(1 if key == "down" else -1)
        elif key == "tab" or (key == "enter" and listed.chosen is not None):
            self.take(listed.chosen or listed.shown[0])
        elif key == "escape":
            self.hide_suggestions()
        else:
            return False
        return True

    def take(self, suggestion: Suggestion) -> None:
        """Type a suggestion, or attach its file in place of what was searched."""
        self.hide_suggestions()
        if suggestion.path is not None:
            row, column = self.cursor_location
            self.replace("", (row, column - len(self._searched())), (row, column))
            self.post_message(AttachAsked(suggestion.path, suggestion.text))
            return
        self.rewrite(suggestion.text)

    def _recall(self, step: int) -> bool:
        """Step through earlier prompts, from the first or last line of the text.

        Returns:
            Whether the key was used.
        """
        at = len(self.past) if self._recalled is None else self._recalled
        edge = self.cursor_at_first_line if step < 0 else self.cursor_at_last_line and self._recalled is not None
        if not edge or not 0 <= at + step <= len(self.past):
            return False
        if self._recalled is None:
            self._typed = self.value
        at += step
        self.put(self._typed if at == len(self.past) else self.past[at])
        self._recalled = None if at == len(self.past) else at
        if step < 0:
            self.move_cursor((0, 0))
        return True

    def show_context(self, used: int | None, context: int | None, leaves_out: int = 0) -> None:
        """Show how full the context is and what the next message drops; amber above 80 %."""
        if used is None or not context:
            self.set_class(False, "-nearly-full")
            self.border_subtitle = _("⏎ send")
            return
        self.set_class(used / context >= AMBER or leaves_out > 0, "-nearly-full")
        self.border_subtitle = context_line(used, context, self.size.width, leaves_out)


def context_line(used: int, context: int, width: int, leaves_out: int = 0) -> str:
    """The context meter, and what the next message drops, as far as the width allows."""
    share = used / context
    filled = min(METER_CELLS, round(share * METER_CELLS))
    bar = "▰" * filled + "▱" * (METER_CELLS - filled)
    meter = _("{bar} {used} of {context}", bar=bar, used=token_count(used, context), context=token_count(context))
    if not leaves_out:
        return _("context {meter}", meter=meter)
    lines = (
        ngettext(
            "context {meter} · with the next message the model no longer sees the oldest message",
            "context {meter} · with the next message the model no longer sees the oldest {count} messages",
            leaves_out,
            meter=meter,
        ),
        ngettext("{meter} · next drops the oldest message", "{meter} · next drops the oldest {count} messages",
                 leaves_out, meter=meter),
        ngettext("{meter} · drops {count} next", "{meter} · drops {count} next", leaves_out, meter=meter),
    )  # fmt: skip
    return next((line for line in lines if cell_len(line) <= width - BORDER_CELLS), lines[-1])


def _is_large(text: str) -> bool:
    return text.count("\n") >= FOLD_LINES or len(text) > FOLD_CHARACTERS


def _size(text: str) -> str:
    return ngettext("{count:,} line", "{count:,} lines", text.removesuffix("\n").count("\n") + 1)


def _dropped(text: str) -> Path | None:
    """The file whose path was dropped on the terminal, if the paste is one."""
    name = text.strip().strip("'\"").removeprefix("file://").replace("\\ ", " ")
    if "\n" in text.rstrip() or not name.startswith("/"):
        return None
    try:
        return Path(name) if Path(name).is_file() else None
    except OSError:
        return None


def remembered(said: Sequence[str], text: str) -> list[str]:
    """The prompts with one more at the end, without repeats in a row."""
    return [*said] if said and said[-1] == text else [*said, text]
