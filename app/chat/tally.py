"""Statistics of an answer: those that the runtime reports, or the UI's own counts if it can't."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from app.conversation import Statistics

if TYPE_CHECKING:
    from runtime.wire.answers import Status, Timings


@dataclass(slots=True)
class Tally:
    """The UI's own count of an answer: pieces of text, which are tokens except for held-back ones."""

    started: float
    pieces: int = 0
    first: float = 0.0
    last: float = 0.0

    def count(self, now: float) -> None:
        """Count one piece of text."""
        self.first = now if self.pieces == 0 else self.first
        self.last = now
        self.pieces += 1

    @property
    def first_after_s(self) -> float | None:
        """Seconds until the first piece."""
        return self.first - self.started if self.pieces else None

    @property
    def per_s(self) -> float | None:
        """Pieces per second after the first one."""
        return (self.pieces - 1) / (self.last - self.first) if self.pieces > 1 and self.last > self.first else None


def reported(timings: Timings, status: Status | None) -> Statistics:
    """Statistics from the runtime's report."""
    return Statistics(
        tokens=timings.completion_tokens,
        tokens_per_s=timings.decode_tokens_per_s,
        first_after_s=timings.ttft_s,
        context_used=timings.prompt_tokens + timings.completion_tokens,
        k_chunk=timings.k_chunk,
        slowdown_percent=timings.slowdown_percent,
        prompt_slowdown_percent=timings.prompt_slowdown_percent,
        gamma=timings.speculation.gamma if timings.speculation else None,
        acceptance_rate=timings.speculation.acceptance_rate if timings.speculation else None,
        tokens_per_verify=timings.speculation.tokens_per_verify if timings.speculation else None,
        drafted_by=timings.speculation.source if timings.speculation else None,
        context=status.context if status else None,
        bits=status.bits if status else None,
        memory_bytes=status.memory_bytes if status else None,
    )


def continued(before: Statistics | None, after: Statistics) -> Statistics:
    """Statistics of a whole answer, from those of its text before it was continued, and of what followed."""
    if before is None:
        return after
    tokens, speeds = before.tokens + after.tokens, (before.tokens_per_s, after.tokens_per_s)
    if speeds[0] and speeds[1]:
        speed: float | None = tokens / (before.tokens / speeds[0] + after.tokens / speeds[1])
    else:
        speed = speeds[0] or speeds[1]
    first = after.first_after_s if before.first_after_s is None else before.first_after_s
    estimated = before.estimated or after.estimated
    return replace(after, tokens=tokens, tokens_per_s=speed, first_after_s=first, estimated=estimated)


def tallied(tally: Tally, status: Status | None) -> Statistics:
    """Statistics from the UI's own count, when the runtime sent no report."""
    return Statistics(
        tokens=tally.pieces,
        tokens_per_s=tally.per_s,
        first_after_s=tally.first_after_s,
        estimated=True,
        k_chunk=status.k_chunk if status else None,
        slowdown_percent=status.slowdown_percent if status else None,
        context=status.context if status else None,
        bits=status.bits if status else None,
        memory_bytes=status.memory_bytes if status else None,
    )
