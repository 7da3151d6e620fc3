"""The knee curve of one layer type: its time against k_chunk, drawn with Braille dots.

Source: QDEC Fig. 17.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from app.language import localized

Points = Sequence[tuple[int, float]]

DOTS_X, DOTS_Y = 2, 4
"""Braille dots per cell, horizontally and vertically."""
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row, then column
LABEL_CELLS = 6
"""Width of the labels of the vertical axis."""
MIN_SPAN = 0.05
"""Minimum span of the vertical axis, as a share of the time, so that a flat curve stays flat."""


class KneeChart(Widget):
    """A chart with a title, the curves of every n_tb with the chosen one in front, and the chosen k_chunk."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"knee--title", "knee--chosen", "knee--other", "knee--axis"}

    def __init__(
        self, title: str, chosen: Points, others: Sequence[Points] = (), *, k_chunk: int | None = None
    ) -> None:
        """Make a chart.

        Args:
            title: the layer type and its chosen values.
            chosen: (k_chunk, time relative to no compensation) for the chosen n_tb, k_chunk ascending, not empty.
            others: the same for other n_tb.
            k_chunk: the chosen value.
        """
        super().__init__()
        self._title = title
        self._chosen = chosen
        self._others = others
        self._k_chunk = k_chunk
        self._plotted: tuple[tuple[int, int], list[list[int]], list[list[int]]] | None = None

    def render_line(self, y: int) -> Strip:
        """One line of the chart."""
        width, height = self.size
        rows = height - 2
        if width <= LABEL_CELLS or rows < 1:
            return Strip.blank(width, self.rich_style)
        if y == 0:
            cells = [Segment(self._title, self._style("knee--title"))]
        elif y == height - 1:
            cells = [
                Segment(" " * LABEL_CELLS, self.rich_style),
                Segment(axis(width - LABEL_CELLS, self._last, self._k_chunk), self._style("knee--axis")),
            ]
        else:
            low, high = self._span
            label = localized(f"{high:.2f}×" if y == 1 else f"{low:.2f}×" if y == rows else "")
            cells = [Segment(label.rjust(LABEL_CELLS - 1) + " ", self._style("knee--axis"))]
            front, back = self._plots(width - LABEL_CELLS, rows)
            for ahead, behind in zip(front[y - 1], back[y - 1], strict=True):
                style = self._style("knee--chosen" if ahead else "knee--other")
                cells.append(Segment(chr(0x2800 | ahead | behind) if ahead | behind else " ", style))
        return Strip(cells).adjust_cell_length(width, self.rich_style)

    def _plots(self, width: int, rows: int) -> tuple[list[list[int]], list[list[int]]]:
        """The dots of the chosen curve and of the others, cached until the size changes."""
        if self._plotted is None or self._plotted[0] != (width, rows):
            front = plot([self._chosen], width, rows, self._last, self._span)
            back = plot(self._others, width, rows, self._last, self._span)
            self._plotted = ((width, rows), front, back)
        return self._plotted[1], self._plotted[2]

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(name)

    @property
    def _last(self) -> int:
        """The right end of the horizontal axis."""
        return max(1, *(k for points in (self._chosen, *self._others) for k, _ in points))

    @property
    def _span(self) -> tuple[float, float]:
        """The range of the vertical axis: that of the chosen curve, because others may be many times slower."""
        times = [time for _, time in self._chosen]
        low = min(1.0, *times)
        return low, max(low + MIN_SPAN, *times)


def plot(curves: Sequence[Points], width: int, height: int, last: int, span: tuple[float, float]) -> list[list[int]]:
    """Draw curves as Braille.

    Args:
        curves: (x, y) with x ascending.
        width: width in cells.
        height: height in cells.
        last: x at the right edge; the left edge is 0.
        span: y at the bottom and at the top; points above are cut off.

    Returns:
        The dots of each cell, by row from the top, as the low byte of a Braille character; 0 is none.
    """
    cells = [[0] * width for _ in range(height)]
    dots = height * DOTS_Y
    low, high = span
    for points in curves:
        before: int | None = None
        for x in range(width * DOTS_X):
            y = at(points, x / max(1, width * DOTS_X - 1) * last)
            if y is None:
                before = None
                continue
            row = round((high - y) / (high - low) * (dots - 1))
            start = row if before is None else before + (row > before) - (row < before)
            for dot in range(max(0, min(start, row)), min(dots - 1, max(start, row)) + 1):
                cells[dot // DOTS_Y][x // DOTS_X] |= _BITS[dot % DOTS_Y][x % DOTS_X]
            before = row
    return cells


def at(points: Points, x: float) -> float | None:
    """A curve's value, linear between its points; None outside them."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[0][1] if len(points) == 1 and round(x) == points[0][0] else None


def axis(width: int, last: int, k_chunk: int | None) -> str:
    """The horizontal axis: `0──────▲24──────128`."""
    line = ["─"] * width
    if k_chunk:
        text = f"▲{k_chunk}"
        place = round(min(1.0, k_chunk / last) * (width - 1))
        if place + len(text) > width:  # put the number on the other side of its mark
            text = text[1:] + text[0]
            place -= len(text) - 1
        _write(line, place, text)
    _write(line, 0, "0")
    _write(line, width - len(str(last)), str(last))
    return "".join(line)


def _write(line: list[str], place: int, text: str) -> None:
    """Write a label unless its cells or their neighbours are taken."""
    end = place + len(text)
    if place >= 0 and end <= len(line) and set(line[max(0, place - 1) : end + 1]) <= {"─"}:
        line[place:end] = text
