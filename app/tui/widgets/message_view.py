"""One message of the transcript."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.widgets import Static

from app.conversation import Message
from app.tui.figures import SEPARATOR, details, fitting, statistics_line
from app.tui.messages import MessageAct
from app.tui.printable import printable

if TYPE_CHECKING:
    from app.tui.widgets.markdown_body import MarkdownBody

CONTINUE = "[@click=app.continue]continue[/] ^G"
RETRY = "[@click=app.regenerate]retry[/] ^R"
LONGEST_LINES = 30
"""Lines of what a person wrote that are shown; more are folded."""
FOLDED_LINES = 12
"""So many stay in sight then."""
LONGEST_CHARACTERS = 6000


class ActionLine(Static):
    """A line whose links act on the message that it belongs to."""

    @property
    def _message(self) -> MessageView:
        return next(one for one in self.ancestors if isinstance(one, MessageView))

    def action_act(self, act: str) -> None:
        """Ask the screen to do something with the message."""
        self._message.action_act(act)

    def action_toggle_details(self) -> None:
        """Show or hide what the answer cost, in full."""
        self._message.action_toggle_details()

    def action_toggle_fold(self) -> None:
        """Show all of a long prompt, or its beginning."""
        self._message.action_toggle_fold()


class MessageView(Vertical, can_focus=True):
    """Who said it and when, the text, and under an answer what it cost and how it ended."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "screen.step(-1)", "up", show=False, id="message.up"),
        Binding("down,j", "screen.step(1)", "down", show=False, id="message.down"),
        Binding("left", "act('before')", "branch", tooltip="The branch before", id="message.before"),
        Binding("right", "act('after')", "branch", tooltip="The branch after", id="message.after", show=False),
        Binding("e", "act('edit')", "edit", tooltip="Write another prompt beside this one", id="message.edit"),
        Binding("r", "act('regenerate')", "again", tooltip="Another answer beside this one", id="message.again"),
        Binding("c", "act('copy')", "copy", tooltip="Copy the message", id="message.copy"),
        Binding(
            "b", "act('copy_code')", "code", tooltip="Copy its code blocks, one after the other", id="message.code"
        ),
        Binding("d,enter", "toggle_details", "details", tooltip="What the answer cost", id="message.details"),
        Binding("t", "act('inspect')", "tokens", tooltip="How likely each token was", id="message.tokens"),
        Binding("f", "toggle_fold", "fold", tooltip="Fold or unfold a long prompt", id="message.fold", show=False),
        Binding("escape", "screen.to_composer", "back", tooltip="Back to writing", id="message.back"),
    ]

    def __init__(self, message: Message, inspects: Callable[[], bool]) -> None:
        """Make a view.

        Args:
            message: what was said.
            inspects: whether the tokens of answers can be looked at.
        """
        super().__init__(classes=message.role)
        self._inspects = inspects
        self.message = message
        self.body: MarkdownBody | None = None
        self._live = ""
        self._last = False
        self._detailed = False
        self._folded = True
        self._branch: tuple[int, int] = (1, 1)
        self._since = ""

    def compose(self) -> ComposeResult:
        """The parts from top to bottom."""
        message = self.message
        yield Static("", markup=False, classes="message-since")
        with Horizontal(classes="message-head"):
            yield Static(self._label, markup=False, classes="message-label")
            yield ActionLine("", classes="message-branch")
            yield Static(message.created.strftime("%H:%M"), markup=False, classes="message-time")
        if message.role == "user":
            yield Static("", markup=False, classes="message-text")
            yield ActionLine("", classes="message-fold")
        else:
            from app.tui.widgets.markdown_body import MarkdownBody

            self.body = MarkdownBody(message.text)
            yield self.body
            yield Static("", markup=False, classes="message-error")
            yield ActionLine("", classes="message-statistics")
            yield Static("", markup=False, classes="message-details")
            yield Static("", classes="message-actions")

    @property
    def _label(self) -> str:
        return printable("you" if self.message.role == "user" else self.message.model or "model")

    def on_mount(self) -> None:
        """Fill the lines above and under the text."""
        self._refresh_lines()

    def on_resize(self, event: Resize) -> None:
        """Let more or fewer figures stand under the answer."""
        if event.size.width:
            self._refresh_lines()

    def show(self, message: Message) -> None:
        """Show a later state of the same message; the text itself goes through the body."""
        self.message, self._live = message, ""
        self._refresh_lines()

    def mark(self, *, last: bool, branch: tuple[int, int], since: str) -> None:
        """Say where it stands.

        Args:
            last: whether it is the newest message, which alone can be continued or asked again by a link.
            branch: which of how many siblings it is.
            since: what to say above it where the model reads from here on.
        """
        if (last, branch, since) != (self._last, self._branch, self._since):
            self._last, self._branch, self._since = last, branch, since
            self._refresh_lines()

    def show_live(self, line: str) -> None:
        """Show how the answer is coming along."""
        if line != self._live and self.message.state == "streaming":
            self._live = line
            self._refresh_lines()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer the tokens only where they can be looked at."""
        return self._inspects() if (action, *parameters) == ("act", "inspect") else True

    def action_act(self, act: str) -> None:
        """Ask the screen to do something with the message."""
        self.post_message(MessageAct(act, self.message.id))

    def action_toggle_details(self) -> None:
        """Show or hide what the answer cost, in full."""
        if self.message.statistics is not None:
            self._detailed = not self._detailed
            self._refresh_lines()

    def action_toggle_fold(self) -> None:
        """Show all of a long prompt, or its beginning."""
        self._folded = not self._folded
        self._refresh_lines()

    def _refresh_lines(self) -> None:
        if not self.query(".message-time"):
            return
        message, (at, count) = self.message, self._branch
        self._fill(".message-since", self._since)
        self.query_one(".message-label", Static).update(self._label)
        self._fill(
            ".message-branch", f"[@click=act('before')]◂[/] {at}/{count} [@click=act('after')]▸[/]" if count > 1 else ""
        )
        if message.role == "user":
            self._refresh_text()
            return
        failed = message.state == "failed"
        self._fill(".message-error", printable(message.error or "the answer failed") if failed else "")
        self._fill(".message-statistics", self._live if message.state == "streaming" else self._statistics())
        counted = message.statistics
        self._fill(".message-details", "\n".join(details(counted)) if counted and self._detailed else "")
        self._fill(".message-actions", self._actions())

    def _refresh_text(self) -> None:
        """The prompt, folded where it is long."""
        text = self.message.text
        lines = text.split("\n")
        long = len(lines) > LONGEST_LINES or len(text) > LONGEST_CHARACTERS
        folded = long and self._folded
        shown = "\n".join(lines[:FOLDED_LINES])[:LONGEST_CHARACTERS] if folded else text
        self.query_one(".message-text", Static).update(printable(shown))
        verb = "unfold" if folded else "fold"
        self._fill(".message-fold", f"{len(lines):,} lines · [@click=toggle_fold]{verb}[/] F" if long else "")

    def _fill(self, selector: str, text: str) -> None:
        line = self.query_one(selector, Static)
        line.update(text)
        line.display = bool(text)

    def _statistics(self) -> str:
        message = self.message
        before = ["stopped"] if message.state == "stopped" else []
        if message.statistics is None:
            return fitting(before, self.content_size.width)
        links = {"details": "toggle_details"} if details(message.statistics) else {}
        links |= {"tokens": "act('inspect')"} if self._inspects() else {}
        room = self.content_size.width - len(SEPARATOR.join(links)) - len(SEPARATOR)
        line = statistics_line(message.statistics, room, before)
        return SEPARATOR.join([line, *(f"[@click={action}]{word}[/]" for word, action in links.items())])

    def _actions(self) -> str:
        if not self._last or not self.message.resumable:
            return ""
        return f"{CONTINUE} · {RETRY}" if self.message.text else RETRY
