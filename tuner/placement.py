"""Where a model's blocks are, or the experts of a mixture, of which some did not fit the card."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """Experts of each block on the card, and the others in main memory."""

    on_device: int
    """Experts of each block on the card."""
    held: int
    """All of them."""
    host_bytes: int
    """Bytes of the others, in main memory."""
    hit_rate: float | None = None
    """Share of recently chosen experts that were on the card; None before the first count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlacement:
    """First blocks on the card, and the others, which the processor runs."""

    on_device: int
    """Blocks on the card."""
    held: int
    """All of them."""

    def __str__(self) -> str:
        """For the user, within a sentence."""
        return f"{self.on_device} of {self.held} blocks"
