"""Profiles: everything measured of a model on a device, in one file for all budgets.

A profile's key contains everything that its times depend on: device, driver, model, recipe, versions. An unreadable
profile, or one with another key, counts as absent, and everything is measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tuner.curve import Curve
from tuner.errors import ProfileError
from tuner.files import replacing
from tuner.ladder import Setting, best, bound, scatter
from tuner.offers import Offers

_FORMAT = 3
_STALE_SECONDS = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """Everything that measured times depend on."""

    backend: str
    """`triton` or `cpu`."""
    device: str
    """Name of the graphics card or processor."""
    driver: str
    """Version of its driver; empty for a processor."""
    capability: str
    """Compute capability, or threads and instruction set of a processor."""
    model: str
    """Name of the model."""
    content: str
    """Identity of its content: a hash of the checkpoint."""
    recipe: str
    """How it was quantized."""
    versions: Mapping[str, str]
    """Versions of this program and of the libraries that compile its kernels, by name."""

    def digest(self) -> str:
        """Short hash of the key, used as the file's name."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReading:
    """The measurement of one level of a prompt's compensation."""

    k_chunk: int
    """Compensated channels per 1024, shared by all rows of a prompt."""
    slowdown_percent: float
    """Slowdown of the prompt in percent; noise can make it negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProfile:
    """The compensation of prompts within a budget."""

    budget_percent: float
    """The budget of prompts."""
    k_chunk: int
    """Compensated channels per 1024; 0 if no level was within the budget."""
    readings: tuple[PromptReading, ...]
    """The measurements, in order."""
    tokens: int
    """Length of the timed prompt in tokens."""
    seconds: float
    """Duration of the search in seconds."""
    date: str
    """Time of its end in ISO format."""

    def __post_init__(self) -> None:
        if self.k_chunk and all(own.k_chunk != self.k_chunk for own in self.readings):
            raise ValueError(f"{self.k_chunk} is not a level that was tried")

    @property
    def measured_slowdown_percent(self) -> float:
        """Measured slowdown of the chosen level; 0 without compensation."""
        return next((own.slowdown_percent for own in self.readings if own.k_chunk == self.k_chunk), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything measured of a model on a device."""

    key: ProfileKey
    """What it is valid for."""
    times: tuple[tuple[str, int, int, float], ...] = ()
    """(layer type, `n_tb`, `k_chunk`, time relative to that without compensation); of `k_chunk` 0 in seconds."""
    settings: tuple[Setting, ...] = ()
    """The ladder."""
    lost: float | None = None
    """Nats per token lost without compensation by the losses of the layer types; None if unknown."""
    text: str = ""
    """Identity of the text on which losses were read, and of how it was read; empty before that."""
    without: float | None = None
    """Nats per token lost on the text without compensation; None if it was not read."""
    tuned: tuple[float, ...] = ()
    """Budgets in percent for which the ladder was measured."""
    refined: tuple[float, ...] = ()
    """Those of them that were refined on a text."""
    prompts: tuple[PromptProfile, ...] = ()
    """Compensation of prompts, by budget."""
    offers: tuple[Offers, ...] = ()
    """Ways to decode, by budget."""
    seconds: float = 0.0
    """Time that the ladder took, in seconds."""
    date: str = ""
    """Time of the ladder's last measurement in ISO format."""

    def best(self, budget_percent: float) -> Setting | None:
        """The choice for a budget; None if no compensation is the best."""
        return best(self.settings, budget_percent, self.without)

    def bound(self, setting: Setting) -> float:
        """The slowdown in percent that one of the settings is held to."""
        return bound(setting, scatter(self.settings))

    def lost_and_won(self, setting: Setting | None) -> tuple[float | None, float | None]:
        """Nats per token lost without compensation, and recovered by a setting: on the text, if it was read."""
        if self.without is not None and (setting is None or setting.loss is not None):
            return self.without, 0.0 if setting is None or setting.loss is None else self.without - setting.loss
        if self.lost is None:
            return None, None
        return self.lost, 0.0 if setting is None else setting.predicted_won

    def bought(self) -> tuple[tuple[float, float], ...]:
        """Points (budget in percent, share of the loss recovered) at which a larger budget takes another setting."""
        points = [(0.0, 0.0)]
        for setting in sorted(self.settings, key=self.bound):
            lost, won = self.lost_and_won(setting)
            if not lost or won is None or math.isinf(self.bound(setting)):
                continue
            if won / lost > points[-1][1] and self.bound(setting) > points[-1][0]:
                points.append((self.bound(setting), won / lost))
        return tuple(points) if len(points) > 1 else ()

    def curve(self, kind: str, n_tb: int) -> Curve:
        """Time of a layer type's product against `k_chunk`, as far as it was timed; begins with (0, 1)."""
        points = {k_chunk: ratio for name, blocks, k_chunk, ratio in self.times if (name, blocks) == (kind, n_tb)}
        return Curve(kind=kind, n_tb=n_tb, points=tuple(sorted({**points, 0: 1.0}.items())))


class ProfileStore:
    """Profiles in a folder, one file for each model and device.

    Args:
        folder: The folder; created when the first one is saved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: ProfileKey) -> Profile:
        """The profile for a key; an empty one if there is no readable one."""
        try:
            data = json.loads(self._file(key).read_text(encoding="utf-8"))
            if data["format"] != _FORMAT or data["key"] != json.loads(json.dumps(asdict(key))):
                return Profile(key=key)
            profile: Profile = _parsed(Profile, {**data["profile"], "key": data["key"]})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return Profile(key=key)
        return profile

    def update(self, key: ProfileKey, change: Callable[[Profile], Profile]) -> Profile:
        """Change the stored profile, atomically: readers find the previous one or the new one, never a part.

        Raises:
            ProfileError: the folder can't be written.
        """
        profile = change(self.find(key))
        body = {name: value for name, value in asdict(profile).items() if name != "key"}
        text = json.dumps({"format": _FORMAT, "key": asdict(key), "profile": body}, indent=1, sort_keys=True)
        try:
            self._sweep()
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self._file(key)) as stream:
                stream.write(text.encode())
        except OSError as error:
            raise ProfileError(f"the tuning can't be saved in {self.folder}: {error.strerror or error}") from error
        return profile

    def _file(self, key: ProfileKey) -> Path:
        return self.folder / f"{key.digest()}.json"

    def _sweep(self) -> None:
        """Remove the temporary files of processes that were killed while saving."""
        for stray in self.folder.glob(".*.json-*"):
            with contextlib.suppress(OSError):
                if time.time() - stray.stat().st_mtime > _STALE_SECONDS:
                    stray.unlink()


def _parsed(hint: Any, data: Any) -> Any:
    """A value from a file as its type hint says.

    Raises:
        KeyError, TypeError, ValueError: it is another one, not finite, or a negative count.
    """
    if isinstance(hint, type) and is_dataclass(hint):
        if data.keys() != {field.name for field in fields(hint)}:
            raise ValueError(f"not the fields of {hint}")
        return hint(**{name: _parsed(own, data[name]) for name, own in get_type_hints(hint).items()})
    arguments = get_args(hint)
    if get_origin(hint) is UnionType:
        return None if data is None else _parsed(arguments[0], data)
    if get_origin(hint) is tuple:
        if not isinstance(data, list):
            raise TypeError(f"{data!r} is not a list")
        each = [arguments[0]] * len(data) if arguments[1:] == (...,) else arguments
        return tuple(_parsed(own, one) for own, one in zip(each, data, strict=True))
    if get_origin(hint) is Mapping:
        return {str(name): _parsed(arguments[1], own) for name, own in data.items()}
    if get_origin(hint) is Literal:
        if data not in arguments:
            raise ValueError(f"{data!r} is none of {arguments}")
        return data
    if hint is float and type(data) is int:
        data = float(data)
    if type(data) is not hint or (hint is int and data < 0) or (hint is float and not math.isfinite(data)):
        raise ValueError(f"{data!r} is not of type {hint}")
    return data
