"""How long work reports where it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One report of a running piece of work."""

    phase: str
    """What is being done, one word: `check`, `download`, `quantize`, `verify`, ..."""
    done: float
    """How much of the phase is done, in `unit`."""
    total: float | None
    """The whole of the phase, in `unit`; None where it is not known."""
    unit: str
    """`bytes`, `blocks`, ..."""
    message: str
    """The same for a person: one line."""


ProgressCallback = Callable[[Progress], None]
"""Receives reports; called from the thread that does the work, so it must be quick."""


Cancelled = Callable[[], bool]
"""Asked between pieces of work whether to stop; called from the thread that does the work."""


def ignore_progress(progress: Progress) -> None:
    """A `ProgressCallback` for callers that do not listen."""


def never_cancelled() -> bool:
    """The `cancelled` argument of callers that never stop the work."""
    return False
