"""The line of keys at the bottom of a screen."""

from __future__ import annotations

from typing import Any

from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import Footer


class KeyLine(Footer):
    """A footer that is made anew only if the keys changed.

    Textual makes one whenever they may have changed: at every change of the focus, and at every report of a job. For
    each key that takes three widgets, their styles and a new layout of the screen.
    """

    def __init__(self) -> None:
        super().__init__(compact=True, show_command_palette=False)
        self._shown: list[tuple[Binding, bool, str]] = []

    def compose(self) -> ComposeResult:
        """Show the keys that work now."""
        self._shown = _keys(self.screen)
        for key in super().compose():
            yield key.add_class("-compact", update=False)  # given later, each of them would be styled anew

    async def recompose(self) -> None:
        """Show other keys, as many as fit."""
        await super().recompose()
        self.call_after_refresh(self.hide_cut)

    def on_resize(self) -> None:
        """Show the keys that fit the new width."""
        self.call_after_refresh(self.hide_cut)

    def hide_cut(self) -> None:
        """Hide the keys that would be cut at the edge."""
        for key in self.children:
            key.visible = key.virtual_region.right <= self.size.width

    def bindings_changed(self, screen: Screen[Any]) -> None:
        """Show other keys if there are others."""
        if not self.children or self._shown != _keys(screen):
            super().bindings_changed(screen)


def _keys(screen: Screen[Any]) -> list[tuple[Binding, bool, str]]:
    """The shown keys of a screen: what each does, whether it may now, and what its tooltip says."""
    active = screen.active_bindings.values()
    return [(binding, enabled, tooltip) for _, binding, enabled, tooltip in active if binding.show]
