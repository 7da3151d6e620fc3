"""The tokens of an answer as a heat map: a navigable text, its wrapped lines, and the whole answer as one strip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from app.language import _
from app.printable import printable
from app.tui.inspected import HEATS, View, changed, heat, missed

if TYPE_CHECKING:
    from runtime.wire.requests import InspectedToken


LINE_END = "⏎"
"""Marks a token that ends a line."""
TAB = "    "


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent cells of one line that belong to one token."""

    token: int
    text: str


def lay_out(texts: Sequence[str], width: int) -> list[list[Run]]:
    """Wrap a text between words, and inside words that are longer than a line.

    Args:
        texts: the text of each token.
        width: width of a line in cells, at least 2.
    """
    lines: list[list[tuple[int, str]]] = [[]]
    used = 0
    for word in _words(texts):
        cells = sum(cell_len(letter) for _, letter in word)
        if word[0][1] == "\n":
            lines[-1].append((word[0][0], LINE_END))
            lines.append([])
            used = 0
            continue
        if used and used + cells > width:
            lines.append([])
            used = 0
            if word[0][1] == " ":
                continue  # a space between two lines is invisible
        for token, letter in word:
            if used + cell_len(letter) > width:
                lines.append([])
                used = 0
            lines[-1].append((token, letter))
            used += cell_len(letter)
    return [_runs(line) for line in lines]


def _words(texts: Sequence[str]) -> Iterator[list[tuple[int, str]]]:
    """Words, spaces, line ends and wide characters (which break anywhere), each as letters with their token."""
    word: list[tuple[int, str]] = []
    for token, text in enumerate(texts):
        for letter in printable(text).replace("\t", TAB):
            if letter in " \n" or cell_len(letter) > 1:
                if word:
                    yield word
                    word = []
                yield [(token, letter)]
            else:
                word.append((token, letter))
    if word:
        yield word


def _runs(line: Sequence[tuple[int, str]]) -> list[Run]:
    return [
        Run(token, "".join(letter for _, letter in letters)) for token, letters in groupby(line, key=lambda one: one[0])
    ]


HEAT_CLASSES = {f"token--heat{step}" for step in range(HEATS)}
RED = 2
"""The first heat on whose background the accent can't be read."""
LEVELS = "▁▃▅▆█"
"""The character of each heat level in the strip, for terminals without colours."""


class TokenText(ScrollView, can_focus=True):
    """The text. One token is under the cursor."""

    COMPONENT_CLASSES: ClassVar[set[str]] = HEAT_CLASSES | {"token--changed", "token--cursor"}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "step(-1)", _("token"), tooltip=_("The previous token"), id="tokens.before", key_display="←→"),
        Binding("right", "step(1)", _("token"), tooltip=_("The next token"), id="tokens.after", show=False),
        Binding("up", "line(-1)", _("up"), tooltip=_("The line above"), id="tokens.up", show=False),
        Binding("down", "line(1)", _("down"), tooltip=_("The line below"), id="tokens.down", show=False),
        Binding("home", "to(0)", _("first"), tooltip=_("The first token"), id="tokens.first", show=False),
        Binding("end", "to(-1)", _("last"), tooltip=_("The last token"), id="tokens.last", show=False),
    ]

    @dataclass
    class Moved(Message):
        """Another token is under the cursor."""

        token: int

    def __init__(self) -> None:
        super().__init__(id="token-text")
        self._tokens: Sequence[InspectedToken] = ()
        self._lines: list[list[Run]] = []
        self._heats: list[int] = []
        self._marked: list[bool] = []
        self.cursor = 0

    def show(self, tokens: Sequence[InspectedToken], view: View) -> None:
        """Show tokens in a view."""
        self._tokens = tokens
        self._heats = [heat(token, view) for token in tokens]
        self._marked = [missed(token) if view == "drafts" else changed(token) for token in tokens]
        self._lay_out()

    def on_resize(self, event: Resize) -> None:
        """Wrap to the new width."""
        if event.size.width:
            self._lay_out()

    def _lay_out(self) -> None:
        width = max(2, self.scrollable_content_region.width)
        self._lines = lay_out([token.text for token in self._tokens], width)
        self.virtual_size = Size(width, len(self._lines))
        self.refresh()
        self._scroll_to_cursor()

    def _place(self, token: int) -> tuple[int, int, int]:
        """Line, first cell and width of a token; those of the next one if it is invisible."""
        for y, line in enumerate(self._lines):
            x = 0
            for run in line:
                cells = cell_len(run.text)
                if run.token >= token:
                    return y, x, cells
                x += cells
        return max(0, len(self._lines) - 1), 0, 0

    def token_at(self, x: int, y: int) -> int | None:
        """The token at a cell, or the nearest one in its line."""
        if not 0 <= y < len(self._lines) or not self._lines[y]:
            return None
        for run in self._lines[y]:
            x -= cell_len(run.text)
            if x < 0:
                return run.token
        return self._lines[y][-1].token

    def render_line(self, y: int) -> Strip:
        """One line: each token in its heat, marked if it changed."""
        top = self.scroll_offset.y
        width, plain = self.size.width, self.rich_style
        if y + top >= len(self._lines):
            return Strip.blank(width, plain)
        under = self._lines[y + top]
        segments = [Segment(run.text, plain + self._style_of(run.token)) for run in under]
        return Strip(segments).adjust_cell_length(width, plain)

    def _style_of(self, token: int) -> Style:
        style = self.get_component_rich_style(f"token--heat{self._heats[token]}")
        if self._marked[token]:
            mark = self.get_component_rich_style("token--changed", partial=True)
            style += mark.without_color if self._heats[token] >= RED else mark
        return self.get_component_rich_style("token--cursor") if token == self.cursor else style

    def go(self, token: int) -> None:
        """Put the cursor on a token."""
        if self._tokens:
            self.cursor = max(0, min(token, len(self._tokens) - 1))
            self.refresh()
            self._scroll_to_cursor()
            self.post_message(self.Moved(self.cursor))

    def _scroll_to_cursor(self) -> None:
        y, x, cells = self._place(self.cursor)
        self.scroll_to_region(Region(x, y, max(1, cells), 1), animate=False, force=True)

    def go_to_mark(self, step: int) -> bool:
        """Go to the next (1) or previous (-1) marked token, wrapping around. Returns whether any is marked."""
        marks = [token for token, marked in enumerate(self._marked) if marked]
        ahead = [token for token in marks if (token - self.cursor) * step > 0]
        if marks:
            self.go((ahead or marks)[0 if step > 0 else -1])
        return bool(marks)

    def action_step(self, step: int) -> None:
        """Go to the previous or next token."""
        self.go(self.cursor + step)

    def action_line(self, step: int) -> None:
        """Go to the line above or below."""
        y, x = self._place(self.cursor)[:2]
        found = self.token_at(x, y + step)
        if found is not None:
            self.go(found)

    def action_to(self, token: int) -> None:
        """Go to the first or the last token."""
        self.go(token if token >= 0 else len(self._tokens) - 1)

    def on_click(self, event: Click) -> None:
        """Put the cursor at the mouse."""
        offset = event.get_content_offset(self)
        if offset is not None:
            found = self.token_at(offset.x, offset.y + self.scroll_offset.y)
            if found is not None:
                self.go(found)


class TokenStrip(Widget):
    """All tokens in one line of heat, with a line below that marks changes and the cursor."""

    COMPONENT_CLASSES: ClassVar[set[str]] = HEAT_CLASSES | {"token--changed", "token--here"}

    @dataclass
    class Pointed(Message):
        """A position of the strip was clicked."""

        token: int

    def __init__(self) -> None:
        super().__init__(id="token-strip")
        self._heats: list[int] = []
        self._marked: list[bool] = []
        self._cursor = 0

    def show(self, tokens: Sequence[InspectedToken], view: View, cursor: int) -> None:
        """Show these tokens, and where the cursor is."""
        self._heats = [heat(token, view) for token in tokens]
        self._marked = [missed(token) if view == "drafts" else changed(token) for token in tokens]
        self._cursor = cursor
        self.refresh()

    def _spans(self) -> list[range]:
        """The tokens of each cell."""
        count, width = len(self._heats), self.size.width
        cells = min(count, width)
        return [range(cell * count // cells, (cell + 1) * count // cells) for cell in range(cells)]

    def render_line(self, y: int) -> Strip:
        """The line of heat, or the line of marks."""
        plain = self.rich_style
        segments = []
        for span in self._spans():
            hottest = max(self._heats[token] for token in span)
            here = self._cursor in span
            if y == 0:
                style = self.get_component_rich_style(f"token--heat{hottest}")
                lit = Style(color=style.bgcolor if hottest else style.color)  # the text's background, as a bar
                segments.append(Segment(LEVELS[hottest], plain + lit))
            elif here:
                segments.append(Segment("▲", plain + self.get_component_rich_style("token--here", partial=True)))
            else:
                marked = any(self._marked[token] for token in span)
                style = self.get_component_rich_style("token--changed", partial=True)
                segments.append(Segment("·" if marked else " ", plain + style if marked else plain))
        return Strip(segments).adjust_cell_length(self.size.width, plain)

    def on_click(self, event: Click) -> None:
        """Go to the tokens of the cell."""
        offset = event.get_content_offset(self)
        spans = self._spans()
        if offset is not None and 0 <= offset.x < len(spans):
            self.post_message(self.Pointed(spans[offset.x][0]))
