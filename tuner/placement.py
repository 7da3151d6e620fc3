"""Where the experts of a mixture are, of which some did not fit the card."""

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
