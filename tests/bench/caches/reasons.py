"""What we take for the reason where a promise of the caches does not hold, by the text of the claim."""

from __future__ import annotations

WHY: dict[str, str] = {}
"""By the text of a claim in `tests.bench.caches.judge`."""
