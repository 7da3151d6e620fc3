"""The sampling that a model's maker recommends, from generation_config.json or a GGUF file's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, 10_000_000),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""Keys that are taken, as transformers' `GenerationConfig` calls them, and the values that the settings accept."""
GGUF_KEYS: Mapping[str, str] = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Keys of GGUF's `general.sampling`, and their names in generation_config.json."""


def recommended_sampling(table: Mapping[str, Any]) -> dict[str, float]:
    """The recommendations in a generation_config.json.

    Values that are missing, of another type or out of range are left out: a recommendation is no reason to refuse a
    model. `do_sample: false` recommends temperature 0.

    Returns:
        Some of the keys of `_RANGES`; `top_k` is an int.
    """
    found: dict[str, float] = {}
    for key, (low, high) in _RANGES.items():
        value = table.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            continue
        if low <= value <= high:
            found[key] = int(value) if key == "top_k" else float(value)
    return {**found, "temperature": 0.0} if table.get("do_sample") is False else found


def gguf_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A GGUF file's `general.sampling` keys as a generation_config.json; empty where it has none."""
    found = {name: metadata.get(f"general.sampling.{key}") for key, name in GGUF_KEYS.items()}
    return {name: value for name, value in found.items() if isinstance(value, (int, float))}
