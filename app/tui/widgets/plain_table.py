"""A table of plain text that does not move under a hand when it is filled again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.widgets import DataTable  # noqa: TID251  made harmless here

from app.printable import printable, without_middle

MIN_NAME = 8
"""Minimum cells of a column that shrinks."""


class PlainTable(DataTable[Text]):
    """A table of literal text whose columns fit their content. Home and End go to the first and the last row."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]

    @property
    def under(self) -> str | None:
        """The key of the row under the cursor; None if there is no row."""
        row = self.cursor_row
        return self.ordered_rows[row].key.value if 0 <= row < self.row_count else None

    def fill(
        self,
        rows: Mapping[str, Sequence[str | Text]],
        labels: Sequence[str] = (),
        *,
        top: bool = False,
        shrinks: int | None = None,
    ) -> None:
        """Replace all rows. The cursor stays on its row, and that where it is on the screen.

        Args:
            rows: the cells of each row, by key; `Text` is printable already.
            labels: the column headings.
            top: whether the rows are other ones, so that the cursor goes to the first.
            shrinks: the column whose texts are shortened in the middle until the others fit.
        """
        line, under, x, y = self.cursor_row, self.under, self.scroll_x, self.scroll_y
        shown = {key: [_cell(text) for text in cells] for key, cells in rows.items()}
        self.clear(columns=True)
        columns = list(zip_longest([_cell(label) for label in labels], *shown.values(), fillvalue=Text()))
        # The table would measure them only when idle, which may be never.
        widths = [max(cell.cell_len for cell in column) for column in columns]
        if shrinks is not None and self.size.width:
            room = self.size.width - self.scrollbar_size_vertical - sum(widths) - 2 * self.cell_padding * len(widths)
            widths[shrinks] = max(MIN_NAME, widths[shrinks] + min(0, room))
            for cells in shown.values():
                if cells[shrinks].cell_len > widths[shrinks]:
                    cells[shrinks] = _cell(without_middle(cells[shrinks].plain, widths[shrinks]))
        for column, width in zip(columns, widths, strict=True):
            self.add_column(column[0], width=width)
        for key, cells in shown.items():
            self.add_row(*cells, *[Text()] * (len(columns) - len(cells)), key=key)
        if top or not rows:
            return
        row = list(rows).index(under) if under is not None and under in rows else min(line, len(rows) - 1)
        width = sum(column.get_render_width(self) for column in self.ordered_columns)
        header = self.header_height if self.show_header else 0
        self.virtual_size = Size(width, len(rows) + header)
        self.move_cursor(row=row, scroll=False)
        self.scroll_to(x, y + row - line, animate=False)
        if not 0 <= line - y < self.size.height - header:  # the table will scroll to its cursor, which nobody saw
            self.call_after_refresh(self.scroll_to, x, y, animate=False)


def _cell(text: str | Text) -> Text:
    return text if isinstance(text, Text) else Text(printable(text), no_wrap=True, end="")
