"""Toggle buttons that also show their state by shape, so that off never looks like on."""

from __future__ import annotations

from textual.widgets import Checkbox, RadioButton


class Choice(RadioButton):
    """One of several: `●` chosen, `○` not."""

    BUTTON_LEFT = ""
    BUTTON_RIGHT = ""

    @property
    def BUTTON_INNER(self) -> str:  # type: ignore[override]
        """The symbol of the current state."""
        return "●" if self.value else "○"


class Box(Checkbox):
    """Yes or no: `[x]`, `[ ]`."""

    BUTTON_LEFT = ""
    BUTTON_RIGHT = ""

    @property
    def BUTTON_INNER(self) -> str:  # type: ignore[override]
        """The symbol of the current state."""
        return "[x]" if self.value else "[ ]"
