"""Long work, in words and as a bar, with a way to stop it."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Static

from app.tui.jobs import Job
from app.tui.printable import printable

BAR_CELLS = 24
SLIM_BAR_CELLS = 10
"""Of the bar where the numbers beside it would not fit."""
SLIM = 60
"""Width in cells below which that is so."""


class ProgressPanel(Vertical):
    """Shows a job while it runs, and afterwards only if it did not end well."""

    def compose(self) -> ComposeResult:
        """What happens; how far it is."""
        with Horizontal(classes="progress-line"):
            yield Static("", markup=False, classes="progress-words")
            yield Static("", classes="progress-action")
        yield Static("", markup=False, classes="progress-course")
        with Horizontal(classes="progress-line progress-numbers"):
            yield Static("", markup=False, classes="progress-bar")
            yield Static("", markup=False, classes="progress-pace")

    def show(self, job: Job | None) -> None:
        """Show the state of a job, or nothing."""
        self.display = job is not None and job.outcome != "done"
        if job is None or not self.display:
            return
        running = job.outcome == "running"
        self.set_class(job.outcome == "failed", "-failed")
        self.query_one(".progress-words", Static).update(printable(job.line))
        self.query_one(".progress-action", Static).update(_actions(job))
        course = self.query_one(".progress-course", Static)
        course.update(job.course)
        course.display = bool(job.course)
        numbers = self.query_one(".progress-numbers")
        numbers.display = running and bool(job.pace)
        self.query_one(".progress-bar", Static).update(
            bar(job.fraction, SLIM_BAR_CELLS if self.app.size.width < SLIM else BAR_CELLS)
        )
        self.query_one(".progress-pace", Static).update(job.pace)


def _actions(job: Job) -> str:
    """What can be done about it, to click."""
    if job.outcome == "running":
        return "[@click=app.stop_work]stop[/] ^T"
    resume = "[@click=app.resume_work]go on[/] · " if job.stages else ""
    return f"{resume}[@click=app.dismiss_job]close[/]"


def bar(fraction: float | None, cells: int = BAR_CELLS) -> str:
    """A bar of text: `━━━━━────`; nothing where the whole is not known."""
    if fraction is None:
        return ""
    filled = round(fraction * cells)
    return "━" * filled + "─" * (cells - filled) + " "
