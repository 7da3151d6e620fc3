"""The slowdown budget on the settings screen, with its effect on this model and device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, RadioSet

from app.settings import UNSET, Settings
from app.tui.figures import compensated, percent
from app.tui.plain import Plain
from app.tui.widgets.quality_chart import QualityChart
from app.tui.widgets.setting_row import SettingRow
from app.tui.widgets.toggles import Choice
from runtime.compensation import DEFAULT_BUDGET_PERCENT

if TYPE_CHECKING:
    from runtime.wire.answers import Status
    from runtime.wire.device import DeviceReport

CHOICES = (0.0, 2.5, 5.0, 10.0, 20.0)
"""The budgets in percent that have a button; any other number is custom."""
MIN_SHOWN = 0.05
"""Slowdowns below this percentage are shown as none."""
CUSTOM = len(CHOICES)
"""Index of the button for a custom number."""


class BudgetRow(SettingRow):
    """The setting `budget`. A button applies at once, a custom number when its field loses focus."""

    def compose(self) -> ComposeResult:
        """Buttons, the field for a custom number, the problem, the effect."""
        value = self._value if isinstance(self._value, float) else DEFAULT_BUDGET_PERCENT
        at = CHOICES.index(value) if value in CHOICES else CUSTOM
        labels = [*(f"{choice:g} %" if choice else "off" for choice in CHOICES), "custom"]
        with Vertical(classes="budget-body"):
            with Horizontal(classes="setting-line"):
                yield Plain("budget", classes="setting-name")
                with Vertical(classes="budget-choice"):
                    yield RadioSet(*(Choice(label, value=i == at) for i, label in enumerate(labels)), compact=True)
                    with Horizontal(classes="budget-custom"):
                        yield Input(f"{value:g}" if at == CUSTOM else "", placeholder="percent", compact=True)
                        yield Plain("% slower at most", classes="setting-meaning")
                    yield Plain("", classes="setting-problem")
            yield Plain("", id="budget-effect")
        yield QualityChart()

    def on_mount(self) -> None:
        """Show the field for a custom number only if that is chosen."""
        self._show_custom()

    def _show_custom(self) -> None:
        self.query_one(".budget-custom").visible = self.query_one(RadioSet).pressed_index == CUSTOM

    @on(RadioSet.Changed)
    def choose(self, event: RadioSet.Changed) -> None:
        """Show or hide the field for a custom number."""
        self._show_custom()
        if event.index == CUSTOM:
            event.stop()  # nothing to apply until a number is typed
            self.query_one(Input).focus()

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Start the arrow keys at the chosen button."""
        buttons = self.query_one(RadioSet)
        if event.widget is buttons and buttons.pressed_button is not None:
            buttons._selected = buttons.pressed_index  # noqa: SLF001  Textual has no other way to place its cursor

    def typed(self) -> str:
        """The chosen percentage; `auto` while the user has chosen nothing."""
        at = self.query_one(RadioSet).pressed_index
        if at == CUSTOM:
            return self.query_one(Input).value.strip().removesuffix("%").rstrip()
        return UNSET if self._value is None and CHOICES[at] == DEFAULT_BUDGET_PERCENT else str(CHOICES[at])

    def show_effect(
        self, lines: Sequence[str], points: Sequence[tuple[float, float]] = (), budget: float | None = None
    ) -> None:
        """Show the budget's effect.

        Args:
            lines: the effect in words.
            points: the effect of other slowdowns, as for `QualityChart`.
            budget: the chosen budget in percent; None if a fixed k_chunk overrides it.
        """
        self.query_one("#budget-effect", Plain).update("\n".join(lines))
        self.query_one(QualityChart).show(points, budget)


def effect(
    settings: Settings,
    status: Status | None,
    report: DeviceReport | None,
    *,
    speed: float | None,
    tuning: bool,
) -> list[str]:
    """The budget's present effect, as lines of text.

    Args:
        settings: the user's settings.
        status: the runtime's status; None if no model is loaded.
        report: the device and the tuning, if known.
        speed: tokens per second of the last answer.
        tuning: whether another budget is being applied.
    """
    if status is None:
        return ["Its effect is shown here once a model is loaded."]
    lines = []
    wanted = settings.compensation()
    if wanted.budget_percent is None:
        lines.append(f"k_chunk {wanted.k_chunk}, set below, overrides the budget.")
    elif tuning:
        lines.append("A new budget is being applied; until then:")
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
    """The effect of compensation on quality, in words."""
    if not compensated(status.k_chunk):
        return "no compensation: plain low-bit model"
    found = report.tuning if report is not None else None
    if found is None or found.predicted_loss_won is None or not found.loss_without:
        return "closer to full precision; details: F4"
    share = percent(100 * found.predicted_loss_won / found.loss_without)
    return f"recovers {share} of the lost quality"


def _cost(status: Status, report: DeviceReport | None) -> str:
    if not compensated(status.k_chunk):
        return ""
    if status.slowdown_percent is None:
        found = report.tuning if report is not None else None
        expected = None if found is None else percent(found.predicted_slowdown_percent)
        return "slowdown not measured" if expected is None else f"{expected} slower expected, not measured"
    slower = status.slowdown_percent
    return f"{percent(slower) if slower >= MIN_SHOWN else 'no'} slower, measured"
