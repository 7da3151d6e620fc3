"""A table of plain text whose columns fit their content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import DataTable  # noqa: TID251  made harmless here

from app.printable import printable


class PlainTable(DataTable[Text]):
    """A table whose cells are literal text. Home and End go to the first and the last row."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]

    def fill(self, rows: Mapping[str, Sequence[str]], labels: Sequence[str] = ()) -> None:
        """Replace all rows; the cursor keeps its position.

        Args:
            rows: the cells of each row, by key.
            labels: the column headings.
        """
        line = self.cursor_row
        shown = {key: [_cell(text) for text in cells] for key, cells in rows.items()}
        self.clear(columns=True)
        heads = [_cell(label) for label in labels]
        for column in zip_longest(heads, *shown.values(), fillvalue=Text()):
            # The table would measure them only when idle, which may be never.
            self.add_column(column[0], width=max(cell.cell_len for cell in column))
        for key, cells in shown.items():
            self.add_row(*cells, key=key)
        self.move_cursor(row=min(line, max(0, self.row_count - 1)))


def _cell(text: str) -> Text:
    return Text(printable(text), no_wrap=True, end="")
