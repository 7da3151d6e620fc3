"""What is not as it could be, in words for a person."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why something is not as it could be."""

    what: str
    """What is wrong, in one line."""
    fix: str
    """What to do about it."""
    failure: bool = False
    """Whether something went wrong, rather than being so by choice."""
