"""What the UI itself counts of an answer, for when the runtime cannot report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """What the UI itself sees of an answer: pieces of text, which are tokens but for held-back ones."""

    started: float
    pieces: int = 0
    first: float = 0.0
    last: float = 0.0

    def count(self, now: float) -> None:
        """Count one piece."""
        self.first = now if self.pieces == 0 else self.first
        self.last = now
        self.pieces += 1

    @property
    def first_after_s(self) -> float | None:
        """Seconds until the first piece."""
        return self.first - self.started if self.pieces else None

    @property
    def per_s(self) -> float | None:
        """Pieces a second after the first one."""
        return (self.pieces - 1) / (self.last - self.first) if self.pieces > 1 and self.last > self.first else None
