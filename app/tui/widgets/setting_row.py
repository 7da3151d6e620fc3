"""One setting on the settings screen."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Select, Static, TextArea

from app.settings import DEFAULT_IDLE_MINUTES, RULES, UNSET, SettingsError, Value, check
from runtime.compensation import DEFAULT_PROMPT_BUDGET_PERCENT

MEANINGS = {
    "idle_unload": f"minutes until an unused model leaves memory; 0 is never; auto: {DEFAULT_IDLE_MINUTES}",
    "overflow": "what becomes of the oldest messages of a full chat",
    "k_chunk": "a number overrides the budget; 0 is none",
    "prompt_budget": f"% more time to the first word; auto: {DEFAULT_PROMPT_BUDGET_PERCENT:g}",
}
"""What the settings screen says of a key instead of the rule's own words."""
KV_ADVICE = {
    "fp16": "exact and largest; right for short chats",
    "int8": "half of the memory, no loss to be measured: for long chats",
    "int4": "under a third of the memory, little loss: where memory is tight",
    "hierarchical": "8 bits, of which drafts read 4; speculation takes it by itself",
    "kcvt4": "4 bits by key channel, for comparison; int4 does as well",
    "gear4": "4 bits with GEAR's corrections, larger than int4; for comparison",
    "gear-l4": "as gear4, low rank alone; for comparison",
    "kivi2": "2 bits: clearly worse, only where nothing else fits",
    "gear2": "2 bits with GEAR's corrections: better than kivi2, worse than int4",
    "gear-l2": "as gear2, low rank alone",
}
"""When to choose which kind of KV cache; the numbers are in docs/kv.md."""


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
                yield Static(self._meaning(shown), markup=False, classes="setting-meaning")
        yield Static("", markup=False, classes="setting-problem")

    def _meaning(self, value: str) -> str:
        """What the setting means, or when to choose the kind of cache that is chosen."""
        words = KV_ADVICE[value] if self.key == "kv" else MEANINGS.get(self.key, self._rule.meaning)
        return words + (" · reloads" if self._rule.reload else "")

    @on(Select.Changed)
    def tell_meaning(self, event: Select.Changed) -> None:
        """Say when to choose what is chosen now."""
        if isinstance(event.value, str):
            self.query_one(".setting-meaning", Static).update(self._meaning(event.value))

    def typed(self) -> str:
        """What stands in the field; `auto` for an empty one, where that is acceptable."""
        if self._rule.choices:
            return str(self.query_one(Select).value)
        if self._rule.kind is str:
            return self.query_one(TextArea).text
        return self.query_one(Input).value.strip() or (UNSET if self._rule.optional else "")

    def put(self, value: str) -> None:
        """Write something into the field, as a person would; not for texts of many lines."""
        if self._rule.choices:
            self.query_one(Select).value = value
        else:
            self.query_one(Input).value = value

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
