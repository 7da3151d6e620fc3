"""Reading a checkpoint's config.json: every value is checked when it is read, and an error names the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.errors import CheckpointError

PUBLISHED = "Take config.json from the model's publisher."
"""What to do about a value that is not acceptable, unless something else helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """A table of config.json. A key that is absent and one that is null mean the same: the default."""

    table: Mapping[str, Any]
    """The parsed JSON object."""
    source: str
    """What an error calls it, for example the path of config.json."""
    remedy: str = PUBLISHED
    """What to do about a value that is not acceptable."""

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1.

        Raises:
            CheckpointError: The key is missing without a default, or holds something else.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, value, "a whole number of at least 1")
        return value

    def optional_integer(self, key: str) -> int | None:
        """A whole number of at least 1, or None where the key is absent or null."""
        return None if self.table.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0.

        Raises:
            CheckpointError: The key is missing without a default, or holds something else.
        """
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number above 0, or None where the key is absent or null."""
        return None if self.table.get(key) is None else self.number(key)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` finite numbers above 0."""
        value = self._value(key, None)
        acceptable = isinstance(value, list) and all(
            isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and x > 0 for x in value
        )
        if not acceptable or len(value) != length:
            raise self.wrong(key, value, f"a list of {length} numbers above 0")
        return tuple(float(x) for x in value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def section(self, key: str) -> Fields | None:
        """A nested table, or None where the key is absent, null or empty."""
        value = self.table.get(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, value, "a table")
        return Fields(table=value, source=f"{self.source}, {key}", remedy=self.remedy)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; () where the key is absent or null. Negative ids mean none."""
        value = self.table.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(x, bool) or not isinstance(x, int) for x in ids):
            raise self.wrong(key, value, "a token id or a list of token ids")
        return tuple(x for x in ids if x >= 0)

    def wrong(self, key: str, value: object, expected: str) -> CheckpointError:
        """The error for a value that is not acceptable."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return CheckpointError(f"{self.source}: '{key}' is {shown}, but must be {expected}. {self.remedy}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.table.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.source}: '{key}' is missing. {self.remedy}")
        return value
