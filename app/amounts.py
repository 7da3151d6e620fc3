"""Human-readable sizes, losses and durations, and estimates of the time left in a step of a job."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from app.language import _, localized, number
from runtime import errors

if TYPE_CHECKING:
    from runtime.wire.device import PromptTuning, Tuning

WINDOW_S = 10.0
"""The displayed speed is the mean over this time, in seconds, and over a whole unit: its parts differ."""
SETTLING_S = 1.0
"""Minimum time in seconds before a speed is known."""
SHOWN_AFTER_S = 3.0
"""Seconds that a step must run before the time left is shown."""
FIRST = 0.25
"""Share of a unit that must be done before that: a large unit, such as a block of a model, begins slowly."""
SHORTEST_S = 5.0
"""Shorter times are not shown: the last unit of a step often takes longer than the previous ones."""


class Estimate:
    """Estimates the time left from progress reports, step by step."""

    def __init__(self) -> None:
        self.speed: float | None = None
        """Recent units per second."""
        self.left_s: float | None = None
        """Seconds until the step's end, by the slower of its recent and its overall speed."""
        self._phase: str | None = None
        self._points: deque[tuple[float, float]] = deque()
        self._first = (0.0, 0.0)

    def take(self, now: float, phase: str, done: float, total: float | None) -> None:
        """Process a report.

        Args:
            now: time in seconds.
            phase: the step's name.
            done: finished units.
            total: all units, if known.
        """
        if phase != self._phase or (self._points and done < self._points[-1][1]):
            self._phase, self._first = phase, (now, done)
            self._points.clear()
        self._points.append((now, done))
        unit = min(1.0, total / 8) if total else 1.0
        while len(self._points) > 2 and now - self._points[0][0] > WINDOW_S and done - self._points[1][1] >= unit:
            self._points.popleft()
        self.speed = _speed(self._points[0], (now, done), SETTLING_S)
        whole = _speed(self._first, (now, done), SHOWN_AFTER_S)
        self.left_s = None
        if total and whole and self.speed and done - self._first[1] >= FIRST * unit:
            self.left_s = (total - done) / min(whole, self.speed)

    @property
    def ending(self) -> bool:
        """Whether too little time is left to give a number."""
        return self.left_s is not None and self.left_s < SHORTEST_S

    @property
    def words(self) -> str:
        """The time left: `about 40 s left`, `nearly done`; empty while unknown."""
        if self.left_s is None:
            return ""
        return _("nearly done") if self.ending else _("about {time} left", time=duration(self.left_s))


def _speed(first: tuple[float, float], last: tuple[float, float], least_s: float) -> float | None:
    passed, gained = last[0] - first[0], last[1] - first[1]
    return gained / passed if passed >= least_s and gained > 0 else None


def perplexity(before: float | None, after: float | None) -> str:
    """Perplexity after quantizing, and the loss from full precision: `33.25 (+18 %)`; empty if it was not measured."""
    if after is None:
        return ""
    if before is None:
        return number(after, ".2f")
    loss = 100 * (after / before - 1)
    return localized(f"{after:.2f} ({loss:+.{int(abs(loss) < 9.95)}f} %)")


def byte_count(count: float) -> str:
    """A size in decimal units: `812 MB`, `4.9 GB`."""
    return localized(errors.byte_count(count))


def refinement(tuning: Tuning) -> str:
    """Whether the choice of a tuning is final."""
    if tuning.refined:
        return _("refined on a text")
    return _("by times alone; will be refined on a text while the runtime is idle")


def prompt_words(prompts: PromptTuning) -> str:
    """The compensation of prompts, and its cost."""
    from runtime.compensation import CHUNK

    if prompts.pending:
        return _("prompts are not compensated yet; that is tuned while the runtime is idle")
    if not prompts.k_chunk:
        return _("prompts are not compensated")
    cost = _("{slower:.1f} % more time to the first word, {budget:g} % allowed",
             slower=prompts.measured_slowdown_percent, budget=prompts.budget_percent)  # fmt: skip
    if prompts.k_chunk == CHUNK:
        return _("prompts are compensated fully; {cost}", cost=cost)
    return _(
        "prompts are compensated by {number} of {all} channels; {cost}", number=prompts.k_chunk, all=CHUNK, cost=cost
    )


def duration(seconds: float) -> str:
    """A duration: `8 s`, `3 min`, `2 h 05 min`."""
    whole = max(0, round(seconds))
    if whole < 100:
        return _("{seconds} s", seconds=whole)
    minutes = round(seconds / 60)
    if minutes < 60:
        return _("{minutes} min", minutes=minutes)
    return _("{hours} h {minutes:02} min", hours=minutes // 60, minutes=minutes % 60)
