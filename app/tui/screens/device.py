"""The device screen (F4): the detected hardware, its speed, and how the running model is tuned to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Vertical, VerticalScroll
from textual.screen import Screen
from textual.widgets import Sparkline

from app.amounts import byte_count
from app.errors import ClientError
from app.language import _
from app.printable import printable
from app.reports import reported
from app.tui.figures import compensated, k_chunk_text, rate
from app.tui.machine import Lines, chosen_curve, layer_rows, machine_lines, tuning_lines
from app.tui.messages import TuneAsked
from app.tui.plain import Plain
from app.tui.session import Session
from app.tui.widgets.header import HeaderBar
from app.tui.widgets.key_line import KeyLine
from app.tui.widgets.knee_chart import KneeChart
from app.tui.widgets.progress_panel import ProgressPanel

if TYPE_CHECKING:
    from runtime.wire.device import DeviceReport, Tuning
    from tuner.curve import Curve

LIVE_INTERVAL_S = 1.0


class DeviceScreen(Screen[None]):
    """All that is known about the device; asked again whenever the job or the model changes."""

    AUTO_FOCUS = "#device"
    HORIZONTAL_BREAKPOINTS = [(0, "-slim"), (75, "-narrow"), (90, "-wide"), (110, "-broad")]  # noqa: RUF012  declared so by Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "retune", _("retune"), tooltip=_("Measure again and apply the budget"), id="device.retune"),
        Binding("s", "app.stop_work", _("stop"), tooltip=_("Stop the running work"), id="device.stop", show=False),
        Binding("escape", "dismiss", _("back"), tooltip=_("Back to the chat"), id="device.back"),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._seen: tuple[object, ...] = ()
        self._drawn: object = None

    def compose(self) -> ComposeResult:
        """The machine and its current load side by side, then the tuning and its curves."""
        yield HeaderBar()
        with VerticalScroll(id="device"):
            with Vertical(classes="device-columns"):
                with Vertical(classes="device-column"):
                    yield Plain(_("Device"), classes="device-group")
                    yield Plain(_("detecting the device …"), id="device-machine")
                    yield Plain("", id="device-problems")
                with Vertical(classes="device-column device-live"):
                    yield Plain(_("Now"), classes="device-group")
                    yield Plain("", id="device-speed")
                    yield Sparkline([], id="device-speeds")
                    yield Plain("", id="device-memory")
                    yield Sparkline([], id="device-memories")
            yield Plain(_("Tuning"), classes="device-group")
            with Vertical(classes="device-columns"):
                yield Plain("", id="device-tuning", classes="device-column")
                yield Plain("", id="device-layers", classes="device-column device-live")
            yield Plain(
                _("Layer time by k_chunk, relative to no compensation"), classes="device-group", id="device-curves"
            )
            yield Grid(id="device-knees")
        yield ProgressPanel()
        yield KeyLine()

    def on_mount(self) -> None:
        """Show what is already known, and ask for the rest."""
        self.query_one("#device-curves").display = False
        self.query_one("#device-problems").display = False
        self.set_interval(LIVE_INTERVAL_S, self._show_live)
        self.show_session()

    def show_session(self) -> None:
        """Update everything; ask the device only when something changed."""
        if not self.query(ProgressPanel):
            return
        session = self._session
        self.query_one(HeaderBar).show(session)
        self.query_one(ProgressPanel).show(session.job)
        self._show_live()
        status = session.status
        runs = status and (status.model, status.budget, status.k_chunk)
        seen = (session.ready, runs, session.working, session.generating, session.problem)
        if seen != self._seen:
            self._seen = seen
            self.run_worker(self._ask(), group="device", exclusive=True, exit_on_error=False)

    def _show_live(self) -> None:
        session, recent = self._session, self._session.recent
        speed = session.tally.per_s if session.generating else recent.last_speed
        self.query_one("#device-speed", Plain).update(
            _("tok/s: after the first answer")
            if speed is None
            else rate(speed)
            if session.generating
            else _("{speed} in the last answer", speed=rate(speed))
        )
        memory = session.status.memory_bytes if session.status is not None else None
        self.query_one("#device-memory", Plain).update(
            _("{size} held", size=byte_count(memory)) if memory else _("memory unknown")
        )
        self._draw("#device-speeds", list(recent.speeds))
        self._draw("#device-memories", list(recent.memory))

    def _draw(self, selector: str, samples: Sequence[float]) -> None:
        line = self.query_one(selector, Sparkline)
        line.display = len(samples) > 1
        line.data = samples

    async def _ask(self) -> None:
        try:
            report = await self._session.client().device()
        except (ClientError, OSError) as error:
            self.query_one("#device-machine", Plain).update(str(error))
            return
        await self._show(report)

    async def _show(self, report: DeviceReport) -> None:
        self.query_one("#device-machine", Plain).update(listed(machine_lines(report)))
        problems = self.query_one("#device-problems", Plain)
        problems.display = bool(report.problems)
        problems.update(
            "\n".join(f"! {reported(problem.what)}\n  → {reported(problem.fix)}" for problem in report.problems)
        )
        tuning = report.tuning if report.tuning is not None and report.tuning.budget_percent else None
        self.query_one("#device-tuning", Plain).update(
            Text(self._untuned(report)) if tuning is None else listed(tuning_lines(tuning, report.prompts))
        )
        self.query_one("#device-layers", Plain).update(Text() if tuning is None else tabled(layer_rows(tuning)))
        if tuning != self._drawn:
            await self._draw_curves(tuning)
            self._drawn = tuning

    def _untuned(self, report: DeviceReport) -> str:
        session = self._session
        status = session.status
        if status is None or not session.ready:
            return _("No model is loaded; F2 picks one.")
        if session.settings.k_chunk is not None:
            return _(
                "{k_chunk} is set manually (F3), so the budget has no effect.",
                k_chunk=k_chunk_text(status.k_chunk) or "k_chunk 0",
            )
        if status.exact:
            return _(
                "Answers are exact (F3): those of the full-precision weights, so there is no compensation to tune."
            )
        if status.budget_percent == 0:
            return _("The budget is off (F3), so there is no compensation to tune.")
        if session.tuning:
            return _("Measuring …")
        if report.problems:
            return _("Not tuned, for the reason above.")
        if compensated(status.k_chunk):
            return _("Not tuned: the model runs with the program's own k_chunk. R tunes it.")
        return _("Not tuned: the model runs without compensation. R tunes it.")

    async def _draw_curves(self, tuning: Tuning | None) -> None:
        charts = [] if tuning is None else charts_of(tuning)
        grid = self.query_one("#device-knees", Grid)
        await grid.remove_children()
        await grid.mount_all(charts)
        self.query_one("#device-curves").display = bool(charts)

    def action_retune(self) -> None:
        """Measure again, if a budget is in effect."""
        session = self._session
        if not session.ready:
            self.notify(_("No model is loaded; F2 picks one."), severity="warning")
        elif session.settings.k_chunk is not None:
            self.notify(
                _("k_chunk is set manually and overrides the budget; set it to auto in F3 to undo that."),
                severity="warning",
            )
        elif session.status is not None and session.status.exact:
            self.notify(_("Answers are exact, so there is nothing to tune; F3 sets a budget."), severity="warning")
        elif session.settings.budget == 0:
            self.notify(_("The budget is off; F3 sets one."), severity="warning")
        else:
            self.app.post_message(TuneAsked())

    async def action_dismiss(self, result: None = None) -> None:
        """Back to the chat."""
        self.dismiss(result)


def charts_of(tuning: Tuning) -> list[KneeChart]:
    """A chart for each measured layer type."""
    by_kind: dict[str, list[Curve]] = {}
    for curve in tuning.curve:
        if curve.points:
            by_kind.setdefault(curve.kind, []).append(curve)
    charts = []
    for kind, curves in by_kind.items():
        n_tb, k_chunk = tuning.n_tb.get(kind, 0), tuning.k_chunk.get(kind)
        chosen = chosen_curve(curves, n_tb)
        title = [
            kind,
            f"n_tb {chosen.n_tb}" if chosen.n_tb else "",
            "" if k_chunk is None else f"k_chunk {k_chunk}",
        ]
        others = [curve.points for curve in curves if curve is not chosen]
        words = printable(" · ".join(part for part in title if part))
        charts.append(KneeChart(words, chosen.points, others, k_chunk=k_chunk))
    return charts


def listed(lines: Lines) -> Table:
    """Names in one column and wrapped text in the other."""
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for name, words in lines:
        table.add_row(name, Text(printable(words)))
    return table


def tabled(rows: Sequence[Sequence[str]]) -> Table:
    """A table with a heading and right-aligned numbers."""
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column()
    for _column in rows[0][1:]:
        table.add_column(justify="right")
    for at, row in enumerate(rows):
        table.add_row(*(Text(printable(cell)) for cell in row), style="dim" if at == 0 else "")
    return table
