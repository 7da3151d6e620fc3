"""One setting on the settings screen."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Select, Static, TextArea

from app.settings import RULES, UNSET, SettingsError, Value, check
from runtime.compensation import DEFAULT_PROMPT_BUDGET_PERCENT

MEANINGS = {
    "k_chunk": "a number overrides the budget; 0 is none",
    "prompt_budget": f"% more time to the first word; auto: {DEFAULT_PROMPT_BUDGET_PERCENT:g}",
}
"""What the settings screen says of a key instead of the rule's own words."""


class SettingRow(Vertical):
    """One setting: its name, its value, what it means, and what is wrong with what was typed."""

    def __init__(self, key: str, value: Value) -> None:
        super().__init__(id=f"setting-{key}", classes="setting")
        self.key = key
        self._rule = RULES[key]
        self._value = value

    def compose(self) -> ComposeResult:
        """Name, field and meaning on one line, the problem under them."""
        shown = UNSET if self._value is None else str(self._value)
        with Horizontal(classes="setting-line"):
            yield Static(self.key if self.key == "k_chunk" else self.key.replace("_", " "), classes="setting-name")
            if self._rule.choices:
                choices = [(choice, choice) for choice in self._rule.choices]
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
                meaning = MEANINGS.get(self.key, self._rule.meaning) + (" · reloads" if self._rule.reload else "")
                yield Static(meaning, markup=False, classes="setting-meaning")
        yield Static("", markup=False, classes="setting-problem")

    def typed(self) -> str:
        """What stands in the field; `auto` for an empty one, where that is acceptable."""
        if self._rule.choices:
            return str(self.query_one(Select).value)
        if self._rule.kind is str:
            return self.query_one(TextArea).text
        return self.query_one(Input).value.strip() or (UNSET if self._rule.optional else "")

    def take(self) -> bool:
        """Check what was typed and say so.

        Returns:
            Whether there is a new, acceptable value; `value` then holds it.
        """
        problem = self.query_one(".setting-problem", Static)
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
        """The value that was last accepted."""
        return self._value
