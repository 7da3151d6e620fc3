"""The line of keys at the bottom of a screen."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.cells import cell_len
from textual.binding import Binding
from textual.content import Content
from textual.events import MouseDown, MouseMove
from textual.screen import Screen
from textual.style import Style
from textual.widget import Widget


class KeyLine(Widget):
    """The keys that work now, as many as fit. A click presses one.

    Textual's footer makes three widgets for each key, and all of them anew when one changes.
    """

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = {"key-line--key", "key-line--words", "key-line--under"}

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[Binding, str]] = []
        """What each key does, and its tooltip."""
        self._under = ""
        """The key under the mouse."""

    def on_mount(self) -> None:
        """Follow the keys of the screen."""
        self.screen.bindings_updated_signal.subscribe(self, self._follow)

    def _follow(self, screen: Screen[Any]) -> None:
        """Show other keys if there are others; not while another window has the focus."""
        shown: dict[str, tuple[Binding, str]] = {}
        for _, binding, _, tooltip in screen.active_bindings.values():
            if binding.show:
                shown.setdefault(binding.action, (binding, tooltip))
        if self.app.app_focus and [*shown.values()] != self.shown:
            self.shown = [*shown.values()]
            self.refresh()

    def render(self) -> Content:
        """The keys, each with itself and its tooltip as meta data for the mouse."""
        styles = [self.get_visual_style("key-line--key"), self.get_visual_style("key-line--words")]
        parts: list[str | tuple[str, Style]] = []
        room = self.size.width
        for binding, tooltip in self.shown:
            texts = self.app.get_key_display(binding), f" {binding.description} "
            room -= sum(map(cell_len, texts))
            if room < 0:
                break
            about = Style.from_meta({"key": binding.key, "tooltip": tooltip})
            if binding.key == self._under:
                about += self.get_visual_style("key-line--under", partial=True)
            parts += [*((text, style + about) for text, style in zip(texts, styles, strict=True)), " "]
            room -= 1
        return Content.assemble(*parts)

    def on_mouse_move(self, event: MouseMove) -> None:
        """Mark the key under the mouse, and offer its tooltip."""
        self._mark(event.style.meta.get("key", ""), event.style.meta.get("tooltip", ""))

    def on_leave(self) -> None:
        """Mark none."""
        self._mark()

    def _mark(self, key: str = "", tooltip: str = "") -> None:
        if key != self._under:
            self._under = key
            self.styles.pointer = "pointer" if key else "default"
            self.tooltip = tooltip or None
            self.refresh()

    def on_mouse_down(self, event: MouseDown) -> None:
        """Press the key under the mouse."""
        if key := event.style.meta.get("key"):
            self.app.simulate_key(key)
