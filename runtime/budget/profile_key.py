"""What a tuning profile belongs to: a model, a device, and the programs that compute."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Protocol

from models.errors import StoreError
from models.losses import TypeLosses
from models.recipe import Recipe
from models.store.manifest import content_of
from runtime.backends import Device
from tuner.profiles import ProfileKey


class TunedModel(Protocol):
    """What the tuner reads of a stored model; `models.store.StoredModel` has it."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def path(self) -> Path:
        """Its folder."""
        ...

    @property
    def recipe(self) -> Recipe:
        """How it was quantized."""
        ...

    @property
    def losses(self) -> TypeLosses | None:
        """What each layer type loses, by k_chunk; None where it was not measured."""
        ...


def profile_key(device: Device, backend: str, model: TunedModel, budget_percent: float) -> ProfileKey:
    """What a profile belongs to: if any of this changes, it is tuned again.

    Raises:
        StoreError: the model's manifest cannot be read.
    """
    return ProfileKey(
        device=device.name,
        driver=device.driver or "",
        capability=device.capability,
        model=model.name,
        content=content_id(model),
        recipe=_digest(model.recipe.to_json()),
        versions=versions(),
        backend=backend,
        budget_percent=float(budget_percent),  # 5 and 5.0 are one budget, and would be two files
    )


def content_id(model: TunedModel) -> str:
    """What tells the weights of two models apart: the checksum of the manifest, which has those of all files.

    Raises:
        StoreError: the manifest cannot be read.
    """
    found = content_of(model.path)
    if found is None:
        raise StoreError(f"cannot read the manifest of {model.name} in {model.path}: quantize the model again")
    return found


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what timings depend on; empty text for what is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("lowbit-chat", "numba", "torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
