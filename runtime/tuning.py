"""The slowdown budget of a running model: how much compensation it may have here.

Importing this is cheap: timers, and with them a backend, are imported when something is measured.

Source: QDEC §4.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

DEFAULT_BUDGET_PERCENT = 5.0
"""Slowdown that compensation may cost where nobody said how much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KneeCurve:
    """How the time of one layer type grows with k_chunk.

    Source: QDEC Fig. 17.
    """

    kind: str
    """Layer type."""
    n_tb: int
    """Thread blocks of the compensation; 0 on a CPU."""
    points: tuple[tuple[int, float], ...]
    """(k_chunk, time divided by the time without compensation), k_chunk ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What was found for one model, device and budget."""

    device: str
    """The device, in words."""
    budget_percent: float
    """Slowdown that was allowed."""
    n_tb_max: int | None
    """Most thread blocks of any layer type; None on a CPU."""
    n_tb: Mapping[str, int]
    """Thread blocks by layer type; empty on a CPU."""
    k_chunk: Mapping[str, int]
    """Compensated channels per 1024, by layer type."""
    predicted_slowdown_percent: float
    """From the times of the layers alone."""
    measured_slowdown_percent: float
    """Of whole decoding steps; at most the budget unless even no compensation measured more, which is noise."""
    seconds: float
    """How long tuning took."""
    cached: bool
    """Whether a saved profile had it."""
    curve: tuple[KneeCurve, ...] = ()
    """For plots."""
    source: str = "measured"
    """`measured`, or `simulated` for a device that is not here."""

    def to_json(self) -> dict[str, Any]:
        """The object of `GET /runtime/device`."""
        body = asdict(self)
        body["curve"] = [{**curve, "points": [list(point) for point in curve["points"]]} for curve in body["curve"]]
        return body
