"""One setting on the settings screen."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Select, TextArea

from app.settings import DEFAULT_IDLE_MINUTES, RULES, UNSET, SettingsError, Value, check
from app.tui.plain import Plain
from runtime.compensation import DEFAULT_PROMPT_BUDGET_PERCENT
from runtime.kv.kinds import CHAT_KINDS

MEANINGS = {
    "idle_unload": f"minutes until an unused model leaves memory; 0 is never; auto: {DEFAULT_IDLE_MINUTES}",
    "overflow": "what happens to the oldest messages of a full chat",
    "k_chunk": "a number overrides the budget; 0 is none",
    "prompt_budget": f"% more time to the first word; auto: {DEFAULT_PROMPT_BUDGET_PERCENT:g}",
}
"""Descriptions for the settings screen that replace the rule's own."""
KV_ADVICE = {
    "int4": "the default: 28 % of fp16's memory, perplexity within 0.6 %",
    "int8": "half of fp16's memory, no measurable loss",
    "fp16": "exact; the largest and, in long chats, the slowest",
    "hierarchical": "8 bits, of which drafts read 4; chosen by speculation",
    "kcvt4": "4 bits per key channel; for comparison, int4 is as good",
    "gear4": "4 bits with GEAR's corrections; for comparison, larger than int4",
    "gear-l4": "gear4 with the low-rank part only; for comparison",
    "kivi2": "2 bits: clearly worse, only if nothing else fits",
    "gear2": "2 bits with GEAR's corrections: better than kivi2, worse than int4",
    "gear-l2": "gear2 with the low-rank part only",
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
            yield Plain(self.key if self.key == "k_chunk" else self.key.replace("_", " "), classes="setting-name")
            if self._rule.choices:
                offered = CHAT_KINDS if self.key == "kv" else self._rule.choices
                choices = [(choice, choice) for choice in dict.fromkeys((*offered, shown))]
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
        return words + (" · reloads" if self._rule.reload else "")

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
            problem.update(f"allowed: {self._rule.allowed}")
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
