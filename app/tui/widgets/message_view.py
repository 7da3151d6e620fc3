"""One message of the transcript."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize

from app.conversation import Message
from app.documents.citation import cited, place
from app.documents.prompt import with_files_named
from app.language import _, ngettext
from app.printable import printable_name
from app.tui.figures import SEPARATOR, details, fitting, statistics_line
from app.tui.messages import MessageAct
from app.tui.plain import Links, Plain
from app.tui.widgets.call_view import CallView

if TYPE_CHECKING:
    from app.tui.widgets.markdown_body import MarkdownBody

CONTINUE = f"[@click=app.continue]{_('continue')}[/] ^G"
RETRY = f"[@click=app.regenerate]{_('retry')}[/] ^R"
MAX_LINES = 30
"""Prompts with more lines are folded."""
FOLDED_LINES = 12
"""Lines of a folded prompt that stay visible."""
MAX_CHARACTERS = 6000
MIN_LINKS = 60
"""Cells of width from which the line under an answer has a link to its passages."""


class ActionLine(Links):
    """A line whose links act on its message."""

    @property
    def _message(self) -> MessageView:
        return next(one for one in self.ancestors if isinstance(one, MessageView))

    def action_act(self, act: str) -> None:
        """Ask the screen to act on the message."""
        self._message.action_act(act)

    def action_toggle_details(self) -> None:
        """Show or hide the answer's full statistics."""
        self._message.action_toggle_details()

    def action_toggle_passages(self) -> None:
        """Show or hide the passages that the answer was given."""
        self._message.action_toggle_passages()

    def action_toggle_fold(self) -> None:
        """Unfold or fold a long prompt."""
        self._message.action_toggle_fold()


class MessageView(Vertical, can_focus=True):
    """Author and time, the text, and under an answer its statistics and how it ended."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "screen.step(-1)", _("up"), show=False, id="message.up"),
        Binding("down,j", "screen.step(1)", _("down"), show=False, id="message.down"),
        Binding("left", "act('before')", _("branch"), tooltip=_("The previous branch"), id="message.before"),
        Binding("right", "act('after')", _("branch"), tooltip=_("The next branch"), id="message.after", show=False),
        Binding("e", "act('edit')", _("edit"), tooltip=_("Edit this prompt as a new branch"), id="message.edit"),
        Binding("r", "act('regenerate')", _("again"), tooltip=_("Get another answer"), id="message.again"),
        Binding("c", "act('copy')", _("copy"), tooltip=_("Copy the message"), id="message.copy"),
        Binding("b", "act('copy_code')", _("code"), tooltip=_("Copy its code blocks, one by one"), id="message.code"),
        Binding("o", "act('open')", _("open"), tooltip=_("Open its links, one by one"), id="message.open", show=False),
        Binding("d,enter", "toggle_details", _("details"), tooltip=_("Statistics of the answer"), id="message.details"),
        Binding("t", "act('inspect')", _("tokens"), tooltip=_("How likely each token was"), id="message.tokens"),
        Binding(
            "p",
            "toggle_passages",
            _("passages"),
            tooltip=_("Read the passages used"),
            id="message.passages",
            show=False,
        ),
        Binding(
            "f",
            "toggle_fold",
            _("fold"),
            tooltip=_("Fold or unfold a long prompt, or calls"),
            id="message.fold",
            show=False,
        ),
        Binding("escape", "screen.to_composer", _("back"), tooltip=_("Back to the composer"), id="message.back"),
    ]

    def __init__(self, message: Message, inspects: Callable[[], bool]) -> None:
        super().__init__(classes=message.role)
        self._inspects = inspects
        self.message = message
        self.body: MarkdownBody | None = None
        self._live = ""
        self._last = False
        self._detailed = False
        self._quoted = False
        self._folded = True
        self._branch: tuple[int, int] = (1, 1)
        self._since = ""

    def compose(self) -> ComposeResult:
        """The parts from top to bottom."""
        message = self.message
        yield Plain("", classes="message-since")
        with Horizontal(classes="message-head"):
            yield Plain(self._label, classes="message-label")
            yield ActionLine("", classes="message-branch")
            yield Plain(message.created.strftime("%H:%M"), classes="message-time")
        if message.role == "user":
            yield Plain("", classes="message-text")
            yield ActionLine("", classes="message-fold")
        else:
            from app.tui.widgets.markdown_body import MarkdownBody

            self.body = MarkdownBody(message.text)
            yield self.body
            yield Vertical(classes="message-calls")
            yield Plain("", classes="message-error")
            yield Plain("", classes="message-passages")
            yield ActionLine("", classes="message-statistics")
            yield Plain("", classes="message-details")
            yield Links("", classes="message-actions")

    @property
    def _label(self) -> str:
        return _("you") if self.message.role == "user" else printable_name(self.message.model or _("model"))

    def on_mount(self) -> None:
        """Fill the lines above and under the text."""
        self._refresh_lines()

    def on_resize(self, event: Resize) -> None:
        """Fit the statistics to the new width."""
        if event.size.width:
            self._refresh_lines()

    def show(self, message: Message) -> None:
        """Show a later state of the same message; the text itself goes through the body."""
        self.message, self._live = message, ""
        self._refresh_lines()

    def mark(self, *, last: bool, branch: tuple[int, int], since: str) -> None:
        """Set the message's position in the chat.

        Args:
            last: whether it is the newest message; only that one has links to continue or retry.
            branch: its number among its siblings, and how many there are.
            since: the note above it if the model's view begins here.
        """
        if (last, branch, since) != (self._last, self._branch, self._since):
            self._last, self._branch, self._since = last, branch, since
            self._refresh_lines()

    def show_live(self, line: str) -> None:
        """Show the answer's progress."""
        if line != self._live and self.message.state == "streaming":
            self._live = line
            self._refresh_lines()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Enable the inspector only where it works."""
        return self._inspects() if (action, *parameters) == ("act", "inspect") else True

    def action_act(self, act: str) -> None:
        """Ask the screen to act on the message."""
        self.post_message(MessageAct(act, self.message.id))

    def action_toggle_details(self) -> None:
        """Show or hide the answer's full statistics."""
        if self.message.statistics is not None:
            self._detailed = not self._detailed
            self._refresh_lines()

    def action_toggle_passages(self) -> None:
        """Show or hide the passages that the answer was given."""
        self._quoted = not self._quoted
        self._refresh_lines()

    def action_toggle_fold(self) -> None:
        """Unfold or fold a long prompt, or the calls of an answer."""
        self._folded = not self._folded
        for call in self.query(CallView):
            call.unfold(not self._folded)
        self._refresh_lines()

    def _refresh_lines(self) -> None:
        if not self.is_attached or not self.query(".message-time"):
            return
        message, (at, count) = self.message, self._branch
        self._fill(".message-since", self._since)
        self.query_one(".message-label", Plain).update(self._label)
        self._fill(
            ".message-branch",
            f"[@click=act('before')]◂[/] {at}/{count} [@click=act('after')]▸[/]" if count > 1 else "",
        )
        if message.role == "user":
            self._refresh_text()
            return
        self._refresh_calls()
        failed = message.state == "failed"
        self._fill(".message-error", (message.error or _("the answer failed")) if failed else "")
        self._fill(".message-passages", self._passages())
        self._fill(".message-statistics", self._live if message.state == "streaming" else self._statistics())
        counted = message.statistics
        self._fill(".message-details", "\n".join(details(counted)) if counted and self._detailed else "")
        self._fill(".message-actions", self._actions())

    def _refresh_calls(self) -> None:
        """Show the tools that the answer called."""
        shown = {view.call.id: view for view in self.query(CallView)}
        for call in self.message.calls:
            if call.id in shown:
                shown[call.id].show(call)
            else:
                self.query_one(".message-calls", Vertical).mount(CallView(call))

    def _refresh_text(self) -> None:
        """Show the prompt, with attached documents by name, and folded if it is long."""
        text, lines = self.message.text, self.message.text.count("\n") + 1
        shown = with_files_named(text)
        if shown.count("\n") >= MAX_LINES or len(shown) > MAX_CHARACTERS:
            shown = "\n".join(shown.split("\n")[:FOLDED_LINES])[:MAX_CHARACTERS]
        foldable = shown != text
        self.query_one(".message-text", Plain).update(shown if self._folded else text)
        verb = _("unfold") if self._folded else _("fold")
        size = ngettext("{count:,} line", "{count:,} lines", lines)
        self._fill(".message-fold", f"{size} · [@click=toggle_fold]{verb}[/] F" if foldable else "")

    def _fill(self, selector: str, text: str) -> None:
        line = self.query_one(selector, Plain)
        line.update(text)
        line.display = bool(text)

    def _statistics(self) -> str:
        message = self.message
        before = [_("stopped")] if message.state == "stopped" else []
        if message.statistics is None:
            return fitting(before, self.content_size.width)
        links = {_("details"): "toggle_details"} if details(message.statistics) else {}
        links |= {_("passages"): "toggle_passages"} if message.passages and self.content_size.width >= MIN_LINKS else {}
        links |= {_("tokens"): "act('inspect')"} if self._inspects() else {}
        room = self.content_size.width - cell_len(SEPARATOR.join(links)) - len(SEPARATOR)
        line = statistics_line(message.statistics, room, before)
        return SEPARATOR.join([line, *(f"[@click={action}]{word}[/]" for word, action in links.items())])

    def _passages(self) -> str:
        """Where the passages stand that the answer was given, and their texts if they are unfolded."""
        passages = self.message.passages
        if passages is None:
            return ""
        if not self._quoted:
            return cited(passages)
        return "\n\n".join(f"{passage.file}, {place(passage)}\n{passage.text}" for passage in passages) or cited(
            passages
        )

    def _actions(self) -> str:
        if not self._last or not self.message.resumable:
            return ""
        return f"{CONTINUE} · {RETRY}" if self.message.text else RETRY
