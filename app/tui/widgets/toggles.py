"""Buttons that show their state by their shape as well, so that one that is off does not look as if it were on."""

from __future__ import annotations

from textual.widgets import Checkbox, RadioButton


class Choice(RadioButton):
    """One of several: `●` chosen, `○` not."""

    BUTTON_LEFT = ""
    BUTTON_RIGHT = ""

    @property
    def BUTTON_INNER(self) -> str:  # type: ignore[override]
        """The mark of the present state."""
        return "●" if self.value else "○"


class Box(Checkbox):
    """Yes or no: `[x]`, `[ ]`."""

    BUTTON_LEFT = ""
    BUTTON_RIGHT = ""

    @property
    def BUTTON_INNER(self) -> str:  # type: ignore[override]
        """The mark of the present state."""
        return "[x]" if self.value else "[ ]"
