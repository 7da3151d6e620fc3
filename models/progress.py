"""Progress reports and cancellation of long work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One report of a running job."""

    phase: str
    """The current phase, one word: `check`, `download`, `quantize`, `verify`, ..."""
    done: float
    """The finished part of the phase, in `unit`."""
    total: float | None
    """The total of the phase, in `unit`; None if unknown."""
    unit: str
    """`bytes`, `blocks`, ..."""
    message: str


ProgressCallback = Callable[[Progress], None]
"""Receives reports; called from the thread that does the work, so it must be quick."""


Cancelled = Callable[[], bool]
"""Whether to stop; called between pieces of work, on the thread that does the work."""


def note(progress: ProgressCallback, message: str) -> None:
    """Report what happens while bytes cannot be counted yet."""
    progress(Progress(phase="check", done=0.0, total=None, unit="bytes", message=message))


def ignore_progress(progress: Progress) -> None:
    """Ignore a report; the default `ProgressCallback`."""


def never_cancelled() -> bool:
    """Never cancel; the default `cancelled` argument."""
    return False
