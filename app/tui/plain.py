"""Widgets for untrusted text: no markup is parsed, and no control characters reach the terminal.

Names, titles, answers and errors come from files, models and servers. Textual parses markup in most strings, including
links that run actions, and passes control characters through. So every widget that shows text is one of these, and
`PlainApp` covers the rest: notifications, and a final filter on every line before it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from textual.app import App
from textual.color import Color
from textual.content import Content
from textual.filter import LineFilter
from textual.notifications import SeverityLevel
from textual.visual import VisualType
from textual.widgets import OptionList, Static  # noqa: TID251  made harmless here
from textual.widgets.option_list import Option

from app.printable import harmless, printable


def plain(text: str) -> Content:
    """Literal text where Textual would parse markup in a string: border titles, placeholders, options."""
    return Content(printable(text))


class Plain(Static):
    """Literal text. Styled text is passed as `Content` or as a Rich renderable."""

    def __init__(self, content: VisualType = "", *, id: str | None = None, classes: str | None = None) -> None:  # noqa: A002  the name is Textual's
        super().__init__(self._read(content), markup=False, id=id, classes=classes)

    def update(self, content: VisualType = "", *, layout: bool = True) -> None:
        """Replace the content; the same text costs nothing."""
        content, before = self._read(content), self.content
        if isinstance(content, str) and content == before:
            return
        if isinstance(content, Content) and isinstance(before, Content) and content.is_same(before):
            return
        super().update(content, layout=layout)

    def _read(self, content: VisualType) -> VisualType:
        return printable(content) if isinstance(content, str) else content


class Links(Plain):
    """The program's own text with links as markup. It must never contain text from outside."""

    def _read(self, content: VisualType) -> VisualType:
        return Content.from_markup(content) if isinstance(content, str) else content


class PlainList(OptionList):
    """A list of options that have ids. It does not move under a hand when it is filled again."""

    @property
    def under(self) -> str | None:
        """The id of the option under the cursor; None if there is none."""
        return None if self.highlighted is None else self.options[self.highlighted].id

    def fill(self, options: Iterable[Option], go_to: str | None = None) -> None:
        """Replace all options. The cursor stays on its option, and that where it is on the screen.

        Args:
            options: the new ones.
            go_to: id of the option to put the cursor on instead, if it is there.
        """
        under, line, y = self.under, self.highlighted, self.scroll_y
        self.set_options(options)
        places = {option.id: at for at, option in enumerate(self.options) if not option.disabled}
        target = go_to if go_to in places else under
        if target in places:
            self.highlighted = places[target]
        elif line is not None:
            self.highlighted = next((at for at in places.values() if at >= line), None)
        if target == under:
            moved = 0 if line is None or self.highlighted is None else self.highlighted - line
            self.scroll_to(y=y + moved, animate=False)


class PlainApp(App[None]):
    """An application that shows untrusted text safely."""

    def __init__(self) -> None:
        super().__init__()
        self.error_console = _PlainConsole(markup=False, highlight=False, file=sys.__stderr__)
        self._last_look = _ControlFilter()

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = False,  # noqa: ARG002  Textual's screens and widgets hand theirs on
    ) -> None:
        """Show a notification without markup, whoever asks for it."""
        super().notify(printable(message), title=printable(title), severity=severity, timeout=timeout, markup=False)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """The filters that every line passes on its way to the terminal."""
        return [*super().get_line_filters(), self._last_look]


class _ControlFilter(LineFilter):
    """Removes control characters from a line. Our own widgets leave none; input fields do."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:  # noqa: ARG002  the protocol has it
        """The same cells without control characters."""
        if all(segment.text.isprintable() for segment in segments):
            return segments
        seen = (Segment(text if control else harmless(text), style, control) for text, style, control in segments)
        return [segment for segment in seen if segment.text]


class _PlainConsole(Console):
    """Prints the traceback of a crash, which may contain untrusted text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments to print."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)
