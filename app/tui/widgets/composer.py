"""Where a person writes."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.events import Key
from textual.widgets import TextArea

from app.tui.figures import token_count
from app.tui.messages import Submitted

AMBER = 0.8
"""Share of the context from which on the meter warns."""
METER_CELLS = 8


class Composer(TextArea):
    """A prompt of any number of lines. Enter sends; Shift+Enter, Alt+Enter or Ctrl+J begin a new line."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "app.scroll_chat(-1)", "Page up", show=False, id="chat.page_up"),
        Binding("pagedown", "app.scroll_chat(1)", "Page down", show=False, id="chat.page_down"),
        Binding("ctrl+home", "app.scroll_chat(-2)", "Start of the chat", show=False, id="chat.home"),
        Binding("ctrl+end", "app.scroll_chat(2)", "End of the chat, and follow it", show=False, id="chat.end"),
    ]

    def __init__(self) -> None:
        super().__init__(
            id="composer",
            soft_wrap=True,
            tab_behavior="focus",
            show_line_numbers=False,
            placeholder="Ask anything …",
            highlight_cursor_line=False,
        )
        self.border_subtitle = "⏎ send"

    def on_key(self, event: Key) -> None:
        """Send on Enter; a new line on Shift+Enter, Alt+Enter and Ctrl+J."""
        if event.key == "enter":
            event.prevent_default()
            event.stop()
            if self.text.strip():
                self.post_message(Submitted(self.text.strip("\n")))
        elif event.key in ("shift+enter", "alt+enter", "ctrl+j"):
            event.prevent_default()
            event.stop()
            self.replace("\n", *self.selection)
            self.scroll_cursor_visible()

    def show_context(self, used: int | None, context: int | None) -> None:
        """Show how full the context is; amber from 80 % on."""
        if used is None or not context:
            self.set_class(False, "-nearly-full")
            self.border_subtitle = "⏎ send"
            return
        share = used / context
        self.set_class(share >= AMBER, "-nearly-full")
        self.border_subtitle = context_line(used, context, self.size.width)


def context_line(used: int, context: int, width: int) -> str:
    """The context meter, with what to do when it gets full, as far as the width allows."""
    share = used / context
    filled = min(METER_CELLS, round(share * METER_CELLS))
    meter = f"{'▰' * filled}{'▱' * (METER_CELLS - filled)} {token_count(used)} of {token_count(context)}"
    if share < AMBER:
        return f"context {meter}"
    if width < 76:
        return f"{meter} · ^N new"
    return f"context {meter} · nothing is dropped: ^N begins anew, F3 raises it"
