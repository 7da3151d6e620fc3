"""A chart of quality against slowdown: the share of the lost quality that compensation recovers at each slowdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from textual.strip import Strip
from textual.widget import Widget

from app.language import _, localized
from app.tui.figures import percent, share_words
from app.tui.widgets.knee_chart import plot

LABEL_CELLS = 6
"""Width of the labels of the vertical axis."""
EMPTY = _("A chart appears once the model is tuned.")


class QualityChart(Widget):
    """A curve with the budget marked on its axis. Its height is the same with and without a curve."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"quality--curve", "quality--paid", "quality--axis", "quality--title"}

    def __init__(self) -> None:
        super().__init__(id="quality-chart")
        self._points: Sequence[tuple[float, float]] = ()
        self._budget: float | None = None
        self._applied = True

    def show(self, points: Sequence[tuple[float, float]], budget: float | None, *, applied: bool) -> None:
        """Draw a curve.

        Args:
            points: (budget in percent, share recovered), ascending from (0, 0); empty if unknown.
            budget: the chosen budget in percent; None if a fixed k_chunk overrides it.
            applied: whether the model runs within it, so that what it wins back is told beside the chart.
        """
        if (points, budget, applied) != (self._points, self._budget, self._applied):
            self._points, self._budget, self._applied = points, budget, applied
            self.refresh()

    @property
    def title(self) -> str:
        """The meaning of the mark, in words."""
        points, budget = self._points, self._budget
        if len(points) < 2:
            return EMPTY
        if not budget or self._applied:
            return _("quality won back by slowdown")
        share = share_words(recovered_at(points, budget))
        return _("{budget} slower at most wins back {share} it", budget=percent(budget), share=share)

    def render_line(self, y: int) -> Strip:
        """One line of the chart."""
        width, height = self.size
        rows, points = height - 2, self._points
        if y == 0:
            return self._line([(self.title, "quality--title")], width)
        if len(points) < 2 or width <= LABEL_CELLS + 8 or rows < 1:
            return Strip.blank(width, self.rich_style)
        last, top = points[-1][0], max(won for _, won in points)
        if y == height - 1:
            words = axis(width - LABEL_CELLS, last, self._budget)
            return self._line([(" " * LABEL_CELLS, "quality--axis"), (words, "quality--axis")], width)
        label = percent(100 * top) if y == 1 else "0 %" if y == rows else ""
        cells = [(label.rjust(LABEL_CELLS - 1) + " ", "quality--axis")]
        scaled = [(round(1000 * slowdown), won) for slowdown, won in points]
        plotted = plot([scaled], width - LABEL_CELLS, rows, max(1, round(1000 * last)), (0.0, max(top, 0.01)))
        paid = width if self._budget is None else self._budget / last * (width - LABEL_CELLS)
        for x, dots in enumerate(plotted[y - 1]):
            name = "quality--paid" if x <= paid else "quality--curve"
            cells.append((chr(0x2800 | dots) if dots else " ", name))
        return self._line(cells, width)

    def _line(self, parts: Sequence[tuple[str, str]], width: int) -> Strip:
        segments = [Segment(text, self.get_component_rich_style(name)) for text, name in parts]
        return Strip(segments).adjust_cell_length(width, self.rich_style)


def recovered_at(points: Sequence[tuple[float, float]], budget: float) -> float:
    """The share recovered within a budget: that of the last point that it reaches."""
    return max(share for slowdown, share in points if slowdown <= budget)


def axis(width: int, last: float, budget: float | None) -> str:
    """The horizontal axis: `0────▲5 %────────12 %`."""
    end = percent(last)
    line = list("0" + "─" * (width - 1 - len(end)) + end)
    if budget:
        mark = localized(f"▲{budget:g} %")
        place = round(min(1.0, budget / last) * (width - 1))
        if place + len(mark) > width - len(end) - 1:  # put the number on the other side of its mark
            mark = mark[1:] + mark[0]
            place = min(place, width - 1) - len(mark) + 1
            line[place:width] = list(mark) + ["─"] * (width - place - len(mark))
        else:
            line[place : place + len(mark)] = list(mark)
    return "".join(line[:width])
