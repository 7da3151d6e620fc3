"""The tokens of an answer (T on a message, F7): how likely each was, what else could have come, what changed it."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.screen import Screen
from textual.widgets import Footer, Static

from app.errors import ClientError
from app.tui.figures import SEPARATOR, fitting
from app.tui.inspected import (
    LEGENDS,
    NOTE,
    TITLES,
    View,
    candidate_rows,
    chosen,
    share,
    shown,
    summary,
    verdicts,
    views,
)
from app.tui.session import Session
from app.tui.widgets.token_text import LEVELS, TokenStrip, TokenText

if TYPE_CHECKING:
    from app.conversation import Message
    from runtime.wire.inspection import Inspection

LEGEND_CELLS = 80
"""From this width on the legend says what it is the legend of."""
NOTED_LINES = 20
"""From this height on it says where the figures come from."""


class InspectorScreen(Screen[None]):
    """A strip of the whole answer, its text, and beside or below it what there is to say of one token."""

    AUTO_FOCUS = "#token-text"
    HORIZONTAL_BREAKPOINTS = [(0, "-slim"), (60, "-narrow"), (100, "-wide")]  # noqa: RUF012  declared so by Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "mark(1)", "next change", tooltip="The next token that something changed", id="tokens.next"),
        Binding("p", "mark(-1)", "before", tooltip="The one before", id="tokens.previous", show=False),
        Binding("m", "view", "look", tooltip="Certainty, compensation, drafts: what the heat means", id="tokens.view"),
        Binding("escape", "back", "back", tooltip="Back to the chat", id="tokens.back"),
    ]

    def __init__(self, session: Session, answer: Message) -> None:
        """Make the screen.

        Args:
            session: asks the runtime.
            answer: a message of the conversation in sight.
        """
        super().__init__()
        self._session, self._answer = session, answer
        self._told: Inspection | None = None
        self._view: View = "certainty"

    def compose(self) -> ComposeResult:
        """Figures, strip, text, one token, keys."""
        yield Static("", markup=False, id="token-summary")
        yield TokenStrip()
        with Container(id="token-body"):
            yield TokenText()
            with Vertical(id="token-panel"):
                yield Static("", markup=False, id="token-head")
                yield Static("", markup=False, id="token-verdicts")
                yield Static("", markup=False, id="token-candidates")
        yield Static("", id="token-legend")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Ask the runtime."""
        self.query_one("#token-summary", Static).update("The model reads its answer again …")
        self.run_worker(self._read(), group="inspect", exclusive=True, exit_on_error=False)

    async def _read(self) -> None:
        from models.progress import Progress

        line = self.query_one("#token-summary", Static)
        try:
            async with aclosing(self._session.inspect(self._answer.id)) as reports:
                async for report in reports:
                    if isinstance(report, Progress):
                        line.update(
                            f"{report.message} · {report.done:,.0f} of {report.total or 0:,.0f} tokens · Esc stops"
                        )
                    else:
                        self._told = report
        except (ClientError, OSError) as error:
            line.update(f"The tokens can't be looked at: {error}")
            return
        self._show()

    def _show(self) -> None:
        if self._told is None:
            return
        text = self.query_one(TokenText)
        text.show(self._told.tokens, self._view)
        line = fitting(summary(self._told), self.size.width - 2)
        noted = self.size.height >= NOTED_LINES and self.size.width > len(NOTE)
        self.query_one("#token-summary", Static).update(f"{line}\n{NOTE}" if noted else line)
        self.query_one("#token-legend", Static).update(self._legend())
        self.show_token()

    def _legend(self) -> Text:
        """What each heat means."""
        strip = self.query_one(TokenStrip)
        steps = LEGENDS[self._view]
        heats = (0, 3) if self._view == "drafts" else range(len(steps))
        title = f"{TITLES[self._view]}  " if self.size.width >= LEGEND_CELLS else ""
        line = Text(title, no_wrap=True, overflow="ellipsis")
        for step, words in zip(heats, steps, strict=True):
            line.append(f"{LEVELS[step]} {words}", strip.get_component_rich_style(f"token--heat{step}"))
            line.append("  ")
        if self._told is not None and self._told.compensated and self._view != "drafts":
            line.append("another choice", strip.get_component_rich_style("token--changed", partial=True))
        return line

    @on(TokenText.Moved)
    def show_token(self) -> None:
        """Tell of the token under the cursor."""
        if self._told is None:
            return
        at = self.query_one(TokenText).cursor
        self.query_one(TokenStrip).show(self._told.tokens, self._view, at)
        token = self._told.tokens[at]
        own = chosen(token)
        told = [f"{at + 1} of {len(self._told.tokens)}", shown(own.text), share(own.probability)]
        if own.logit is not None:
            without = "" if own.base_logit is None else f", without compensation {own.base_logit:.2f}"
            told.append(f"logit {own.logit:.2f}{without}")
        panel = self.query_one("#token-panel", Vertical)
        width = max(30, panel.content_size.width)
        sentences = verdicts(token)
        self.query_one("#token-head", Static).update(fitting(told, width, SEPARATOR))
        self.query_one("#token-verdicts", Static).update("\n".join(sentences))
        taken = 1 + sum(1 + len(sentence) // width for sentence in sentences)
        room = max(3, panel.content_size.height - taken)
        self.query_one("#token-candidates", Static).update("\n".join(candidate_rows(token, width, min(room, 11))))

    @on(TokenStrip.Pointed)
    def go_to(self, event: TokenStrip.Pointed) -> None:
        """Go where the strip was clicked."""
        self.query_one(TokenText).go(event.token)

    def on_resize(self) -> None:
        """Use the new room."""
        self.call_after_refresh(self._show)

    def action_mark(self, step: int) -> None:
        """Go to the next change, or the one before."""
        if self._told is not None and not self.query_one(TokenText).go_to_mark(step):
            self.notify("No token was changed.", timeout=3)

    def action_view(self) -> None:
        """Let the heat mean something else."""
        if self._told is not None:
            ways = views(self._told)
            self._view = ways[(ways.index(self._view) + 1) % len(ways)]
            self._show()

    def action_back(self) -> None:
        """Back to the chat; what is being read is stopped."""
        self.dismiss()
