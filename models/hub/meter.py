"""Progress of a download: bytes, speed, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from models.progress import Progress, ProgressCallback

_INTERVAL_S = 0.2
"""Minimum seconds between two reports, so that a fast network does not flood the listener."""
_WINDOW_S = 8.0
"""The displayed speed is the mean over this time, in seconds."""
_UNITS = ("B", "kB", "MB", "GB", "TB")


class Meter:
    """Counts and reports the bytes of a checkpoint at a limited rate. Bytes from earlier runs don't count as speed."""

    def __init__(
        self,
        progress: ProgressCallback,
        total: int,
        *,
        phase: str = "download",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
        self._total = total
        self._phase = phase
        self._clock = clock
        self._done = 0
        self._received = 0
        self._reported = float("-inf")
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)])
        self._file = ""

    @property
    def done(self) -> int:
        return self._done

    def begin(self, file: str) -> None:
        self._file = file

    def found(self, count: int) -> None:
        """Count bytes from an earlier run."""
        self._done += count
        self._report()

    def received(self, count: int) -> None:
        self._done += count
        self._received += count
        self._report()

    def lost(self, count: int) -> None:
        """Subtract bytes that must be downloaded again."""
        self._done -= count

    def note(self, message: str) -> None:
        self._send(message)

    def finish(self) -> None:
        """Report the end, whenever the last report was."""
        self._send(f"{bytes_text(self._done)} downloaded")

    def _report(self) -> None:
        now = self._clock()
        if now - self._reported >= _INTERVAL_S:
            self._reported = now
            self._send(self._sentence(now))

    def _send(self, message: str) -> None:
        self._progress(
            Progress(phase=self._phase, done=float(self._done), total=float(self._total), unit="bytes", message=message)
        )

    def _sentence(self, now: float) -> str:
        self._samples.append((now, self._received))
        while len(self._samples) > 2 and now - self._samples[1][0] > _WINDOW_S:
            self._samples.popleft()
        begin, before = self._samples[0]
        speed = (self._received - before) / (now - begin) if now > begin else 0.0
        text = f"{self._file}: {bytes_text(self._done)} of {bytes_text(self._total)}"
        if speed > 0:
            left = duration_text((self._total - self._done) / speed)
            text += f", {bytes_text(speed)}/s, {left} left"
        return text


def bytes_text(count: float) -> str:
    """A number of bytes in decimal units, three digits: `812 MB`, `4.97 GB`."""
    if count < 999.5:
        return f"{count:.0f} {_UNITS[0]}"
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count /= 1000
        unit += 1
    digits = 2 if count < 9.995 else 1 if count < 99.95 else 0
    return f"{count:.{digits}f} {_UNITS[unit]}"


def free_text(free: int, needed: int) -> str:
    """What is free, beside what is needed: `4.97 GB`, or `12 kB less` where both would read the same."""
    text = bytes_text(free)
    return text if text != bytes_text(needed) else f"{bytes_text(needed - free)} less"


def duration_text(seconds: float) -> str:
    """A duration in one or two units: `40 s`, `3 min`, `2 h 10 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
