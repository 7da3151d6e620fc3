"""The token inspector (T on a message, F7): each token's probability, its alternatives, and what changed it."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.screen import Screen

from app.errors import ClientError
from app.language import _, localized
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
from app.tui.plain import Plain
from app.tui.session import Session
from app.tui.widgets.key_line import KeyLine
from app.tui.widgets.token_text import LEVELS, TokenStrip, TokenText

if TYPE_CHECKING:
    from app.conversation import Message
    from runtime.wire.requests import Inspection

LEGEND_CELLS = 80
"""Minimum width at which the legend has a title."""
NOTED_LINES = 20
"""Minimum height at which the origin of the figures is shown."""


class InspectorScreen(Screen[None]):
    """A strip of the whole answer, its text, and the details of one token beside or below it."""

    AUTO_FOCUS = "#token-text"
    HORIZONTAL_BREAKPOINTS = [(0, "-slim"), (60, "-narrow"), (100, "-wide")]  # noqa: RUF012  declared so by Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "mark(1)", _("next change"), tooltip=_("The next changed token"), id="tokens.next"),
        Binding(
            "p", "mark(-1)", _("previous"), tooltip=_("The previous changed token"), id="tokens.previous", show=False
        ),
        Binding(
            "m", "view", _("view"), tooltip=_("Switch the view: certainty, compensation, drafts"), id="tokens.view"
        ),
        Binding("escape", "back", _("back"), tooltip=_("Back to the chat"), id="tokens.back"),
    ]

    def __init__(self, session: Session, answer: Message) -> None:
        super().__init__()
        self._session, self._answer = session, answer
        self._told: Inspection | None = None
        self._view: View = "certainty"

    def compose(self) -> ComposeResult:
        """Figures, strip, text, one token, keys."""
        yield Plain("", id="token-summary")
        yield TokenStrip()
        with Container(id="token-body"):
            yield TokenText()
            with Vertical(id="token-panel"):
                yield Plain("", id="token-head")
                yield Plain("", id="token-verdicts")
                yield Plain("", id="token-candidates")
        yield Plain("", id="token-legend")
        yield KeyLine()

    def on_mount(self) -> None:
        """Ask the runtime."""
        self.query_one("#token-summary", Plain).update(_("The model is reading its answer again …"))
        self.run_worker(self._read(), group="inspect", exclusive=True, exit_on_error=False)

    async def _read(self) -> None:
        from models.progress import Progress

        line = self.query_one("#token-summary", Plain)
        try:
            async with aclosing(self._session.inspect(self._answer.id)) as reports:
                async for report in reports:
                    if isinstance(report, Progress):
                        line.update(
                            _(
                                "reading: {done:,.0f} of {total:,.0f} tokens · Esc stops",
                                done=report.done,
                                total=report.total or 0,
                            )
                        )
                    else:
                        self._told = report
        except (ClientError, OSError) as error:
            line.update(_("The tokens can't be shown: {error}", error=error))
            return
        self._show()

    def _show(self) -> None:
        if self._told is None:
            return
        text = self.query_one(TokenText)
        text.show(self._told.tokens, self._view)
        line = fitting(summary(self._told), self.size.width - 2)
        noted = self.size.height >= NOTED_LINES and self.size.width > cell_len(NOTE)
        self.query_one("#token-summary", Plain).update(f"{line}\n{NOTE}" if noted else line)
        self.query_one("#token-legend", Plain).update(self._legend())
        self.show_token()

    def _legend(self) -> Text:
        """The meaning of each heat level."""
        strip = self.query_one(TokenStrip)
        steps = LEGENDS[self._view]
        heats = (0, 3) if self._view == "drafts" else range(len(steps))
        title = f"{TITLES[self._view]}  " if self.size.width >= LEGEND_CELLS else ""
        line = Text(title, no_wrap=True, overflow="ellipsis")
        for step, words in zip(heats, steps, strict=True):
            line.append(f"{LEVELS[step]} {words}", strip.get_component_rich_style(f"token--heat{step}"))
            line.append("  ")
        if self._told is not None and self._told.compensated and self._view != "drafts":
            line.append(_("another choice"), strip.get_component_rich_style("token--changed", partial=True))
        return line

    @on(TokenText.Moved)
    def show_token(self) -> None:
        """Show the details of the token under the cursor."""
        if self._told is None:
            return
        at = self.query_one(TokenText).cursor
        self.query_one(TokenStrip).show(self._told.tokens, self._view, at)
        token = self._told.tokens[at]
        own = chosen(token)
        told = [_("{at} of {count}", at=at + 1, count=len(self._told.tokens)), shown(own.text), share(own.probability)]
        if own.logit is not None:
            told.append(
                localized(f"logit {own.logit:.2f}")
                if own.base_logit is None
                else _("logit {own:.2f}, without compensation {base:.2f}", own=own.logit, base=own.base_logit)
            )
        panel = self.query_one("#token-panel", Vertical)
        width = max(30, panel.content_size.width)
        sentences = verdicts(token)
        self.query_one("#token-head", Plain).update(fitting(told, width, SEPARATOR))
        self.query_one("#token-verdicts", Plain).update("\n".join(sentences))
        taken = 1 + sum(1 + cell_len(sentence) // width for sentence in sentences)
        room = max(3, panel.content_size.height - taken)
        self.query_one("#token-candidates", Plain).update("\n".join(candidate_rows(token, width, min(room, 11))))

    @on(TokenStrip.Pointed)
    def go_to(self, event: TokenStrip.Pointed) -> None:
        """Go to the clicked position of the strip."""
        self.query_one(TokenText).go(event.token)

    def on_resize(self) -> None:
        """Lay out for the new size."""
        self.call_after_refresh(self._show)

    def action_mark(self, step: int) -> None:
        """Go to the next or previous change."""
        if self._told is not None and not self.query_one(TokenText).go_to_mark(step):
            self.notify(_("No token changed."), timeout=3)

    def action_view(self) -> None:
        """Switch to the next view."""
        if self._told is not None:
            ways = views(self._told)
            self._view = ways[(ways.index(self._view) + 1) % len(ways)]
            self._show()

    def action_back(self) -> None:
        """Stop reading and go back to the chat."""
        self.dismiss()
