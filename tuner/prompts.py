"""What was found for the prompts of a model: how far they are compensated within a budget. Kept between runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tuner.candidates import CHUNK
from tuner.profiles import KeyedStore, ProfileKey, count_of

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One level that was tried."""

    k_chunk: int
    """Channels per 1024 that the rows of a prompt share."""
    slowdown_percent: float
    """How much longer the prompt took than without; noise goes below 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProfile:
    """What a search found."""

    key: ProfileKey
    """What it was found for; its budget is that of prompts."""
    k_chunk: int
    """Channels per 1024; 0 where nothing was within the budget."""
    readings: tuple[Reading, ...]
    """What was tried, in that order."""
    tokens: int
    """Of the prompt that was timed."""
    seconds: float
    """How long the search took."""
    date: str
    """When it ended, in ISO format."""

    @property
    def measured_slowdown_percent(self) -> float:
        """Of the level that was found; 0 without compensation."""
        return next((own.slowdown_percent for own in self.readings if own.k_chunk == self.k_chunk), 0.0)


class PromptStore(KeyedStore[PromptProfile]):
    """Profiles of prompts in a folder, one file each, beside those of decoding.

    Args:
        folder: Where; made when the first one is saved.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _profile, form=_FORMAT, suffix=".prompts.json")


def _profile(key: ProfileKey, data: Mapping[str, Any]) -> PromptProfile:
    """Read a profile's body.

    Raises:
        KeyError, TypeError, ValueError: it is not one.
    """
    if data.keys() != {field.name for field in fields(PromptProfile)} - {"key"}:
        raise ValueError("not the fields of a profile")
    readings = tuple(
        Reading(k_chunk=count_of(one["k_chunk"]), slowdown_percent=float(one["slowdown_percent"]))
        for one in data["readings"]
    )
    if not all(math.isfinite(one.slowdown_percent) for one in readings):
        raise ValueError("not a number")
    k_chunk = count_of(data["k_chunk"])
    if k_chunk > CHUNK or (k_chunk and k_chunk not in {one.k_chunk for one in readings}):
        raise ValueError("not a level that was tried")
    return PromptProfile(
        key=key,
        k_chunk=k_chunk,
        readings=readings,
        tokens=count_of(data["tokens"]),
        seconds=float(data["seconds"]),
        date=str(data["date"]),
    )
