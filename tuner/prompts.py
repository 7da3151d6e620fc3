"""Stored results of prompt tuning: the compensation of a model's prompts within a budget."""

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
    """The measurement of one level of compensation."""

    k_chunk: int
    """Compensated channels per 1024, shared by all rows of a prompt."""
    slowdown_percent: float
    """Slowdown of the prompt in percent; noise can make it negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProfile:
    """The result of a search."""

    key: ProfileKey
    """The key of the result, with the budget of prompts."""
    k_chunk: int
    """Compensated channels per 1024; 0 if no level was within the budget."""
    readings: tuple[Reading, ...]
    """The measurements, in order."""
    tokens: int
    """Length of the timed prompt in tokens."""
    seconds: float
    """Duration of the search in seconds."""
    date: str
    """Time of its end in ISO format."""

    @property
    def measured_slowdown_percent(self) -> float:
        """Measured slowdown of the chosen level; 0 without compensation."""
        return next((own.slowdown_percent for own in self.readings if own.k_chunk == self.k_chunk), 0.0)


class PromptStore(KeyedStore[PromptProfile]):
    """Profiles of prompts in a folder, one file each, next to those of decoding.

    Args:
        folder: The folder; created when the first one is saved.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, _profile, form=_FORMAT, suffix=".prompts.json")


def _profile(key: ProfileKey, data: Mapping[str, Any]) -> PromptProfile:
    """Read a profile's body.

    Raises:
        KeyError, TypeError, ValueError: it is malformed.
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
