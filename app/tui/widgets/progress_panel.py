"""The progress of a job: text, a bar, and links to stop or resume it."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from app.language import _
from app.tui.jobs import Job
from app.tui.plain import Links, Plain

BAR_CELLS = 24
SLIM_BAR_CELLS = 10
"""Width of the bar where the numbers beside it would not fit."""
SLIM = 60
"""Width of the panel in cells below which that is the case."""


class ProgressPanel(Vertical):
    """Shows a job while it runs, and afterwards only if it failed or was stopped."""

    def compose(self) -> ComposeResult:
        """Text and bar."""
        with Horizontal(classes="progress-line"):
            yield Plain("", classes="progress-words")
            yield Links("", classes="progress-action")
        yield Plain("", classes="progress-course")
        with Horizontal(classes="progress-line progress-numbers"):
            yield Plain("", classes="progress-bar")
            yield Plain("", classes="progress-pace")

    def show(self, job: Job | None) -> None:
        """Show a job, or hide if there is none."""
        self.display = job is not None and job.outcome != "done"
        if job is None or not self.display:
            return
        running = job.outcome == "running"
        self.set_class(job.outcome == "failed", "-failed")
        self.query_one(".progress-words", Plain).update(job.line)
        self.query_one(".progress-action", Plain).update(_actions(job))
        course = self.query_one(".progress-course", Plain)
        course.update(job.course)
        course.display = bool(job.course)
        numbers = self.query_one(".progress-numbers")
        numbers.display = running and bool(job.pace)
        self.query_one(".progress-bar", Plain).update(
            bar(job.fraction, SLIM_BAR_CELLS if self.app.size.width < SLIM else BAR_CELLS)
        )
        self.query_one(".progress-pace", Plain).update(job.pace)


def _actions(job: Job) -> str:
    """Links to stop, resume or dismiss the job."""
    if job.outcome == "running":
        return f"[@click=app.stop_work]{_('stop')}[/] ^T"
    resume = f"[@click=app.resume_work]{_('resume')}[/] · " if job.stages else ""
    return f"{resume}[@click=app.dismiss_job]{_('close')}[/]"


def bar(fraction: float | None, cells: int = BAR_CELLS) -> str:
    """A bar of text: `━━━━━────`; empty if the total is unknown."""
    if fraction is None:
        return ""
    filled = round(fraction * cells)
    return "━" * filled + "─" * (cells - filled) + " "
