"""The slowdown budget: a choice, and beside it what it buys on this model and device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, RadioSet, Static

from app.settings import UNSET, Settings
from app.tui.figures import compensated, percent
from app.tui.printable import printable
from app.tui.widgets.bought_chart import BoughtChart
from app.tui.widgets.setting_row import SettingRow
from app.tui.widgets.toggles import Choice
from runtime.compensation import DEFAULT_BUDGET_PERCENT, of_settings

if TYPE_CHECKING:
    from runtime.wire.answers import Status
    from runtime.wire.device import DeviceReport

CHOICES = (0.0, 2.5, 5.0, 10.0, 20.0)
"""Percent, each a button; any other number is custom."""
LEAST_TOLD = 0.05
"""A slowdown in percent below which there is none."""
CUSTOM = len(CHOICES)
"""Index of the button for any other number."""


class BudgetRow(SettingRow):
    """The setting `budget`. A button applies at once, a custom number when its field is left."""

    def compose(self) -> ComposeResult:
        """The choice, the field of a custom number, the problem, the effect."""
        value = self._value if isinstance(self._value, float) else DEFAULT_BUDGET_PERCENT
        at = CHOICES.index(value) if value in CHOICES else CUSTOM
        labels = [*(f"{choice:g} %" if choice else "off" for choice in CHOICES), "custom"]
        with Vertical(classes="budget-body"):
            with Horizontal(classes="setting-line"):
                yield Static("budget", classes="setting-name")
                with Vertical(classes="budget-choice"):
                    yield RadioSet(*(Choice(label, value=i == at) for i, label in enumerate(labels)), compact=True)
                    with Horizontal(classes="budget-custom"):
                        yield Input(f"{value:g}" if at == CUSTOM else "", placeholder="percent", compact=True)
                        yield Static("% slower at most", classes="setting-meaning")
                    yield Static("", markup=False, classes="setting-problem")
            yield Static("", markup=False, id="budget-effect")
        yield BoughtChart()

    def on_mount(self) -> None:
        """Show the field of a custom number only where one is chosen."""
        self._show_custom()

    def _show_custom(self) -> None:
        self.query_one(".budget-custom").visible = self.query_one(RadioSet).pressed_index == CUSTOM

    @on(RadioSet.Changed)
    def choose(self, event: RadioSet.Changed) -> None:
        """Open the field for a custom number, or put it away."""
        self._show_custom()
        if event.index == CUSTOM:
            event.stop()  # nothing to apply before there is a number
            self.query_one(Input).focus()

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Let the arrow keys begin at what is chosen."""
        buttons = self.query_one(RadioSet)
        if event.widget is buttons and buttons.pressed_button is not None:
            buttons._selected = buttons.pressed_index  # noqa: SLF001  Textual has no other way to place its cursor

    def typed(self) -> str:
        """The chosen percentage; `auto` while the default is chosen by nobody."""
        at = self.query_one(RadioSet).pressed_index
        if at == CUSTOM:
            return self.query_one(Input).value.strip().removesuffix("%").rstrip()
        return UNSET if self._value is None and CHOICES[at] == DEFAULT_BUDGET_PERCENT else str(CHOICES[at])

    def show_effect(
        self, lines: Sequence[str], points: Sequence[tuple[float, float]] = (), budget: float | None = None
    ) -> None:
        """Say and draw what the budget buys.

        Args:
            lines: in words.
            points: what other slowdowns would buy, as `BoughtChart` has it.
            budget: the wanted one in percent; None where a fixed k_chunk overrides it.
        """
        self.query_one("#budget-effect", Static).update(printable("\n".join(lines)))
        self.query_one(BoughtChart).show(points, budget)


def effect(
    settings: Settings,
    status: Status | None,
    report: DeviceReport | None,
    *,
    speed: float | None,
    tuning: bool,
) -> list[str]:
    """What the budget buys now, in lines.

    Args:
        settings: what a person chose.
        status: what runs; None where no model is loaded.
        report: the device and the tuning, where the runtime told.
        speed: tokens a second of the last answer.
        tuning: whether another budget is being applied right now.
    """
    if status is None:
        return ["What it buys is shown here once a model is loaded."]
    lines = []
    wanted = of_settings(settings.k_chunk, settings.budget)
    if wanted.budget_percent is None:
        lines.append(f"k_chunk {wanted.k_chunk}, set below, overrides the budget.")
    elif tuning:
        lines.append("Another budget is being applied; until then:")
    elif status.budget_percent is not None and status.budget_percent != wanted.budget_percent:
        lines.append(f"Not applied yet: still {status.budget_percent:g} %. F4, then R, tries again.")
    lines.append(_quality(status, report))
    if cost := _cost(status, report):
        lines.append(cost)
    lines.append(f"{speed:.1f} tok/s in the last answer" if speed is not None else "tok/s: after the next answer")
    if report is not None and wanted.budget_percent is not None and status.budget_percent is None:
        lines += [f"{problem.what} → {problem.fix}" for problem in report.problems]  # why the budget has no effect
    return lines


def _quality(status: Status, report: DeviceReport | None) -> str:
    """What compensation does for the answers."""
    if not compensated(status.k_chunk):
        return "no compensation: the plain low-bit model"
    found = report.tuning if report is not None else None
    if found is None or found.predicted_loss_won is None or not found.loss_without:
        return "nearer to full precision; details: F4"
    share = percent(100 * found.predicted_loss_won / found.loss_without)
    return f"wins back {share} of what low bits lose"


def _cost(status: Status, report: DeviceReport | None) -> str:
    if not compensated(status.k_chunk):
        return ""
    found = report.tuning if report is not None else None
    expected = f"{percent(found.predicted_slowdown_percent)} expected" if found is not None else ""
    if status.slowdown_percent is None:
        return f"{expected} slower, not measured" if expected else "slowdown not measured"
    slower = status.slowdown_percent
    words = f"{percent(slower)} slower" if slower >= LEAST_TOLD else "no slower"
    return f"{words}, measured{f' ({expected})' if expected else ''}"
