"""Findings: what whole decoding steps and a text said of a model's configurations, for every budget.

A budget's choice is a function of the findings alone: of the configurations that fit, the one that loses least on the
text. So a larger budget never buys worse, and what one budget's refinement measured counts for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from tuner.candidates import CHUNK
from tuner.profiles import KeyedStore, ProfileKey, count_of

Channels = tuple[tuple[str, int], ...]
"""`k_chunk` by layer type, and by the types of single blocks; sorted."""
FEWEST = 3
"""A configuration counts from so many readings of its slowdown on; their median counts."""
_FORMAT = 2


def channels_of(k_chunk: Mapping[str, int]) -> Channels:
    """A configuration as a key."""
    return tuple(sorted(k_chunk.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One configuration."""

    k_chunk: Mapping[str, int]
    """Compensated channels per 1024, by layer type."""
    n_tb: Mapping[str, int]
    """Thread blocks, by layer type."""
    slowdowns: tuple[float, ...] = ()
    """Readings of decoding's slowdown in percent."""
    loss: float | None = None
    """Nats per token on the text; None if it was not read."""

    @property
    def slowdown_percent(self) -> float:
        """The median slowdown; 0 without compensation, infinite with too few readings."""
        if not any(self.k_chunk.values()):
            return 0.0
        return median(self.slowdowns) if len(self.slowdowns) >= FEWEST else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything measured of a model on a device, for all budgets."""

    key: ProfileKey
    """The key, with a budget of 0."""
    text: str = ""
    """Identity of the text, and of how it was read."""
    measured: tuple[Finding, ...] = ()
    """The configurations."""
    refined: tuple[float, ...] = ()
    """Budgets whose refinement is complete, in percent."""

    @property
    def without(self) -> float | None:
        """What the text loses without compensation; None if it was not read."""
        return next((own.loss for own in self.measured if not any(own.k_chunk.values())), None)

    def best(self, allowed_percent: float) -> Finding | None:
        """The configuration that loses least on the text, of those within a slowdown; the faster one of equals.

        Args:
            allowed_percent: The limit.

        Returns:
            Without compensation if nothing that fits makes the text better; None if too little was measured.
        """
        if self.without is None:
            return None
        within = [own for own in self.measured if own.loss is not None and own.slowdown_percent <= allowed_percent]
        return min(within, key=lambda own: (own.loss, own.slowdown_percent))

    def front(self) -> tuple[tuple[float, float], ...]:
        """Points (slowdown in percent, share of the loss recovered) of the best choices, by rising slowdown."""
        if not self.without:
            return ()
        points = [(0.0, 0.0)]
        for own in sorted(self.measured, key=lambda own: own.slowdown_percent):
            if own.loss is None or math.isinf(own.slowdown_percent):
                continue
            share = 1 - own.loss / self.without
            if share > points[-1][1] and own.slowdown_percent > points[-1][0]:
                points.append((own.slowdown_percent, share))
        return tuple(points) if len(points) > 1 else ()


class FindingsStore(KeyedStore[Findings]):
    """Findings in a folder, one file for each model and device, next to the profiles.

    Args:
        folder: The folder; created when the first ones are saved.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _findings, form=_FORMAT, suffix=".findings.json")

    def known(self, key: ProfileKey, text: str) -> Findings:
        """The findings for any budget; empty ones if there are none, or if they are of another text.

        Args:
            key: The key of a profile.
            text: Identity of the text.
        """
        shared = replace(key, budget_percent=0.0)
        found = self.find(shared)
        return found if found is not None and found.text == text else Findings(key=shared, text=text)


def _findings(key: ProfileKey, data: Mapping[str, Any]) -> Findings:
    """Read findings.

    Raises:
        KeyError, TypeError, ValueError: they are malformed.
    """
    if data.keys() != {field.name for field in fields(Findings)} - {"key"} or not isinstance(data["text"], str):
        raise ValueError("not the fields of findings")
    return Findings(
        key=key,
        text=data["text"],
        measured=tuple(_finding(own) for own in data["measured"]),
        refined=tuple(_number(budget) for budget in data["refined"]),
    )


def _finding(own: Mapping[str, Any]) -> Finding:
    k_chunk = {str(kind): count_of(count) for kind, count in own["k_chunk"].items()}
    if not k_chunk or max(k_chunk.values()) > CHUNK:
        raise ValueError("not a configuration")
    return Finding(
        k_chunk=k_chunk,
        n_tb={str(kind): count_of(count) for kind, count in own["n_tb"].items()},
        slowdowns=tuple(_number(percent) for percent in own["slowdowns"]),
        loss=None if own["loss"] is None else _number(own["loss"]),
    )


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)
