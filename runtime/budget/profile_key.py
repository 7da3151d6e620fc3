"""Profile keys: identify the model, device and software versions that a tuning profile is valid for."""

from __future__ import annotations

import functools
import hashlib
import json
from typing import TYPE_CHECKING

from models.errors import StoreError
from models.store.manifest import content_of
from runtime.backends import Device
from tuner.profiles import ProfileKey

if TYPE_CHECKING:
    from models.store import StoredModel


def profile_key(device: Device, backend: str, model: StoredModel) -> ProfileKey:
    """The key of a model's profile: if any part of it changes, the model is tuned again.

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
    )


def content_id(model: StoredModel) -> str:
    """Identifier of a model's weights: the checksum of the manifest, which contains those of all files.

    Raises:
        StoreError: the manifest cannot be read.
    """
    found = content_of(model.path)
    if found is None:
        raise StoreError(f"cannot read the manifest of {model.name} in {model.path}: quantize the model again")
    return found


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the packages that timings depend on; empty for those not installed."""
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
