"""What the text before the cursor may become: a list above the composer, which keeps the focus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from textual.widgets.option_list import Option

from app.tui.plain import PlainList, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A text, or a file to attach in its place."""

    text: str
    label: str
    """What the list shows."""
    path: Path | None = None


class Suggestions(PlainList, can_focus=False):
    """The suggestions. The composer passes the keys."""

    def __init__(self) -> None:
        super().__init__(compact=True, markup=False, id="suggestions")
        self.display = False
        self.shown: Sequence[Suggestion] = ()

    def show(self, found: Sequence[Suggestion], *, first: bool = False) -> None:
        """Show suggestions, or nothing.

        Args:
            found: The suggestions.
            first: Whether the first one is chosen at once, so that Enter takes it.
        """
        self.shown, self.display = found, bool(found)
        self.set_options([Option(plain(one.label)) for one in found])
        self.highlighted = 0 if first and found else None

    @property
    def chosen(self) -> Suggestion | None:
        """The one under the cursor."""
        return None if self.highlighted is None or not self.display else self.shown[self.highlighted]

    def step(self, by: int) -> None:
        """Move the cursor down or up."""
        at = (-1 if by > 0 else 0) if self.highlighted is None else self.highlighted
        self.highlighted = (at + by) % len(self.shown)
