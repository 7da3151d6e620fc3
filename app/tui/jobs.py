"""Long pieces of work (load, quantize, tune) as the progress panel shows them: phase, speed, time left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from app.tui.figures import byte_count, duration

if TYPE_CHECKING:
    from models.progress import Progress

Outcome = Literal["running", "done", "stopped", "failed"]
SPEED_WINDOW_S = 10.0
"""The speed shown is the mean over this time."""
SETTLING_S = 1.0
"""Before that, a speed would be a guess."""
PHASES = {"tune": "tuning", "allocate": "choosing bits", "sensitivities": "gradients"}
"""Words for phases whose names are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The present state of one piece of work."""

    title: str
    phase: str = ""
    message: str = ""
    done: float = 0.0
    total: float | None = None
    unit: str = ""
    speed: float | None = None
    """Units a second."""
    left_s: float | None = None
    outcome: Outcome = "running"
    error: str | None = None

    @property
    def fraction(self) -> float | None:
        """Share of the phase that is done; None where the whole is not known."""
        return min(1.0, self.done / self.total) if self.total else None

    @property
    def line(self) -> str:
        """What is happening, in words."""
        if self.outcome == "failed":
            return f"{self.title} failed: {self.error}"
        if self.outcome == "stopped":
            return f"{self.title} stopped"
        if self.message.lower().startswith(self.title.lower()):
            return self.message[:1].upper() + self.message[1:]
        phase = PHASES.get(self.phase, self.phase)
        parts = [self.title, phase if phase not in self.title.lower() else "", self.message]
        return " · ".join(part for part in parts if part)

    @property
    def pace(self) -> str:
        """How far and how fast: `12 of 28 blocks · 1.5 blocks/s · 11 s left`."""
        if self.outcome != "running" or not (self.unit or self.total):
            return ""
        parts = [self._amount(self.done) if not self.total else f"{self._amount(self.done, self.total)}"]
        if self.speed:
            rate = f"{byte_count(self.speed)}/s" if self._bytes else f"{self.speed:.3g} {self.unit}/s"
            parts.append(rate)
        if self.left_s is not None:
            parts.append(f"{duration(self.left_s)} left")
        return " · ".join(parts)

    @property
    def _bytes(self) -> bool:
        return self.unit.lower() in ("b", "byte", "bytes")

    def _amount(self, done: float, total: float | None = None) -> str:
        if self._bytes:
            return byte_count(done) if total is None else f"{byte_count(done)} of {byte_count(total)}"
        text = f"{int(done)}" if total is None else f"{int(done)} of {int(total)}"
        return f"{text} {self.unit}".rstrip()


class Meter:
    """Turns a stream of progress reports into the state of a job."""

    def __init__(self, title: str, clock: Callable[[], float], message: str = "") -> None:
        """Begin.

        Args:
            title: what is being done.
            clock: seconds.
            message: what happens until the first report.
        """
        self.job = Job(title=title, message=message)
        self._clock = clock
        self._points: deque[tuple[float, float]] = deque()

    def take(self, progress: Progress) -> Job:
        """The job after one more report."""
        now = self._clock()
        if progress.phase != self.job.phase or progress.done < self.job.done:
            self._points.clear()
        self._points.append((now, progress.done))
        while len(self._points) > 2 and now - self._points[0][0] > SPEED_WINDOW_S:
            self._points.popleft()
        first_time, first_done = self._points[0]
        speed = None
        if now - first_time >= SETTLING_S and progress.done > first_done:
            speed = (progress.done - first_done) / (now - first_time)
        self.job = replace(
            self.job,
            phase=progress.phase,
            message=progress.message,
            done=progress.done,
            total=progress.total,
            unit=progress.unit,
            speed=speed,
            left_s=(progress.total - progress.done) / speed if speed and progress.total else None,
        )
        return self.job

    def end(self, outcome: Outcome, error: str | None = None) -> Job:
        """The job after its end."""
        self.job = replace(self.job, outcome=outcome, error=error)
        return self.job
