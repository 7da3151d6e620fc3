"""Checked access to the values of a checkpoint's config.json: an error names the key."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.errors import CheckpointError

PUBLISHED = "Take config.json from the model's publisher."
"""Default advice for an invalid value."""
LARGEST = 2**31 - 1
"""Maximum of any size in a configuration, because kernels use 32-bit offsets."""
NUMBERS = (1e-30, 1e30)
"""Range of other numbers, so that combinations of two of them can't overflow."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """A table of config.json. A key that is absent and one that is null mean the same: the default.

    A value that is missing without a default, or not acceptable, raises a CheckpointError.
    """

    table: Mapping[str, Any]
    source: str
    """Its name in errors, for example the path of config.json."""
    remedy: str = PUBLISHED

    def integer(self, key: str, default: int | None = None, *, most: int = LARGEST) -> int:
        """A whole number of at least 1 and at most `most`: sizes become allocations before weights are looked at."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.wrong(key, value, f"a whole number from 1 to {most:,}")
        return value

    def optional_integer(self, key: str, *, most: int = LARGEST) -> int | None:
        """A whole number of at least 1, or None where the key is absent or null."""
        return None if self.table.get(key) is None else self.integer(key, most=most)

    def count(self, key: str, most: int) -> int:
        """A whole number that may be 0, which an absent key means."""
        return 0 if self.table.get(key) in (None, 0) else self.integer(key, most=most)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(key, default)
        if not _is_positive(value):
            raise self.wrong(key, value, "a number above 0")
        return float(value)

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` finite numbers above 0."""
        value = self._value(key, None)
        if not isinstance(value, list) or len(value) != length or not all(map(_is_positive, value)):
            raise self.wrong(key, value, f"a list of {length} numbers above 0")
        return tuple(float(x) for x in value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def optional_number(self, key: str) -> float | None:
        """A finite number above 0, or None where the key is absent or null."""
        return None if self.table.get(key) is None else self.number(key)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """The same table, with values for keys that are absent or null."""
        return replace(self, table={**defaults, **{key: x for key, x in self.table.items() if x is not None}})

    def section(self, key: str) -> Fields | None:
        """A nested table, or None where the key is absent, null or empty."""
        value = self.table.get(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, value, "a table")
        return Fields(table=value, source=f"{self.source}, {key}", remedy=self.remedy)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; () where the key is absent or null. Negative ids and 2^32 - 1 mean none."""
        value = self.table.get(key)
        ids = value if isinstance(value, list) else [] if value in (None, 2**32 - 1) else [value]
        if any(isinstance(x, bool) or not isinstance(x, int) or x > LARGEST for x in ids):
            raise self.wrong(key, value, "a token id or a list of token ids")
        return tuple(x for x in ids if x >= 0)

    def wrong(self, key: str, value: object, expected: str) -> CheckpointError:
        shown = _SHORT.repr(value[:9].tolist() if isinstance(value, memoryview) else value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return CheckpointError(f"{self.source}: '{key}' is {shown}, but must be {expected}. {self.remedy}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.table.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.source}: '{key}' is missing. {self.remedy}")
        return value


def _is_positive(value: object) -> bool:
    """Whether a value is a finite number above 0 within range."""
    return isinstance(value, int | float) and not isinstance(value, bool) and NUMBERS[0] <= value <= NUMBERS[1]
