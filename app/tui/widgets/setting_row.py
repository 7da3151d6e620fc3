"""Rows of the settings screen: a plain setting, the slowdown budget with its effect, the best offer, the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Checkbox, Input, RadioButton, RadioSet, Select, TextArea

from app.amounts import byte_count
from app.language import _, localized, ngettext
from app.reports import reported
from app.settings import DEFAULT_IDLE_MINUTES, RULES, UNSET, Settings, SettingsError, Value, check
from app.tui.figures import SEPARATOR, compensated, percent, rate, setting_name, share_words, token_count
from app.tui.plain import Plain
from app.tui.widgets.quality_chart import QualityChart
from runtime.compensation import DEFAULT_BUDGET_PERCENT, DEFAULT_PROMPT_BUDGET_PERCENT, EXACT
from runtime.kv.kinds import CHAT_KINDS, DEFAULT_KV, SPECULATIVE_KV

if TYPE_CHECKING:
    from runtime.wire.answers import CacheFacts, Caches, Holding, Status
    from runtime.wire.device import DeviceReport, Offer


class Choice(RadioButton):
    """One of several: `●` chosen, `○` not."""

    BUTTON_LEFT = ""
    BUTTON_RIGHT = ""

    @property
    def BUTTON_INNER(self) -> str:  # type: ignore[override]
        """The symbol of the current state."""
        return "●" if self.value else "○"


class Box(Checkbox):
    """Yes or no: `[x]`, `[ ]`."""

    BUTTON_LEFT = ""
    BUTTON_RIGHT = ""

    @property
    def BUTTON_INNER(self) -> str:  # type: ignore[override]
        """The symbol of the current state."""
        return "[x]" if self.value else "[ ]"


MEANINGS = {
    "idle_unload": _(
        "minutes until an unused model leaves memory; 0 is never; auto: {default}",
        default=DEFAULT_IDLE_MINUTES,
    ),
    "overflow": _("what happens to the oldest messages of a full chat"),
    "k_chunk": _("a number overrides the budget; 0 is none"),
    "prompt_budget": _(
        "% more time to the first word; auto: {default:g}",
        default=DEFAULT_PROMPT_BUDGET_PERCENT,
    ),
}
"""Descriptions for the settings screen that replace the rule's own."""
KV_ADVICE = {
    UNSET: _("int4, or 8 bits where int4 damages the answers"),
    "int4": _("28 % of fp16's memory, perplexity within 0.6 % where the model's check passed"),
    "int8": _("half of fp16's memory, no measurable loss"),
    "fp16": _("exact; the largest and, in long chats, the slowest"),
    "hierarchical": _("8 bits, of which drafts read 4; chosen by speculation"),
    "kcvt4": _("4 bits per key channel; for comparison, int4 is as good"),
    "gear4": _("4 bits with GEAR's corrections; for comparison, larger than int4"),
    "gear-l4": _("gear4 with the low-rank part only; for comparison"),
    "kivi2": _("2 bits: clearly worse, only if nothing else fits"),
    "gear2": _("2 bits with GEAR's corrections: better than kivi2, worse than int4"),
    "gear-l2": _("gear2 with the low-rank part only"),
}
"""When to choose each kind of KV cache; docs/kv.md has the numbers."""


class SettingRow(Vertical):
    """One setting: name, value, meaning, and any problem with the typed value."""

    def __init__(self, key: str, value: Value) -> None:
        super().__init__(id=f"setting-{key}", classes="setting")
        self.key = key
        self._rule = RULES[key]
        self._value = value

    def compose(self) -> ComposeResult:
        """Name, field and meaning on one line, the problem below."""
        shown = UNSET if self._value is None else str(self._value)
        with Horizontal(classes="setting-line"):
            yield Plain(setting_name(self.key), classes="setting-name")
            if self._rule.choices:
                offered = (UNSET, *CHAT_KINDS) if self.key == "kv" else self._rule.choices
                choices = [(_(choice), choice) for choice in dict.fromkeys((*offered, shown))]
                yield Select(choices, value=shown, allow_blank=False, compact=True)
            elif self._rule.kind is str:
                yield TextArea(
                    shown,
                    compact=True,
                    tab_behavior="focus",
                    show_line_numbers=False,
                    highlight_cursor_line=False,
                    placeholder=self._rule.meaning,
                )
            else:
                yield Input(shown, compact=True)
            if self._rule.kind is not str or self._rule.choices:
                yield Plain(self._meaning(shown), classes="setting-meaning")
        yield Plain("", classes="setting-problem")

    def _meaning(self, value: str) -> str:
        """The setting's meaning, or when to choose the selected kind of cache."""
        words = KV_ADVICE[value] if self.key == "kv" else MEANINGS.get(self.key, self._rule.meaning)
        return f"{words} · {_('reloads')}" if self._rule.reload else words

    @on(Select.Changed)
    def tell_meaning(self, event: Select.Changed) -> None:
        """Show when to choose the selected value."""
        if isinstance(event.value, str):
            self.query_one(".setting-meaning", Plain).update(self._meaning(event.value))

    def typed(self) -> str:
        """The field's text; `auto` for an empty field where that is allowed."""
        if self._rule.choices:
            return str(self.query_one(Select).value)
        if self._rule.kind is str:
            return self.query_one(TextArea).text
        return self.query_one(Input).value.strip() or (UNSET if self._rule.optional else "")

    def put(self, value: str) -> None:
        """Set the field as if typed; not for multi-line texts."""
        if self._rule.choices:
            self.query_one(Select).value = value
        else:
            self.query_one(Input).value = value

    def take(self) -> bool:
        """Validate the typed value and show any problem.

        Returns:
            Whether there is a new, valid value; `value` then holds it.
        """
        problem = self.query_one(".setting-problem", Plain)
        try:
            value = check(self.key, self.typed())
        except SettingsError:
            problem.update(_("it must be {allowed}", allowed=self._rule.allowed))
            problem.display = True
            return False
        problem.display = False
        changed = value != self._value
        self._value = value
        return changed

    @property
    def value(self) -> Value:
        """The last valid value."""
        return self._value


CHOICES = (0.0, 2.5, 5.0, 10.0, 20.0)
"""The budgets in percent that have a button; any other number is custom."""
MIN_SHOWN = 0.05
"""Slowdowns below this percentage are shown as none."""
CUSTOM = len(CHOICES)
"""Index of the button for a custom number; that of exact answers is behind it."""


class BudgetRow(SettingRow):
    """The setting `budget`. A button applies at once, a custom number when its field loses focus."""

    def compose(self) -> ComposeResult:
        """Buttons, the field for a custom number, the problem, the effect."""
        value = self._value if isinstance(self._value, float) else DEFAULT_BUDGET_PERCENT
        at = CUSTOM + 1 if self._value == EXACT else CHOICES.index(value) if value in CHOICES else CUSTOM
        numbers = [localized(f"{choice:g} %") if choice else _("off") for choice in CHOICES]
        labels = [*numbers, _("custom"), _("exact")]
        with Vertical(classes="budget-body"):
            with Horizontal(classes="setting-line"):
                yield Plain(_("budget"), classes="setting-name")
                with Vertical(classes="budget-choice"):
                    yield RadioSet(*(Choice(label, value=i == at) for i, label in enumerate(labels)), compact=True)
                    with Horizontal(classes="budget-custom"):
                        yield Input(f"{value:g}" if at == CUSTOM else "", placeholder=_("percent"), compact=True)
                        yield Plain(_("% slower at most"), classes="setting-meaning")
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
        if at > CUSTOM:
            return EXACT
        if at == CUSTOM:
            return self.query_one(Input).value.strip().removesuffix("%").rstrip()
        return UNSET if self._value is None and CHOICES[at] == DEFAULT_BUDGET_PERCENT else str(CHOICES[at])

    def show_effect(
        self,
        lines: Sequence[str],
        points: Sequence[tuple[float, float]] = (),
        budget: float | None = None,
        *,
        applied: bool = True,
        exact: bool = False,
    ) -> None:
        """Show the budget's effect.

        Args:
            lines: the effect in words.
            points: the effect of other slowdowns, as for `QualityChart`.
            budget: the chosen budget in percent; None if a fixed k_chunk overrides it.
            applied: whether the lines are about this budget, so that the chart need not tell what it would do.
            exact: whether answers are to be exact, so that there is nothing to draw.
        """
        self.query_one("#budget-effect", Plain).update("\n".join(lines))
        chart = self.query_one(QualityChart)
        chart.show(points, budget, applied=applied)
        chart.visible = not exact


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
        return [_("Its effect is shown here once a model is loaded.")]
    lines = []
    wanted = settings.compensation()
    if wanted.budget is None:
        lines.append(_("k_chunk {k_chunk}, set below, overrides the budget.", k_chunk=wanted.k_chunk))
    elif tuning:
        lines.append(_("A new budget is being applied; until then:"))
    elif status.budget not in (None, wanted.budget):
        still = _("exact") if status.exact else localized(f"{status.budget:g} %")
        lines.append(_("Not applied yet: still {budget}. F4, then R, tries again.", budget=still))
    lines.append(_quality(status, report))
    if report is not None and report.lost_percent is not None:
        lines.append(_("perplexity {percent} above full precision's", percent=percent(report.lost_percent)))
    if cost := _cost(status, report):
        lines.append(cost)
    lines.append(
        _("{speed} in the last answer", speed=rate(speed)) if speed is not None else _("tok/s: after the next answer")
    )
    if report is not None and wanted.budget not in (None, status.budget) and (status.budget is None or wanted.exact):
        lines += [
            f"{reported(problem.what)} → {reported(problem.fix)}" for problem in report.problems
        ]  # why the budget has no effect
    return lines


def _quality(status: Status, report: DeviceReport | None) -> str:
    """The effect of compensation on quality, in words."""
    if status.exact:
        return _("as full precision, token for token")
    if not compensated(status.k_chunk):
        return _("no compensation: plain low-bit model")
    found = report.tuning if report is not None else None
    if found is None or found.predicted_loss_won is None or not found.loss_without:
        return _("closer to full precision; details: F4")
    return _(
        "wins back {share} the lost quality",
        share=share_words(found.predicted_loss_won / found.loss_without),
    )


def _cost(status: Status, report: DeviceReport | None) -> str:
    if status.exact:
        return _("the checkpoint's weights are in memory, too")
    if not compensated(status.k_chunk):
        return ""
    if status.slowdown_percent is None:
        found = report.tuning if report is not None else None
        expected = None if found is None else percent(found.predicted_slowdown_percent)
        return (
            _("slowdown not measured")
            if expected is None
            else _("{percent} slower expected, not measured", percent=expected)
        )
    slower = status.slowdown_percent
    if slower < MIN_SHOWN:
        return _("no slower, measured")
    return _("{percent} slower, measured", percent=percent(slower))


NONE = _("none measured yet: `lowbit-chat tune-device MODEL` measures drafts and residuals on this device")
OVERRIDDEN = _("overridden by k_chunk; set that to auto to see the best offer within the budget")


class OfferRow(Horizontal):
    """`offer  within 0.3 % of full precision, 11 % slower than low bits alone (...)  [Use it]`."""

    def __init__(self) -> None:
        super().__init__(id="offer-row", classes="setting-line")
        self.changes: Mapping[str, str] = {}
        """Settings that apply the offer, by key, as a user would type them; empty if there is none."""
        self._offer: Offer | None = None

    def compose(self) -> ComposeResult:
        """Name, words, button."""
        yield Plain(_("offer"), classes="setting-name")
        yield Plain(NONE, id="offer-words")
        yield Button(_("Use it"), id="offer-take", compact=True)

    def show(self, offer: Offer | None, settings: Settings) -> None:
        """Show the offer, and whether it is applied.

        Args:
            offer: the best within the budget; None if none is known, or if a fixed k_chunk overrides it, in which
                case the previous one stays.
            settings: the user's settings.
        """
        if settings.k_chunk is not None:
            offer = offer or self._offer
        self._offer = offer
        self.changes = {} if offer is None else changes(offer)
        taken = bool(self.changes) and all(_typed(settings, key) == value for key, value in self.changes.items())
        none = NONE if settings.k_chunk is None else OVERRIDDEN
        words = none if offer is None else reported(offer.words)
        words = _("in use: {offer}", offer=words) if taken else words
        self.query_one("#offer-words", Plain).update(words)
        self.query_one(Button).disabled = offer is None or taken


def changes(offer: Offer) -> dict[str, str]:
    """The settings with which a load applies an offer, by key, as a user would type them."""
    drafts = {"kv": SPECULATIVE_KV, "speculate": "auto"} if offer.gamma else {}
    return {"k_chunk": UNSET, **drafts}


def _typed(settings: Settings, key: str) -> str:
    value = settings.get(key)
    return UNSET if value is None else str(value)


class SavedRow(Horizontal):
    """The size of the saved caches, and a button that deletes them."""

    def __init__(self) -> None:
        super().__init__(id="saved-row", classes="setting-line")

    def compose(self) -> ComposeResult:
        """Name, amount, button."""
        yield Plain(_("saved caches"), classes="setting-name")
        yield Plain("", id="saved-amount")
        yield Button(_("Delete"), id="saved-delete", compact=True)

    def show(self, saved: Holding | None) -> None:
        """Show the size; None if the runtime did not report it."""
        words = _("not known") if saved is None else _("none") if not saved.files else _amount(saved)
        self.query_one("#saved-amount", Plain).update(words)
        self.query_one(Button).disabled = saved is None


def _amount(saved: Holding) -> str:
    size = byte_count(saved.bytes)
    return ngettext("{size} of {count} chat on disk", "{size} of {count} chats on disk", saved.files, size=size)


def cache_effect(facts: Caches | None, kv: str | None, context: int | None, status: Status | None) -> list[str]:
    """The effect of the chosen kind of cache and context, as lines; empty if no model is loaded.

    Args:
        facts: the cost of each kind for the model, and its default.
        kv: the chosen kind; None: that.
        context: the chosen context in tokens; None for automatic.
        status: the runtime's status.
    """
    caches, usual = ({}, DEFAULT_KV) if facts is None else (facts.kinds, facts.usual)
    kv = kv or usual
    chosen, plain = caches.get(kv), caches.get("fp16")
    if chosen is None or plain is None or status is None:
        return []
    size, share = byte_count(chosen.bytes_per_token), 100 * chosen.bytes_per_token / plain.bytes_per_token
    parts = [
        _("{size} per token", size=size)
        if kv == "fp16"
        else _("{size} per token ({share:.0f} % of fp16)", size=size, share=share),
        _("{count} tokens fit", count=token_count(chosen.context)),
    ]
    tokens = min(context or status.context or 0, chosen.context)
    if tokens:
        parts.append(
            _(
                "{size} for {tokens}",
                size=byte_count(tokens * chosen.bytes_per_token),
                tokens=token_count(tokens),
            )
        )
    lines = [SEPARATOR.join(parts), _advice(caches, kv, usual)]
    if context is not None and context > chosen.context:
        lines.append(
            _(
                "A context of {context} exceeds this model or memory; it will be shortened or refused.",
                context=token_count(context),
            )
        )
    return lines


def _advice(caches: Mapping[str, CacheFacts], kv: str, usual: str) -> str:
    if kv == usual:
        return _("Recommended here: {kv}, your current setting.", kv=kv)
    return _(
        "Recommended here: {usual}; it holds {context} tokens.", usual=usual, context=token_count(caches[usual].context)
    )
