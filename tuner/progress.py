"""How a long search tells what it is doing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.errors import Cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One message about work that goes on."""

    done: float
    """Steps of the work that are behind."""
    total: float | None
    """Steps of the whole work; None where nobody can know."""
    message: str
    """What is being done now, for a person."""


Progress = Callable[[Report], None]
"""Takes reports; called often, so it must be quick."""

Cancel = Callable[[], bool]
"""Whether the work should stop; asked before every measurement."""


def silent(_report: Report) -> None:
    """Progress that nobody watches."""


def never() -> bool:
    """Work that nobody stops."""
    return False


def check(cancelled: Cancel) -> None:
    """Stop here if that was asked for.

    Raises:
        Cancelled: the work was asked to stop.
    """
    if cancelled():
        raise Cancelled("the tuning was stopped; what was measured is kept, so starting it again goes on from here")
