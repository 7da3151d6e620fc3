"""Progress reports and cancellation of a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.errors import Cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One report of a running search."""

    done: float
    """Number of finished steps."""
    total: float | None
    """Total number of steps; None if unknown."""
    message: str
    """The current step, for the user."""


Progress = Callable[[Report], None]
"""Receives reports; called often, so it must be quick."""

Cancel = Callable[[], bool]
"""Whether the work should stop; called before every measurement."""


def silent(_report: Report) -> None:
    """Ignore a report; the default `Progress`."""


def never() -> bool:
    """Never stop; the default `Cancel`."""
    return False


def check(cancelled: Cancel) -> None:
    """Raise if `cancelled` returns True.

    Raises:
        Cancelled: the work was asked to stop.
    """
    if cancelled():
        raise Cancelled("the tuning was stopped. Its measurements are kept; start it again to continue")
