"""Choice of a sequence's snapshots, to which it can be cut back: where prompts begin and as they go on, thinned out."""

from __future__ import annotations

from collections.abc import Collection

SNAPSHOT_GAP = 64
"""A snapshot is taken if the latest before it is at least so many tokens away."""
MOST_SNAPSHOTS = 8
"""Most snapshots of a slot."""


def is_due(places: Collection[int], at: int) -> bool:
    """Whether to take a snapshot of a slot's first `at` tokens, given the places of those it has."""
    return at - max(places, default=0) >= SNAPSHOT_GAP


def least_needed(places: Collection[int], end: int) -> int:
    """The snapshot that a slot of `end` tokens needs least: those near it are close, compared to how far back it is."""
    ordered = [0, *sorted(places), end]
    between = zip(ordered, ordered[1:], ordered[2:], strict=False)
    return min(between, key=lambda each: (each[2] - each[0]) / (end - each[1] + 1))[1]
