"""One message of the transcript."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.widgets import Static

from app.conversation import Message
from app.tui.figures import fitting, statistics_lines
from app.tui.printable import printable

if TYPE_CHECKING:
    from app.tui.widgets.markdown_body import MarkdownBody

CONTINUE = "[@click=app.continue]continue[/] ^G"
RETRY = "[@click=app.regenerate]retry[/] ^R"


class MessageView(Vertical):
    """Who said it and when, the text, and under an answer what it cost and how it ended."""

    def __init__(self, message: Message) -> None:
        super().__init__(classes=message.role)
        self.message = message
        self.body: MarkdownBody | None = None
        self._live = ""
        self._last = False

    def compose(self) -> ComposeResult:
        """The parts from top to bottom."""
        message = self.message
        label = "you" if message.role == "user" else message.model or "model"
        with Horizontal(classes="message-head"):
            yield Static(printable(label), markup=False, classes="message-label")
            yield Static(message.created.strftime("%H:%M"), markup=False, classes="message-time")
        if message.role == "user":
            yield Static(printable(message.text), markup=False, classes="message-text")
        else:
            from app.tui.widgets.markdown_body import MarkdownBody

            self.body = MarkdownBody(message.text)
            yield self.body
            yield Static("", markup=False, classes="message-error")
            yield Static("", markup=False, classes="message-statistics")
            yield Static("", classes="message-actions")

    def on_mount(self) -> None:
        """Fill the lines under the text."""
        self._refresh_lines()

    def on_resize(self, event: Resize) -> None:
        """Let more or fewer figures stand under the answer."""
        if event.size.width:
            self._refresh_lines()

    def show(self, message: Message) -> None:
        """Show a later state of the same message; the text itself goes through the body."""
        self.message, self._live = message, ""
        self._refresh_lines()

    def mark_last(self, *, last: bool) -> None:
        """Say whether it is the newest message, which alone can be continued or asked again."""
        if last != self._last:
            self._last = last
            self._refresh_lines()

    def show_live(self, line: str) -> None:
        """Show how the answer is coming along."""
        if line != self._live and self.message.state == "streaming":
            self._live = line
            self._refresh_lines()

    def _refresh_lines(self) -> None:
        if not self.query(".message-actions"):
            return
        message = self.message
        failed = message.state == "failed"
        self._fill(".message-error", printable(message.error or "the answer failed") if failed else "")
        self._fill(".message-statistics", self._live if message.state == "streaming" else self._statistics())
        self._fill(".message-actions", self._actions())

    def _fill(self, selector: str, text: str) -> None:
        line = self.query_one(selector, Static)
        line.update(text)
        line.display = bool(text)

    def _statistics(self) -> str:
        message = self.message
        before = ["stopped"] if message.state == "stopped" else []
        if message.statistics is None:
            return fitting(before, self.content_size.width)
        return statistics_lines(message.statistics, self.content_size.width, before)

    def _actions(self) -> str:
        if not self._last or not self.message.resumable:
            return ""
        return f"{CONTINUE} · {RETRY}" if self.message.text else RETRY
